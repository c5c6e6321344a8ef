"""SAC: its losses against a slow NumPy computation, its temperature, and what it bootstraps from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.making import describe_space
from shared.errors import UnsupportedSpace
from shared.policies.codec import state_arrays
from shared.spaces import Array, PolicySpaces
from shared.steps import Counters
from tests.trainer_node.continuous import (
    BOXES,
    CHOICE,
    SLOTS,
    STEPS,
    fragment,
    in_unit_box,
    made,
    minibatch,
    moved_apart,
    slow_actor,
    slow_critic,
)

BOTH = pytest.mark.parametrize("described", [BOXES, CHOICE], ids=["boxes", "choice"])
ALPHA = 0.3


def slow_actions(params: Array, noise: Array, discrete: bool) -> list[tuple[float, float, Array]]:
    """(probability, log probability, what the critic is told) of what stands for the policy's actions."""
    if discrete:
        log_p = params - math.log(sum(math.exp(x) for x in params))
        return [(math.exp(log_p[n]), float(log_p[n]), np.array([n])) for n in range(len(params))]
    action, log_prob = [], 0.0
    for mean, log_std, z in zip(params[:2], params[2:], noise):
        value = math.tanh(mean + math.exp(log_std) * z)
        log_prob += -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi) - math.log(1 - value * value)
        action.append(value)
    return [(1.0, log_prob, np.array(action))]


def slow_value(critics: torch.nn.Module, which: int, sight: Array, action: Array, discrete: bool) -> float:
    if discrete:
        return float(slow_critic(critics, which, sight)[int(action[0])])
    return float(slow_critic(critics, which, np.concatenate([sight, action]))[0])


@BOTH
def test_the_losses_are_those_of_a_slow_computation(described: PolicySpaces) -> None:
    sac, batch, discrete = made("sac", described, initial_temperature=ALPHA), minibatch(described), described is CHOICE
    moved_apart(sac.policy, sac.critics, sac.targets)
    noise = sac.actions.noise(len(batch), torch.Generator().manual_seed(5))
    rows = np.zeros((len(batch), 2)) if discrete else noise.numpy().astype(np.float64)
    critic, actor, entropies = 0.0, 0.0, []
    for row in range(len(batch)):
        sight, after = (
            seen["obs"][row].numpy().astype(np.float64) for seen in (batch.observations, batch.next_observations)
        )
        soft = sum(
            p * (min(slow_value(sac.targets, c, after, a, discrete) for c in (0, 1)) - ALPHA * log_p)
            for p, log_p, a in slow_actions(slow_actor(sac.policy, after), rows[row], discrete)
        )
        wanted = float(batch.reward[row]) + float(batch.discount[row]) * soft
        taken = batch.actions["action"][row].numpy()
        taken = np.array([taken]) if discrete else in_unit_box(taken)
        errors = [slow_value(sac.critics, c, sight, taken, discrete) - wanted for c in (0, 1)]
        weight = float(batch.weight[row]) / len(batch)
        critic += 0.5 * weight * sum(error**2 for error in errors)
        considered = slow_actions(slow_actor(sac.policy, sight), rows[row], discrete)
        actor += weight * sum(
            p * (ALPHA * log_p - min(slow_value(sac.critics, c, sight, a, discrete) for c in (0, 1)))
            for p, log_p, a in considered
        )
        entropies.append(-sum(p * log_p for p, log_p, _ in considered))
    assert float(sac.critic_loss(batch, noise)[0].detach()) == pytest.approx(critic, rel=1e-4)
    found, found_entropies = sac.actor_loss(batch, noise)
    assert float(found.detach()) == pytest.approx(actor, rel=1e-4)
    np.testing.assert_allclose(found_entropies.numpy(), entropies, rtol=1e-4, atol=1e-5)


