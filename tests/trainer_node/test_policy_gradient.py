"""A2C and IMPALA: batch and loss against slow computations, and what an update promises whatever the batch holds."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from shared.algorithm_configs.a2c import A2CConfig
from shared.algorithm_configs.impala import IMPALAConfig
from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.policies.actor_critic import ActorCritic
from shared.policies.codec import state_arrays
from shared.policies.registry import build_policies
from shared.spaces import Columns, PolicySpaces
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.trainer_node.test_ppo import CONTINUOUS, CPU, DISCRETE, of, random_columns
from tests.trainer_node.test_vtrace import Case
from trainer_node.algorithms.a2c import A2C
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.impala import IMPALA
from trainer_node.algorithms.policy_gradient import PolicyGradient
from trainer_node.algorithms.registry import make_algorithm

both = pytest.mark.parametrize("name", ["a2c", "impala"])
on_both_spaces = pytest.mark.parametrize("described", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])


def make(
    name: str, described: PolicySpaces = DISCRETE, policy: dict[str, Any] | None = None, **config: Any
) -> PolicyGradient:
    networks = {"p": PolicyConfig.model_validate({"hidden_sizes": (16,), **(policy or {})})}
    section = ALGORITHMS[name].model_validate({"name": name, **config})
    built = build_policies({"p": described}, networks, section, 3)["p"]
    made = make_algorithm(built, section, Setting(CPU, 3, 8, 4))
    assert isinstance(made, PolicyGradient)
    return made


def older(policy: ActorCritic) -> ActorCritic:
    """Another policy that may have acted."""
    found = copy.deepcopy(policy)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
    return found


def weights(algorithm: PolicyGradient) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state_arrays(algorithm.policy).items()}


def random_batch(algorithm: PolicyGradient, rows: int = 20) -> Batch:
    random = torch.Generator().manual_seed(9)
    observations = {"obs": torch.randn(rows, 3, generator=random)}
    with torch.no_grad():
        params = algorithm.policy.action_parameters(observations)
        actions = algorithm.policy.distribution.sample(params, random)
    noise = torch.randn(4, rows, generator=random)
    return Batch(observations, actions, noise[0], noise[1], 3 * noise[2] + 1, 2 * noise[3])


def slow_loss(algorithm: PolicyGradient, batch: Batch, value: float, entropy: float, normalise: bool) -> list[float]:
    """Row by row: loss, policy loss, value loss, entropy."""
    policy = algorithm.policy
    advantage = batch.advantage.double().numpy()
    if normalise:
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    sums = np.zeros(3)
    for row in range(len(batch)):
        one = batch.take(slice(row, row + 1))
        with torch.no_grad():
            params = policy.action_parameters(one.observations)
            log_prob = float(policy.distribution.log_prob(params, one.actions))
            error = float(policy.value(one.observations)) - float(one.target)
            sums += [-advantage[row] * log_prob, error**2, float(policy.distribution.entropy(params))]
    means = sums / len(batch)
    return [float(means @ [1, value, -entropy]), *means.tolist()]


@on_both_spaces
@both
@pytest.mark.parametrize("normalise", [False, True])
def test_the_loss_is_the_papers(name: str, described: PolicySpaces, normalise: bool) -> None:
    algorithm = make(name, described, value_coefficient=0.7, entropy_coefficient=0.05, normalise_advantages=normalise)
    batch = random_batch(algorithm)
    loss, terms = algorithm.loss(batch)
    expected = slow_loss(algorithm, batch, 0.7, 0.05, normalise)
    names = ("train/loss", "train/policy_loss", "train/value_loss", "train/entropy")
    assert [float(terms[item]) for item in names] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert loss.item() == pytest.approx(expected[0], rel=1e-4) and set(terms) == set(names)


@on_both_spaces
def test_the_gradient_is_that_of_the_slow_loss(described: PolicySpaces) -> None:
    algorithm = make("a2c", described, entropy_coefficient=0.05)
    batch = random_batch(algorithm)
    algorithm.loss(batch)[0].backward()  # type: ignore[no-untyped-call]
    for name, parameter in algorithm.policy.named_parameters():
        if not parameter.numel():
            continue
        where = (0,) * parameter.ndim
        assert parameter.grad is not None
        kept, losses = parameter[where].item(), []
        for change in (1e-2, -1e-2):
            with torch.no_grad():
                parameter[where] = kept + change
            losses.append(slow_loss(algorithm, batch, 0.5, 0.05, False)[0])
        with torch.no_grad():
            parameter[where] = kept
        found = (losses[0] - losses[1]) / 2e-2
        assert parameter.grad[where].item() == pytest.approx(found, rel=0.05, abs=2e-3), name


def values(policy: ActorCritic, columns: Columns, prefix: str = "") -> Any:
    with torch.no_grad():
        observations = torch.from_numpy(columns[prefix + "obs"])
        return policy.value({"obs": observations.reshape(-1, 3)}).double().numpy()


def as_case(policy: ActorCritic, columns: Columns, config: IMPALAConfig) -> Case:
    """The same experience for the slow V-trace, valued by `policy`."""
    shape = columns["reward"].shape
    final = values(policy, columns, "final_")
    with torch.no_grad():
        params = policy.action_parameters({"obs": torch.from_numpy(columns["obs"]).flatten(0, 1)})
        log_prob = policy.distribution.log_prob(params, {"action": torch.from_numpy(columns["action"]).flatten(0, 1)})
    return Case(
        log_prob.double().numpy().reshape(shape) - columns["log_prob"], columns["reward"].astype(np.float64),
        values(policy, columns).reshape(shape), values(policy, columns, "bootstrap_"), columns["terminated"],
        columns["truncated"], columns["mask"],
        {(int(t), int(s)): float(final[row]) for row, (t, s) in enumerate(columns["final_index"])},
        config.gamma, config.vtrace_lambda, config.rho_bar, config.c_bar,
    )  # fmt: skip


@on_both_spaces
def test_impala_learns_v_traces_targets_of_what_an_older_policy_acted(
    described: PolicySpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"vtrace_lambda": 0.9, "rho_bar": 1.2, "c_bar": 0.8}
    impala = make("impala", described, **settings)
    columns = random_columns(older(impala.policy), 3, absent=True)
    target, advantage, weight = as_case(impala.policy, columns, IMPALAConfig(**settings)).expected()
    seen: list[Batch] = []
    loss = impala._loss
    monkeypatch.setattr(impala, "_loss", lambda batch: (seen.append(batch), loss(batch))[1])  # type: ignore[func-returns-value]
    metrics = impala.update(of(columns), Counters())
    (batch,), mask = seen, columns["mask"]
    assert len(batch) == mask.sum() < mask.size
    np.testing.assert_allclose(batch.target, target[mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch.advantage, (weight * advantage)[mask], rtol=1e-4, atol=1e-5)
    assert metrics["train/importance_weight"] == pytest.approx(weight[mask].mean(), rel=1e-4) != 1.0
    assert metrics["train/gradient_steps"] == 1


def test_where_no_older_policy_acted_impala_is_a2c() -> None:
    found = []
    for name in ("a2c", "impala"):
        algorithm = make(name, learning_rate=1e-3)
        algorithm.update(of(random_columns(algorithm.policy, 4)), Counters())
        found.append(torch.cat([parameter.flatten() for parameter in algorithm.policy.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert not torch.equal(found[0], torch.cat([item.flatten() for item in make("a2c").policy.parameters()]))


@both
def test_what_stands_in_masked_rows_is_not_learnt(name: str) -> None:
    found = []
    for change in (0.0, 50.0):
        algorithm = make(name, policy={"normalise_observations": True})
        columns = random_columns(algorithm.policy, 5, absent=True)
        gone = ~columns["mask"]
        assert gone.any()
        columns["reward"][gone] += change
        columns["obs"][gone] += change
        columns["log_prob"][gone] -= change
        metrics = algorithm.update(of(columns), Counters())
        found.append((metrics, weights(algorithm), {key: item.tobytes() for key, item in algorithm.state().items()}))
    assert found[0] == found[1]


@both
def test_an_update_in_which_nobody_acted_learns_nothing(name: str) -> None:
    algorithm = make(name, policy={"normalise_observations": True})
    before, columns = weights(algorithm), random_columns(algorithm.policy, 6)
    columns["mask"][:] = columns["terminated"][:] = columns["truncated"][:] = False
    columns |= {"final_index": columns["final_index"][:0], "final_obs": columns["final_obs"][:0]}
    metrics = algorithm.update(of(columns), Counters())
    assert metrics == {"train/learning_rate": pytest.approx(7e-4, rel=0.2), "train/gradient_steps": 0}
    assert weights(algorithm) == before


@both
def test_the_optimiser_goes_on_from_its_state_with_the_same_bits(name: str) -> None:
    whole = make(name, policy={"normalise_observations": True})
    batches = [random_columns(older(whole.policy), seed) for seed in range(4)]
    for update, columns in enumerate(batches[:2]):
        whole.update(of(columns), Counters(updates=update))
    resumed = make(name, policy={"normalise_observations": True})
    resumed.policy.load_state_dict(whole.policy.state_dict())
    resumed.load_state(whole.state())
    for algorithm in (whole, resumed):
        torch.manual_seed(id(algorithm) % 1000)
        for update, columns in enumerate(batches[2:], start=2):
            algorithm.update(of(columns), Counters(updates=update))
    assert weights(whole) == weights(resumed)
    assert {k: v.tobytes() for k, v in whole.state().items()} == {k: v.tobytes() for k, v in resumed.state().items()}


@both
def test_the_learning_rate_follows_its_schedule(name: str) -> None:
    schedule = {"kind": "linear", "start": 1e-2, "end": 0.0, "over": "10 updates"}
    algorithm = make(name, learning_rate=schedule)
    columns = random_columns(algorithm.policy, 1)
    assert algorithm.update(of(columns), Counters(updates=5))["train/learning_rate"] == pytest.approx(5e-3)
    before = weights(algorithm)
    assert algorithm.update(of(columns), Counters(updates=10))["train/learning_rate"] == 0.0
    assert weights(algorithm) == before


def test_a2c_refuses_what_an_older_policy_acted_and_impala_does_not() -> None:
    lagging = {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 1}
    with pytest.raises(ConfigError, match=r"max_policy_lag=1 with algorithm.name=a2c: .* use impala or appo"):
        minimal_config(algorithm="a2c", rollout=lagging)
    assert minimal_config(algorithm="impala", rollout=lagging).rollout.max_policy_lag == 1


@pytest.mark.parametrize(
    ("algorithm", "where"),
    [
        ({"name": "impala", "rho_bar": 0}, "rho_bar"),
        ({"name": "impala", "c_bar": -1}, "c_bar"),
        ({"name": "impala", "vtrace_lambda": 1.1}, "vtrace_lambda"),
        ({"name": "impala", "gae_lambda": 0.9}, "gae_lambda"),
        ({"name": "a2c", "epochs": 4}, "epochs"),
        ({"name": "a2c", "max_grad_norm": 0}, "max_grad_norm"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(algorithm: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        minimal_config(algorithm=algorithm)


def test_the_sections_mean_these_classes() -> None:
    assert isinstance(make("a2c"), A2C) and isinstance(make("impala"), IMPALA)
    assert isinstance(minimal_config(algorithm="a2c").algorithm, A2CConfig)
