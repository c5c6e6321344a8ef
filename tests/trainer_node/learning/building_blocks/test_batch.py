"""Policies with a recurrent core: batch and loss against a walk step by step, and what an update promises for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.building_blocks.batch import Sequences
from tests.support.learning.algorithms import gradients_are_differences, make
from tests.support.learning.experience import acted, received, update_batch
from tests.support.learning.slow_returns import Case

STEPS, SLOTS, GAMMA, LAMBDA = 8, 5, 0.9, 0.8
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])


def recurrent(name: str = "ppo", core: str = "gru", policy: dict[str, Any] | None = None, **fields: Any) -> Any:
    """With larger heads than at the start, so that outputs tell states apart."""
    network = {"core": core, "core_size": 6, "share_encoder": True, "hidden_sizes": (8,)} | (policy or {})
    decay = "gae_lambda" if name in {"ppo", "a2c"} else "vtrace_lambda"
    numbers = {"gamma": GAMMA, decay: LAMBDA} | fields
    return make(
        name, policy=network, shape=(STEPS, SLOTS), prepare=lambda its: its.head.weight.data.mul_(100), **numbers
    )


def experience(algorithm: Any, seed: int = 4) -> Columns:
    """In the midst of episodes, as a native environment makes it: the step after an end is masked."""
    return acted(algorithm.policy, seed, STEPS, SLOTS, absent=True, noise=0.3)


def one_row(columns: Columns, name: str, *where: int) -> dict[str, Tensor]:
    return {"obs": torch.from_numpy(columns[name][where][None])}


@dataclass
class Walk:
    """Each slot of a fragment, a step at a time through the network; all are `[T, S]`."""

    params: Tensor
    chosen: Array
    """Log-probability of what was done."""
    case: Case
    """For the slow estimators."""

    def rows(self, values: Array) -> Array:
        """Those that count, slot by slot."""
        return np.asarray(values.T[self.case.mask.T])


@torch.no_grad()
def walked(algorithm: Any, columns: Columns) -> Walk:
    over = columns["terminated"] | columns["truncated"] | ~columns["mask"]
    policy, finals = algorithm.policy, {(int(t), int(s)): n for n, (t, s) in enumerate(columns["final_index"])}
    params = torch.zeros(STEPS, SLOTS, policy.head.out_features)
    value, chosen, bootstrap, final = np.zeros((STEPS, SLOTS)), np.zeros((STEPS, SLOTS)), np.zeros(SLOTS), {}
    for slot in range(SLOTS):
        state = torch.from_numpy(columns["state_in"][slot][None])
        for step in range(STEPS):
            obs = one_row(columns, "obs", step, slot)
            value[step, slot] = float(policy.value(obs, state))
            params[step, slot], state = policy.step(obs, state)
            chosen[step, slot] = torch.log_softmax(params[step, slot].double(), 0)[int(columns["action"][step, slot])]
            if (step, slot) in finals:
                seen = one_row(columns, "final_obs", finals[step, slot])
                final[step, slot] = float(policy.value(seen, state))
            if over[step, slot]:
                state = torch.zeros_like(state)
        bootstrap[slot] = float(policy.value(one_row(columns, "bootstrap_obs", slot), state))
    ends = columns["terminated"], columns["truncated"], columns["mask"]
    case = Case(chosen - columns["log_prob"], columns["reward"], value, bootstrap, *ends, final, GAMMA, LAMBDA)
    return Walk(params, chosen, case)


@CORES
def test_batch_advantages_and_targets_equal_slow_walk(core: str) -> None:
    ppo = recurrent(core=core)
    columns = experience(ppo)
    assert len(columns["final_index"]) > 1 and columns["terminated"].any() and not columns["mask"].all()
    flat, walk = update_batch(ppo, columns).flat(), walked(ppo, columns)
    np.testing.assert_allclose(flat.value, walk.rows(walk.case.value), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.advantage, walk.rows(walk.case.slow_gae()), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.target, flat.advantage + flat.value, rtol=1e-5, atol=1e-6)


def slow_loss(ppo: Any, columns: Columns, slots: list[int], batch: Sequences, clip: float, bonus: float) -> float:
    """Schulman et al. 2017, eq. 7 and 9, over these slots; values and targets as `batch` has them."""
    walk, mask = walked(ppo, columns), columns["mask"][:, slots].T
    log_p = torch.log_softmax(walk.params[:, slots].double(), dim=2)
    entropies = -(log_p.exp() * log_p).sum(dim=2).numpy().T[mask]
    ratios = np.exp(walk.case.log_ratio[:, slots]).T[mask]
    advantages, targets = batch.advantage[slots].numpy()[mask], batch.target[slots].numpy()[mask]
    scaled = (advantages - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-8)
    surrogates = np.minimum(scaled * ratios, scaled * np.clip(ratios, 1 - clip, 1 + clip))
    squares = (walk.case.value[:, slots].T[mask] - targets) ** 2
    return float(-np.mean(surrogates) + 0.5 * np.mean(squares) - bonus * np.mean(entropies))


@CORES
def test_loss_of_some_slots_equals_the_paper(core: str) -> None:
    ppo = recurrent(core=core, entropy_coefficient=0.02)
    columns = experience(ppo)
    batch = update_batch(ppo, columns)
    slots = [3, 0, 4]
    loss, terms = ppo.loss(batch.take(torch.tensor(slots)), 0.2)
    assert loss.item() == pytest.approx(slow_loss(ppo, columns, slots, batch, 0.2, 0.02), rel=1e-4)
    assert 0 < float(terms["train/clip_fraction"]) < 1


def test_gradient_equals_slow_loss_through_all_steps() -> None:
    ppo = recurrent(core="lstm", entropy_coefficient=0.02)
    columns, slots = experience(ppo), [0, 1, 2]
    batch = update_batch(ppo, columns)
    ppo.loss(batch.take(torch.tensor(slots)), 0.2)[0].backward()
    slow = lambda: slow_loss(ppo, columns, slots, batch, 0.2, 0.02)  # noqa: E731
    gradients_are_differences(ppo.policy.named_parameters(), slow, step=2e-3, rel=0.1, abs_=2e-3)


def test_minibatches_hold_whole_slots_within_size() -> None:
    ppo = recurrent(epochs=2, minibatch_size=2 * STEPS + 3)
    columns = experience(ppo, 5)
    assert ppo.update(received(columns), Counters())["train/gradient_steps"] == 2 * 3, "5 slots, two at a time"


def test_slot_without_actor_yields_no_sequence() -> None:
    ppo = recurrent()
    columns = experience(ppo, 6)
    columns["mask"][:, 2] = columns["terminated"][:, 2] = columns["truncated"][:, 2] = False
    kept = columns["final_index"][:, 1] != 2
    columns |= {"final_index": columns["final_index"][kept], "final_obs": columns["final_obs"][kept]}
    assert len(update_batch(ppo, columns)) == SLOTS - 1


def test_many_slots_are_valued_in_pieces_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = recurrent()
    columns = experience(ppo, 5)
    whole = update_batch(ppo, columns)
    monkeypatch.setattr("stagecoach.trainer_node.learning.building_blocks.batch.CHUNK", 2 * STEPS)
    pieces = update_batch(ppo, columns)
    torch.testing.assert_close(whole.value, pieces.value)
    torch.testing.assert_close(whole.advantage, pieces.advantage)


def test_a2c_learns_the_same_batch_in_one_step() -> None:
    a2c = recurrent("a2c")
    columns = experience(a2c)
    walk, (_, terms) = walked(a2c, columns), a2c.loss(update_batch(a2c, columns))
    expected = -walk.rows(walk.case.slow_gae() * walk.chosen).mean()
    assert float(terms["train/policy_loss"]) == pytest.approx(expected, rel=1e-4)
    assert a2c.update(received(columns), Counters())["train/gradient_steps"] == 1


@pytest.mark.parametrize("weighted", [{"name": "impala"}, {"name": "appo", "clip_against": "target"}, {"name": "appo"}])
def test_impala_and_appo_learn_v_trace_targets_of_sequences(weighted: dict[str, Any]) -> None:
    name, by_weight = weighted["name"], len(weighted) == 2 or weighted["name"] == "impala"
    steps = {"kl_coefficient": 0.1, "minibatch_size": 2 * STEPS, "epochs": 2} if name == "appo" else {}
    algorithm = recurrent(**steps | weighted)
    columns = experience(algorithm)
    batch, walk = update_batch(algorithm, columns), walked(algorithm, columns)
    target, advantage, weight = walk.case.slow_vtrace()
    assert len(np.unique(weight)) > 5, "some ratios are below 1"
    flat, expected = batch.flat(), weight * advantage if by_weight else advantage
    np.testing.assert_allclose(flat.target, walk.rows(target), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.advantage, walk.rows(expected), rtol=1e-4, atol=1e-5)
    if name == "appo":
        params = walk.params.transpose(0, 1)[torch.from_numpy(columns["mask"].T)]
        torch.testing.assert_close(flat.anchor_params, params, rtol=1e-4, atol=1e-5)
        _, terms = algorithm.loss(batch, 0.2)
        assert float(terms["train/kl_from_target"]) == pytest.approx(0, abs=1e-6), "nothing has been learned yet"
        cut = float(terms["train/clip_fraction"])
        assert (cut == 0) == by_weight, "the ratio to the target network, which is the policy, is 1"
    metrics = algorithm.update(received(columns), Counters())
    assert metrics["train/gradient_steps"] == (2 * 3 if name == "appo" else 1)
    assert name == "impala" or metrics["train/kl_from_target"] > 0
