"""PPO: its loss against a slow NumPy computation, and what an update promises whatever the batch holds."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.environments import make_vector
from rollout_worker.exploration import Sampling
from rollout_worker.making import describe_environment, describe_space
from rollout_worker.sampler import Sampler
from rollout_worker.trail import Life
from shared.algorithm_configs.ppo import PPOConfig
from shared.config import PolicyConfig
from shared.fragment import expected_columns
from shared.policies.actor_critic import ActorCritic
from shared.policies.codec import state_arrays
from shared.policies.registry import build_policies
from shared.spaces import Array, Columns, PolicySpaces
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.ppo import PPO
from trainer_node.algorithms.registry import make_algorithm

CPU = torch.device("cpu")
DISCRETE = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Discrete(4)))
CONTINUOUS = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Box(-1.0, 1.0, (2,))))


def make_ppo(
    described: PolicySpaces = DISCRETE, seed: int = 3, policy: dict[str, Any] | None = None, **config: Any
) -> PPO:
    networks = {"p": PolicyConfig.model_validate({"hidden_sizes": (16,), **(policy or {})})}
    built = build_policies({"p": described}, networks, PPOConfig(), seed)["p"]
    assert isinstance(built, ActorCritic)
    return PPO(built, PPOConfig.model_validate({"minibatch_size": 16, "epochs": 3, **config}), Setting(CPU, seed, 8, 4))


def random_columns(policy: ActorCritic, seed: int, steps: int = 8, slots: int = 4, absent: bool = False) -> Columns:
    """A fragment of made-up observations that `policy` acts on; where `absent`, the row after an end is masked."""
    random = np.random.default_rng(seed)
    over = random.random((steps, slots)) < 0.25
    mask = np.ones((steps, slots), np.bool_)
    if absent:
        for step in range(1, steps):
            over[step] &= ~over[step - 1]
            mask[step] = ~over[step - 1]
    terminated = over & (random.random((steps, slots)) < 0.5)
    truncated = over & ~terminated
    last_known = over & (random.random((steps, slots)) < 0.5)
    index = np.argwhere(truncated | last_known).astype(np.int32)
    columns: Columns = {
        "obs": random.normal(size=(steps, slots, 3)).astype(np.float32),
        "bootstrap_obs": random.normal(size=(slots, 3)).astype(np.float32),
        "final_obs": random.normal(size=(len(index), 3)).astype(np.float32),
        "final_index": index,
        "reward": random.normal(size=(steps, slots)).astype(np.float32) * mask,
        "terminated": terminated,
        "truncated": truncated,
        "mask": mask,
    }
    with torch.no_grad():
        observations = torch.from_numpy(columns["obs"]).flatten(0, 1)
        params = policy.action_parameters({"obs": observations})
        actions = policy.distribution.sample(params, torch.Generator().manual_seed(seed))["action"]
        log_prob = policy.distribution.log_prob(params, {"action": actions})
    columns["action"] = actions.reshape(steps, slots, *policy.spaces.action.leaves[0].shape).numpy()
    columns["log_prob"] = log_prob.reshape(steps, slots).numpy()
    assert set(columns) == set(expected_columns(policy.spaces, steps, slots))
    return columns


def of(*columns: Columns) -> list[Experience]:
    """As the learner hands it over."""
    return [Experience("worker-0:0.0", item) for item in columns]


def weights(ppo: PPO) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in state_arrays(ppo.policy).items()}


def random_batch(ppo: PPO, rows: int = 20) -> Batch:
    """Like a minibatch some steps into an update: the policy has moved, so that ratios are away from 1."""
    random = torch.Generator().manual_seed(9)
    observations = {"obs": torch.randn(rows, 3, generator=random)}
    with torch.no_grad():
        params, value = ppo.policy.action_parameters_and_value(observations)
        actions = ppo.policy.distribution.sample(params, random)
        log_prob = ppo.policy.distribution.log_prob(params, actions)
    noise = torch.randn(4, rows, generator=random)
    return Batch(
        observations, actions, log_prob + 0.4 * noise[0], value + noise[1], 3 * noise[2] + 1, value + 2 * noise[3]
    )


def slow_loss(ppo: PPO, batch: Batch, clip: float, config: PPOConfig) -> dict[str, float]:
    """Row by row, as Schulman et al. 2017 write it (eq. 7 and 9)."""
    with torch.no_grad():
        params, values = ppo.policy.action_parameters_and_value(batch.observations)
        new = ppo.policy.distribution.log_prob(params, batch.actions).double().numpy()
        entropies = ppo.policy.distribution.entropy(params).double().numpy()
    old, advantage, target, old_value = (
        getattr(batch, name).double().numpy() for name in ("log_prob", "advantage", "target", "value")
    )
    if config.normalise_advantages:
        deviation = np.sqrt(((advantage - advantage.mean()) ** 2).sum() / (len(advantage) - 1))
        advantage = (advantage - advantage.mean()) / (deviation + 1e-8)
    surrogate, squares, kl, clipped_rows = [], [], [], 0
    for row in range(len(batch)):
        ratio = np.exp(new[row] - old[row])
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        surrogate.append(min(ratio * advantage[row], bounded * advantage[row]))
        error = (float(values[row]) - target[row]) ** 2
        if config.clip_range_value is not None:
            move = float(values[row]) - old_value[row]
            move = np.sign(move) * min(abs(move), config.clip_range_value)
            error = max(error, (old_value[row] + move - target[row]) ** 2)
        squares.append(error)
        kl.append(ratio - 1 - np.log(ratio))
        clipped_rows += abs(ratio - 1) > clip
    policy_loss, value_loss, entropy = -np.mean(surrogate), np.mean(squares), np.mean(entropies)
    return {
        "train/policy_loss": policy_loss, "train/value_loss": value_loss, "train/entropy": entropy,
        "train/loss": policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy,
        "train/approx_kl": float(np.mean(kl)), "train/clip_fraction": clipped_rows / len(batch),
    }  # fmt: skip


@pytest.mark.parametrize("described", [DISCRETE, CONTINUOUS], ids=["discrete", "continuous"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise_advantages": False},
        {"clip_range_value": 0.3},
        {"entropy_coefficient": 0.05, "value_coefficient": 1.5},
    ],
    ids=["plain", "raw advantages", "value clipping", "coefficients"],
)
def test_the_loss_is_the_papers(described: PolicySpaces, changes: dict[str, Any]) -> None:
    ppo = make_ppo(described, **changes)
    batch = random_batch(ppo)
    config = PPOConfig.model_validate(changes)
    loss, metrics = ppo.loss(batch, 0.2)
    expected = slow_loss(ppo, batch, 0.2, config)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert loss.item() == pytest.approx(expected["train/loss"], rel=1e-4)
    assert 0 < expected["train/clip_fraction"] < 1


def test_the_gradient_is_that_of_the_slow_loss() -> None:
    ppo = make_ppo(CONTINUOUS, clip_range_value=0.3, entropy_coefficient=0.01)
    batch = random_batch(ppo)
    config = PPOConfig(clip_range_value=0.3, entropy_coefficient=0.01)
    ppo.loss(batch, 0.2)[0].backward()  # type: ignore[no-untyped-call]
    for name, parameter in ppo.policy.named_parameters():
        where = (0,) * parameter.ndim
        assert parameter.grad is not None
        found, kept, losses = parameter.grad[where].item(), parameter[where].item(), []
        for change in (1e-2, -1e-2):
            with torch.no_grad():
                parameter[where] = kept + change
            losses.append(slow_loss(ppo, batch, 0.2, config)["train/loss"])
        with torch.no_grad():
            parameter[where] = kept
        assert found == pytest.approx((losses[0] - losses[1]) / 2e-2, rel=0.1, abs=2e-3), name


def test_the_same_update_twice_is_bit_equal() -> None:
    results = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        ppo = make_ppo(policy={"normalise_observations": True})
        for update in range(3):
            ppo.update(
                of(*(random_columns(ppo.policy, seed) for seed in (update, update + 10))), Counters(updates=update)
            )
        results.append(weights(ppo))
    assert results[0] == results[1]


def test_the_run_seed_and_the_number_of_the_update_shuffle_the_rows() -> None:
    def after(update: int) -> dict[str, bytes]:
        ppo = make_ppo()
        ppo.update(of(random_columns(ppo.policy, 1)), Counters(updates=update))
        return weights(ppo)

    assert after(0) == after(0) != after(1)


def test_several_fragments_are_one_fragment_with_more_slots() -> None:
    parts_of, whole_of = (
        make_ppo(policy={"normalise_observations": True}),
        make_ppo(policy={"normalise_observations": True}),
    )
    parts = [random_columns(parts_of.policy, seed, slots=slots) for seed, slots in ((1, 4), (2, 3), (3, 5))]
    index, offset = [], 0
    for part in parts:
        index.append(part["final_index"] + np.array([0, offset], np.int32))
        offset += part["mask"].shape[1]
    whole: Columns = {"final_index": np.concatenate(index)}
    whole["final_obs"] = np.concatenate([part["final_obs"] for part in parts])
    whole["bootstrap_obs"] = np.concatenate([part["bootstrap_obs"] for part in parts])
    for name in ("obs", "action", "reward", "log_prob", "terminated", "truncated", "mask"):
        whole[name] = np.concatenate([part[name] for part in parts], axis=1)
    assert len(whole["final_index"]) > 3
    metrics = parts_of.update(of(*parts), Counters()), whole_of.update(of(whole), Counters())
    assert metrics[0] == metrics[1] and weights(parts_of) == weights(whole_of)


def test_masked_rows_do_not_influence_the_update() -> None:
    results = []
    for garbage in (0, 1):
        ppo = make_ppo(policy={"normalise_observations": True})
        columns = random_columns(ppo.policy, 5, absent=True)
        absent = ~columns["mask"]
        assert absent.sum() > 3
        random = np.random.default_rng(garbage)
        for name in ("obs", "reward", "log_prob"):
            columns[name][absent] = random.normal(size=columns[name][absent].shape) * 1e6
        columns["action"][absent] = garbage
        metrics = ppo.update(of(columns), Counters())
        results.append((weights(ppo), metrics))
    assert results[0] == results[1]


def test_a_batch_without_an_actor_changes_nothing() -> None:
    ppo = make_ppo(policy={"normalise_observations": True})
    columns = random_columns(ppo.policy, 6)
    columns["mask"][:] = False
    before = weights(ppo)
    assert ppo.update(of(columns), Counters())["train/gradient_steps"] == 0
    assert weights(ppo) == before


def test_learning_rate_zero_leaves_the_weights_as_they_were() -> None:
    ppo = make_ppo(learning_rate=0.0, policy={"normalise_observations": True})
    before = {name: parameter.detach().clone() for name, parameter in ppo.policy.named_parameters()}
    for update in range(3):
        ppo.update(of(random_columns(ppo.policy, update)), Counters(updates=update))
    assert all(torch.equal(before[name], parameter) for name, parameter in ppo.policy.named_parameters())
    assert ppo.policy.normaliser is not None
    assert ppo.policy.normaliser.moments["0"].get_buffer("count").item() == 3 * 32


@pytest.mark.parametrize(("minibatch", "sizes"), [(32, [32]), (12, [11, 11, 10]), (31, [16, 16]), (1, [1] * 32)])
def test_every_row_is_used_once_in_each_epoch_also_with_a_remainder(
    minibatch: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ppo = make_ppo(minibatch_size=minibatch, epochs=2)
    columns = random_columns(ppo.policy, 7)
    columns["log_prob"] += np.arange(32, dtype=np.float32).reshape(8, 4) * 1e-3
    seen: list[list[float]] = []
    loss = ppo._loss

    def noting(batch: Batch, clip: float) -> Any:
        seen.append(batch.log_prob.tolist())
        return loss(batch, clip)

    monkeypatch.setattr(ppo, "_loss", noting)
    assert ppo.update(of(columns), Counters())["train/gradient_steps"] == 2 * len(sizes)
    assert [len(rows) for rows in seen] == sizes * 2
    epochs = [[row for rows in part for row in rows] for part in (seen[: len(sizes)], seen[len(sizes) :])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(columns["log_prob"].flatten().tolist())
    assert epochs[0] != epochs[1]


def test_a_policy_that_moved_too_far_stops_the_epochs() -> None:
    def steps(**config: Any) -> float:
        ppo = make_ppo(learning_rate=0.05, epochs=10, **config)
        return ppo.update(of(random_columns(ppo.policy, 8)), Counters())["train/gradient_steps"]

    free, bounded, tight = steps(), steps(target_kl=0.05), steps(target_kl=1e-9)
    assert free == 20 and 1 <= tight < bounded < free
    assert steps(target_kl=1e6) == 20


def test_learning_rate_and_clip_range_follow_their_schedules() -> None:
    ppo = make_ppo(
        learning_rate={"kind": "linear", "start": 1e-2, "end": 0.0, "over": "10 updates"},
        clip_range={"kind": "linear", "start": 0.4, "end": 0.1, "over": "100 env_steps"},
    )
    clips: list[float] = []
    loss = ppo._loss
    ppo._loss = lambda batch, clip: (clips.append(clip), loss(batch, clip))[1]  # type: ignore[func-returns-value]
    metrics = ppo.update(of(random_columns(ppo.policy, 1)), Counters(updates=5, env_steps=50))
    assert metrics["train/learning_rate"] == pytest.approx(5e-3)
    assert metrics["train/clip_range"] == pytest.approx(0.25) and set(clips) == {metrics["train/clip_range"]}
    before = weights(ppo)
    metrics = ppo.update(of(random_columns(ppo.policy, 2)), Counters(updates=10, env_steps=1000))
    assert metrics["train/learning_rate"] == 0.0 and metrics["train/clip_range"] == pytest.approx(0.1)
    assert weights(ppo) == before


def test_gradients_are_scaled_down_to_the_bound_and_only_down() -> None:
    def applied(bound: float) -> tuple[float, float]:
        ppo = make_ppo(max_grad_norm=bound, epochs=1, minibatch_size=32)
        metrics = ppo.update(of(random_columns(ppo.policy, 9)), Counters())
        return metrics["train/grad_norm"], float(ppo._optimiser._gradient.norm())

    free, same = applied(1e6)
    assert same == pytest.approx(free, rel=1e-5)
    told, clipped = applied(0.01)
    assert told == pytest.approx(free, rel=1e-5) and clipped == pytest.approx(0.01, rel=1e-3)


def test_the_batch_is_learnt_with_the_statistics_that_it_was_acted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = make_ppo(policy={"normalise_observations": True}, epochs=1, minibatch_size=32)
    ppo.observe(of(random_columns(ppo.policy, 20) | {"obs": np.full((8, 4, 3), 2.0, np.float32)}))
    columns = random_columns(ppo.policy, 21)
    metrics = ppo.update(of(columns), Counters())
    assert metrics["train/approx_kl"] == pytest.approx(0.0, abs=1e-6) and metrics["train/clip_fraction"] == 0.0


def test_the_explained_variance_is_that_of_the_returns() -> None:
    ppo = make_ppo(gae_lambda=1.0, gamma=0.0, learning_rate=0.0)
    columns = random_columns(ppo.policy, 22)
    with torch.no_grad():
        value = ppo.policy.value({"obs": torch.from_numpy(columns["obs"]).flatten(0, 1)}).numpy()
    returns: Array = columns["reward"].flatten()
    expected = 1 - np.var(returns - value, ddof=1) / np.var(returns, ddof=1)
    assert ppo.update(of(columns), Counters())["train/explained_variance"] == pytest.approx(expected, rel=1e-4)


def test_the_optimiser_goes_on_from_its_state_with_the_same_bits() -> None:
    whole = make_ppo()
    batches = [random_columns(whole.policy, seed) for seed in range(4)]
    for update, columns in enumerate(batches[:2]):
        whole.update(of(columns), Counters(updates=update))
    resumed = make_ppo(seed=3)
    resumed.policy.load_state_dict(whole.policy.state_dict())
    resumed.load_state(whole.state())
    for ppo in (whole, resumed):
        for update, columns in enumerate(batches[2:], start=2):
            ppo.update(of(columns), Counters(updates=update))
    assert weights(whole) == weights(resumed)
    assert {k: v.tobytes() for k, v in whole.state().items()} == {k: v.tobytes() for k, v in resumed.state().items()}


def train(
    environment: dict[str, Any], updates: int, steps: int, network: dict[str, Any], **algorithm: Any
) -> tuple[ActorCritic, list[float]]:
    """Acting and learning in turns, in this process; answers the policy and each update's mean episode return."""
    config = minimal_config(
        environment=environment, algorithm={"minibatch_size": 1} | algorithm, policies={"default": network}
    )
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, seed=1)
    sampler = Sampler(make_vector(config.environment, description), description, Life(1, 0, 0, 0))
    ppo = make_algorithm(policies["default"], config.algorithm, Setting(CPU, 1, 8, 4))
    returns = []
    for update in range(updates):
        sample = sampler.sample(policies, Sampling(), steps)
        ppo.update(of(sample.columns["default"]), Counters(updates=update))
        returns.append(float(np.mean([record.episode_return for record in sample.episodes])))
    return cast(ActorCritic, policies["default"]), returns


