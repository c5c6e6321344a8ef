"""Reward signals in an update: advantages against slow NumPy, what they leave alone, their way through a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.reward_signals.reward_signals import _ends
from tests.support.learning import slow_signals as slow
from tests.support.learning.algorithms import make
from tests.support.learning.experience import acted, ignores_masked_rows, received, update_batch

SIGNAL = {"strength": 0.5, "gamma": 0.8, "learning_rate": 1e-3, "hidden_sizes": [6], "embedding_size": 3}
SIGNALS: dict[str, Any] = {"extrinsic": {"strength": 2.0}, "rnd": SIGNAL}
NETWORK = {"normalize_observations": True}
RECURRENT: dict[str, Any] = {"core": "gru", "core_size": 6, "share_encoder": True, "hidden_sizes": (8,)}


def with_rnd(seed: int = 3, **changes: Any) -> Any:
    """PPO and RND, with γ = 0.9 and λ = 0.7 in all."""
    signals = {"extrinsic": {"strength": 2.0}, "rnd": SIGNAL | changes}
    return make("ppo", policy=NETWORK, seed=seed, reward_signals=signals, gamma=0.9, gae_lambda=0.7)


def advantages_of(algorithm: Any, columns: Columns) -> tuple[Array, Array]:
    """Of a batch, as it is to be learned from: advantages and targets, those that count."""
    batch = update_batch(algorithm, columns).flat()
    return batch.advantage.numpy(), batch.target.numpy()


def led_to_what_is_known(columns: Columns) -> Array:
    """`[T, S]`: all steps but those that terminated without a last observation."""
    known: Array = ~columns["terminated"]
    known[tuple(columns["final_index"].T)] = True
    return known


def slow_rnd(algorithm: Any, columns: Columns, episodic: bool, ratio: Array | None = None) -> tuple[Array, Array]:
    """Advantages and targets `[T, S]` of RND alone."""
    state = {name.removeprefix("signals/rnd/"): array for name, array in algorithm.state().items()}
    reward = np.zeros(columns["reward"].shape)
    for step, slot in np.argwhere(columns["mask"] & led_to_what_is_known(columns)):
        seen = slow.normalized(state, "signal/", slow.next_observation(columns, step, slot))
        predicted, wanted = (slow.mlp(state, f"signal/{net}.", seen, "relu") for net in ("predictor", "target"))
        reward[step, slot] = np.mean((predicted - wanted) ** 2)
    reward = slow.scaled(columns, reward, 0.8, episodic)

    def value(observation: Array) -> float:
        normalizer = algorithm.policy.normalizer
        with torch.no_grad():
            seen = observation if normalizer is None else normalizer("obs", torch.from_numpy(observation)).numpy()
        return float(slow.mlp(state, "value/", seen, "tanh")[0])

    case = slow.case_of(columns, reward, value, episodic, gamma=0.8, decay=0.7)
    if ratio is None:
        return case.slow_gae(), case.value + case.slow_gae()
    case.log_ratio = np.log(ratio)
    target, advantage, _ = case.slow_vtrace()
    return advantage, target


def test_last_row_has_no_successor_when_episode_ends_there() -> None:
    ends = {name: torch.tensor([[False, True], [True, False], [True, True]]) for name in ("terminated", "truncated")}
    seen = {"bootstrap_obs.a": torch.zeros(2, 3), "bootstrap_obs.b": torch.zeros(2, dtype=torch.uint8)}
    seen["bootstrap_obs.b"][1] = 7
    for several, last in ((True, [True, False]), (False, [False, False])):
        found = _ends(ends | seen | {"mask": torch.ones(3, 2, dtype=torch.bool)}, False, several)
        for flag in found.values():
            assert flag.tolist() == [[False, False], [False, False], last]


@pytest.mark.parametrize("episodic", [False, True], ids=["goes on", "episodic"])
@pytest.mark.parametrize("absent", [False, True], ids=["all act", "some are absent"])
def test_advantages_of_two_streams_equal_slow_walk(episodic: bool, absent: bool) -> None:
    both, alone = with_rnd(episodic=episodic), make("ppo", policy=NETWORK, gamma=0.9, gae_lambda=0.7)
    columns = acted(both.policy, 5, absent=absent)
    assert len(columns["final_index"]) > 1 and columns["terminated"].any() and columns["mask"].all() != absent
    for algorithm in (both, alone):
        algorithm.observe(received(acted(both.policy, 6)))
    found, targets = advantages_of(both, columns)
    extrinsic, expected_targets = advantages_of(alone, columns)
    intrinsic, _ = slow_rnd(both, columns, episodic)
    mask = columns["mask"]
    np.testing.assert_allclose(found, 2 * extrinsic + 0.5 * intrinsic[mask], rtol=1e-4, atol=1e-5)
    assert abs(intrinsic[mask]).mean() > 0.1
    assert targets.tobytes() == expected_targets.tobytes(), "what the policy's own value learns is left alone"


@pytest.mark.parametrize("name", ["impala", "appo"])
def test_v_trace_weighs_a_signal_by_the_same_ratios(name: str) -> None:
    signals: dict[str, Any] = {"reward_signals": SIGNALS}
    made = [make(name, gamma=0.9, vtrace_lambda=0.7, **extra) for extra in (signals, {})]
    columns = acted(made[0].policy, 5)
    noise = np.random.default_rng(1).normal(size=columns["log_prob"].shape).astype(np.float32)
    columns["log_prob"] += 0.5 * noise
    ratio = np.exp(-0.5 * noise)
    found, extrinsic = (advantages_of(algorithm, columns)[0] for algorithm in made)
    intrinsic, _ = slow_rnd(made[0], columns, episodic=False, ratio=ratio)
    weight = np.minimum(ratio, 1.0) if name == "impala" else 1.0
    expected = 2 * extrinsic + 0.5 * (weight * intrinsic).flatten()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_recurrent_policy_learns_from_feedforward_signal_values() -> None:
    extra: list[dict[str, Any]] = [{"reward_signals": SIGNALS}, {}]
    both, alone = (make("ppo", policy=RECURRENT, gamma=0.9, gae_lambda=0.7, **signals) for signals in extra)
    columns = acted(both.policy, 4, absent=True)
    (found, _), (extrinsic, _) = advantages_of(both, columns), advantages_of(alone, columns)
    intrinsic, _ = slow_rnd(both, columns, episodic=False)
    expected = 2 * extrinsic + 0.5 * intrinsic.T[columns["mask"].T]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert both.update(received(columns), Counters())["train/rnd_value_loss"] > 0


def test_signal_deviation_covers_returns_across_fragments() -> None:
    """Two fragments of one source go on with each other; and the same update by update."""
    algorithm = with_rnd(episodic=True)
    first, second = (acted(algorithm.policy, seed) for seed in (1, 2))
    together: Columns = {name: np.concatenate([first[name], second[name]]) for name in first if name != "bootstrap_obs"}
    stream = algorithm.signals.streams["rnd"]
    raw = []
    for columns in (first, second):
        algorithm.signals.observe_batch(
            received(columns), {name: torch.from_numpy(array) for name, array in columns.items()}
        )
        assert stream.scaling is not None
        count, _, squares = stream.scaling.state()["moments"]
        raw.append(stream.reward.numpy() * np.sqrt(squares / count + 1e-8))
    expected = slow.scaled(together, np.concatenate(raw), 0.8, episodic=True)
    np.testing.assert_allclose(stream.reward, expected[len(raw[0]) :], rtol=1e-4)


def test_terminal_steps_are_rewarded_when_successor_is_known() -> None:
    """What comes after the end is the next episode's, whatever it looks like."""
    algorithm, columns, _ = ignores_masked_rows(with_rnd, lambda policy: acted(policy, 6, absent=True))
    stream = algorithm.signals.streams["rnd"]
    rewarded = led_to_what_is_known(columns) & columns["mask"]
    assert (columns["terminated"] & rewarded).any() and (columns["terminated"] & ~rewarded).any()
    assert ((stream.reward.numpy() > 0) == rewarded).all() and stream.known.tolist() == rewarded.tolist()