@BOTH
def test_the_policys_gradient_is_that_of_finite_differences(described: PolicySpaces) -> None:
    sac, batch = made("sac", described), minibatch(described)
    for network in (sac.policy, sac.critics):
        network.to(torch.float64)
    batch = replace(batch, observations={"obs": batch.observations["obs"]}, weight=batch.weight.to(torch.float64))
    sac.policy.actor.forward = lambda sights, _: sac.policy.actor.mlp(sights["obs"].to(torch.float64))
    sac.critics.inputs.forward = lambda sights, _: sights["obs"].to(torch.float64)
    noise = sac.actions.noise(len(batch), torch.Generator().manual_seed(5)).to(torch.float64)
    bias = sac.policy.head.bias
    (found,) = torch.autograd.grad(sac.actor_loss(batch, noise)[0], bias)
    for element in range(len(bias)):
        sides = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                bias[element] += step
                sides.append(float(sac.actor_loss(batch, noise)[0]))
                bias[element] -= step
        assert float(found[element]) == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=1e-4, abs=1e-7)


def test_the_critics_losses_leave_the_targets_and_the_policy_alone() -> None:
    sac, batch = made("sac"), minibatch(BOXES)
    sac.critic_loss(batch, torch.zeros(len(batch), 2))[0].backward()
    assert all(tensor.grad is None for network in (sac.policy, sac.targets) for tensor in network.parameters())
    assert all(tensor.grad is not None for tensor in sac.critics.parameters())


@BOTH
def test_one_step_moves_everything_and_the_targets_by_tau(described: PolicySpaces) -> None:
    sac = made("sac", described, tau=0.25)
    before = {name: array.copy() for name, array in sac.networks().items()}
    policy = state_arrays(sac.policy)
    sac.learn(minibatch(described), Counters(), torch.Generator().manual_seed(1))
    after = sac.networks()
    assert all((state_arrays(sac.policy)[name] != array).any() for name, array in policy.items())
    assert after["log_temperature"] != before["log_temperature"]
    for name, array in before.items():
        if name.startswith("critics/"):
            target = name.replace("critics/", "targets/")
            assert (after[name] != array).any()
            np.testing.assert_allclose(after[target], 0.75 * before[target] + 0.25 * after[name], atol=1e-6)


def test_the_temperature_brings_the_entropy_to_its_target() -> None:
    """A bandit whose reward is −10 · a²: the best policy is as wide as the temperature makes it."""
    sac = made("sac", policy={"hidden_sizes": (64, 64), "activation": "relu"}, learning_rate=1e-2, target_entropy=-1.0)
    drawing, entropies = torch.Generator().manual_seed(0), []
    for step in range(400):
        batch = minibatch(BOXES, rows=64, seed=step)
        unit = torch.from_numpy(in_unit_box(batch.actions["action"].numpy())).to(torch.float32)
        bandit = replace(batch, reward=-10 * unit.square().sum(dim=1), discount=torch.zeros(64), weight=torch.ones(64))
        entropies.append(float(sac.learn(bandit, Counters(), drawing).metrics["train/entropy"]))
    assert entropies[0] > 0.0
    assert np.mean(entropies[-100:]) == pytest.approx(-1.0, abs=0.15)


def test_a_temperature_that_is_not_learnt_stays() -> None:
    sac = made("sac", initial_temperature=0.2, learn_temperature=False)
    found = sac.learn(minibatch(BOXES), Counters(), torch.Generator().manual_seed(1))
    assert float(found.metrics["train/temperature"]) == pytest.approx(0.2)
    assert float(sac.log_temperature.detach().exp()) == pytest.approx(0.2)


def test_the_default_target_is_the_papers_and_that_of_nearly_greedy_acting_for_a_choice() -> None:
    assert made("sac", BOXES).target_entropy == -2.0
    greedy = np.array([0.925, 0.025, 0.025, 0.025])
    assert made("sac", CHOICE).target_entropy == pytest.approx(-(greedy * np.log(greedy)).sum())