@pytest.mark.parametrize(("ends", "doorstep", "inside"), [("truncated", 9.0, 10.0), ("terminated", 0.9, 1.0)])
def test_what_lies_behind_a_truncation_is_valued_and_behind_a_termination_is_not(
    ends: str, doorstep: float, inside: float
) -> None:
    """Inside pays 1 a step, γ = 0.9: worth 1/(1 − γ) = 10 where the limit is no end.

    Whoever took the first observation of the next episode for what follows would learn 1/(1 − γ²) = 5.3.
    """
    policy, _ = train(
        {"id": f"{MODULE}:Doorstep", "num_envs": 2, "kwargs": {"ends": ends}},
        updates=80, steps=4, network={"hidden_sizes": ()}, gamma=0.9, gae_lambda=0.95, minibatch_size=8,
        epochs=4, max_grad_norm=100.0,
        learning_rate={"kind": "linear", "start": 0.5, "end": 0.0, "over": "80 updates"},
    )  # fmt: skip
    with torch.no_grad():
        values = policy.value({"obs": torch.tensor([0, 1])}).tolist()
    assert values == pytest.approx([doorstep, inside], abs=0.2)


def test_gaussian_actions_learn_a_target() -> None:
    policy, returns = train(
        {"id": f"{MODULE}:Target", "num_envs": 16}, updates=30, steps=4, network={"hidden_sizes": (8,)},
        minibatch_size=32, epochs=5, learning_rate=0.02,
    )  # fmt: skip
    params = policy.action_parameters({"obs": torch.ones(1, 1)})
    assert policy.distribution.mode(params)["action"].item() == pytest.approx(0.5, abs=0.2)
    assert np.mean(returns[-5:]) > 0.5 * np.mean(returns[:3]) and policy.log_std.item() < -0.3


def test_without_a_learning_rate_nothing_is_learnt() -> None:
    policy, _ = train(
        {"id": f"{MODULE}:Target", "num_envs": 16}, updates=5, steps=4, network={"hidden_sizes": (8,)},
        minibatch_size=32, epochs=5, learning_rate=0.0,
    )  # fmt: skip
    assert abs(policy.distribution.mode(policy.action_parameters({"obs": torch.ones(1, 1)}))["action"].item()) < 0.1
    assert policy.log_std.item() == 0.0
