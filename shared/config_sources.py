"""Reading a `Config`: file < environment < command line, and errors that name the nearest right key."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from shared.algorithm_configs.registry import ALGORITHMS, tag_of
from shared.config import Config
from shared.config_errors import in_words, shown
from shared.errors import ConfigError
from shared.printable import printable

ENV_PREFIX = "STAGECOACH__"
_MOST_VALUES = 100_000


def load_config(path: Path | None, overrides: Iterable[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The resolved config.

    `overrides` are `a.b=value` strings of the command line, `environ` the process environment by default. Raises
    `ConfigError` for everything that is wrong with any of them.
    """
    data = _read_yaml(path) if path is not None else {}
    for name, text in sorted((os.environ if environ is None else environ).items()):
        _refuse_single_underscores(name)
        if name.startswith(ENV_PREFIX):
            keys = [key.lower() for key in name.removeprefix(ENV_PREFIX).split("__")]
            _set(data, keys, _value(text, name), f"environment variable {name}")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set expects section.field=value, found {override!r}")
        _set(data, key.split("."), _value(text, override), f"--set {override}")
    return parse_config(data)


def parse_config(data: Mapping[str, Any]) -> Config:
    """Validates plain data; raises `ConfigError` with one line per mistake."""
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        lines = []
        for item in error.errors():
            loc = [str(part) for part in item["loc"]]
            if loc[:1] == ["algorithm"] and len(loc) > 1:
                del loc[1]  # which of the sections it is; its name says so
            kinds = _kinds(loc[:2], tag_of(data.get("algorithm") or {}))
            if kinds and len(loc) > 2:
                del loc[2]  # likewise its kind
            where = ".".join(_as_written(loc, data))
            if item["type"] == "extra_forbidden":
                lines.append(_misspelt(where, tag_of(data.get("algorithm") or {})))
            elif item["type"] == "union_tag_invalid" and where == "algorithm":
                lines.append(_unknown_algorithm(tag_of(data["algorithm"])))
            elif kinds and len(loc) == 2 and item["type"] != "value_error":
                found = item["input"].get("kind", "none") if isinstance(item["input"], dict) else item["input"]
                lines.append(f"{where}.kind must be one of {', '.join(kinds)}, found {shown(found)}")
            else:
                lines.append(in_words(item, where))
        raise ConfigError("; ".join(lines)) from None
    except UnicodeEncodeError as error:
        raise ConfigError(f"found {error.object[error.start]!r}, which no text can hold; remove it") from None


def _as_written(loc: list[str], data: Any) -> list[str]:
    """The path as far as the config goes: a plain number stands for a schedule's `start`."""
    for depth, part in enumerate(loc):
        if isinstance(data, list | tuple):
            data = {str(index): value for index, value in enumerate(data)}
        if not isinstance(data, dict):
            return loc[:depth]
        data = data.get(part, {})
    return loc


def dump_config(config: Config) -> str:
    """The resolved config as YAML, as it is stored with a run."""
    return yaml.dump(config.model_dump(mode="json"), Dumper=_StrictDumper, sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        return parse_yaml(path.read_text(), str(path))
    except FileNotFoundError:
        raise ConfigError(f"no config file {path}; `stagecoach init` writes one to start from") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A config's YAML as plain data; raises `ConfigError`, naming `where` it came from."""
    try:
        data = _loaded(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{where} must hold a mapping of sections (environment: …), found {type(data).__name__}")
    return data


class _StrictLoader(yaml.SafeLoader):
    """YAML without silent surprises: a key that stands twice is an error, 1e-3 is a number, a date stays text."""

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
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _StrictDumper(yaml.SafeDumper):
    """Writes what `_StrictLoader` reads back: a text that looks like 1e-3 gets quotes."""


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
    """As plain data; raises `ValueError` with one line that says what is wrong."""
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


def _set(data: dict[str, Any], keys: list[str], value: Any, source: str) -> None:
    here: dict[str, Any] = data
    for depth, key in enumerate(keys[:-1]):
        below = here.get(key)
        if below is None:
            below = here[key] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"{source}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        here = below
    here[keys[-1]] = value


def _refuse_single_underscores(name: str) -> None:
    meant = {path.replace(".", "_"): path for path in field_paths(Config)}.get(
        name.removeprefix("STAGECOACH_").replace("__", "_").lower()
    )
    if name.startswith("STAGECOACH_") and not name.startswith(ENV_PREFIX) and meant:
        right = ENV_PREFIX + meant.replace(".", "__").upper()
        raise ConfigError(f"environment variable {name} is never read; did you mean {right}?")


def _unknown_algorithm(name: str) -> str:
    guesses = difflib.get_close_matches(name, ALGORITHMS, n=1)
    hint = f"did you mean {guesses[0]}?" if guesses else f"known are {', '.join(sorted(ALGORITHMS))}."
    return f"algorithm.name={printable(name, 100)} is no algorithm; {hint} Or a class of your own: package.module:Class"


def _kinds(loc: list[str], algorithm: str) -> list[str]:
    """The kinds of section that may stand in a field of the algorithm, where there are several."""
    section = ALGORITHMS.get(algorithm)
    if loc[:1] != ["algorithm"] or len(loc) < 2 or section is None or loc[1] not in section.model_fields:
        return []
    sections = [found for found in get_args(section.model_fields[loc[1]].annotation) if hasattr(found, "model_fields")]
    return [found.model_fields["kind"].default for found in sections] if len(sections) > 1 else []


def _misspelt(where: str, algorithm: str) -> str:
    known = field_paths(Config)
    parent, _, name = where.rpartition(".")
    beside = _fields_at(parent.split(".") if parent else [], algorithm)
    guesses = difflib.get_close_matches(name, beside, n=1, cutoff=0.6)
    owners = [found for found, section in ALGORITHMS.items() if parent == "algorithm" and name in section.model_fields]
    if owners:
        hint = f"{algorithm} has no such field, but {', '.join(owners)}: is algorithm.name right?"
    elif guesses:
        hint = f"did you mean {parent + '.' if parent else ''}{guesses[0]}?"
    else:
        elsewhere = [path for path in known if path.rpartition(".")[2] == name]
        hint = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(sorted(beside))}"
    return f"unknown key {where}; {hint}"


def _fields_at(parts: list[str], algorithm: str) -> list[str]:
    """The field names of the section there, also of one within a mapping (`policies.default`) or a list."""
    model: type[BaseModel] | None = Config
    rest = list(parts)
    if rest[:1] == ["algorithm"]:
        model = ALGORITHMS[algorithm]
        rest.pop(0)
    while rest and model is not None:
        field = model.model_fields.get(rest.pop(0))
        model = _model_in(field.annotation) if field else None
        if field and get_origin(field.annotation) in (dict, tuple) and rest:
            rest.pop(0)
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_model_in, get_args(annotation)) if found), None)


def _of_any_algorithm() -> list[str]:
    return [path for section in ALGORITHMS.values() for path in field_paths(section)]


def field_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """All dotted field paths of the config, sections included."""
    paths = []
    for name, field in model.model_fields.items():
        paths.append(prefix + name)
        if name == "algorithm":
            paths.extend(sorted({f"{prefix}{name}.{below}" for below in _of_any_algorithm()}))
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            paths.extend(field_paths(field.annotation, f"{prefix}{name}."))
    return paths
