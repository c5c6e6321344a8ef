"""Random network distillation: reward, loss and gradient against slow NumPy, and that what is known is worth less."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.algorithm_configs.ppo import PPOConfig
from shared.config import PolicyConfig
from shared.policies.codec import state_arrays
from shared.policies.registry import borrowed_random_state, build_policies
from shared.reward_signals_config import RNDConfig
from shared.spaces import Array
from tests.trainer_node.reward_signals import slow
from tests.trainer_node.test_ppo import DISCRETE
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.descent import descend
from trainer_node.reward_signals.rnd import RND
from trainer_node.reward_signals.signal import Rows

GENERATOR = torch.Generator()


def make_rnd(seed: int = 1) -> RND:
    config = PPOConfig()
    policy = build_policies({"p": DISCRETE}, {"p": PolicyConfig()}, config, seed)["p"]
    with borrowed_random_state(seed):
        return RND(policy, RNDConfig(hidden_sizes=(8, 8), embedding_size=4))


def rows(seed: int = 0, count: int = 9, middle: float = 0.0) -> Rows:
    random = np.random.default_rng(seed)
    here, there = (torch.from_numpy(random.normal(middle, 1.0, (count, 3)).astype(np.float32)) for _ in range(2))
    return Rows({"obs": here}, {"action": torch.zeros(count, dtype=torch.int64)}, {"obs": there})


def slow_errors(rnd: RND, batch: Rows) -> list[float]:
    """Row by row: ‖f̂(s′) − f(s′)‖², the mean over the embedding."""
    arrays, errors = state_arrays(rnd), []
    for observation in batch.next_observations["obs"].numpy().astype(np.float64):
        seen = slow.normalised(arrays, "", observation)
        parts: list[Array] = [slow.mlp(arrays, f"{net}.", seen, "relu") for net in ("predictor", "target")]
        errors.append(float(np.mean((parts[0] - parts[1]) ** 2)))
    return errors


def test_reward_and_loss_are_the_papers() -> None:
    rnd, batch = make_rnd(), rows()
    rnd.observe({"obs": torch.from_numpy(np.random.default_rng(5).normal(1.0, 0.3, (50, 3)).astype(np.float32))})
    expected = slow_errors(rnd, batch)
    with torch.no_grad():
        assert rnd.reward(batch).tolist() == pytest.approx(expected, rel=1e-4)
    loss, metrics = rnd.loss(batch, GENERATOR)
    assert loss.item() == metrics["train/rnd_loss"].item() == pytest.approx(np.mean(expected), rel=1e-4)


def test_the_gradient_is_that_of_the_slow_loss_and_the_target_has_none() -> None:
    rnd, batch = make_rnd(), rows()
    rnd.observe(batch.observations)
    rnd.loss(batch, GENERATOR)[0].backward()
    assert all(parameter.grad is None for parameter in rnd.target.parameters())
    for name, parameter in rnd.predictor.named_parameters():
        where = (0,) * parameter.ndim
        assert parameter.grad is not None
        found, kept, losses = parameter.grad[where].item(), parameter[where].item(), []
        for change in (1e-3, -1e-3):
            with torch.no_grad():
                parameter[where] = kept + change
            losses.append(np.mean(slow_errors(rnd, batch)))
        with torch.no_grad():
            parameter[where] = kept
        assert found == pytest.approx((losses[0] - losses[1]) / 2e-3, rel=0.05, abs=1e-3), name


def test_what_was_learnt_is_worth_less_than_what_is_new() -> None:
    rnd, known, new = make_rnd(), rows(1, 64), rows(2, 64, middle=3.0)
    rnd.observe({"obs": torch.cat([known.next_observations["obs"], new.next_observations["obs"]])})
    before = [rnd.reward(batch).mean().item() for batch in (known, new)]
    learnt = list(rnd.predictor.parameters())
    optimiser = Adam(learnt, 1e-8)
    for _ in range(300):
        descend(rnd.loss(known, GENERATOR)[0], learnt, optimiser, 1e-3, None)
    after = [rnd.reward(batch).mean().item() for batch in (known, new)]
    assert after[0] < 0.05 * before[0] and after[1] > 5 * after[0]
