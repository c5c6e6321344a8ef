"""R2D2: sequences as they are drawn, and burn-in, targets, loss and priorities beside a walk step by step in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.rollout_worker.exploration.discrete import EpsilonGreedy
from stagecoach.shared.config.algorithms.q_learning import R2D2Config
from stagecoach.shared.config.algorithms.replay_buffer import PrioritizedReplay
from stagecoach.shared.config.schema.section import Schedule
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.q_network import rescaled, unscaled
from tests.support.environments.small import MODULE
from tests.support.learning.algorithms import make, move_apart, weights
from tests.support.learning.experience import acted, received
from tests.support.learning.learners import trained
from tests.support.runs.game import small

STEPS, SLOTS, HELD, GAMMA = 5, 3, 3, 0.9
PRIORITIZED = {"kind": "prioritized", "capacity": HELD * STEPS * SLOTS}
UNIFORM = {"kind": "uniform", "capacity": HELD * STEPS * SLOTS}


def made(**fields: Any) -> Any:
    fields = {"replay_buffer": UNIFORM, "gamma": GAMMA, "minibatch_size": 8 * STEPS, **fields}
    algorithm = make("r2d2", shape=(STEPS, SLOTS), **fields)
    move_apart(algorithm.policy, algorithm.target)
    return algorithm


def fed(algorithm: Any, count: int = 5, seed: int = 0) -> list[Columns]:
    """Fragments that go on where the last one ended; only some of them are still held."""
    fragments: list[Columns] = []
    for number in range(count):
        columns = acted(algorithm.policy, 10 * seed + number, STEPS, SLOTS, absent=True)
        if number == 3:
            columns["mask"][:, 1] = False  # a slot that is absent all along
        if fragments:
            columns["obs"][0] = fragments[-1]["bootstrap_obs"]
        fragments.append(columns)
        algorithm.observe(received(columns))
    return fragments


class Walk:
    """One slot's steps through a network, one at a time."""

    def __init__(self, network: Any, fragments: list[Columns], slot: int) -> None:
        self.network, self.fragments, self.slot = network, fragments, slot

    @torch.no_grad()
    def through(self, fragment: int, burn_in: int, oldest: int) -> tuple[Array, Array]:
        """Values of the choices at each step of the fragment, and of what each step led to, `[T, A]`."""
        first = fragment
        while first > max(oldest, fragment - burn_in) and self.fragments[first - 1]["mask"][-1, self.slot]:
            first -= 1
        state = torch.from_numpy(self.fragments[first]["state_in"][self.slot][None])
        for number in range(first, fragment + 1):
            here, after = [], []
            columns = self.fragments[number]
            for step in range(STEPS):
                values, state = self.network.step(self._seen(columns["obs"][step, self.slot]), state)
                here.append(values[0])
                after.append(self.network.step(self._seen(self._following(columns, step)), state)[0][0])
                if self._over(columns, step):
                    state = torch.zeros_like(state)
        return torch.stack(here).double().numpy(), torch.stack(after).double().numpy()

    def _over(self, columns: Columns, step: int) -> bool:
        where = step, self.slot
        return bool(columns["terminated"][where] | columns["truncated"][where] | ~columns["mask"][where])

    def _following(self, columns: Columns, step: int) -> Array:
        for place, (row, slot) in enumerate(columns["final_index"]):
            if (row, slot) == (step, self.slot):
                return np.asarray(columns["final_obs"][place])
        rows = [*columns["obs"][1:, self.slot], columns["bootstrap_obs"][self.slot]]
        return np.asarray(rows[step])

    @staticmethod
    def _seen(observation: Array) -> dict[str, torch.Tensor]:
        return {"obs": torch.from_numpy(observation[None])}


def h(value: float) -> float:
    return float(np.sign(value) * (np.sqrt(abs(value) + 1) - 1) + 1e-3 * value)


def h_inverse(value: float) -> float:
    """By bisection."""
    low, high = -1e4, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if h(middle) < value else (low, middle)
    return low


def slow_errors(
    algorithm: Any, fragments: list[Columns], fragment: int, slot: int, *, double: bool, rescale: bool, n_step: int
) -> list[float]:
    """y − Q of the steps that count of one sequence."""
    burn_in, columns, oldest = algorithm._config.burn_in_fragments, fragments[fragment], len(fragments) - HELD
    here, chosen_by = Walk(algorithm.policy, fragments, slot).through(fragment, burn_in, oldest)
    _, valued_by = Walk(algorithm.target, fragments, slot).through(fragment, burn_in, oldest)
    found = []
    for step in range(STEPS):
        if not columns["mask"][step, slot]:
            continue
        total, last = 0.0, step
        for ahead in range(n_step):
            last = step + ahead
            total += GAMMA**ahead * float(columns["reward"][last, slot])
            over = columns["terminated"][last, slot] or columns["truncated"][last, slot]
            if over or last + 1 == STEPS or not columns["mask"][last + 1, slot]:
                break
        if not columns["terminated"][last, slot]:
            best = (chosen_by if double else valued_by)[last].argmax()
            value = valued_by[last][best]
            total += GAMMA ** (last - step + 1) * (h_inverse(value) if rescale else value)
        found.append((h(total) if rescale else total) - here[step][columns["action"][step, slot]])
    return found


