"""Policies with a recurrent core: batch and loss against a walk step by step, and what an update promises for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.experience.counters import Counters
from shared.experience.spaces import Columns
from tests.support.learning.algorithms import gradients_are_differences, make, weights
from tests.support.learning.experience import acted, received, update_batch
from trainer_node.learning.building_blocks.batch import Sequences

STEPS, SLOTS, GAMMA, LAMBDA = 8, 5, 0.9, 0.8
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])


def recurrent(name: str = "ppo", core: str = "gru", policy: dict[str, Any] | None = None, **fields: Any) -> Any:
    """With larger heads than at the start, so that outputs tell states apart."""
    network = {"core": core, "core_size": 6, "share_encoder": True, "hidden_sizes": (8,)} | (policy or {})
    decay = "gae_lambda" if name in {"ppo", "a2c"} else "vtrace_lambda"

    def enlarge(policy: Any) -> None:
        policy.head.weight.data.mul_(100)

    numbers = {"gamma": GAMMA, decay: LAMBDA} | fields
    return make(name, policy=network, shape=(STEPS, SLOTS), prepare=enlarge, **numbers)


def experience(algorithm: Any, seed: int = 4) -> Columns:
    """In the midst of episodes, as a native environment makes it: the step after an end is masked."""
    return acted(algorithm.policy, seed, STEPS, SLOTS, absent=True, noise=0.3)


def one_row(columns: Columns, name: str, *where: int) -> dict[str, Tensor]:
    return {"obs": torch.from_numpy(columns[name][where][None])}


def slow_slot(ppo: Any, columns: Columns, slot: int) -> list[dict[str, Any]]:
    """One slot, forwards through the network and backward through the rewards, a row at a time."""
    policy, rows = ppo.policy, []
    state = torch.from_numpy(columns["state_in"][slot][None])
    finals = {(int(t), int(s)): number for number, (t, s) in enumerate(columns["final_index"])}
    for step in range(STEPS):
        obs = one_row(columns, "obs", step, slot)
        value = float(policy.value(obs, state))
        params, state = policy.step(obs, state)
        row: dict[str, Any] = {"step": step, "value": value, "params": params, "after": state}
        if (step, slot) in finals:
            row["next_value"] = float(policy.value(one_row(columns, "final_obs", finals[step, slot]), state))
        row["over"] = any(columns[name][step, slot] for name in ("terminated", "truncated"))
        if row["over"] or not columns["mask"][step, slot]:
            state = torch.zeros_like(state)
        rows.append(row)
    bootstrap = float(policy.value(one_row(columns, "bootstrap_obs", slot), state))
    running = 0.0
    for step in reversed(range(STEPS)):
        row, terminated = rows[step], columns["terminated"][step, slot]
        follows = bootstrap if step == STEPS - 1 else rows[step + 1]["value"]
        follows = 0.0 if terminated else row.get("next_value", follows)
        row["follows"] = float(follows)
        delta = columns["reward"][step, slot] + GAMMA * follows - row["value"]
        running = row["advantage"] = float(delta) + (0.0 if row["over"] else GAMMA * LAMBDA * running)
        if not columns["mask"][step, slot]:
            running = 0.0
    return [row for row in rows if columns["mask"][row["step"], slot]]


@CORES
def test_advantages_and_targets_are_those_of_a_walk_through_each_slot(core: str) -> None:
    ppo = recurrent(core=core)
    columns = experience(ppo)
    assert len(columns["final_index"]) > 1 and columns["terminated"].any() and not columns["mask"].all()
    batch = update_batch(ppo, columns)
    with torch.no_grad():
        rows = [row for slot in range(SLOTS) for row in slow_slot(ppo, columns, slot)]
    flat = batch.flat()
    np.testing.assert_allclose(flat.value, [row["value"] for row in rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.advantage, [row["advantage"] for row in rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.target, flat.advantage + flat.value, rtol=1e-5, atol=1e-6)


def slow_loss(ppo: Any, columns: Columns, slots: list[int], batch: Sequences, clip: float, bonus: float) -> float:
    """Schulman et al. 2017, eq. 7 and 9, over these slots; values and targets as `batch` has them."""
    advantages, surrogates, squares, entropies, ratios = [], [], [], [], []
    for slot in slots:
        for row in slow_slot(ppo, columns, slot):
            log_p = torch.log_softmax(row["params"][0].double(), dim=0)
            new = log_p[int(columns["action"][row["step"], slot])]
            ratios.append((new - float(columns["log_prob"][row["step"], slot])).exp())
            entropies.append(-(log_p.exp() * log_p).sum())
            advantages.append(float(batch.advantage[slot, row["step"]]))
            squares.append((row["value"] - float(batch.target[slot, row["step"]])) ** 2)
    scaled = (np.array(advantages) - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-8)
    for advantage, ratio in zip(scaled, ratios, strict=True):
        bounded = min(max(float(ratio), 1 - clip), 1 + clip)
        surrogates.append(min(advantage * float(ratio), advantage * bounded))
    entropy = float(torch.stack(entropies).mean())
    return float(-np.mean(surrogates) + 0.5 * np.mean(squares) - bonus * entropy)


@CORES
def test_the_loss_of_some_slots_is_the_papers(core: str) -> None:
    ppo = recurrent(core=core, entropy_coefficient=0.02)
    columns = experience(ppo)
    batch = update_batch(ppo, columns)
    slots = [3, 0, 4]
    loss, terms = ppo.loss(batch.take(torch.tensor(slots)), 0.2)
    with torch.no_grad():
        assert loss.item() == pytest.approx(slow_loss(ppo, columns, slots, batch, 0.2, 0.02), rel=1e-4)
    assert 0 < float(terms["train/clip_fraction"]) < 1


def test_the_gradient_is_that_of_the_slow_loss_through_all_steps() -> None:
    ppo = recurrent(core="lstm", entropy_coefficient=0.02)
    columns, slots = experience(ppo), [0, 1, 2]
    batch = update_batch(ppo, columns)
    ppo.loss(batch.take(torch.tensor(slots)), 0.2)[0].backward()
    slow = lambda: slow_loss(ppo, columns, slots, batch, 0.2, 0.02)  # noqa: E731
    gradients_are_differences(ppo.policy.named_parameters(), slow, step=2e-3, rel=0.1, abs_=2e-3)


def test_minibatches_are_whole_slots_and_no_larger_than_they_may_be() -> None:
    ppo = recurrent(epochs=2, minibatch_size=2 * STEPS + 3)
    columns = experience(ppo, 5)
    assert ppo.update(received(columns), Counters())["train/gradient_steps"] == 2 * 3, "5 slots, two at a time"


def test_a_slot_that_nobody_acted_in_is_no_sequence() -> None:
    ppo = recurrent()
    columns = experience(ppo, 6)
    columns["mask"][:, 2] = columns["terminated"][:, 2] = columns["truncated"][:, 2] = False
    kept = columns["final_index"][:, 1] != 2
    columns |= {"final_index": columns["final_index"][kept], "final_obs": columns["final_obs"][kept]}
    assert len(update_batch(ppo, columns)) == SLOTS - 1


def test_what_was_remembered_before_the_fragment_matters() -> None:
    results = []
    for known in (0.0, 1.0):
        ppo = recurrent()
        columns = experience(ppo, 5)
        columns["state_in"] *= np.float32(known)
        ppo.update(received(columns), Counters())
        results.append(weights(ppo))
    assert results[0] != results[1]


def test_many_slots_are_valued_in_pieces_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = recurrent()
    columns = experience(ppo, 5)
    whole = update_batch(ppo, columns)
    monkeypatch.setattr("trainer_node.learning.building_blocks.batch.CHUNK", 2 * STEPS)
    pieces = update_batch(ppo, columns)
    torch.testing.assert_close(whole.value, pieces.value)
    torch.testing.assert_close(whole.advantage, pieces.advantage)


def test_a2c_learns_the_same_batch_in_one_step() -> None:
    a2c = recurrent("a2c")
    columns = experience(a2c)
    batch = update_batch(a2c, columns)
    loss, terms = a2c.loss(batch)
    with torch.no_grad():
        rows = [(slot, row) for slot in range(SLOTS) for row in slow_slot(a2c, columns, slot)]
        log_probs = [
            float(torch.log_softmax(row["params"][0], 0)[int(columns["action"][row["step"], slot])])
            for slot, row in rows
        ]
        expected = -np.mean([row["advantage"] * log_p for (_, row), log_p in zip(rows, log_probs, strict=True)])
    assert float(terms["train/policy_loss"]) == pytest.approx(expected, rel=1e-4)
    assert a2c.update(received(columns), Counters())["train/gradient_steps"] == 1
    assert torch.isfinite(loss)


def slow_vtrace(algorithm: Any, columns: Columns) -> list[dict[str, float]]:
    """Espeholt et al. 2018, remark 2, backward through each slot: what a row's value learns, and its advantage."""
    found = []
    for slot in range(SLOTS):
        correction, rows = 0.0, []
        for row in reversed(slow_slot(algorithm, columns, slot)):
            step = row["step"]
            log_p = torch.log_softmax(row["params"][0], dim=0)[int(columns["action"][step, slot])]
            ratio = float((log_p - float(columns["log_prob"][step, slot])).exp())
            reward = float(columns["reward"][step, slot])
            after = 0.0 if row["over"] else correction
            delta = min(1.0, ratio) * (reward + GAMMA * row["follows"] - row["value"])
            correction = delta + GAMMA * LAMBDA * min(1.0, ratio) * after
            advantage = reward + GAMMA * (row["follows"] + after) - row["value"]
            rows.append({"target": row["value"] + correction, "advantage": advantage, "weight": min(1.0, ratio)})
        found += reversed(rows)
    return found


