"""Intrinsic curiosity: reward, losses and gradients against slow NumPy, and that what is understood is worth less."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.config.algorithms.on_policy import PPOConfig
from stagecoach.shared.config.algorithms.reward_signals import ICMConfig
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import Array, PolicySpaces
from stagecoach.shared.policies.registry import borrowed_random_state, build_policies
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.reward_signals.base import ActionEncoding, Rows
from stagecoach.trainer_node.learning.reward_signals.signals import ICM
from tests.support.learning import slow_signals as slow
from tests.support.learning.algorithms import gradients_are_differences

GENERATOR = torch.Generator()
OBSERVATION = describe_space(spaces.Box(-5.0, 5.0, (3,)))
MIXED = describe_space(
    spaces.Dict(
        {"arm": spaces.Box(np.array([-2, 0], np.float32), np.array([2, 1], np.float32)), "gear": spaces.Discrete(3)}
    )
)
FREE = describe_space(spaces.Box(-np.inf, np.inf, (2,)))


def make_icm(action: Any = MIXED, **config: Any) -> ICM:
    described = PolicySpaces(OBSERVATION, action)
    policy = build_policies({"p": described}, {"p": PolicyConfig()}, PPOConfig(), 1)["p"]
    section = {"hidden_sizes": [8, 8], "embedding_size": 4, "model_sizes": [5]} | config
    with borrowed_random_state(1):
        icm = ICM(policy, ICMConfig.model_validate(section))
    icm.observe({"obs": torch.from_numpy(np.random.default_rng(5).normal(0.2, 0.7, (50, 3)).astype(np.float32))})
    return icm


def rows(count: int = 9, seed: int = 0) -> Rows:
    random = np.random.default_rng(seed)
    here, there = (torch.from_numpy(random.normal(size=(count, 3)).astype(np.float32)) for _ in range(2))
    arm = torch.from_numpy(random.uniform(-3, 3, (count, 2)).astype(np.float32))
    gear = torch.from_numpy(random.integers(3, size=count))
    return Rows({"obs": here}, {"action.arm": arm, "action.gear": gear}, {"obs": there})


def slow_model(arrays: dict[str, Array], name: str, inputs: Array) -> Array:
    return slow.linear(arrays, f"{name}.2", np.maximum(slow.linear(arrays, f"{name}.0", inputs), 0.0))


def slow_errors(icm: ICM, batch: Rows) -> tuple[list[float], list[float]]:
    """Row by row: of the forward model (equation 6), and of the inverse model."""
    arrays, forward, inverse = state_arrays(icm), [], []
    for row in range(len(batch)):
        here, there = (
            slow.mlp(arrays, "features.", slow.normalized(arrays, "", columns["obs"][row].numpy()), "relu")
            for columns in (batch.observations, batch.next_observations)
        )
        arm, gear = batch.actions["action.arm"][row].numpy(), int(batch.actions["action.gear"][row])
        arm = np.array([min(max(arm[0], -2.0), 2.0) / 2, 2 * min(max(arm[1], 0.0), 1.0) - 1])
        action = np.concatenate([arm, [float(gear == choice) for choice in range(3)]])
        predicted = slow_model(arrays, "forward_model", np.concatenate([here, action]))
        forward.append(float(np.sum((predicted - there) ** 2) / 2))
        guessed = slow_model(arrays, "inverse_model", np.concatenate([here, there]))
        logits = guessed[2:]
        probability = np.exp(logits[gear]) / np.exp(logits).sum()
        inverse.append(float(np.sum((guessed[:2] - arm) ** 2) / 2 - np.log(probability)))
    return forward, inverse


def test_reward_and_losses_are_the_papers() -> None:
    icm, batch = make_icm(), rows()
    forward, inverse = slow_errors(icm, batch)
    with torch.no_grad():
        assert icm.reward(batch).tolist() == pytest.approx(forward, rel=1e-4)
    loss, metrics = icm.loss(batch, GENERATOR)
    assert metrics["train/icm_forward_loss"].item() == pytest.approx(np.mean(forward), rel=1e-4)
    assert metrics["train/icm_inverse_loss"].item() == pytest.approx(np.mean(inverse), rel=1e-4)
    expected = 0.8 * np.mean(inverse) + 0.2 * np.mean(forward)
    assert loss.item() == metrics["train/icm_loss"].item() == pytest.approx(expected, rel=1e-4)


def test_icm_gradients_equal_slow_losses() -> None:
    icm, batch = make_icm(forward_weight=0.4), rows()
    icm.loss(batch, GENERATOR)[0].backward()

    def slow_loss() -> float:
        forward, inverse = slow_errors(icm, batch)
        return float(0.6 * np.mean(inverse) + 0.4 * np.mean(forward))

    gradients_are_differences(icm.named_parameters(), slow_loss, step=1e-3, rel=0.05, abs_=1e-3)


def test_actions_that_nothing_bounds_are_taken_as_they_are() -> None:
    given = torch.tensor([[3.0, -7.0]])
    assert ActionEncoding(FREE)({"action": given}).tolist() == given.tolist()
    fixed = describe_space(spaces.Box(np.array([-1, 2], np.float32), np.array([1, 2], np.float32)))
    assert ActionEncoding(fixed)({"action": torch.tensor([[0.5, 2.0]])}).tolist() == [[0.5, 2.0]], "no room to choose"
