"""A config as plain data, as YAML has it, and changes of it by dotted field."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.printable import printable
from stagecoach.shared.config.schema.foreign_words import HINTS
from stagecoach.shared.config.schema.validation import Model, shown, validated
from stagecoach.shared.experience.counters import Duration


class Change(NamedTuple):
    """A new value of a field."""

    keys: list[str]
    value: Any
    source: str
    """Origin of the value, for error messages."""
    form: str = "--set '{section}={{{tag}: {value}}}'"
    """Form in which that origin gives a whole section."""


_WAYS = {
    "agents": "; map names or patterns to policies: {'player_*': 'main'}",
    "policies": "; map each to its section: {'main': {}}",
}
"""Field → how it is written, for RLlib's `policy_mapping_fn` and set of policies."""


def changes_of(fields: Mapping[str, Any]) -> list[Change]:
    """Returns the changes of a mapping of dotted fields to values; raises `ConfigError` for values that no config file
    could hold."""
    if not isinstance(fields, Mapping):
        raise ConfigError(f"expected dotted fields with their values, {{'rollout.workers': 4}}, found {shown(fields)}")
    form = "{{'{section}': {{'{tag}': '{value}'}}}}"
    found = []
    for field, value in fields.items():
        if not isinstance(field, str) or not field:
            raise ConfigError(f"expected a field such as 'rollout.workers', found {shown(field)}")
        found.append(Change(field.split("."), plain(value, field), f"{field}={shown(value)}", form))
    return found


def changed(model: type[Model], data: dict[str, Any], changes: Iterable[Change]) -> Model:
    """Validates `data`, changed in place, as a `model`; raises `ConfigError` with all mistakes."""
    hints = []
    for change in changes:
        hints.append(_changed_section(data, change))
        _set(data, change)
    try:
        return validated(model, plain(data))
    except ConfigError as error:
        fitting = [hint for section, hint in filter(None, hints) if f"unknown key {section}." in str(error)]
        raise ConfigError("; ".join([str(error), *fitting])) from None


def plain(value: Any, field: str = "") -> Any:
    """Returns a value of `field` as plain data. A section holds the fields that were set, and its name or kind.

    Raises:
        ConfigError: The value is, or holds, something that no config file could hold.
    """
    below = f"{field}." if field else ""
    try:
        if isinstance(value, BaseModel):
            given = value.model_fields_set | {"name", "kind"}
            value = {name: item for name, item in value if name in given}
        if isinstance(value, Mapping):
            if field and (odd := [key for key in value if not isinstance(key, str)]):  # JSON would make it text
                raise ConfigError(
                    f"{below}{odd[0]}: expected keys that are text, found {shown(odd[0])}; put it in quotes"
                )
            return {key: plain(item, f"{below}{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, f"{below}{index}") for index, item in enumerate(value)]
    except RecursionError:
        raise ConfigError(f"{printable(field, 40)} holds itself; expected plain data, as in a YAML file") from None
    if isinstance(value, Path | Duration):
        return str(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy or PyTorch
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if (word := field.partition(".")[0]) in HINTS and word != "env_kwargs":  # no key here: its value matters less
        raise ConfigError(f"unknown key {word}; {HINTS[word]}")
    own = value if isinstance(value, type) else type(value)
    named = callable(value) and own.__module__ not in ("builtins", "_io") and ".kwargs" not in field
    raise ConfigError(
        f"{field or 'the config'}: expected plain data (numbers, text, lists, mappings), since it is stored as YAML, "
        f"found {type(value).__name__} {printable(repr(value), 60)}"
        f"{_WAYS.get(field) or (f'; name its class, as text: {own.__module__}:{own.__qualname__}' if named else '')}"
    )


def _changed_section(data: dict[str, Any], change: Change) -> tuple[str, str] | None:
    """Returns a section whose name or kind is changed while it keeps its fields, with the correct way."""
    *above, tag = change.keys
    here: Any = data
    for key in above:
        here = here.get(key) if isinstance(here, dict) else None
    if tag not in ("name", "kind") or not isinstance(here, dict) or not here.keys() - {tag}:
        return None
    section = ".".join(above)
    way = change.form.format(section=section, tag=tag, value=change.value)
    return (
        section,
        f"{section}.{tag}={change.value} alone keeps the section's other fields; {way} starts it from its defaults",
    )


def _set(data: dict[str, Any], change: Change) -> None:
    here, keys = data, change.keys
    for depth, key in enumerate(keys[:-1]):
        below = here.get(key)
        if below is None:
            below = here[key] = {}
        if not isinstance(below, dict):
            found, rest = ".".join(keys[: depth + 1]), ".".join(keys[depth + 1 :])
            raise ConfigError(
                f"{change.source}: {found} is a value ({printable(below, 40)}), not a section with {rest}; set {found} "
                f"itself"
            )
        here = below
    here[keys[-1]] = change.value
