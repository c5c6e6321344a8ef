"""Every algorithm on a small network, and copies of networks that differ as in the middle of training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.config.algorithms.off_policy import OffPolicyConfig
from stagecoach.shared.config.algorithms.on_policy import OnPolicyConfig
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.learner import make_algorithm
from tests.support.learning.streams import PLAIN

CPU = torch.device("cpu")
LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 4.0], np.float32)
SEEN = describe_space(spaces.Box(-5.0, 5.0, (3,)))
BOXES = PolicySpaces(SEEN, describe_space(spaces.Box(LOW, HIGH)))
CHOICE = PolicySpaces(SEEN, describe_space(spaces.Discrete(4)))
on_both_spaces = pytest.mark.parametrize("described", [BOXES, CHOICE], ids=["boxes", "choice"])

ON_POLICY = [name for name, section in ALGORITHMS.items() if issubclass(section, OnPolicyConfig)]
OFF_POLICY = [name for name, section in ALGORITHMS.items() if issubclass(section, OffPolicyConfig)]
OF_BOXES = ("cql", "ddpg", "sac", "td3", "td3_bc", "tqc")
"""Algorithms for box actions, unless a test says otherwise."""


def make(
    name: str,
    described: PolicySpaces | None = None,
    policy: dict[str, Any] | None = None,
    *,
    shape: tuple[int, int] | None = None,
    seed: int = 3,
    agents: int = 1,
    setting: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
    **fields: Any,
) -> Any:
    """The algorithm of that name; `shape` is [T, S] of its fragments, 4 × 3 where it has a memory and else 8 × 4.

    `prepare` is called with the policy before the algorithm is made of it.
    """
    remembers = name in OFF_POLICY
    steps, slots = shape or ((4, 3) if remembers else (8, 4))
    defaults: dict[str, Any] = {"minibatch_size": 16, "epochs": 3}
    if remembers:
        defaults["replay_buffer"] = {"kind": "uniform", "capacity": 20 * steps * slots}
        defaults |= {"gradient_steps_per_env_step": 0.25} if name == "r2d2" else {}
    known = ALGORITHMS[name].model_fields
    section = {"name": name} | {key: value for key, value in defaults.items() if key in known} | fields
    config = ALGORITHMS[name].model_validate(section)
    core = {"core": "lstm", "core_size": 5, "share_encoder": True} if name == "r2d2" else {}
    network = PolicyConfig.model_validate({"hidden_sizes": (6, 5) if remembers else (16,)} | core | (policy or {}))
    described = described or (BOXES if name in OF_BOXES else CHOICE)
    built = build_policies({"p": described}, {"p": network}, config, seed, lambda _: agents)["p"]
    if prepare is not None:
        prepare(built)
    return make_algorithm(built, config, Setting(CPU, seed, steps, slots, **{"agents": agents, **(setting or {})}))


def make_dqn(
    name: str = "dqn", policy: dict[str, Any] | None = None, capacity: int = 240, rewards: Any = None, **fields: Any
) -> Any:
    """Config with one hidden layer, for `streams.py`; a gradient step for each env step."""
    memory = {"kind": "uniform"} | fields.pop("replay_buffer", {}) | {"capacity": capacity}
    fields = {"minibatch_size": 8, "gradient_steps_per_env_step": 1.0} | fields
    network = {"hidden_sizes": (6,)} | (policy or {})
    return make(name, PLAIN, network, setting={"rewards": rewards}, replay_buffer=memory, **fields)


def weights(algorithm: Any) -> dict[str, bytes]:
    """Tensors of its policy, with the statistics of its normalizer."""
    return {name: array.tobytes() for name, array in state_arrays(algorithm.policy).items()}


def bits(algorithm: Any) -> dict[str, bytes]:
    """All that its next update depends on."""
    return weights(algorithm) | {f"state/{name}": array.tobytes() for name, array in algorithm.state().items()}


def move_apart(*networks: nn.Module) -> None:
    """Perturbs the networks as in the middle of training, so that no two are equal."""
    drawing = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for network in networks:
            for tensor in network.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=drawing) * 0.3)


def older(policy: Any) -> Any:
    """Another policy, which may have acted."""
    found = copy.deepcopy(policy)
    move_apart(found)
    return found


def noted(monkeypatch: pytest.MonkeyPatch, algorithm: Any, method: str) -> list[tuple[Any, ...]]:
    """The arguments of each call of a method (such as `loss`) of this algorithm, or of those of that name."""
    named, seen = isinstance(algorithm, str), list[tuple[Any, ...]]()
    owner = type(make(algorithm)) if named else algorithm
    original = getattr(owner, method)

    def noting(*arguments: Any) -> Any:
        seen.append(arguments[1:] if named else arguments)
        return original(*arguments)

    monkeypatch.setattr(owner, method, noting)
    return seen


def gradients_are_differences(
    parameters: Iterable[tuple[str, nn.Parameter]], slow_loss: Callable[[], float], step: float, rel: float, abs_: float
) -> None:
    """Looks at each parameter's `grad`, where it is largest, beside what a slow computation of the loss says of it."""
    for name, parameter in parameters:
        if not parameter.numel():
            continue
        assert parameter.grad is not None, name
        place, losses = int(parameter.grad.abs().argmax()), []
        found, flat = float(parameter.grad.flatten()[place]), parameter.data.view(-1)
        kept = float(flat[place])
        for change in (step, -step):
            flat[place] = kept + change
            with torch.no_grad():
                losses.append(slow_loss())
        flat[place] = kept
        assert found == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=rel, abs=abs_), name
