"""Random network distillation: reward, loss and gradient against slow NumPy, and that what is known is worth less."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.reward_signals.base import Rows
from stagecoach.trainer_node.learning.reward_signals.signals import RND
from tests.support.learning import slow_signals
from tests.support.learning.algorithms import gradients_are_differences
from tests.support.learning.slow_signals import make_rnd, transitions

GENERATOR = torch.Generator()


def slow_errors(rnd: RND, batch: Rows) -> list[float]:
    """Row by row: ‖f̂(s′) − f(s′)‖², the mean over the embedding."""
    arrays, errors = state_arrays(rnd), []
    for observation in batch.next_observations["obs"].numpy().astype(np.float64):
        seen = slow_signals.normalized(arrays, "", observation)
        parts: list[Array] = [slow_signals.mlp(arrays, f"{net}.", seen, "relu") for net in ("predictor", "target")]
        errors.append(float(np.mean((parts[0] - parts[1]) ** 2)))
    return errors


def test_reward_and_loss_are_the_papers() -> None:
    rnd, batch = make_rnd(), transitions()
    rnd.observe({"obs": torch.from_numpy(np.random.default_rng(5).normal(1.0, 0.3, (50, 3)).astype(np.float32))})
    expected = slow_errors(rnd, batch)
    with torch.no_grad():
        assert rnd.reward(batch).tolist() == pytest.approx(expected, rel=1e-4)
    loss, metrics = rnd.loss(batch, GENERATOR)
    assert loss.item() == metrics["train/rnd_loss"].item() == pytest.approx(np.mean(expected), rel=1e-4)


def test_rnd_gradient_equals_slow_loss_and_spares_target() -> None:
    rnd, batch = make_rnd(), transitions()
    rnd.observe(batch.observations)
    rnd.loss(batch, GENERATOR)[0].backward()
    assert all(parameter.grad is None for parameter in rnd.target.parameters())
    slow_loss = lambda: float(np.mean(slow_errors(rnd, batch)))  # noqa: E731
    gradients_are_differences(rnd.predictor.named_parameters(), slow_loss, step=1e-3, rel=0.05, abs_=1e-3)