def test_signal_value_learns_its_own_targets() -> None:
    algorithm = with_rnd()
    columns = acted(algorithm.policy, 5)
    algorithm.signals.observe({name: torch.from_numpy(array) for name, array in columns.items()})
    _, target = slow_rnd(algorithm, columns, episodic=False)
    state = {name.removeprefix("signals/rnd/"): array for name, array in algorithm.state().items()}
    found = [slow.mlp(state, "value/", row, "tanh")[0] for row in columns["obs"].reshape(-1, 3)]
    one_step: dict[str, Any] = {"epochs": 1, "minibatch_size": 32, "max_grad_norm": 1e6, "gae_lambda": 0.7}
    metrics = make("ppo", policy=NETWORK, reward_signals={"rnd": SIGNAL}, **one_step).update(
        received(columns), Counters()
    )
    expected = np.mean((np.array(found) - target.flatten()) ** 2)
    assert metrics["train/rnd_value_loss"] == pytest.approx(expected, rel=1e-4)


def test_heatup_moves_only_statistics() -> None:
    algorithm = with_rnd()
    before = {name: array.tobytes() for name, array in algorithm.state().items()}
    algorithm.observe(received(acted(algorithm.policy, 1)))
    moved = {name for name, array in algorithm.state().items() if array.tobytes() != before[name]}
    assert moved and all("normalizer" in name for name in moved)


def test_state_of_other_networks_is_refused() -> None:
    with pytest.raises(Exception, match="do not fit"):
        with_rnd(embedding_size=4).load_state(with_rnd().state())
