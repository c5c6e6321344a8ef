"""Reward signals of algorithms with a replay buffer: what is drawn is paid for anew, against slow NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.counters import Counters
from stagecoach.trainer_node.learning.reward_signals.base import Rows
from tests.support.learning import slow_signals as slow
from tests.support.learning.algorithms import BOXES, CHOICE, make, noted
from tests.support.learning.experience import random_fragment

SIGNAL = {"strength": 0.5, "gamma": 0.8, "learning_rate": 1e-2, "hidden_sizes": [6], "embedding_size": 3}


def rewarded(name: str, **fields: Any) -> Any:
    signals = {"extrinsic": {"strength": 2.0}, "rnd": SIGNAL}
    described = BOXES if name in {"sac", "td3"} else CHOICE
    return make(name, described, reward_signals=signals, gradient_steps_per_env_step=0.25, gamma=0.9, **fields)


def fed(algorithm: Any) -> list[Any]:
    """Some of its steps terminate, and what those led to is not known."""
    fragments = [random_fragment(algorithm.policy, seed, terminated=0.3) for seed in range(4)]
    for item in fragments[:3]:
        algorithm.observe([item])
    return fragments


@pytest.mark.parametrize("name", ["dqn", "sac", "td3"])
def test_drawn_rewards_use_the_current_signal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment's rewards by their strength, and RND's divided by the deviation of its returns so far."""
    algorithm, states, drawn = rewarded(name), list[Any](), list[Any]()
    fragments = fed(algorithm)
    on_device, learned = algorithm.on_device, noted(monkeypatch, algorithm, "learn")

    def draw(found: Any) -> Any:
        drawn.append(found)
        states.append(algorithm.state())
        return on_device(found)

    monkeypatch.setattr(algorithm, "on_device", draw)
    metrics = algorithm.update([fragments[3]], Counters(env_steps=12))
    assert len(learned) == 3 and metrics["train/rnd_reward"] > 0
    for (batch, *_), found, arrays in zip(learned, drawn, states, strict=True):
        state = {key.removeprefix("signals/rnd/"): array for key, array in arrays.items()}
        count, _, squares = state["scaling/moments"]
        for row in range(len(batch)):
            seen = slow.normalized(state, "signal/", found.next_observations["obs"][row])
            predicted, wanted = (slow.mlp(state, f"signal/{net}.", seen, "relu") for net in ("predictor", "target"))
            raw = np.mean((predicted - wanted) ** 2) if found.discount[row] else 0.0  # here no end is known
            expected = 2 * found.reward[row] + 0.5 * raw / np.sqrt(squares / count + 1e-8)
            assert float(batch.reward[row]) == pytest.approx(float(expected), rel=1e-3, abs=1e-4)
    assert (states[0]["signals/rnd/signal/predictor.head.weight"] != states[1][
        "signals/rnd/signal/predictor.head.weight"
    ]).any(), "it learns at each gradient step"  # fmt: skip


def test_signal_scale_follows_fragments_in_order() -> None:
    algorithm = rewarded("dqn")
    fragments = fed(algorithm)
    stream, raw = algorithm.signals.streams["rnd"], []
    for item in fragments[:2]:
        tensors = {name: torch.from_numpy(array) for name, array in item.columns.items()}
        algorithm.signals.observe_batch([item], tensors)
        rows = algorithm.signals._rows(tensors)
        known = torch.from_numpy(~item.columns["terminated"]).flatten()
        with torch.no_grad():
            reward = torch.where(known, stream.signal.reward(rows), 0.0)
        raw.append(reward.reshape(item.columns["reward"].shape).numpy())
    columns = {
        name: np.concatenate([item.columns[name] for item in fragments[:2]])
        for name in ("reward", "mask", "terminated", "truncated")
    }
    expected = slow.scaled(columns, np.concatenate(raw), 0.8, episodic=False)[len(raw[0]) :]
    np.testing.assert_allclose(stream.scaling.scaled(raw[1]), expected, rtol=1e-3, atol=1e-5)


def test_rows_with_unknown_successor_do_not_teach_the_signal() -> None:
    """Whatever stands there as the next observation."""
    results = []
    for garbage in (1.0, -1e3):
        algorithm = rewarded("dqn")
        known, rows = torch.tensor([True, False, True]), torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
        after = torch.where(known.unsqueeze(1), rows + 1, garbage)
        action = {"action": torch.tensor([0, 1, 2])}
        batch = Rows({"obs": rows}, action, {"obs": after})
        found, _ = algorithm.signals.paid(batch, torch.zeros(3), known, Counters(), algorithm.signals.generators(0))
        assert found[1] == 0 and found[0] > 0
        results.append({key: array.tobytes() for key, array in algorithm.state().items()})
    assert results[0] == results[1]
