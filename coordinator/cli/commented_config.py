"""The commented config of `stagecoach init`, from the models' own docstrings."""

import textwrap
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.loading import dump_config, parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import RunPolicyConfig

_STARTER: dict[str, Any] = {
    "environment": {"id": "CartPole-v1"},
    "stop_at": {"env_steps": 100_000, "mean_return": 475.0},
}
_WIDTH = 100


def commented_config() -> str:
    """A complete config to start from, each field under its explanation."""
    lines = ["# A Stagecoach run. Every field stands here with its default; delete what you don't change.", ""]
    _commented(Config, yaml.safe_load(dump_config(parse_config(_STARTER))), 0, lines)
    return "\n".join(lines) + "\n"


def _commented(model: type[BaseModel], values: dict[str, Any], depth: int, lines: list[str]) -> None:
    pad = "  " * depth
    for name, field in model.model_fields.items():
        inner = ALGORITHMS[values[name]["name"]] if model is Config and name == "algorithm" else section_of(field)
        if inner is not None:
            lines += ["", f"{pad}# {first_paragraph(inner)}", f"{pad}{name}:"]
            _commented(inner, values[name], depth + 1, lines)
            continue
        lines += [f"{pad}# {line}" for line in textwrap.wrap(explained(field), _WIDTH - 2 * depth)]
        if name == "policies":
            lines.append(f"{pad}policies:")
            for policy_id, policy in values[name].items():
                lines.append(f"{pad}  {policy_id}:")
                _commented(RunPolicyConfig, policy, depth + 2, lines)
            continue
        lines.append(f"{pad}{name}: {inline(values[name])}")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and not field.metadata:
        return annotation
    return None


def explained(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def inline(value: Any) -> str:
    """One line of YAML; a constant schedule is just its number."""
    if isinstance(value, dict) and value.get("kind") == "constant":
        value = value["start"]
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000).removesuffix("...\n").strip()
