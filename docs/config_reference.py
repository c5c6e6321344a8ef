"""docs/reference/config.md, from the models' own docstrings; `make docs` writes it."""

from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from pydantic import BaseModel

from stagecoach.coordinator.cli.commented_config import explained, first_paragraph, inline, section_of
from stagecoach.shared.config.algorithms.base import OwnAlgorithm
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.environments.parameters import SamplerConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.validation import section_tag, sections_in
from stagecoach.shared.config.sections import RunPolicyConfig

_BEGINNING = """# Configuration

Generated from the sections of shared/ by `make docs`; do not edit by hand.

Later sources win: default < file < environment < command line. A field is set in the file as nested YAML, in
the environment as `STAGECOACH__SECTION__FIELD=value`, on the command line as `--set section.field=value`, in Python by
`load_config(source, {"section.field": value})` or `config.replace("section.field", value)`.
Unknown keys are errors. Durations are written `10 updates`, `20000 env_steps` or `50 episodes`.

## Defaults that depend on the algorithm

A field that your config leaves out has the algorithm's default, where this table lists one, and otherwise the
default in the tables below. `stagecoach config FILE` shows the result; a run keeps it in its `config.yaml`. An
algorithm of your own (`module:Class`) has the defaults of the tables below, even if it derives from a built-in one.
With a `dataset` there is no warm-up by default.

| `algorithm.name` | defaults |
|---|---|"""
_ELSEWHERE = {SamplerConfig, OwnAlgorithm}
"""Sections without a table: of the one it is in that of parameters, of the other in the user's class."""


def config_markdown() -> str:
    lines = [_BEGINNING]
    for name, section in ALGORITHMS.items():
        if section.defaults:
            said = [f"`{path}: {_plain(value)}`" for path, value in _leaves(section.defaults, "")]
            lines.append(f"| `{name}` | {', '.join(said)} |")
    _section(Config, "", lines, set(_ELSEWHERE))
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
        if section_of(field) is None and place != "algorithm":
            default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
            rows.append(f"| `{place}` | {default} | {explained(field)} |")
    title = f"## `{path.rstrip('.')}`{which}" if path else "## Top level"
    title += f" ({model.__name__})" if title in lines else ""
    lines += ["", title, "", first_paragraph(model), ""]
    if rows:
        lines += ["| field | default | meaning |", "|---|---|---|", *rows]
    for section, inner, tag in below:
        if section not in told:
            _section(section, inner, lines, told, tag)


def _plain(value: Any) -> str:
    """A default as a config's YAML has it."""
    if isinstance(value, dict) and value and isinstance(next(iter(value.values())), BaseModel):
        return ", ".join(value)
    return inline(_data(value))


def _data(value: Any) -> Any:
    if isinstance(value, BaseModel):
        data = value.model_dump(mode="json")
        if not data.get("points", True):
            del data["points"]
        return data
    if isinstance(value, list | tuple):
        return [_data(item) for item in value]
    return value if isinstance(value, bool | int | float | dict | None) else str(value)


if __name__ == "__main__":
    print(config_markdown(), end="")
