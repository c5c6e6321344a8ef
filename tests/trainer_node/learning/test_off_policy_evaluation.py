"""Off-policy evaluation: estimators against slow loops, fitted Q on a known chain, a policy on recorded CartPole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_environment, describe_space
from stagecoach.rollout_worker.exploration.base import RandomActing, Sampling
from stagecoach.shared.config.algorithms.q_learning import DQNConfig
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.spaces import Array, Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.off_policy_evaluation import (
    DataEvaluation,
    Evidence,
    FittedQ,
    Transitions,
    dm,
    dr,
    effective_episodes,
    estimates,
    evaluate,
    fit,
    ips,
    sequential_dr,
    wis,
)
from tests.conftest import minimal_config
from tests.support.environments.small import MODULE
from tests.support.experience.cartpole_data import RULE, played, write_played
from tests.support.experience.datasets import fragment_of, swung, write_archive, write_recorded
from tests.support.learning.algorithms import make
from tests.support.learning.learners import sampler_of

Estimator = Callable[[Evidence], float]
GAMMA = 0.9


def random_evidence(lengths: tuple[int, ...] = (4, 1, 6, 3)) -> Evidence:
    generator = np.random.default_rng(1)
    shape = len(lengths), max(lengths)
    mask = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    target, behavior = (-generator.random(shape) for _ in range(2))
    reward, q, v = (generator.normal(size=shape) for _ in range(3))
    return Evidence(target, behavior, reward, q, v, mask, GAMMA)


def rows(evidence: Evidence) -> list[list[tuple[float, float, float, float]]]:
    """ρ, r, q, v of each step of each episode."""
    found = []
    for episode in range(len(evidence.mask)):
        steps = []
        for t in range(int(evidence.mask[episode].sum())):
            ratio = math.exp(evidence.target_log_prob[episode, t]) / math.exp(evidence.behavior_log_prob[episode, t])
            steps.append((ratio, evidence.reward[episode, t], evidence.q[episode, t], evidence.v[episode, t]))
        found.append(steps)
    return found


def slow_ips(evidence: Evidence) -> float:
    total = 0.0
    for steps in rows(evidence):
        product = 1.0
        for t, (ratio, reward, _, _) in enumerate(steps):
            product *= ratio
            total += GAMMA**t * product * reward
    return total / len(rows(evidence))


def slow_wis(evidence: Evidence) -> float:
    episodes, total = rows(evidence), 0.0
    for t in range(max(len(steps) for steps in episodes)):
        products = [math.prod(ratio for ratio, *_ in steps[: t + 1]) for steps in episodes]
        for product, steps in zip(products, episodes, strict=True):
            if t < len(steps):
                total += GAMMA**t * product / sum(products) * steps[t][1]
    return total


def slow_dm(evidence: Evidence) -> float:
    return sum(steps[0][3] for steps in rows(evidence)) / len(rows(evidence))


def slow_dr(evidence: Evidence) -> float:
    first = [(steps[0][3], steps[0][0] * steps[0][2]) for steps in rows(evidence)]
    return slow_ips(evidence) + sum(v - weighted for v, weighted in first) / len(first)


def slow_sequential_dr(evidence: Evidence) -> float:
    def value(steps: list[tuple[float, float, float, float]]) -> float:
        if not steps:
            return 0.0
        ratio, reward, q, v = steps[0]
        return v + ratio * (reward + GAMMA * value(steps[1:]) - q)

    return sum(value(steps) for steps in rows(evidence)) / len(rows(evidence))


@pytest.mark.parametrize(
    ("fast", "slow"),
    [(ips, slow_ips), (wis, slow_wis), (dm, slow_dm), (dr, slow_dr), (sequential_dr, slow_sequential_dr)],
)
def test_estimators_agree_with_slow_loops(fast: Estimator, slow: Estimator) -> None:
    assert fast(random_evidence()) == pytest.approx(slow(random_evidence()), rel=1e-12)


def test_value_of_behavior_policy_is_the_mean_return() -> None:
    evidence = random_evidence()
    own = replace(evidence, target_log_prob=evidence.behavior_log_prob)
    mean = evidence.discounted.sum(axis=1).mean()
    assert ips(own) == pytest.approx(mean) and wis(own) == pytest.approx(mean)
    assert effective_episodes(own) == pytest.approx(4.0)


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    evidence = random_evidence((4, 1, 60, 3))
    for sign in (1.0, -1.0):
        far = replace(evidence, target_log_prob=sign * 500 + evidence.target_log_prob)
        assert all(math.isfinite(value) for value in estimates(far).values())


def test_only_model_estimates_without_behavior_probabilities() -> None:
    unknown = replace(evidence := random_evidence(), behavior_log_prob=np.full(evidence.mask.shape, np.nan))
    assert estimates(unknown) == {"ope/dm": dm(evidence), "ope/episodes_left_out": len(evidence.mask)}
    assert len(estimates(evidence)) == 7 and estimates(evidence)["ope/episodes_left_out"] == 0


def test_episode_with_unknown_step_counts_for_model_alone() -> None:
    evidence = random_evidence((4, 1, 6, 3))
    behavior = np.where(evidence.mask, evidence.behavior_log_prob, np.nan)
    behavior[2, 3] = np.nan
    found = estimates(replace(evidence, behavior_log_prob=behavior))
    rest = estimates(evidence.of(np.array([True, True, False, True])))
    assert found == rest | {"ope/dm": dm(evidence), "ope/episodes_left_out": 1}


# Fitted Q evaluation

DISCOUNT, LENGTH = 0.8, 5
PLACE = SpaceSpec((Leaf("", "discrete", (), "int64", (LENGTH + 1,), (0,)),), 0)
GO = SpaceSpec((Leaf("", "discrete", (), "int64", (2,), (0,)),), 0)
FORCE = SpaceSpec((Leaf("", "box", (1,), "float32", low=(-1.0,), high=(1.0,)),), 0)


def chain(action: SpaceSpec) -> Transitions:
    """Each place is left to the right (1, or a positive force), which costs 1, or one stays, which costs 2."""
    generator = np.random.default_rng(0)
    place = generator.integers(0, LENGTH, 2000)
    chosen = generator.integers(0, 2, 2000) if action is GO else generator.uniform(-1, 1, (2000, 1)).astype(np.float32)
    right = chosen == 1 if action is GO else chosen[:, 0] > 0
    after = place + right
    return Transitions(
        {"obs": torch.from_numpy(place)},
        {"action": torch.from_numpy(chosen)},
        torch.from_numpy(np.where(right, -1.0, -2.0).astype(np.float32)),
        torch.from_numpy(after == LENGTH),
        {"obs": torch.from_numpy(after)},
        torch.zeros(2000),
    )


def true_values(right: float) -> list[float]:
    """Of each place, where one goes to the right with this probability: solved from the end."""
    values = [0.0]
    for _ in range(LENGTH):
        here = (right * (-1 + DISCOUNT * values[0]) + (1 - right) * -2) / (1 - (1 - right) * DISCOUNT)
        values.insert(0, here)
    return values


@pytest.mark.parametrize("logit", [-1.0, 2.0])
def test_estimates_value_another_policy_than_the_behavior(logit: float) -> None:
    policy = ActorCritic(PolicySpaces(PLACE, GO), PolicyConfig(hidden_sizes=()))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.copy_(torch.tensor([0.0, logit]))
    before = torch.random.get_rng_state()
    fitted = fit(policy, chain(GO), DISCOUNT, 1500, seed=1)
    assert torch.equal(before, torch.random.get_rng_state())
    places = {"obs": torch.arange(LENGTH)}
    found = fitted.value(policy, places, torch.Generator().manual_seed(0))
    expected = true_values(1 / (1 + np.exp(-logit)))[:LENGTH]
    np.testing.assert_allclose(found.numpy(), expected, atol=0.35)
    stay, go = (fitted(places, {"action": torch.full((LENGTH,), n)}).detach().numpy() for n in (0, 1))
    assert (go > stay).all(), "going on is better everywhere"
    again = fit(policy, chain(GO), DISCOUNT, 1500, seed=1)
    assert torch.equal(again.value(policy, places, torch.Generator().manual_seed(0)), found)


def test_continuous_actions_are_averaged_over_samples() -> None:
    policy = ActorCritic(PolicySpaces(PLACE, FORCE), PolicyConfig(hidden_sizes=(), log_std_init=-2.0))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.fill_(0.5)
    fitted = fit(policy, chain(FORCE), DISCOUNT, 1500, seed=1)
    found = fitted.value(policy, {"obs": torch.arange(LENGTH)}, torch.Generator().manual_seed(0))
    np.testing.assert_allclose(found.numpy(), true_values(1.0)[:LENGTH], atol=0.5)


# On recorded experience


def policy_of(sharpness: float) -> ActorCritic:
    """Pushes to the right with probability sigmoid(sharpness × the rule's sum)."""
    spaces = describe_environment(minimal_config()).policies["default"]
    policy = ActorCritic(spaces, PolicyConfig(hidden_sizes=()))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.weight[1] = torch.from_numpy(RULE * sharpness).to(torch.float32)
    return policy


@pytest.mark.parametrize(("sharpness", "truth"), [(-8.0, 6.33), (4.0, 9.99)])
def test_estimates_rank_better_and_worse_policy(sharpness: float, truth: float) -> None:
    """`truth` is the mean discounted return of 400 episodes that each played; the data, almost random, falls soon."""
    found = evaluate(policy_of(sharpness), played(150, greed=0.2, steps=60), GAMMA, 1000, seed=1)
    assert found["ope/dm"] == pytest.approx(truth, abs=0.7)
    assert found["ope/sequential_dr"] == pytest.approx(truth, abs=0.7)
    assert 1 <= found["ope/effective_episodes"] < 20, "so far from what acted that weights alone tell little"
    assert all(np.isfinite(value) for value in found.values()) and len(found) == 7


def evaluation_of(path: Path, environment: str = "CartPole-v1", **evaluation: Any) -> DataEvaluation:
    return DataEvaluation(
        config := minimal_config(
            environment={"id": environment},
            algorithm={"name": "bc"},
            dataset={"path": str(path), "evaluation": evaluation},
        ),
        describe_environment(config),
        read_dataset,
    )


def test_evaluation_is_periodic_and_repeatable(tmp_path: Path) -> None:
    write_played(tmp_path / "data.csv", played(9, greed=0.5, steps=30))
    policy = policy_of(1.0)
    source = evaluation_of(tmp_path / "data.csv", every_updates=4, gradient_steps=20, episodes=5)
    assert [updates for updates in range(9) if source.figures("default", policy, updates)] == [4, 8]
    assert source.figures("default", policy, 4) == source.figures("default", policy, 8)
    assert source.episodes is not None and len(source.episodes["default"]) == 5
    assert not evaluation_of(tmp_path / "data.csv", every_updates=0).figures("default", policy, 4)


def test_heatup_steps_count_with_their_own_probabilities(tmp_path: Path) -> None:
    """A lever pays 1, and the policy pulls it with probability 0.9; half of the archive is heat-up, half another's."""
    config = minimal_config(environment={"id": f"{MODULE}:Lever", "num_envs": 50})
    description = describe_environment(config)
    policy, acting = (ActorCritic(description.policies["default"], PolicyConfig(hidden_sizes=())) for _ in range(2))
    with torch.no_grad():
        for made, chance in ((policy, 0.9), (acting, 0.7)):
            made.head.bias.copy_(torch.tensor([np.log(1 - chance), np.log(chance)]))
    sampler = sampler_of(config)
    fragments = []
    for seq, exploration in enumerate([RandomActing(), Sampling()] * 5):
        columns = sampler.sample({"default": acting}, {"default": exploration}, 8).columns["default"]
        fragments.append(fragment_of(columns, seq))
    write_archive(tmp_path, fragments)
    source = evaluation_of(tmp_path / "a-run", f"{MODULE}:Lever", every_updates=1, gradient_steps=200, episodes=4000)
    found = source.figures("default", policy, 1)
    assert found["ope/episodes_left_out"] == 0
    for name in ("ips", "wis", "dr", "sequential_dr"):
        assert found[f"ope/{name}"] == pytest.approx(0.9, abs=0.05), name


def test_small_boards_use_the_policy_convolutions() -> None:
    board = describe_space(spaces.Box(0, 1, (3, 3, 2), np.bool_))
    policy = ActorCritic(PolicySpaces(board, describe_space(spaces.Discrete(9))), PolicyConfig(cnn="residual"))
    boards = {"obs": torch.zeros(5, 3, 3, 2, dtype=torch.bool)}
    fitted = FittedQ(policy, boards, 1.0)
    assert fitted(boards, {"action": torch.zeros(5, dtype=torch.int64)}).shape == (5,)


def test_only_episodes_with_known_beginning_are_evaluated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of an archive that lacks a worker's first fragment: CartPole begins within 0.05 of upright, and moves on."""
    sampler = sampler_of(minimal_config(environment={"id": "CartPole-v1", "num_envs": 8}))
    acting = {"default": policy_of(1.0)}
    columns = [sampler.sample(acting, {"default": Sampling()}, steps).columns["default"] for steps in (4, 3, 60)]
    write_archive(tmp_path, [fragment_of(its, seq) for seq, its in enumerate(columns) if seq])
    source = evaluation_of(tmp_path / "a-run", every_updates=1, gradient_steps=20, episodes=1000)
    assert source.figures("default", policy_of(1.0), 1) and source.episodes is not None
    begun = source.episodes["default"]
    assert len(begun) > 8 and all(np.abs(episode.observations["obs"][0]).max() <= 0.05 for episode in begun)
    write_archive(tmp_path / "short", [fragment_of(columns[1], 1)])
    source = evaluation_of(tmp_path / "short" / "a-run", every_updates=1)
    assert not source.figures("default", policy_of(1.0), 1) and "no episode from its beginning" in caplog.text


def test_missing_dataset_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = evaluation_of(tmp_path / "gone.csv", every_updates=1)
    assert [source.figures("default", policy_of(1.0), update) for update in (1, 2)] == [{}, {}]
    assert "no off-policy evaluation" in caplog.text and caplog.text.count("gone.csv") == 1


def test_squashed_policy_is_worth_its_own_returns(tmp_path: Path) -> None:
    """Each weight is 1, since the densities are of actions in the environment's units on both sides."""
    policy = make(
        "cql", describe_environment(minimal_config(environment={"id": "Pendulum-v1"})).policies["default"]
    ).policy
    drawing = torch.Generator().manual_seed(0)

    def choose(observation: Array) -> tuple[Array, float]:
        with torch.no_grad():
            params = policy.action_parameters({"obs": torch.from_numpy(observation[None])})
            action = policy.distribution.sample(params, drawing)
            return action["action"][0].numpy(), float(policy.distribution.log_prob(params, action))

    listed = swung(4, choose)
    write_recorded(tmp_path / "data.csv", "Pendulum-v1", listed)
    source = evaluation_of(tmp_path / "data.csv", "Pendulum-v1", every_updates=1, gradient_steps=20)
    found = source.figures("default", policy, 1)
    assert found["ope/effective_episodes"] == pytest.approx(4, rel=1e-3)
    assert found["ope/wis"] == pytest.approx(found["ope/ips"], rel=1e-3)


def test_q_network_is_worth_its_best_choices(tmp_path: Path) -> None:
    """A lever pays 1 for the one choice and 0 for the other, half of them each by chance; there is one step."""
    config = minimal_config(environment={"id": f"{MODULE}:Lever", "num_envs": 50})
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, DQNConfig(), 0)
    sampler = sampler_of(config)
    acted = [sampler.sample(policies, {"default": RandomActing()}, 8).columns["default"] for _ in range(5)]
    write_archive(tmp_path, [fragment_of(columns, seq) for seq, columns in enumerate(acted)])
    evaluation = evaluation_of(
        tmp_path / "a-run", f"{MODULE}:Lever", every_updates=1, gradient_steps=200, episodes=2000
    )
    for best in (0, 1):
        with torch.no_grad():
            cast(Any, policies["default"]).advantage.layers[-1].bias.copy_(
                torch.tensor([10.0 * (1 - best), 10.0 * best])
            )
        found = evaluation.figures("default", policies["default"], 1)
        assert found["ope/effective_episodes"] == pytest.approx(1000, rel=0.1)
        for name in ("ips", "wis", "dm", "dr", "sequential_dr"):
            assert found[f"ope/{name}"] == pytest.approx(best, abs=0.1), name