@pytest.mark.parametrize(
    ("burn_in", "double", "rescale", "n_step", "replay"),
    [(0, True, True, 3, UNIFORM), (1, False, True, 1, PRIORITIZED), (2, True, False, 9, PRIORITIZED)],
)
def test_loss_and_priorities_are_those_of_a_walk_step_by_step(
    burn_in: int, double: bool, rescale: bool, n_step: int, replay: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"double": double, "n_step": n_step}
    algorithm = made(
        burn_in_fragments=burn_in,
        rescale_values=rescale,
        loss="squared",
        replay_buffer=replay,
        priority_mix=0.7,
        **asked,
    )
    fragments = fed(algorithm)
    drawn = algorithm.replay_buffer.sample(8 * STEPS, np.random.default_rng(5), gamma=GAMMA, n_step=n_step, beta=0.5)
    loss, lesson = algorithm.loss(algorithm.on_device(drawn))
    total, count, priorities = 0.0, 0, []
    for row, weight in zip(drawn.row.tolist(), drawn.weight.tolist(), strict=True):
        place, slot = divmod(row, STEPS * SLOTS)
        assert slot < SLOTS, "a sequence stands at its first step"
        fragment = max(number for number in range(len(fragments)) if number % HELD == place)
        errors = slow_errors(algorithm, fragments, fragment, slot, rescale=rescale, **asked)
        total, count = total + weight * float(np.square(errors).sum()), count + len(errors)
        priorities.append(0.7 * np.abs(errors).max() + 0.3 * np.abs(errors).mean())
    assert loss.item() == pytest.approx(total / count, rel=1e-3)
    np.testing.assert_allclose(lesson.td_error, priorities, rtol=1e-3, atol=1e-4)


@given(st.integers(0, 50))
def test_drawn_sequences_contain_acted_steps(seed: int) -> None:
    algorithm = made()
    fragments = fed(algorithm, seed=seed)
    expected = {
        (number, slot) for number in (2, 3, 4) for slot in range(SLOTS) if fragments[number]["mask"][:, slot].any()
    }
    drawn = algorithm.replay_buffer.sample(200 * STEPS, np.random.default_rng(seed), gamma=GAMMA)
    places = {divmod(row, STEPS * SLOTS) for row in drawn.row.tolist()}
    assert {(max(n for n in (2, 3, 4) if n % HELD == place), slot) for place, slot in places} == expected
    assert len(algorithm.replay_buffer) == len(expected)


def test_gradients_do_not_go_into_the_burn_in() -> None:
    """The steps before a sequence have no part in the gradient but for the state that they lead to."""
    algorithm = made(burn_in_fragments=1)
    fed(algorithm)
    drawn = algorithm.replay_buffer.sample(20 * STEPS, np.random.default_rng(5), gamma=GAMMA)
    batch = algorithm.on_device(drawn)
    assert drawn.spans[1].goes_on.any()
    for observations, *_ in batch.spans:
        observations["obs"].requires_grad_()
    algorithm.loss(batch)[0].backward()
    earlier, learned = (observations["obs"].grad for observations, *_ in batch.spans)
    assert earlier is None and learned.abs().sum() > 0


@given(st.floats(-1e4, 1e4))
def test_value_rescaling_has_an_inverse(value: float) -> None:
    given = torch.tensor([value])
    assert rescaled(given).item() == pytest.approx(h(value), rel=1e-4, abs=1e-6)
    assert unscaled(rescaled(given)).item() == pytest.approx(value, rel=1e-3, abs=1e-5)


def test_r2d2_updates_repeat_after_restore_and_skip_evicted_data() -> None:
    algorithm, second = made(replay_buffer=PRIORITIZED), made(replay_buffer=PRIORITIZED)
    fragments = fed(algorithm)
    for number in range(2):
        algorithm.update(received(fragments[number]), Counters(env_steps=400 * (number + 1), updates=number))
    second.policy.load_state_dict(algorithm.policy.state_dict())
    second.load_state(algorithm.state())
    for columns in [fragments[4], *fragments[:2]]:
        second.remember(received(columns))
    for one in (algorithm, second):
        one.update(received(fragments[2]), Counters(env_steps=1200, updates=2))
    assert weights(algorithm) == weights(second)


@pytest.mark.learning
def test_r2d2_remembers_a_cue() -> None:
    """Without a memory half of the episodes are paid; with ε = 0.05 at most 0.975 of them."""
    rollout = {"fragment_steps": 8, "fragments_per_update": 1}
    config = small(
        environment={"id": f"{MODULE}:Cue", "num_envs": 16}, rollout=rollout, algorithm="r2d2",
        policies={"default": {"hidden_sizes": [16, 16], "core": "lstm", "core_size": 16, "share_encoder": True}},
    )  # fmt: skip
    section = R2D2Config(
        learning_rate=Schedule(start=3e-3), minibatch_size=128, gradient_steps_per_env_step=0.016,
        target_update_steps=50, replay_buffer=PrioritizedReplay(capacity=20_000),
    )  # fmt: skip
    _, returns = trained(config, section, 300, lambda update: EpsilonGreedy(max(0.05, 1 - update / 150)))
    assert np.mean(returns[-600:]) > 0.85
