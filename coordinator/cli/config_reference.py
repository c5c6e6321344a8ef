"""The configuration as text, from the models' own docstrings: docs/CONFIG.md, and the commented file of `init`.

`python -m coordinator.cli.config_reference` prints docs/CONFIG.md.
"""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.config.algorithms.base import OwnAlgorithm
from shared.config.algorithms.registry import ALGORITHMS
from shared.config.loading import dump_config, parse_config
from shared.config.parameters import SamplerConfig
from shared.config.run_config import Config
from shared.config.sections import RunPolicyConfig
from shared.config.validation import section_tag, sections_in

_STARTER: dict[str, Any] = {
    "environment": {"id": "CartPole-v1"},
    "stop_at": {"env_steps": 100_000, "mean_return": 475.0},
}
_BEGINNING = """# Configuration

Generated from the sections of shared/ by `python -m coordinator.cli.config_reference`; do not edit by hand.

Later sources win: default < file < environment < command line. A field is set in the file as nested YAML, in
the environment as `STAGECOACH__SECTION__FIELD=value`, on the command line as `--set section.field=value`.
Unknown keys are errors. Durations are written `10 updates`, `20000 env_steps` or `50 episodes`.

## Defaults that depend on the algorithm

A field that your config leaves out has the algorithm's default, where this table lists one, and otherwise the
default in the tables below. `stagecoach config FILE` shows the result; a run keeps it in its `config.yaml`. An
algorithm of your own (`module:Class`) has the defaults of the tables below, even if it derives from a built-in one.
With a `dataset` there is no warm-up by default.

| `algorithm.name` | defaults |
|---|---|"""
_WIDTH = 100
_ELSEWHERE = {SamplerConfig, OwnAlgorithm}
"""Sections without a table: of the one it is in that of parameters, of the other in the user's class."""


def config_markdown() -> str:
    lines = [_BEGINNING]
    for name, section in ALGORITHMS.items():
        if section.defaults:
            said = [f"`{path}: {value}`" for path, value in _leaves(section.defaults, "")]
            lines.append(f"| `{name}` | {', '.join(said)} |")
    _section(Config, "", lines, set(_ELSEWHERE))
    return "\n".join(lines) + "\n"


def commented_config() -> str:
    """A complete config to start from, each field under its explanation."""
    lines = ["# A Stagecoach run. Every field stands here with its default; delete what you don't change.", ""]
    _commented(Config, yaml.safe_load(dump_config(parse_config(_STARTER))), 0, lines)
    return "\n".join(lines) + "\n"


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{'policies.<id>' if name == 'policies' else name}.")
        else:
            yield f"{path}{name}", value


def _section(model: type[BaseModel], path: str, lines: list[str], told: set[type], which: str = "") -> None:
    """A table, then those of the sections below that were not `told` yet. `which` tells sections apart that may stand
    in one place: by their `name` or `kind`."""
    told.add(model)
    below: list[tuple[type[BaseModel], str, str]] = []
    rows = []
    for name, field in model.model_fields.items():
        place = f"{path}{name}"
        sections = sections_in(field.annotation) if model is not RunPolicyConfig else []  # they are the run's own
        origin = get_origin(field.annotation)
        several = (
            "[]" if origin is tuple else "" if origin is not dict else ".<id>" if name == "policies" else ".<name>"
        )
        for section in sections:
            tag = " with `{}: {}`".format(*section_tag(section)) if len(sections) > 1 else ""
            below.append((section, f"{place}{several}.", tag))
        if _model(field) is None and place != "algorithm":
            default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
            rows.append(f"| `{place}` | {default} | {_text(field)} |")
    title = f"## `{path.rstrip('.')}`{which}" if path else "## Top level"
    title += f" ({model.__name__})" if title in lines else ""
    lines += ["", title, "", _first_paragraph(model), ""]
    if rows:
        lines += ["| field | default | meaning |", "|---|---|---|", *rows]
    for section, inner, tag in below:
        if section not in told:
            _section(section, inner, lines, told, tag)


def _commented(model: type[BaseModel], values: dict[str, Any], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for name, field in model.model_fields.items():
        inner = ALGORITHMS[values[name]["name"]] if model is Config and name == "algorithm" else _model(field)
        if inner is not None:
            lines += ["", f"{pad}# {_first_paragraph(inner)}", f"{pad}{name}:"]
            _commented(inner, values[name], depth + 1, lines)
            continue
        lines += [f"{pad}# {line}" for line in textwrap.wrap(_text(field), _WIDTH - 2 * depth)]
        if name == "policies":
            lines.append(f"{pad}policies:")
            for policy_id, policy in values[name].items():
                lines.append(f"{pad}  {policy_id}:")
                _commented(RunPolicyConfig, policy, depth + 2, lines)
            continue
        lines.append(f"{pad}{name}: {_inline(values[name])}")


def _model(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and not field.metadata:
        return annotation
    return None


def _plain(value: Any) -> str:
    if isinstance(value, BaseModel):
        data = value.model_dump(mode="json")
        if not data.get("points", True):
            del data["points"]
        return _inline(data)
    if isinstance(value, dict) and value and isinstance(next(iter(value.values())), BaseModel):
        return ", ".join(value)
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _inline(value: Any) -> str:
    """One line of YAML; a constant schedule is just its number."""
    if isinstance(value, dict) and value.get("kind") == "constant":
        value = value["start"]
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).removesuffix("...\n").strip()


if __name__ == "__main__":
    print(config_markdown(), end="")
