"""The configuration as text, from the models' own docstrings: docs/CONFIG.md, and the commented file of `init`.

`python -m coordinator.config_docs` prints docs/CONFIG.md.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.algorithm_configs.cloning import CloningConfig
from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import Config, PolicyConfig, WrapperConfig
from shared.config_sources import dump_config, parse_config
from shared.dataset_config import DatasetConfig, DemonstrationsConfig
from shared.exploration_config import ExplorationConfig
from shared.memory_config import MemoryConfig
from shared.reward_signals_config import RewardSignalsConfig
from shared.schedules import Schedule

_STARTER: dict[str, Any] = {
    "environment": {"id": "CartPole-v1"},
    "stop_at": {"env_steps": 100_000, "mean_return": 475.0},
}
_WIDTH = 100


def config_markdown() -> str:
    """docs/CONFIG.md."""
    lines = [
        "# Configuration",
        "",
        "Generated from `shared/config.py` by `python -m coordinator.config_docs`; do not edit by hand.",
        "",
        "Later sources win: default < file < environment < command line. A field is set in the file as nested YAML, in",
        "the environment as `STAGECOACH__SECTION__FIELD=value`, on the command line as `--set section.field=value`.",
        "Unknown keys are errors. Durations are written `10 updates`, `20000 env_steps` or `50 episodes`.",
    ]
    _defaults(lines)
    _section(Config, "", lines)
    return "\n".join(lines) + "\n"


def commented_config() -> str:
    """A complete config to start from, each field under its explanation."""
    lines = ["# A Stagecoach run. Every field stands here with its default; delete what you don't change.", ""]
    _commented(Config, yaml.safe_load(dump_config(parse_config(_STARTER))), 0, lines)
    return "\n".join(lines) + "\n"


def _defaults(lines: list[str]) -> None:
    """What `AlgorithmConfig.defaults` says, a row for each algorithm that has any."""
    lines += [
        "",
        "## Defaults that depend on the algorithm",
        "",
        "What is not said is as the algorithm has it, and else as the tables below say. `stagecoach config FILE` shows",
        "what that comes to; a run keeps it in its `config.yaml`. An algorithm of your own (`module:Class`) has those",
        "of the tables. With a `dataset` there is no heat-up by default.",
        "",
        "| `algorithm.name` | defaults |",
        "|---|---|",
    ]
    for name, section in ALGORITHMS.items():
        if section.defaults:
            said = [f"`{path}: {value}`" for path, value in _leaves(section.defaults, "")]
            lines.append(f"| `{name}` | {', '.join(said)} |")


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{'policies.<id>' if name == 'policies' else name}.")
        else:
            yield f"{path}{name}", value


def _section(model: type[BaseModel], path: str, lines: list[str], which: str = "") -> None:
    """`which` tells sections apart that may stand in one place: by their `name` or `kind`."""
    below: list[tuple[type[BaseModel], str, str]] = []
    rows = []
    for name, field in model.model_fields.items():
        inner = _model(field)
        if model is Config and name == "algorithm":
            below += [(section, "algorithm.", f" with `name: {found}`") for found, section in ALGORITHMS.items()]
        elif inner is not None:
            below.append((inner, f"{path}{name}.", ""))
        else:
            default = "required" if field.is_required() else f"`{_plain(field.get_default(call_default_factory=True))}`"
            rows.append(f"| `{path}{name}` | {default} | {_text(field)} |")
    title = f"## `{path.rstrip('.')}`{which}" if path else "## Top level"
    lines += ["", title, "", _first_paragraph(model), ""]
    if rows:
        lines += ["| field | default | meaning |", "|---|---|---|", *rows]
    for inner, inner_path, told in below:
        _section(inner, inner_path, lines, told)
    if model is Config:
        _section(PolicyConfig, "policies.<id>.", lines)
        _section(WrapperConfig, "environment.wrappers[].", lines)
        _section(DatasetConfig, "dataset.", lines)
        _section(DemonstrationsConfig, "demonstrations.", lines)
        _section(CloningConfig, "algorithm.behavioural_cloning.", lines)
        _section(Schedule, "algorithm.learning_rate.", lines)
        _section(RewardSignalsConfig, "algorithm.reward_signals.", lines)
        for name, field in RewardSignalsConfig.model_fields.items():
            for section in get_args(field.annotation):
                if hasattr(section, "model_fields"):
                    _section(section, f"algorithm.reward_signals.{name}.", lines)
        for place, union in (("exploration", ExplorationConfig), ("memory", MemoryConfig)):
            for section in get_args(union):
                kind = section.model_fields["kind"].default
                _section(section, f"algorithm.{place}.", lines, f" with `kind: {kind}`")


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
                _commented(PolicyConfig, policy, depth + 2, lines)
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
        return (
            str(data["start"])
            if data.get("kind") == "constant"
            else yaml.safe_dump(data, default_flow_style=True, width=1000).strip()
        )
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