def test_impala_learns_vtraces_targets_of_whole_sequences() -> None:
    impala = recurrent("impala")
    columns = experience(impala)
    flat = update_batch(impala, columns).flat()
    with torch.no_grad():
        rows = slow_vtrace(impala, columns)
    assert len({row["weight"] for row in rows}) > 5, "some ratios are below 1"
    np.testing.assert_allclose(flat.target, [row["target"] for row in rows], rtol=1e-4, atol=1e-5)
    weighted = [row["weight"] * row["advantage"] for row in rows]
    np.testing.assert_allclose(flat.advantage, weighted, rtol=1e-4, atol=1e-5)
    assert impala.update(received(columns), Counters())["train/gradient_steps"] == 1


@pytest.mark.parametrize("against", ["behavior", "target"])
def test_appo_learns_sequences_against_either_policy(against: str) -> None:
    fields: dict[str, Any] = {"clip_against": against, "kl_coefficient": 0.1, "minibatch_size": 2 * STEPS, "epochs": 2}
    appo = recurrent("appo", **fields)
    columns = experience(appo)
    batch = update_batch(appo, columns)
    with torch.no_grad():
        rows = slow_vtrace(appo, columns)
        params = [row["params"][0] for slot in range(SLOTS) for row in slow_slot(appo, columns, slot)]
    weights_of = [row["weight"] if against == "target" else 1.0 for row in rows]
    expected = [weight * row["advantage"] for weight, row in zip(weights_of, rows, strict=True)]
    flat = batch.flat()
    np.testing.assert_allclose(flat.advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.target, [row["target"] for row in rows], rtol=1e-4, atol=1e-5)
    assert flat.anchor_params is not None
    torch.testing.assert_close(flat.anchor_params, torch.stack(params), rtol=1e-4, atol=1e-5)
    _, terms = appo.loss(batch, 0.2)
    assert float(terms["train/kl_from_target"]) == pytest.approx(0, abs=1e-6), "nothing has been learned yet"
    if against == "target":
        assert float(terms["train/clip_fraction"]) == 0, "the ratio is to the target network, which is the policy"
    else:
        assert float(terms["train/clip_fraction"]) > 0
    metrics = appo.update(received(columns), Counters())
    assert metrics["train/gradient_steps"] == 2 * 3 and metrics["train/kl_from_target"] > 0
