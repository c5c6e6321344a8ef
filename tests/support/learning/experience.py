"""Made-up experience: fragments as a policy acts them or of random numbers, and minibatches of both families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import expected_columns
from stagecoach.shared.experience.spaces import Columns, PolicySpaces
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from stagecoach.trainer_node.learning.building_blocks.batch import Batch
from stagecoach.trainer_node.learning.building_blocks.interface import Experience
from tests.support.learning.algorithms import bits


def received(*columns: Columns) -> list[Experience]:
    """Wraps fragments of one source as the learner passes them to an algorithm."""
    return [Experience("worker-0:0.0", item) for item in columns]


def acted(
    policy: Any, seed: int, steps: int = 8, slots: int = 4, *, absent: bool = False, noise: float = 0.0
) -> Columns:
    """A fragment of made-up observations that `policy` acts on, in the midst of episodes if it has a core.

    Where `absent`, the row after an end is masked, as native environments have it. `noise` is how far the
    log-probabilities are from the policy's.
    """
    random, size = np.random.default_rng(seed), (steps, slots)
    over, mask = random.random(size) < 0.25, np.ones(size, np.bool_)
    if absent:
        for step in range(1, steps):
            over[step] &= ~over[step - 1]
            mask[step] = ~over[step - 1]
    terminated = over & (random.random(size) < 0.5)
    last_known = random.random(size) < 0.5
    index = np.argwhere(over & (~terminated | last_known)).astype(np.int32)
    (leaf,) = policy.spaces.observation.leaves

    def normal(*shape: int) -> Any:
        return random.normal(size=shape).astype(np.float32)

    columns: Columns = {
        "obs": normal(*size, *leaf.shape), "bootstrap_obs": normal(slots, *leaf.shape),
        "final_obs": normal(len(index), *leaf.shape), "final_index": index, "reward": normal(*size) * mask,
        "terminated": terminated, "truncated": over & ~terminated, "mask": mask,
    }  # fmt: skip
    with torch.no_grad():
        observations = {"obs": torch.from_numpy(columns["obs"])}
        if policy.state_size:
            columns["state_in"] = np.tanh(normal(slots, policy.state_size))
            before = torch.from_numpy(columns["state_in"]), torch.from_numpy(over | ~mask)
            if hasattr(policy, "sequence"):
                params = policy.sequence(observations, *before)[0].flatten(0, 1)
            else:
                rows = {"obs": observations["obs"].flatten(0, 1)}
                params = policy.values(rows, policy.states(rows, *before).flatten(0, 1))
        else:
            params = policy.action_parameters({"obs": observations["obs"].flatten(0, 1)})
        actions = policy.distribution.sample(params, torch.Generator().manual_seed(seed))
        log_prob = policy.distribution.log_prob(params, actions).reshape(size).numpy()
    columns["action"] = actions["action"].reshape(*size, *policy.spaces.action.leaves[0].shape).numpy()
    columns["log_prob"] = log_prob + np.float32(noise) * normal(*size) if noise else log_prob
    assert set(columns) == set(expected_columns(policy.spaces, steps, slots, policy.state_size))
    return columns


def fill_masked_rows(columns: Columns, seed: int, scale: float) -> None:
    """Fills the rows in which no agent acts with garbage."""
    gone, random = ~columns["mask"], np.random.default_rng(seed)
    assert gone.sum() > 3
    for name in ("obs", "reward", "log_prob"):
        columns[name][gone] = random.normal(size=columns[name][gone].shape) * scale
    columns["action"][gone] = seed


def ignores_masked_rows(
    make: Callable[[], Any], columns_of: Callable[[Any], Columns], scale: float = 1e6
) -> tuple[Any, Columns, dict[str, float]]:
    """Checks that garbage in rows in which no agent acts changes no bit; returns algorithm, columns and metrics."""
    found = []
    for garbage in (0, 1):
        algorithm = make()
        columns = columns_of(algorithm.policy)
        fill_masked_rows(columns, garbage, scale)
        metrics = algorithm.update(received(columns), Counters(env_steps=10))
        found.append((metrics, bits(algorithm)))
    assert found[0] == found[1]
    return algorithm, columns, metrics


def random_fragment(
    policy: Policy, seed: int, steps: int = 4, slots: int = 3, *, terminated: float = 0.1, truncated: float = 0.1
) -> Experience:
    """Random numbers of any spaces, with this share of ends; actions are within their bounds."""
    random, size = np.random.default_rng(seed), (steps, slots)
    columns: Columns = {}
    for name, (shape, dtype) in expected_columns(policy.spaces, steps, slots, policy.state_size).items():
        if not name.startswith("final_"):
            columns[name] = random.normal(size=shape).astype(dtype)
    for leaf in policy.spaces.action.leaves:
        shape = (*size, *leaf.shape)
        low, high = leaf.bounds() if leaf.kind == "box" else (0, 0)
        drawn = random.uniform(low, high, shape) if leaf.kind == "box" else random.integers(leaf.nvec, size=shape)
        columns[leaf.column("action")] = drawn.astype(leaf.column_dtype)
    columns["mask"] = np.ones(size, np.bool_)
    columns["terminated"] = random.random(size) < terminated
    columns["truncated"] = ~columns["terminated"] & (random.random(size) < truncated)
    columns["final_index"] = np.argwhere(columns["truncated"]).astype(np.int32)
    for leaf in policy.spaces.observation.leaves:
        ends = (len(columns["final_index"]), *leaf.shape)
        columns[leaf.column("final_obs")] = random.normal(size=ends).astype(leaf.column_dtype)
    return Experience("worker-0:0", columns)


def minibatch(described: PolicySpaces, rows: int = 9, seed: int = 0, weighted: bool = True) -> Minibatch:
    """Batch of random transitions; some discounts are 0."""
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


def advantage_batch(policy: Any) -> Batch:
    """Rows with advantages, some steps into an update: the policy has moved, so that ratios are away from 1."""
    random, rows = torch.Generator().manual_seed(9), 20
    observations = {"obs": torch.randn(rows, 3, generator=random)}
    with torch.no_grad():
        params, value = policy.action_parameters_and_value(observations)
        actions = policy.distribution.sample(params, random)
        log_prob = policy.distribution.log_prob(params, actions)
    noise = torch.randn(4, rows, generator=random)
    return Batch(
        observations, actions, log_prob + 0.4 * noise[0], value + noise[1], 3 * noise[2] + 1, value + 2 * noise[3]
    )


def weights_after_updates(algorithm: Any) -> Columns:
    """Three of them, on random fragments."""
    counters, (steps, slots) = Counters(), (4, 3)
    for number in range(3):
        counters.env_steps += steps * slots
        algorithm.update([random_fragment(algorithm.policy, number, steps, slots)], counters)
        counters.updates += 1
    return state_arrays(algorithm.policy)


@torch.no_grad()
def update_batch(algorithm: Any, columns: Columns) -> Any:
    """Batch that an on-policy algorithm builds from a fragment."""
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    algorithm.signals.observe_batch(received(columns), tensors)
    return algorithm.batch(tensors)
