"""Actor-critics: epochs, minibatches, bounds, and APPO's target network; losses are in against_others."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, PolicySpaces
from stagecoach.trainer_node.learning.building_blocks.optimization import state_of
from tests.support.learning.algorithms import make, move_apart, noted, older, on_both_spaces
from tests.support.learning.experience import acted, advantage_batch, received
from tests.support.learning.slow_returns import case_of

against_both = pytest.mark.parametrize("against", ["behavior", "target"])


@pytest.mark.parametrize(("minibatch", "sizes"), [(32, [32]), (12, [11, 11, 10]), (31, [16, 16]), (1, [1] * 32)])
def test_epoch_uses_every_row_once_when_there_is_a_remainder(
    minibatch: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = noted(monkeypatch, "ppo", "loss")
    ppo = make("ppo", minibatch_size=minibatch, epochs=2)
    columns = acted(ppo.policy, 7)
    columns["log_prob"] += np.arange(32, dtype=np.float32).reshape(8, 4) * 1e-3
    metrics = ppo.update(received(columns), Counters())
    assert metrics["train/gradient_steps"] == 2 * len(sizes)
    assert {clip for _, clip in seen} == {metrics["train/clip_range"]}
    rows = [batch.log_prob.tolist() for batch, _ in seen]
    assert [len(part) for part in rows] == sizes * 2
    epochs = [[row for part in parts for row in part] for parts in (rows[: len(sizes)], rows[len(sizes) :])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(columns["log_prob"].flatten().tolist())
    assert epochs[0] != epochs[1]


def test_target_kl_stops_the_epochs() -> None:
    def steps(**config: Any) -> float:
        ppo = make("ppo", learning_rate=0.05, epochs=10, **config)
        return float(ppo.update(received(acted(ppo.policy, 8)), Counters())["train/gradient_steps"])

    free, bounded, tight = steps(), steps(target_kl=0.05), steps(target_kl=1e-9)
    assert free == 20 and 1 <= tight < bounded < free
    assert steps(target_kl=1e6) == 20


@pytest.mark.parametrize("against", ["ppo", "behavior", "target"])
def test_target_kl_does_not_depend_on_age_of_acting_policy(against: str) -> None:
    """`target_kl` counts from where the update begins, also where the target network is older than that."""
    fields: dict[str, Any] = {"target_kl": 0.05, "epochs": 10, "learning_rate": 0.05}
    algorithm = (
        make("ppo", **fields) if against == "ppo" else make("appo", clip_against=against, target_updates=9, **fields)
    )
    for update in range(4):
        fragments = received(acted(older(algorithm.policy), update))
        metrics = algorithm.update(fragments, Counters(updates=update))
        assert 1 < metrics["train/gradient_steps"] < 20 and metrics["train/update_kl"] < 1.5 * 0.05
    assert metrics["train/approx_kl"] > metrics["train/update_kl"], "from the one that acted, or the target network"


def test_gradients_are_scaled_down_to_the_configs_bound() -> None:
    ppo = make("ppo", max_grad_norm=0.01, epochs=1, minibatch_size=32)
    assert ppo.update(received(acted(ppo.policy, 9)), Counters())["train/grad_norm"] > 0.1
    moments = [array for name, array in ppo.state().items() if name.endswith("/exp_avg")]
    assert 10 * float(np.sqrt(sum((array**2).sum() for array in moments))) == pytest.approx(0.01, rel=1e-3)


def test_explained_variance_is_of_the_returns() -> None:
    ppo = make("ppo", gae_lambda=1.0, gamma=0.0, learning_rate=0.0)
    columns = acted(ppo.policy, 22)
    with torch.no_grad():
        value = ppo.policy.value({"obs": torch.from_numpy(columns["obs"]).flatten(0, 1)}).numpy()
    returns: Array = columns["reward"].flatten()
    expected = 1 - np.var(returns - value, ddof=1) / np.var(returns, ddof=1)
    assert ppo.update(received(columns), Counters())["train/explained_variance"] == pytest.approx(expected, rel=1e-4)


# APPO


@on_both_spaces
@against_both
def test_appos_batch_is_by_v_trace_from_the_target_network(
    described: PolicySpaces, against: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = noted(monkeypatch, "appo", "loss")
    bounds: dict[str, Any] = {"rho_bar": 1.2, "c_bar": 0.8}
    fields: dict[str, Any] = {"clip_against": against, "target_updates": 5, "epochs": 1, "minibatch_size": 32}
    appo = make("appo", described, vtrace_lambda=0.9, **bounds, **fields)
    acting, target = older(appo.policy), copy.deepcopy(appo.policy)
    appo.update(received(acted(acting, 2)), Counters(updates=0))  # now the policy is not the target any more
    seen.clear()
    columns = acted(acting, 3, absent=True)
    case = case_of(target, columns, gamma=0.99, decay=0.9, **bounds)
    targets, advantage, weight = case.slow_vtrace()
    metrics = appo.update(received(columns), Counters(updates=1))
    (batch, _), mask = seen[0], columns["mask"]
    weighted = weight * advantage if against == "target" else advantage
    anchor = columns["log_prob"] + (case.log_ratio if against == "target" else 0)
    for found, expected in ((batch.target, targets), (batch.advantage, weighted), (batch.log_prob, anchor)):
        np.testing.assert_allclose(np.sort(found), np.sort(expected[mask]), rtol=1e-3, atol=1e-4)
    assert metrics["train/importance_weight"] == pytest.approx(weight[mask].mean(), rel=1e-4) != 1.0


@on_both_spaces
def test_appos_loss_is_ppos_and_the_divergence_from_the_target(described: PolicySpaces) -> None:
    appo, ppo = make("appo", described, kl_coefficient=0.7), make("ppo", described)
    move_apart(ppo.policy, appo.target)
    appo.policy.load_state_dict(ppo.policy.state_dict())
    plain = advantage_batch(ppo.policy)
    with torch.no_grad():
        mine, its = (policy.action_parameters(plain.observations) for policy in (appo.policy, appo.target))
        samples = appo.target.distribution.sample(its.repeat(4000, 1), torch.Generator().manual_seed(1))
        log_probs = (ppo.policy.distribution.log_prob(params.repeat(4000, 1), samples) for params in (its, mine))
        divergence = float(next(log_probs).mean() - next(log_probs).mean())
    loss, terms = appo.loss(replace(plain, anchor_params=its), 0.2)
    assert float(terms["train/kl_from_target"]) == pytest.approx(divergence, rel=0.1) and divergence > 1e-3
    expected = ppo.loss(plain, 0.2)[0].item() + 0.7 * float(terms["train/kl_from_target"])
    assert terms["train/loss"].item() == loss.item() == pytest.approx(expected, rel=1e-5)


@on_both_spaces
def test_magnet_pulls_the_policy_and_follows_it(described: PolicySpaces) -> None:
    """The loss is PPO's and the divergence of the policy from the magnet, which moves its share after an update."""
    held, ppo = make("ppo", described, magnet_coefficient=0.7, magnet_rate=0.25), make("ppo", described)
    move_apart(ppo.policy, held.magnet)
    held.policy.load_state_dict(ppo.policy.state_dict())
    before, batches = state_of({"": held.magnet}), list[Any]()
    loss = held._loss

    def noting(batch: Any, clip: float) -> Any:
        if not batches:
            batches.append(batch)
            params, anchor = (
                each.action_parameters(batch.observations).detach() for each in (held.policy, held.magnet)
            )
            assert torch.allclose(batch.anchor_params, anchor, atol=1e-6)
            samples = held.policy.distribution.sample(params.repeat(4000, 1), torch.Generator().manual_seed(1))
            mine, its = (held.policy.distribution.log_prob(each.repeat(4000, 1), samples) for each in (params, anchor))
            found, terms = loss(batch, clip)
            assert float(terms["train/kl_from_magnet"]) == pytest.approx(float((mine - its).mean()), rel=0.1)
            expected = ppo.loss(batch, clip)[0].item() + 0.7 * float(terms["train/kl_from_magnet"])
            assert terms["train/loss"].item() == found.item() == pytest.approx(expected, rel=1e-5)
        return loss(batch, clip)

    held._loss = noting
    held.update(received(acted(held.policy, 1)), Counters(updates=0))
    after, now = state_of({"": held.magnet}), state_of({"": held.policy})
    assert batches
    for name, array in after.items():
        np.testing.assert_allclose(array, 0.75 * before[name] + 0.25 * now[name], atol=1e-5)
    assert {f"magnet/{name}" for name in after} <= set(held.state()) and ppo.magnet is None


def test_target_network_updates_in_steps() -> None:
    appo = make("appo", policy={"normalize_observations": True}, target_updates=2)
    targets = []
    for update in range(4):
        before = state_of({"": appo.policy})
        appo.update(received(acted(appo.policy, update)), Counters(updates=update))
        target = {name.removeprefix("target/"): item for name, item in appo.state().items() if "target/" in name}
        targets.append({name: item.tobytes() for name, item in target.items()})
        assert set(target) == set(before)
        if update % 2 == 0:
            assert targets[-1] == {name: item.tobytes() for name, item in before.items()}
    assert targets[0] == targets[1] != targets[2] == targets[3]


def test_state_without_target_network_is_refused() -> None:
    with pytest.raises(KeyError, match="target/"):
        make("appo").load_state(make("ppo").state())
