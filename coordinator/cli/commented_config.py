"""The commented configs of `stagecoach init`: the fields that people change, or all of them."""

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.loading import dump_config, parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.plain_data import plain
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.config.sections import RunPolicyConfig

_TASKS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "CartPole-v1": ((), {"env_steps": 100_000, "mean_return": 475.0}),
    "Pendulum-v1": (("sac", "tqc", "td3", "ddpg", "cql", "td3_bc"), {"env_steps": 20_000, "mean_return": -200.0}),
    "mpe2.simple_spread_v3:parallel_env": (("vdn", "qmix"), {"env_steps": 500_000}),
}
"""Environment → the algorithms that begin with it, and the end of the run."""
_FROM_DATA = ("bc", "iql", "cql", "td3_bc")
_SHOWN = {
    "seed": "seed of everything random",
    "environment.id": "a Gymnasium id, or module:factory for an environment of yours",
    "environment.api": "several agents; these need: pip install mpe2",
    "environment.kwargs": "arguments of the environment",
    "environment.num_envs": "environments of each worker",
    "dataset.path": "give yours: a run's store, CSV, HDF5 … (docs/guides/offline.md)",
    "policies.default.hidden_sizes": "layers of the network",
    "algorithm.name": f"one of {', '.join(ALGORITHMS)}",
    "algorithm.learning_rate": "or a schedule: {kind: linear, start: 3e-4, end: 0, over: 100000 env_steps}",
    "algorithm.gamma": "discount per step",
    "rollout.workers": "processes that act",
    "rollout.fragment_steps": "steps of each environment in a fragment",
    "rollout.fragments_per_update": "fragments that an update learns from",
    "checkpoint.every": "a duration in updates, env_steps or episodes",
    "evaluation.episodes": "played with each checkpoint",
    "stop_at.env_steps": "the first of these ends the run",
    "stop_at.mean_return": "reached in three evaluations in a row",
}
"""Fields that people change, and a comment on each."""
_WIDTH = 100


def _starter(algorithm: str) -> dict[str, Any]:
    task = next((name for name, (learned, _) in _TASKS.items() if algorithm in learned), "CartPole-v1")
    starter = {"environment": {"id": task}, "algorithm": {"name": algorithm}, "stop_at": _TASKS[task][1]}
    if ":" in task:
        starter["environment"]["api"] = "pettingzoo"
    return starter | ({"dataset": {"path": "data.csv"}} if algorithm in _FROM_DATA else {})


def short_config(algorithm: str | None = None) -> str:
    """Returns a config of the fields that people change; for an `algorithm`, its whole section and its defaults of
    others. Raises `ConfigError` for an unknown one."""
    starter = _starter(algorithm or "ppo")
    config, section = parse_config(starter), ALGORITHMS[algorithm] if algorithm else AlgorithmConfig
    optional = {"environment.api", "dataset.path", "stop_at.mean_return"} - leaves(starter).keys()
    comments = {path: comment for path, comment in _SHOWN.items() if path not in optional}
    tree: dict[str, Any] = {path.partition(".")[0]: {} for path in comments}
    for name, field in section.model_fields.items() if algorithm else ():
        sentence = re.split(r"[.;] ", re.sub(r" \([^()]*\)", "", explained(field)))[0].rstrip(".")
        comments.setdefault(f"algorithm.{name}", textwrap.shorten(sentence, 90, placeholder=" …"))
    for path in leaves(dict(section.defaults)):
        comments.setdefault(path.replace("policies.", "policies.default."), f"default of {algorithm}")
    for path, comment in comments.items():
        *above, name = path.split(".")
        value, here = config, tree
        for key in above:
            value, here = value[key] if isinstance(value, dict) else getattr(value, key), here.setdefault(key, {})
        here[name] = f"{inline(plain(getattr(value, name)))}  # {comment}"
    lines = ["# The fields that people change. `stagecoach init --all FILE` writes all of them."]
    return "\n".join([*lines, *_nested(tree, 0)]) + "\n"


def _nested(tree: dict[str, Any], depth: int) -> Iterator[str]:
    for name, below in tree.items():
        if isinstance(below, dict):
            yield f"{'  ' * depth}{name}:"
            yield from _nested(below, depth + 1)
        else:
            yield f"{'  ' * depth}{name}: {below}"


def commented_config(algorithm: str = "ppo") -> str:
    """Returns a complete config to start from, each field under its explanation."""
    lines = ["# A Stagecoach run. Every field is here with its default; delete what you don't change.", ""]
    _commented(Config, yaml.safe_load(dump_config(parse_config(_starter(algorithm)))), 0, lines)
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
