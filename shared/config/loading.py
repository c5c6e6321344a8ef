"""Loads a `Config` from file, environment and command line, with errors that suggest the nearest key."""

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.printable import printable
from stagecoach.shared.config.presets import config_file
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.plain_data import Change, changed, changes_of, plain
from stagecoach.shared.config.schema.validation import field_paths, validated

ENV_PREFIX = "STAGECOACH__"
_MOST_VALUES = 100_000


def load_config(
    source: str | Path | Mapping[str, Any] | Config | None,
    overrides: Iterable[str] | Mapping[str, Any] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Loads and validates a run's config.

    Args:
        source: A file's path, a preset's name (`stagecoach presets` lists them), sections as a dict, or a config.
        overrides: Dotted fields and their values, `{"rollout.workers": 4}`, or texts `rollout.workers=4` as on the
            command line. They take precedence over the environment and the source.
        environ: Environment variables, those of this process by default. They do not apply to a `Config`, which is
            resolved already.

    Returns:
        The resolved config.

    Raises:
        ConfigError: All mistakes in one line, with the fields that were probably meant.
    """
    changes = changes_of(overrides) if isinstance(overrides, Mapping) else _changes(overrides)
    if isinstance(source, Config):
        return source.changed(changes)
    if isinstance(source, str | Path):
        data = _read_yaml(config_file(source))
    elif source is None or isinstance(source, Mapping):
        data = plain(source or {})
    else:
        raise ConfigError(
            f"a config is a file's path, a preset's name, a dict or a Config, found {type(source).__name__} "
            f"{printable(repr(source), 60)}"
        )
    return changed(Config, data, [*_from_environment(os.environ if environ is None else environ), *changes])


def _from_environment(environ: Mapping[str, str]) -> Iterator[Change]:
    for name, text in sorted(environ.items()):
        _refuse_single_underscores(name)
        if name.startswith(ENV_PREFIX):
            keys = [key.lower() for key in name.removeprefix(ENV_PREFIX).split("__")]
            yield Change(keys, _value(text, name), f"environment variable {name}")


def _changes(overrides: Iterable[str]) -> list[Change]:
    found = []
    for override in overrides if isinstance(overrides, Iterable) and not isinstance(overrides, str) else [overrides]:
        key, separator, text = override.partition("=") if isinstance(override, str) else ("", "", "")
        if not separator or not key:
            raise ConfigError(f"--set expects section.field=value, found {override!r}")
        found.append(Change(key.split("."), _value(text, override), f"--set {override}"))
    return found


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
        raise ConfigError(f"no config file {path.absolute()}; `stagecoach init` writes one to start from") from None
    except (OSError, ValueError) as error:  # not UTF-8, or a null character in the path
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


def _refuse_single_underscores(name: str) -> None:
    if not name.startswith("STAGECOACH_") or name.startswith(ENV_PREFIX):
        return
    asked = name.removeprefix("STAGECOACH_").replace("__", "_").lower()
    for path in field_paths(Config):
        if asked == path.replace(".", "_"):
            right = ENV_PREFIX + path.replace(".", "__").upper()
            raise ConfigError(f"environment variable {name} is never read; did you mean {right}?")
