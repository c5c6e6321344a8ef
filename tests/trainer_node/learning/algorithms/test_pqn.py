"""PQN: its targets by the recursion of the paper, its loss, and what a repeated update does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.counters import Counters
from tests.support.learning.algorithms import bits, make, move_apart, noted
from tests.support.learning.experience import random_fragment

STEPS, SLOTS = 9, 3


@pytest.mark.parametrize("td_lambda", [0.0, 0.7, 1.0])
def test_targets_and_loss_are_those_of_q_lambda(td_lambda: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """R_t = r_t + γ (λ R_{t+1} + (1 − λ) max Q(s_{t+1})) within an episode (section 3.3), else the end's."""
    seen = noted(monkeypatch, "pqn", "loss")
    pqn = make("pqn", shape=(STEPS, SLOTS), td_lambda=td_lambda, gamma=0.9, epochs=1, minibatch_size=STEPS * SLOTS)
    move_apart(pqn.policy)
    fragment = random_fragment(pqn.policy, 3, STEPS, SLOTS, terminated=0.2, truncated=0.2)
    columns = fragment.columns
    columns["mask"][[1, 4], [0, 2]] = False

    @torch.no_grad()
    def values(observations: Any) -> Any:
        return pqn.policy.action_parameters({"obs": torch.from_numpy(observations)}).double().numpy()

    best = values(columns["obs"].reshape(-1, 3)).max(axis=1).reshape(STEPS, SLOTS)
    last, finals = values(columns["bootstrap_obs"]).max(axis=1), values(columns["final_obs"]).max(axis=1)
    known = {(int(step), int(slot)): value for (step, slot), value in zip(columns["final_index"], finals, strict=True)}
    expected = np.zeros((STEPS, SLOTS))
    for slot in range(SLOTS):
        returned = last[slot]
        for step in reversed(range(STEPS)):
            after = last[slot] if step == STEPS - 1 else best[step + 1, slot]
            if not columns["mask"][step, slot]:
                returned = best[step, slot]
                continue
            if columns["terminated"][step, slot]:
                after = returned = 0.0
            elif columns["truncated"][step, slot]:
                after = returned = known[step, slot]
            returned = columns["reward"][step, slot] + 0.9 * (td_lambda * returned + (1 - td_lambda) * after)
            expected[step, slot] = returned
    counted = columns["mask"].nonzero()
    taken = values(columns["obs"].reshape(-1, 3)).reshape(STEPS, SLOTS, -1)[*counted, columns["action"][counted]]
    metrics = pqn.update([fragment], Counters())
    ((batch,),) = seen
    np.testing.assert_allclose(np.sort(batch.target), np.sort(expected[counted]), rtol=1e-4, atol=1e-5)
    assert metrics["train/loss"] == pytest.approx(0.5 * np.square(taken - expected[counted]).mean(), rel=1e-4)
    assert metrics["train/td_error"] == pytest.approx(np.abs(taken - expected[counted]).mean(), rel=1e-4)
    assert metrics["train/q_value"] == pytest.approx(taken.mean(), rel=1e-4)


def test_nothing_but_policy_and_optimizer_is_carried() -> None:
    """No replay buffer, no target network: a successor needs no fragments that were learned before."""
    first, second = make("pqn"), make("pqn")
    for number in range(3):
        first.update([random_fragment(first.policy, number, 8, 4)], Counters(updates=number))
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state(first.state())
    for each in (first, second):
        each.update([random_fragment(each.policy, 9, 8, 4)], Counters(updates=3))
    assert bits(first) == bits(second)
    assert not hasattr(first, "replay_buffer") and not hasattr(first, "target")