@pytest.mark.parametrize("name", ["sac", "td3", "ddpg", "cql"])
def test_it_bootstraps_from_the_true_last_observation_after_truncation_and_not_after_termination(name: str) -> None:
    algorithm = made(name)
    ended = fragment(algorithm.policy, 1, terminated=0.4, truncated=0.9)
    algorithm.remember([ended])
    drawn = algorithm.memory.sample(200, np.random.default_rng(0), gamma=0.9)
    batch = algorithm._on_device(drawn)
    found = algorithm.targets_of(batch, torch.zeros(200, 2))
    columns, finals = ended.columns, {tuple(place): n for n, place in enumerate(ended.columns["final_index"])}
    seen = {"terminated": 0, "truncated": 0}
    for place, row in enumerate(drawn.row):
        step, slot = divmod(int(row), SLOTS)
        reward = float(columns["reward"][step, slot])
        if columns["terminated"][step, slot]:
            assert float(found[place]) == pytest.approx(reward)
            seen["terminated"] += 1
        elif columns["truncated"][step, slot]:
            last = columns["final_obs"][finals[step, slot]]
            alone = replace(
                minibatch(BOXES, 1), next_observations={"obs": torch.from_numpy(last[None])},
                reward=torch.tensor([reward]), discount=torch.tensor([0.9]),
            )  # fmt: skip
            assert float(found[place]) == pytest.approx(float(algorithm.targets_of(alone, torch.zeros(1, 2))), rel=1e-4)
            seen["truncated"] += 1
    assert min(seen.values()) > 10


@pytest.mark.parametrize(
    ("name", "described", "fields"),
    [
        ("sac", BOXES, {}),
        ("sac", CHOICE, {}),
        ("td3", BOXES, {"policy_delay": 3}),
        ("ddpg", BOXES, {}),
        ("cql", BOXES, {"largest_gap": 1.0, "cloning_steps": 26}),
        ("cql", CHOICE, {"value_entropy": True}),
    ],
    ids=["sac", "discrete sac", "td3", "ddpg", "cql", "discrete cql"],
)
def test_k_updates_a_restore_and_the_rest_are_as_n_updates(
    name: str, described: PolicySpaces, fields: dict[str, Any]
) -> None:
    fields = {"policy": {"normalise_observations": True}, "gradient_steps_per_env_step": 0.6, **fields}
    whole, first = made(name, described, **fields), made(name, described, **fields)
    experience = [fragment(whole.policy, seed) for seed in range(6)]

    def learn(algorithm: Any, item: int) -> dict[str, float]:
        now = Counters(env_steps=(item + 1) * STEPS * SLOTS, updates=item)
        found: dict[str, float] = algorithm.update([experience[item]], now)
        return found

    for item in range(6):
        metrics = learn(whole, item)
        assert metrics["train/gradient_steps"] in (7, 8) and all(math.isfinite(value) for value in metrics.values())
    for item in range(3):
        learn(first, item)
    second = made(name, described, **fields)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state(first.state())
    second.remember(experience[:3])
    for item in range(3, 6):
        learn(second, item)
    ours, theirs = (state_arrays(one.policy) | one.state() for one in (whole, second))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    "action", [spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2), spaces.Tuple((spaces.Discrete(2),) * 2)], ids=str
)
def test_several_choices_are_refused(action: spaces.Space[Any]) -> None:
    described = PolicySpaces(describe_space(spaces.Box(-1.0, 1.0, (3,))), describe_space(action))
    with pytest.raises(UnsupportedSpace, match="sac learns boxes or one discrete choice"):
        made("sac", described)


def test_noise_on_choices_is_refused() -> None:
    with pytest.raises(UnsupportedSpace, match="exploration=gaussian is for continuous actions; use sampling"):
        made("sac", CHOICE, exploration={"kind": "gaussian"})


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sac", {"tau": 0}), ("sac", {"initial_temperature": 0}), ("sac", {"exploration": {"kind": "epsilon_greedy"}}),
        ("td3", {"policy_delay": 0}), ("td3", {"target_noise": -0.1}), ("ddpg", {"policy_delay": 2}),
        ("ddpg", {"exploration": {"kind": "ou", "theta": 0}}),
    ],
)  # fmt: skip
def test_fields_out_of_bounds_are_refused(name: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        made(name, **wrong)
