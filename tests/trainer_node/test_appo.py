"""APPO: the batch by V-trace from the target network, the clipped objective on it, and the target network's state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shared.algorithm_configs.appo import APPOConfig
from shared.algorithm_configs.impala import IMPALAConfig
from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.policies.codec import state_arrays
from shared.policies.registry import build_policies
from shared.spaces import PolicySpaces
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.trainer_node.test_policy_gradient import as_case, older
from tests.trainer_node.test_ppo import CONTINUOUS, CPU, DISCRETE, make_ppo, of, random_columns
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.appo import APPO
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.named_arrays import network_state

on_both_spaces = pytest.mark.parametrize("described", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
against_both = pytest.mark.parametrize("against", ["behaviour", "target"])


def make(described: PolicySpaces = DISCRETE, policy: dict[str, Any] | None = None, **config: Any) -> APPO:
    networks = {"p": PolicyConfig.model_validate({"hidden_sizes": (16,), **(policy or {})})}
    section = APPOConfig.model_validate({"minibatch_size": 16, "epochs": 3, **config})
    built: Any = build_policies({"p": described}, networks, section, 3)["p"]
    return APPO(built, section, Setting(CPU, 3, 8, 4))


def bits(algorithm: Any) -> dict[str, bytes]:
    """Of the policy and of all state."""
    arrays = {**state_arrays(algorithm.policy), **{f"state/{name}": item for name, item in algorithm.state().items()}}
    return {name: array.tobytes() for name, array in arrays.items()}


def batches(algorithm: APPO, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, float]]:
    """What `loss` gets to see, from now on."""
    seen: list[tuple[Batch, float]] = []
    loss = algorithm._loss

    def noting(batch: Batch, clip: float) -> Any:
        seen.append((batch, clip))
        return loss(batch, clip)

    monkeypatch.setattr(algorithm, "_loss", noting)
    return seen


@on_both_spaces
@against_both
def test_the_batch_is_by_v_trace_from_the_target_network(
    described: PolicySpaces, against: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"vtrace_lambda": 0.9, "rho_bar": 1.2, "c_bar": 0.8}
    appo = make(described, clip_against=against, target_updates=5, epochs=1, minibatch_size=32, **settings)
    acted_by, target = older(appo.policy), copy.deepcopy(appo.policy)
    appo.update(of(random_columns(acted_by, 2)), Counters(updates=0))  # now the policy is not the target any more
    seen = batches(appo, monkeypatch)
    columns = random_columns(acted_by, 3, absent=True)
    case = as_case(target, columns, IMPALAConfig.model_validate(settings))
    targets, advantage, weight = case.expected()
    metrics = appo.update(of(columns), Counters(updates=1))
    (batch, _), mask = seen[0], columns["mask"]
    weighted = weight * advantage if against == "target" else advantage
    anchor = columns["log_prob"] + (case.log_ratio if against == "target" else 0)
    for found, expected in ((batch.target, targets), (batch.advantage, weighted), (batch.log_prob, anchor)):
        np.testing.assert_allclose(np.sort(found), np.sort(expected[mask]), rtol=1e-3, atol=1e-4)
    assert metrics["train/importance_weight"] == pytest.approx(weight[mask].mean(), rel=1e-4) != 1.0


@on_both_spaces
def test_the_loss_is_ppos_and_the_divergence_from_the_target(
    described: PolicySpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"clip_range_value": 0.3, "entropy_coefficient": 0.02, "normalise_advantages": True}
    appo, ppo = make(described, kl_coefficient=0.7, learning_rate=1e-2, **settings), make_ppo(described, **settings)
    target = copy.deepcopy(appo.policy)
    seen = batches(appo, monkeypatch)
    appo.update(of(random_columns(older(appo.policy), 3)), Counters())
    ppo.policy.load_state_dict(appo.policy.state_dict())
    batch, clip = seen[-1]
    loss, terms = appo.loss(batch, clip)
    plain, of_ppo = ppo.loss(batch, clip)
    with torch.no_grad():
        mine, its = (policy.action_parameters(batch.observations) for policy in (appo.policy, target))
        samples = target.distribution.sample(its.repeat(4000, 1), torch.Generator().manual_seed(1))
        log_probs = (target.distribution.log_prob(params.repeat(4000, 1), samples) for params in (its, mine))
        divergence = float(next(log_probs).mean() - next(log_probs).mean())
    assert divergence > 1e-3
    assert float(terms["train/kl_from_target"]) == pytest.approx(divergence, rel=0.1)
    assert loss.item() == pytest.approx(plain.item() + 0.7 * float(terms["train/kl_from_target"]), rel=1e-5)
    assert terms["train/loss"].item() == loss.item()
    assert {name: float(terms[name]) for name in of_ppo if name != "train/loss"} == pytest.approx(
        {name: float(value) for name, value in of_ppo.items() if name != "train/loss"}
    )


def test_the_divergence_holds_the_policy_back() -> None:
    moved = []
    for coefficient in (0.0, 50.0):
        appo = make(kl_coefficient=coefficient, learning_rate=1e-2)
        moved.append(appo.update(of(random_columns(appo.policy, 1)), Counters())["train/kl_from_target"])
    assert 0 < moved[1] < moved[0] / 2


def test_in_lockstep_and_without_traces_cut_short_it_is_ppo() -> None:
    appo, ppo = make(vtrace_lambda=1.0), make_ppo(gae_lambda=1.0)
    assert appo.policy.state_dict().keys() == ppo.policy.state_dict().keys()
    columns = random_columns(ppo.policy, 4)
    found, expected = (algorithm.update(of(columns), Counters()) for algorithm in (appo, ppo))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-5)
    for one, other in zip(appo.policy.parameters(), ppo.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_target_network_follows_in_steps() -> None:
    appo = make(policy={"normalise_observations": True}, target_updates=2)
    targets = []
    for update in range(4):
        before = network_state(appo.policy, "")
        appo.update(of(random_columns(appo.policy, update)), Counters(updates=update))
        target = {name.removeprefix("target/"): item for name, item in appo.state().items() if "target/" in name}
        targets.append({name: item.tobytes() for name, item in target.items()})
        assert set(target) == set(before)
        if update % 2 == 0:
            assert targets[-1] == {name: item.tobytes() for name, item in before.items()}
    assert targets[0] == targets[1] != targets[2] == targets[3]


@pytest.mark.parametrize("algorithm", ["ppo", "behaviour", "target"])
def test_how_far_the_policy_may_move_does_not_depend_on_how_old_the_one_that_acted_is(algorithm: str) -> None:
    """`target_kl` counts from where the update begins, also where the target network is older than that."""
    fields: dict[str, Any] = {"target_kl": 0.05, "epochs": 10, "learning_rate": 0.05}
    found: Any = make_ppo(**fields)
    if algorithm != "ppo":
        found = make(clip_against=algorithm, target_updates=9, **fields)
    for update in range(4):
        metrics = found.update(of(random_columns(older(found.policy), update)), Counters(updates=update))
        assert 1 < metrics["train/gradient_steps"] < 20 and metrics["train/update_kl"] < 1.5 * 0.05
    assert metrics["train/approx_kl"] > metrics["train/update_kl"], "from the one that acted, or the target network"


@against_both
def test_it_goes_on_from_its_state_with_the_same_bits(against: str) -> None:
    def fresh() -> APPO:
        return make(policy={"normalise_observations": True}, target_updates=3, clip_against=against)

    whole = fresh()
    acted = [random_columns(older(whole.policy), seed) for seed in range(6)]
    for update in range(2):
        whole.update(of(acted[update]), Counters(updates=update))
    resumed, without_target = fresh(), fresh()
    for algorithm in (resumed, without_target):
        algorithm.policy.load_state_dict(whole.policy.state_dict())
        algorithm.load_state(whole.state())
    without_target._target.load_state_dict(whole.policy.state_dict())
    for algorithm in (whole, resumed, without_target):
        for update in range(2, 6):
            algorithm.update(of(acted[update]), Counters(updates=update))
    assert bits(whole) == bits(resumed) != bits(without_target)


def test_a_state_without_a_target_network_is_refused() -> None:
    with pytest.raises(KeyError, match="target/"):
        make().load_state(make_ppo().state())


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ({"target_updates": 0}, "target_updates"),
        ({"clip_against": "reference"}, "clip_against"),
        ({"kl_coefficient": -1}, "kl_coefficient"),
        ({"minibatch_size": 10_000}, "minibatch_size=10000 is more than one update's batch"),
        ({"gae_lambda": 0.9}, "gae_lambda"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(algorithm: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        minimal_config(algorithm={"name": "appo", **algorithm})
