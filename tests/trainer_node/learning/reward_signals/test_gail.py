"""Adversarial imitation: reward, loss and gradient against slow NumPy, what it rewards, exact resume and replay."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.spaces import Array, Columns, PolicySpaces
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.reward_signals.base import Rows
from stagecoach.trainer_node.learning.reward_signals.signals import GAIL
from tests.support.learning import slow_signals as slow
from tests.support.learning.algorithms import CHOICE, CPU, gradients_are_differences
from tests.support.learning.slow_signals import UNBOUNDED, make_gail, pairs


def slow_features(arrays: Columns, observation: Array, action: Array, use_actions: bool = True) -> Array:
    seen = slow.normalized(arrays, "", observation, 10.0)
    if not use_actions:
        return seen
    if action.ndim == 0:
        return np.concatenate([seen, np.eye(4)[int(action)]])
    bounded = [np.clip(action[0] / 2, -1, 1), np.clip((action[1] - 2) / 2, -1, 1), action[2]]
    return np.concatenate([seen, bounded])


def slow_logit(arrays: Columns, features: Array) -> float:
    for layer in (0, 2):
        features = np.tanh(slow.linear(arrays, f"mlp.{layer}", features))
    return float(slow.linear(arrays, "mlp.4", features)[0])


def slow_loss(gail: GAIL, batch: Rows, seed: int, penalty: float, use_actions: bool = True) -> tuple[float, float]:
    """Cross-entropy, and with the penalty, whose slopes are differences. The same steps are drawn."""
    arrays, generator = state_arrays(gail), torch.Generator().manual_seed(seed)
    drawn = gail.demonstrations.draw(len(batch), generator, CPU)
    mixture = torch.rand(len(batch), 1, generator=generator).numpy().astype(np.float64)
    entropy, slopes = [], []
    for row in range(len(batch)):
        theirs, ours = (
            slow_features(
                arrays, part.observations["obs"][row].numpy().astype(np.float64), part.actions["action"][row].numpy(),
                use_actions,
            )
            for part in (drawn, batch)
        )  # fmt: skip
        probable = [1 / (1 + np.exp(-slow_logit(arrays, features))) for features in (theirs, ours)]
        entropy.append(-np.log(probable[0]) - np.log(1 - probable[1]))
        between = mixture[row] * theirs + (1 - mixture[row]) * ours
        moved = np.eye(len(between)) * 1e-5
        slope = [(slow_logit(arrays, between + d) - slow_logit(arrays, between - d)) / 2e-5 for d in moved]
        slopes.append((np.sqrt(np.sum(np.square(slope))) - 1) ** 2)
    return float(np.mean(entropy)), float(np.mean(entropy) + penalty * np.mean(slopes))


@pytest.mark.parametrize("use_actions", [True, False], ids=["state and action", "state alone"])
@pytest.mark.parametrize("described", [CHOICE, UNBOUNDED], ids=["discrete", "boxes"])
def test_reward_and_loss_are_the_papers(tmp_path: Path, described: PolicySpaces, use_actions: bool) -> None:
    gail, batch = make_gail(tmp_path, described, use_actions=use_actions, gradient_penalty=3.0), pairs(described)
    gail.observe(batch.observations)
    arrays = state_arrays(gail)
    logits = [
        slow_logit(arrays, slow_features(arrays, obs.astype(np.float64), action, use_actions))
        for obs, action in zip(batch.observations["obs"].numpy(), batch.actions["action"].numpy(), strict=True)
    ]
    with torch.no_grad():
        found = gail.reward(batch).numpy()
    np.testing.assert_allclose(found, [-np.log(1 - 1 / (1 + np.exp(-logit))) for logit in logits], rtol=1e-4)
    loss, metrics = gail.loss(batch, torch.Generator().manual_seed(7))
    entropy, whole = slow_loss(gail, batch, 7, 3.0, use_actions)
    assert float(metrics["train/gail_loss"]) == pytest.approx(entropy, rel=1e-4)
    assert loss.item() == pytest.approx(whole, rel=1e-4) != pytest.approx(entropy, rel=1e-2)
    assert float(metrics["train/gail_acted"]) == pytest.approx(
        np.mean([1 / (1 + np.exp(-x)) for x in logits]), rel=1e-4
    )


def test_gail_gradient_equals_slow_loss(tmp_path: Path) -> None:
    gail, batch = make_gail(tmp_path), pairs()
    gail.observe(batch.observations)
    gail.loss(batch, torch.Generator().manual_seed(7))[0].backward()
    learned = [(name, parameter) for name, parameter in gail.named_parameters() if name != "mlp.4.bias"]
    gradients_are_differences(learned, lambda: slow_loss(gail, batch, 7, 10.0)[1], step=1e-3, rel=0.02, abs_=1e-3)


def test_statistics_begin_with_what_was_demonstrated(tmp_path: Path) -> None:
    gail, batch = make_gail(tmp_path), pairs()
    gail.observe(batch.observations)
    gail.observe(batch.observations)
    seen = np.concatenate([gail.demonstrations.columns["obs"], *[batch.observations["obs"].numpy()] * 2])
    assert state_arrays(gail)["normalizer.moments.0.count"] == len(gail.demonstrations) + 14
    np.testing.assert_allclose(state_arrays(gail)["normalizer.moments.0.mean"], seen.mean(axis=0), rtol=1e-5)
