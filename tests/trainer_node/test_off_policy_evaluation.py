"""Estimators against slow loops, and on a small decision process whose values are known exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from shared.spaces import Array
from trainer_node.off_policy_evaluation import (
    Evidence,
    dm,
    dr,
    effective_episodes,
    estimates,
    ips,
    sequential_dr,
    wis,
)

Estimator = Callable[[Evidence], float]
GAMMA = 0.9


def random_evidence(lengths: tuple[int, ...] = (4, 1, 6, 3)) -> Evidence:
    generator = np.random.default_rng(1)
    shape = len(lengths), max(lengths)
    mask = np.arange(shape[1])[None] < np.array(lengths)[:, None]
    target, behaviour = (-generator.random(shape) for _ in range(2))
    reward, q, v = (generator.normal(size=shape) for _ in range(3))
    return Evidence(target, behaviour, reward, q, v, mask, GAMMA)


def rows(evidence: Evidence) -> list[list[tuple[float, float, float, float]]]:
    """ρ, r, q, v of each step of each episode."""
    found = []
    for episode in range(len(evidence.mask)):
        steps = []
        for t in range(int(evidence.mask[episode].sum())):
            ratio = math.exp(evidence.target_log_prob[episode, t]) / math.exp(evidence.behaviour_log_prob[episode, t])
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
    ("fast", "slow"), [(ips, slow_ips), (wis, slow_wis), (dr, slow_dr), (sequential_dr, slow_sequential_dr)]
)
def test_estimators_agree_with_slow_loops(fast: Estimator, slow: Estimator) -> None:
    assert fast(random_evidence()) == pytest.approx(slow(random_evidence()), rel=1e-12)


class Process(NamedTuple):
    """Two steps, two states in each, two actions; the first state is 0 or 1 alike."""

    target: Array
    """`[2 steps, 2 states]`: probability of action 1."""
    behaviour: Array
    moves: Array
    """`[2 states, 2 actions]`: probability that the second state is 1."""
    reward: Array
    """`[2 steps, 2 states, 2 actions]`."""

    def outcomes(self) -> list[tuple[float, tuple[int, int, int, int]]]:
        """All episodes (s0, a0, s1, a1) with the probability that the behaviour acts them."""
        found = []
        for s0, a0, s1, a1 in itertools.product((0, 1), repeat=4):
            chance = 0.5 * self._of(self.behaviour[0, s0], a0)
            chance *= self._of(self.moves[s0, a0], s1) * self._of(self.behaviour[1, s1], a1)
            found.append((chance, (s0, a0, s1, a1)))
        return found

    @staticmethod
    def _of(one: float, choice: int) -> float:
        return float(one if choice else 1 - one)

    def value(self) -> float:
        """Of the target, exactly."""
        second = [sum(self._of(self.target[1, s], a) * self.reward[1, s, a] for a in (0, 1)) for s in (0, 1)]
        total = 0.0
        for s, a in itertools.product((0, 1), repeat=2):
            after = sum(self._of(self.moves[s, a], nxt) * second[nxt] for nxt in (0, 1))
            total += 0.5 * self._of(self.target[0, s], a) * (self.reward[0, s, a] + GAMMA * after)
        return total

    def evidence(self, episodes: list[tuple[int, int, int, int]], q: Array) -> Evidence:
        """Of these episodes, with estimates `q` `[2 steps, 2 states, 2 actions]`; v is what follows from q."""
        listed = np.array(episodes)
        state, action = listed[:, [0, 2]], listed[:, [1, 3]]
        step = np.arange(2)[None]

        def log_prob(policy: Array) -> Array:
            one = policy[step, state]
            chosen: Array = np.log(np.where(action == 1, one, 1 - one))
            return chosen

        one = self.target[step, state]
        v = one * q[step, state, 1] + (1 - one) * q[step, state, 0]
        mask = np.ones_like(action, np.bool_)
        reward = self.reward[step, state, action]
        return Evidence(log_prob(self.target), log_prob(self.behaviour), reward, q[step, state, action], v, mask, GAMMA)


PROCESS = Process(
    target=np.array([[0.9, 0.2], [0.7, 0.4]]),
    behaviour=np.array([[0.5, 0.6], [0.3, 0.5]]),
    moves=np.array([[0.2, 0.8], [0.6, 0.3]]),
    reward=np.array([[[0.0, 1.0], [2.0, -1.0]], [[1.0, 3.0], [-2.0, 0.5]]]),
)


def true_q() -> Array:
    second = [
        sum(PROCESS._of(PROCESS.target[1, s], a) * PROCESS.reward[1, s, a] for a in (0, 1)) for s in (0, 1)
    ]  # fmt: skip
    q = PROCESS.reward.copy()
    for s, a in itertools.product((0, 1), repeat=2):
        q[0, s, a] += GAMMA * sum(PROCESS._of(PROCESS.moves[s, a], nxt) * second[nxt] for nxt in (0, 1))
    return q


def expectation(estimator: Estimator, q: Array) -> float:
    """Of the estimate from a single episode, over all that the behaviour may act: no noise of sampling is left."""
    return sum(chance * estimator(PROCESS.evidence([episode], q)) for chance, episode in PROCESS.outcomes())


@pytest.mark.parametrize("estimator", [ips, dr, sequential_dr])
@pytest.mark.parametrize("off_by", [0.0, 5.0])
def test_ips_and_the_doubly_robust_are_unbiased_whatever_the_model_says(estimator: Estimator, off_by: float) -> None:
    q = true_q() + off_by * np.random.default_rng(0).normal(size=(2, 2, 2))
    assert expectation(estimator, q) == pytest.approx(PROCESS.value(), abs=1e-12)


def test_the_direct_method_is_as_good_as_its_model() -> None:
    assert expectation(dm, true_q()) == pytest.approx(PROCESS.value(), abs=1e-12)
    assert expectation(dm, true_q() + 1.0) == pytest.approx(PROCESS.value() + 1.0, abs=1e-12)


def test_with_a_right_model_sequential_dr_has_the_least_spread() -> None:
    def spread(estimator: Estimator) -> float:
        found = [(chance, estimator(PROCESS.evidence([episode], true_q()))) for chance, episode in PROCESS.outcomes()]
        mean = sum(chance * value for chance, value in found)
        return sum(chance * (value - mean) ** 2 for chance, value in found)

    assert spread(sequential_dr) < spread(dr) and spread(sequential_dr) < spread(ips)


def test_wis_comes_to_the_value_with_more_episodes() -> None:
    generator = np.random.default_rng(3)
    chances, episodes = zip(*PROCESS.outcomes(), strict=True)
    errors = []
    for count in (100, 100_000):
        drawn = generator.choice(len(episodes), count, p=chances)
        errors.append(abs(wis(PROCESS.evidence([episodes[n] for n in drawn], true_q())) - PROCESS.value()))
    assert errors[1] < 0.02 and errors[1] < errors[0]


def test_the_behaviours_own_value_is_the_mean_return() -> None:
    evidence = random_evidence()
    own = Evidence(
        evidence.behaviour_log_prob, evidence.behaviour_log_prob, evidence.reward, evidence.q, evidence.v,
        evidence.mask, GAMMA,
    )  # fmt: skip
    mean = evidence.discounted.sum(axis=1).mean()
    assert ips(own) == pytest.approx(mean) and wis(own) == pytest.approx(mean)
    assert effective_episodes(own) == pytest.approx(4.0)


def test_ratios_beyond_all_bounds_stay_finite() -> None:
    evidence = random_evidence((4, 1, 60, 3))
    for sign in (1.0, -1.0):
        far = Evidence(
            sign * 500 + evidence.target_log_prob, evidence.behaviour_log_prob, evidence.reward, evidence.q,
            evidence.v, evidence.mask, GAMMA,
        )  # fmt: skip
        assert all(math.isfinite(value) for value in estimates(far).values())


def test_without_the_behaviours_probabilities_only_the_model_tells() -> None:
    unknown = replace(evidence := random_evidence(), behaviour_log_prob=np.full(evidence.mask.shape, np.nan))
    assert estimates(unknown) == {"ope/dm": dm(evidence), "ope/episodes_left_out": len(evidence.mask)}
    assert len(estimates(evidence)) == 7 and estimates(evidence)["ope/episodes_left_out"] == 0


def test_an_episode_with_one_unknown_step_counts_for_the_model_alone_and_what_lies_behind_an_end_for_nothing() -> None:
    evidence = random_evidence((4, 1, 6, 3))
    behaviour = np.where(evidence.mask, evidence.behaviour_log_prob, np.nan)
    behaviour[2, 3] = np.nan
    found = estimates(replace(evidence, behaviour_log_prob=behaviour))
    rest = estimates(evidence.of(np.array([True, True, False, True])))
    assert found == rest | {"ope/dm": dm(evidence), "ope/episodes_left_out": 1}
