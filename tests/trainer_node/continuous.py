"""Made-up experience and minibatches for tests of off-policy algorithms, and slow networks of actors and critics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rollout_worker.making import describe_space
from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import PolicyConfig
from shared.fragment import expected_columns
from shared.policies.codec import state_arrays
from shared.policies.policy import Policy
from shared.policies.registry import build_policies
from shared.spaces import Array, Columns, PolicySpaces
from shared.steps import Counters
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.off_policy import Minibatch
from trainer_node.algorithms.registry import make_algorithm

LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 4.0], np.float32)
BOXES = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Box(LOW, HIGH)))
CHOICE = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Discrete(4)))
STEPS, SLOTS = 4, 3


def made(name: str, described: PolicySpaces = BOXES, policy: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The algorithm of that name on a small network, with a memory of 20 fragments."""
    memory = {"kind": "uniform", "capacity": 20 * STEPS * SLOTS}
    config = ALGORITHMS[name].model_validate({"name": name, "minibatch_size": 16, "memory": memory, **fields})
    networks = {"p": PolicyConfig.model_validate({"hidden_sizes": (6, 5), **(policy or {})})}
    built = build_policies({"p": described}, networks, config, seed=3)["p"]
    return make_algorithm(built, config, Setting(torch.device("cpu"), 3, STEPS, SLOTS))


def any_algorithm(
    name: str, fields: dict[str, Any] | None = None, policy: dict[str, Any] | None = None, **setting: Any
) -> Any:
    """The algorithm of that name on a network of two layers, in this setting, with actions that it has losses for."""
    known = ALGORITHMS[name].model_fields
    section: dict[str, Any] = {"minibatch_size": 4, "epochs": 2}
    if "memory" in known:
        section = {"minibatch_size": 16, "memory": {"kind": "uniform", "capacity": 20 * STEPS * SLOTS}}
    section = {key: value for key, value in section.items() if key in known} | (fields or {})
    config = ALGORITHMS[name].model_validate({"name": name} | section)
    network = PolicyConfig.model_validate({"hidden_sizes": (16, 16)} | (policy or {}))
    described = BOXES if name in {"sac", "td3", "ddpg", "cql"} else CHOICE
    built = build_policies({"p": described}, {"p": network}, config, seed=3)["p"]
    return make_algorithm(built, config, Setting(torch.device("cpu"), 3, STEPS, SLOTS, **setting))


def learnt(algorithm: Any) -> Columns:
    """The weights after three updates."""
    counters = Counters()
    for number in range(3):
        counters.env_steps += STEPS * SLOTS
        algorithm.update([fragment(algorithm.policy, number)], counters)
        counters.updates += 1
    return state_arrays(algorithm.policy)


def fragment(policy: Policy, seed: int, *, terminated: float = 0.1, truncated: float = 0.1) -> Experience:
    """Random numbers, with this share of ends."""
    random = np.random.default_rng(seed)
    columns: Columns = {}
    for name, (shape, dtype) in expected_columns(policy.spaces, STEPS, SLOTS).items():
        if not name.startswith("final_"):
            columns[name] = random.normal(size=shape).astype(dtype)
    for leaf in policy.spaces.action.leaves:
        shape = (STEPS, SLOTS, *leaf.shape)
        low, high = leaf.bounds() if leaf.kind == "box" else (0, 0)
        drawn = random.uniform(low, high, shape) if leaf.kind == "box" else random.integers(leaf.nvec, size=shape)
        columns[leaf.column("action")] = drawn.astype(leaf.column_dtype)
    columns["mask"] = np.ones((STEPS, SLOTS), np.bool_)
    columns["terminated"] = random.random((STEPS, SLOTS)) < terminated
    columns["truncated"] = ~columns["terminated"] & (random.random((STEPS, SLOTS)) < truncated)
    columns["final_index"] = np.argwhere(columns["truncated"]).astype(np.int32)
    for leaf in policy.spaces.observation.leaves:
        ends = (len(columns["final_index"]), *leaf.shape)
        columns[leaf.column("final_obs")] = random.normal(size=ends).astype(leaf.column_dtype)
    return Experience("worker-0:0", columns)


def minibatch(described: PolicySpaces, rows: int = 9, seed: int = 0, weighted: bool = True) -> Minibatch:
    """Random numbers; some discounts are 0."""
    random = np.random.default_rng(seed)
    (sight,), (action,) = described.observation.leaves, described.action.leaves

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(random.normal(size=shape).astype(np.float32))

    if action.kind == "discrete":
        actions = random.integers(action.nvec[0], size=rows)
    else:
        actions = random.uniform(*action.bounds(), (rows, *action.shape)).astype(np.float32)
    discount = torch.from_numpy(random.choice(np.array([0.0, 0.9, 0.729], np.float32), size=rows))
    weight = torch.from_numpy(random.random(rows).astype(np.float32)) if weighted else torch.ones(rows)
    return Minibatch(
        {"obs": normal(rows, *sight.shape)}, {"action": torch.from_numpy(actions)}, {"obs": normal(rows, *sight.shape)},
        normal(rows), discount, weight,
    )  # fmt: skip


def moved_apart(*networks: torch.nn.Module) -> None:
    """As in the middle of learning: no two networks are equal."""
    drawing = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for network in networks:
            for tensor in network.parameters():
                tensor.add_(torch.randn(tensor.shape, generator=drawing) * 0.3)


def slow_critic(critics: torch.nn.Module, which: int, inputs: Array) -> Array:
    """One row through one critic, float64."""
    arrays = {name: tensor.detach().numpy().astype(np.float64)[which] for name, tensor in critics.named_parameters()}
    for layer in range(3):
        inputs = inputs @ arrays[f"weights.{layer}"] + arrays[f"biases.{layer}"][0]
        if layer < 2:
            inputs = np.tanh(inputs)
    return inputs


def slow_actor(policy: torch.nn.Module, inputs: Array) -> Array:
    """One row through a policy's network, float64."""
    arrays = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in policy.named_parameters()}
    for layer in (0, 2):
        inputs = np.tanh(arrays[f"actor.mlp.{layer}.weight"] @ inputs + arrays[f"actor.mlp.{layer}.bias"])
    found: Array = arrays["head.weight"] @ inputs + arrays["head.bias"]
    return found


def in_unit_box(action: Array) -> Array:
    """From the environment's units to [-1, 1]."""
    found: Array = 2 * (action.astype(np.float64) - LOW) / (HIGH - LOW) - 1
    return found
