"""DQN: ensembles and their masks, how often it learns, priorities; losses are in against_others."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.trainer_node.learning.algorithms.dqn import bootstrap_masks, divergence
from tests.support.learning.algorithms import make_dqn, move_apart, noted
from tests.support.learning.experience import minibatch
from tests.support.learning.streams import PLAIN, streamed

HEADS: list[dict[str, Any]] = [
    {"head": "expected"},
    {"head": "expected", "loss": "squared"},
    {"head": "c51", "atoms": 7, "v_min": -3.0, "v_max": 3.0},
    {"head": "hl_gauss", "atoms": 7, "v_min": -3.0, "v_max": 3.0},
    {"head": "qr", "quantiles": 5},
]
STEPS, SLOTS = 4, 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("fields", [*HEADS, {"head": "expected", "dueling": True, "prior_scale": 2.0}], ids=str)
def test_ensemble_loss_is_mean_of_heads_on_their_own_data(fields: dict[str, Any], double: bool, masked: bool) -> None:
    """Every head bootstraps from itself, as if it were alone; transitions that it is not taught have no weight."""
    heads, rows = 4, 40
    dqn, alone = make_dqn(double=double, heads=heads, **fields), make_dqn(double=double, **fields | {"prior_scale": 0})
    move_apart(dqn.policy, dqn.target)
    batch = minibatch(PLAIN, rows)
    taught = torch.from_numpy(np.random.default_rng(5).integers(0, 2, (heads, rows)).astype(np.float32))
    taught = taught if masked else torch.ones(heads, rows)
    expected, errors = torch.zeros(()), torch.zeros(rows)
    for head in range(heads):
        for its, whole in ((alone.policy, dqn.policy), (alone.target, dqn.target)):
            its.outputs = lambda seen, _=None, of=whole, at=head: of.outputs(seen).unflatten(0, (heads, rows))[at]
        loss, lesson = alone.loss(replace(batch, weight=batch.weight * taught[head]))
        expected, errors = expected + loss / heads, errors + lesson.td_error.abs() * taught[head]
    found, lesson = dqn.loss(replace(batch, heads=taught if masked else None))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lesson.td_error, errors / taught.sum(dim=0).clamp_min(1))
    values = dqn.policy.head_values(batch.observations)[:, torch.arange(rows), batch.actions["action"]]
    torch.testing.assert_close(lesson.metrics["train/disagreement"], values.std(dim=0, correction=0).mean())


def test_head_learns_from_the_same_share_of_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    dqn = make_dqn(heads=3, bootstrap_share=0.5, capacity=3 * STEPS * SLOTS)
    learned, seen = noted(monkeypatch, dqn, "learn"), defaultdict[int, set[tuple[float, ...]]](set)
    for update, item in enumerate(streamed(9)):
        dqn.update([item], Counters(env_steps=STEPS * SLOTS * (update + 1), updates=update))
    for batch, *_ in learned:
        assert batch.heads.shape == (3, len(batch))
        for number, taught in zip(batch.observations["obs"][:, 0].tolist(), batch.heads.T.tolist(), strict=True):
            seen[int(number)].add(tuple(taught))
    assert len(seen) > 60 and all(len(masks) == 1 for masks in seen.values())
    share = np.array([next(iter(masks)) for masks in seen.values()]).mean(axis=0)
    assert (np.abs(share - 0.5) < 0.2).all()
    everything = make_dqn(heads=3, bootstrap_share=1.0)
    everything.observe(streamed(2))
    drawn = everything.replay_buffer.sample(4, np.random.default_rng(0), gamma=0.9)
    assert everything.on_device(drawn).heads is None


def test_head_ignores_other_transitions_and_priors_stay_fixed() -> None:
    dqn = make_dqn(heads=3, prior_scale=2.0, learning_rate=0.1)
    batch = replace(minibatch(PLAIN), heads=torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 9))
    before = {name: array.copy() for name, array in state_arrays(dqn.policy).items()}
    dqn.learn(batch, Counters(), torch.Generator())
    after = state_arrays(dqn.policy)
    assert all(np.array_equal(after[name], array) for name, array in before.items() if "prior" in name)
    moved = [
        not np.array_equal(after["advantage.layers.1.weight"][head], before["advantage.layers.1.weight"][head])
        for head in range(3)
    ]
    assert moved == [True, False, True]
    assert any("prior" in name for name in before)


def test_gradient_steps_follow_env_steps_but_not_in_heatup() -> None:
    dqn = make_dqn(gradient_steps_per_env_step=0.3)
    dqn.observe(streamed(2))
    assert dqn.done == 0 and len(dqn.replay_buffer) > 0
    counts = []
    for update, item in enumerate(streamed(6, seed=1)):
        counters = Counters(env_steps=STEPS * SLOTS * (update + 1), updates=update)
        counts.append(int(dqn.update([item], counters)["train/gradient_steps"]))
    assert counts == [3, 4, 3, 4, 4, 3] and dqn.done == int(0.3 * 72)


def test_gradient_steps_start_with_first_agent() -> None:
    """Else one that comes after a million env steps would do a million in one update, with a handful of rows."""
    dqn = make_dqn()
    absent, present = streamed(1, absent=1.1)[0], streamed(1)[0]
    metrics = dqn.update([absent], Counters(env_steps=5))
    assert metrics["train/gradient_steps"] == 0 and metrics["train/replay_buffer_transitions"] == 0
    assert "train/loss" not in metrics
    assert dqn.update([present], Counters(env_steps=9, updates=1))["train/gradient_steps"] == 4
    assert dqn.update([absent], Counters(env_steps=12, updates=2))["train/gradient_steps"] == 3, "it has rows now"


def test_target_network_updates_every_n_gradient_steps() -> None:
    dqn = make_dqn(target_update_steps=4, tau=0.25, learning_rate=0.01)
    before = dict(state_arrays(dqn.target))
    (item,) = streamed(1)
    dqn.update([item], Counters(env_steps=3))
    assert all(np.array_equal(before[name], array) for name, array in state_arrays(dqn.target).items())
    dqn.update([item], Counters(env_steps=4, updates=1))
    online, target = state_arrays(dqn.policy), state_arrays(dqn.target)
    for name, array in target.items():
        np.testing.assert_allclose(array, 0.75 * before[name] + 0.25 * online[name], rtol=1e-5, atol=1e-6)
    assert any(not np.allclose(array, before[name]) for name, array in target.items())


def test_priorities_are_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    dqn = make_dqn("rainbow", replay_buffer={"kind": "prioritized"}, atoms=5)
    dqn.observe(streamed(3))
    learn, learned, told = dqn.learn, list[Array](), list[Array]()

    def noted(*arguments: Any) -> Any:
        lesson = learn(*arguments)
        learned.append(lesson.td_error.numpy())
        return lesson

    monkeypatch.setattr(dqn, "learn", noted)
    monkeypatch.setattr(dqn.replay_buffer, "update_priorities", lambda rows, errors: told.append(errors))
    dqn.update(streamed(1, seed=9), Counters(env_steps=2))
    assert len(told) == 2 and all(np.array_equal(*pair) for pair in zip(told, learned, strict=True))


def test_another_networks_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target/advantage\.layers\.1\.weight has the shape"):
        make_dqn().load_state(make_dqn(head="qr", quantiles=3).state())


# Masks


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_bootstrap_masks_differ_by_head_and_not_by_batch(share: float) -> None:
    numbers = np.arange(40_000) + 10**12
    masks = bootstrap_masks(numbers, 4, share, seed=3)
    assert np.array_equal(bootstrap_masks(numbers[::-1].copy(), 4, share, seed=3), masks[:, ::-1])
    assert not np.array_equal(bootstrap_masks(numbers, 4, share, seed=2), masks)
    assert masks.shape == (4, 40_000) and masks.dtype == np.float32 and set(np.unique(masks)) == {0.0, 1.0}
    np.testing.assert_allclose(masks.mean(axis=1), share, atol=0.012)
    among_heads, among_neighbors = np.corrcoef(masks), np.corrcoef(masks[:, :-1], masks[:, 1:])[:4, 4:]
    assert np.abs(among_heads - np.eye(4)).max() < 0.02 and np.abs(among_neighbors).max() < 0.02


# Distributions; C51's loss, of projections and cross-entropies, is compared with TorchRL's


def test_divergence_is_cross_entropy_minus_entropy_of_target() -> None:
    logits, target = torch.randn(6, 5, generator=torch.Generator().manual_seed(4)), torch.eye(5)[[1, 0, 2, 3, 4, 1]]
    target[1:] = 0.6 * target[1:] + 0.08
    parts = torch.nn.functional.kl_div(logits.log_softmax(dim=1), target, reduction="none")
    torch.testing.assert_close(divergence(logits, target), parts.sum(dim=1))
    same = divergence(logits, logits.softmax(dim=1))
    assert (same >= 0).all() and same.max() < 1e-6
