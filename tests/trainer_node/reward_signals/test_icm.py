"""Intrinsic curiosity: reward, losses and gradients against slow NumPy, and that what is understood is worth less."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.making import describe_space
from shared.algorithm_configs.ppo import PPOConfig
from shared.config import PolicyConfig
from shared.policies.codec import state_arrays
from shared.policies.registry import borrowed_random_state, build_policies
from shared.reward_signals_config import ICMConfig
from shared.spaces import Array, PolicySpaces
from tests.trainer_node.reward_signals import slow
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.descent import descend
from trainer_node.reward_signals.actions import ActionEncoding
from trainer_node.reward_signals.icm import ICM
from trainer_node.reward_signals.signal import Rows

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
    hidden = np.maximum(arrays[f"{name}.0.weight"].astype(np.float64) @ inputs + arrays[f"{name}.0.bias"], 0.0)
    found: Array = arrays[f"{name}.2.weight"].astype(np.float64) @ hidden + arrays[f"{name}.2.bias"]
    return found


def slow_errors(icm: ICM, batch: Rows) -> tuple[list[float], list[float]]:
    """Row by row: of the forward model (equation 6), and of the inverse model."""
    arrays, forward, inverse = state_arrays(icm), [], []
    for row in range(len(batch)):
        here, there = (
            slow.mlp(arrays, "features.", slow.normalised(arrays, "", columns["obs"][row].numpy()), "relu")
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


def test_the_gradients_are_those_of_the_slow_losses() -> None:
    icm, batch = make_icm(forward_weight=0.4), rows()
    icm.loss(batch, GENERATOR)[0].backward()
    for name, parameter in icm.named_parameters():
        where = (0,) * parameter.ndim
        assert parameter.grad is not None
        found, kept, losses = parameter.grad[where].item(), parameter[where].item(), []
        for change in (1e-3, -1e-3):
            with torch.no_grad():
                parameter[where] = kept + change
            forward, inverse = slow_errors(icm, batch)
            losses.append(0.6 * np.mean(inverse) + 0.4 * np.mean(forward))
        with torch.no_grad():
            parameter[where] = kept
        assert found == pytest.approx((losses[0] - losses[1]) / 2e-3, rel=0.05, abs=1e-3), name


def test_actions_that_nothing_bounds_are_taken_as_they_are() -> None:
    given = torch.tensor([[3.0, -7.0]])
    assert ActionEncoding(FREE)({"action": given}).tolist() == given.tolist()
    fixed = describe_space(spaces.Box(np.array([-1, 2], np.float32), np.array([1, 2], np.float32)))
    assert ActionEncoding(fixed)({"action": torch.tensor([[0.5, 2.0]])}).tolist() == [[0.5, 2.0]], "no room to choose"


def test_where_the_next_observation_follows_from_the_action_curiosity_fades_and_elsewhere_it_stays() -> None:
    """The first element moves by the action; the actions are told from observations."""
    icm = make_icm(describe_space(spaces.Discrete(2)), embedding_size=2)
    random = np.random.default_rng(1)

    def played(rule: int) -> Rows:
        here, action = random.normal(size=(256, 3)), random.integers(2, size=256)
        there = here.copy()
        there[:, 0] += rule * (2 * action - 1)
        columns = [{"obs": torch.from_numpy(side.astype(np.float32))} for side in (here, there)]
        return Rows(columns[0], {"action": torch.from_numpy(action)}, columns[1])

    learnt = list(icm.parameters())
    optimiser = Adam(learnt, 1e-8)
    first = icm.loss(played(1), GENERATOR)[1]
    for _ in range(400):
        metrics = icm.loss(batch := played(1), GENERATOR)[1]
        descend(icm.loss(batch, GENERATOR)[0], learnt, optimiser, 3e-3, None)
    assert metrics["train/icm_inverse_loss"] < 0.1 * first["train/icm_inverse_loss"]
    with torch.no_grad():
        known, other = (icm.reward(played(rule)).mean() for rule in (1, -1))
    assert other > 3 * known
