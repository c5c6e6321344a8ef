"""Loads a `Config` from file, environment and command line, with errors that suggest the nearest key."""

import os
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.printable import printable
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.validation import field_paths, validated

ENV_PREFIX = "STAGECOACH__"
_MOST_VALUES = 100_000


def load_config(path: Path | None, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Returns the resolved config. `overrides` are `a.b=value` strings of the command line, `environ` the process
    environment by default. Raises `ConfigError` for mistakes in any of them."""
    data, changed = _read_yaml(path) if path is not None else {}, []
    for name, text in sorted((os.environ if environ is None else environ).items()):
        _refuse_single_underscores(name)
        if name.startswith(ENV_PREFIX):
            keys = [key.lower() for key in name.removeprefix(ENV_PREFIX).split("__")]
            changed.append(_changed_section(data, keys, value := _value(text, name)))
            _set(data, keys, value, f"environment variable {name}")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set expects section.field=value, found {override!r}")
        changed.append(_changed_section(data, key.split("."), value := _value(text, override)))
        _set(data, key.split("."), value, f"--set {override}")
    try:
        return parse_config(data)
    except ConfigError as error:
        hints = [hint for section, hint in filter(None, changed) if f"unknown key {section}." in str(error)]
        raise ConfigError("; ".join([str(error), *hints])) from None


def parse_config(data: Mapping[str, Any]) -> Config:
    """Validates plain data; raises `ConfigError` with all mistakes."""
    return validated(Config, dict(data))


def dump_config(config: Config) -> str:
    """Returns the resolved config as YAML, as it is stored with a run."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_StrictDumper, sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return parse_yaml(path.read_text(), str(path))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; `stagecoach init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """Parses a config's YAML into plain data; raises `ConfigError` that names its source, `where`."""
    try:
        data = _loaded(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold a mapping of sections (environment: …), found {type(data).__name__}")
    return data


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent surprises: duplicate keys are errors, 1e-3 is a number, a date stays text."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _StrictDumper(yaml.SafeDumper):
    """Writes YAML that `_StrictLoader` reads back: a text like 1e-3 gets quotes."""


for _side in (_StrictLoader, _StrictDumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def _value(text: str, source: str) -> Any:
    try:
        return _loaded(text)
    except ValueError as error:
        raise ConfigError(f"{printable(source, 100)}: not a YAML value: {error}") from None


def _loaded(text: str) -> Any:
    """Parses YAML into plain data; raises `ValueError` with one line."""
    try:
        data = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - derives from SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).replace('"<unicode string>", ', "").split())) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # whatever PyYAML meets in a tag that does not fit its value, such as `!!int ""`
        raise ValueError(f"a tag (!!…) does not fit its value: {type(error).__name__}: {error}") from None
    values, left = 0, [data]
    while left:
        item = left.pop()
        values += 1
        if values > _MOST_VALUES:
            raise ValueError(
                f"with its aliases (*name) it has more than {_MOST_VALUES:,} values, or one of them holds itself"
            )
        left += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return data


def _changed_section(data: dict[str, Any], keys: list[str], value: Any) -> tuple[str, str] | None:
    """Returns a section whose name or kind is changed while it keeps its fields, with the correct command."""
    *above, tag = keys
    here: Any = data
    for key in above:
        here = here.get(key) if isinstance(here, dict) else None
    if tag not in ("name", "kind") or not isinstance(here, dict) or not here.keys() - {tag}:
        return None
    section = ".".join(above)
    way = f"--set '{section}={{{tag}: {value}}}'"
    return section, f"{section}.{tag}={value} alone keeps the section's other fields; {way} starts it from its defaults"


def _set(data: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    here: dict[str, Any] = data
    for depth, key in enumerate(keys[:-1]):
        below = here.get(key)
        if below is None:
            below = here[key] = {}
        if not isinstance(below, dict):
            found, rest = ".".join(keys[: depth + 1]), ".".join(keys[depth + 1 :])
            raise ConfigError(
                f"{source}: {found} is a value ({printable(below, 40)}), not a section with {rest}; set {found} itself"
            )
        here = below
    here[keys[-1]] = value


def _refuse_single_underscores(name: str) -> None:
    if not name.startswith("STAGECOACH_") or name.startswith(ENV_PREFIX):
        return
    asked = name.removeprefix("STAGECOACH_").replace("__", "_").lower()
    for path in field_paths(Config):
        if asked == path.replace(".", "_"):
            right = ENV_PREFIX + path.replace(".", "__").upper()
            raise ConfigError(f"environment variable {name} is never read; did you mean {right}?")
