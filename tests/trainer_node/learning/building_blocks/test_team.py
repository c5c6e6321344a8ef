"""Centralized critics: what a team observes, who is absent from it, and values in units of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.critic import MASK, NUMBER, ValueScale
from stagecoach.shared.policies.serialization import decode_policy, encode_policy
from stagecoach.trainer_node.learning.building_blocks.team import with_team
from tests.conftest import minimal_config
from tests.support.learning.algorithms import ON_POLICY, SEEN, make, weights
from tests.support.learning.cases import team
from tests.support.learning.experience import acted, ignores_masked_rows, received, update_batch
from tests.support.learning.slow_returns import case_of

AGENTS = 3
every = pytest.mark.parametrize("name", ON_POLICY)


def of_a_team(name: str, *, observes: str = "team", **fields: Any) -> Any:
    policy = {"normalize_observations": True, "critic_observes": observes}
    return make(name, policy=policy, agents=AGENTS, shape=(8, 6), **fields)


def seen_by_a_team(policy: Any, seed: int) -> Columns:
    """A fragment of two environments; agents come and go, and absent ones are zeros where a fragment ends."""
    columns = acted(policy, seed, slots=2 * AGENTS, absent=True)
    columns["bootstrap_obs"][columns["terminated"][-1] | columns["truncated"][-1]] = 0.0
    return columns


@given(st.integers(0, 200), st.integers(1, 4), st.integers(1, 3))
def test_team_columns_hold_observations_of_all_agents(seed: int, agents: int, num_envs: int) -> None:
    policy = make("ppo").policy
    columns = acted(policy, seed, slots=agents * num_envs, absent=True)
    found = with_team(columns, SEEN, agents)
    over = columns["terminated"] | columns["truncated"]
    last = {(int(t), int(s)): row for (t, s), row in zip(columns["final_index"], columns["final_obs"])}

    def slow(slot: int, observed: Any) -> tuple[list[Array], list[bool]]:
        """From a slot → what it observes, None where it is absent; our own agent first."""
        own, environment = divmod(slot, num_envs)
        others = [number for number in range(agents) if number != own]
        rows = [observed(number * num_envs + environment) for number in (own, *others)]
        return [np.zeros(3) if row is None else row for row in rows], [row is not None for row in rows]

    def same(prefix: str, place: Any, slot: int, observed: Any) -> None:
        rows, there = slow(slot, observed)
        masked = found[f"{prefix}team_obs"][place] * found[prefix + MASK][place][:, np.newaxis]
        np.testing.assert_array_equal(masked, np.array(rows, np.float32))
        assert found[prefix + MASK][place].tolist() == there and found[prefix + NUMBER][place] == slot // num_envs

    def now(step: int, other: int) -> Any:
        return columns["obs"][step, other] if columns["mask"][step, other] else None

    def after(step: int, other: int) -> Any:
        if (step, other) in last and not columns["terminated"][step, other]:
            return last[step, other]
        if over[step, other] or not columns["mask"][step, other]:
            return None
        return columns["obs"][step + 1, other] if step < 7 else columns["bootstrap_obs"][other]

    for step, slot in np.ndindex(columns["mask"].shape):
        same("", (step, slot), slot, partial(now, step))
    for slot in range(agents * num_envs):  # never zeros here: all are there, also those that begin anew
        same("bootstrap_", slot, slot, lambda s: columns["bootstrap_obs"][s])
    for number, (step, slot) in enumerate(columns["final_index"].tolist()):
        same("final_", number, slot, partial(after, step))


def test_team_marks_agents_absent_after_last_step() -> None:
    columns = acted(make("ppo").policy, 3, slots=4)
    columns["terminated"][-1], columns["truncated"][-1] = [True, False, False, False], False
    columns["bootstrap_obs"][0] = 0.0
    columns["bootstrap_obs"][1] = 0.0  # plays on, and happens to observe zeros
    there = with_team(columns, SEEN, 2)["bootstrap_" + MASK]
    assert there.tolist() == [[False, True], [True, True], [True, False], [True, True]]


@every
def test_critic_sees_the_team_and_actor_does_not(name: str) -> None:
    algorithm = of_a_team(name)
    columns = seen_by_a_team(algorithm.policy, 1)
    batch = update_batch(algorithm, with_team(columns, SEEN, AGENTS))
    observations = {name: tensor.clone() for name, tensor in batch.observations.items()}
    params, value = algorithm.policy.action_parameters_and_value(observations)
    assert torch.equal(params, algorithm.policy.action_parameters({"obs": observations["obs"]}))
    present, absent = observations[MASK][:, 1], ~observations[MASK][:, 2]
    assert present.any() and absent.any()
    observations["team_obs"][:, 1] += 1.0
    moved = algorithm.policy.value(observations) != value
    assert torch.equal(moved, present), "whoever is there is seen"
    observations["team_obs"][:, 1] -= 1.0
    observations[NUMBER] = (observations[NUMBER] + 1) % AGENTS
    assert (algorithm.policy.value(observations) != value).all(), "it knows whose value it tells"


@every
@pytest.mark.parametrize("normalize", [False, True])
def test_masked_rows_are_ignored(name: str, normalize: bool) -> None:
    ignores_masked_rows(lambda: of_a_team(name, normalize_values=normalize), lambda policy: seen_by_a_team(policy, 5))


@every
def test_several_fragments_are_learned_together(name: str) -> None:
    """Slots of several fragments stand side by side; each team stays that of its own environment."""
    algorithm, other = of_a_team(name), of_a_team(name)
    first, second = (seen_by_a_team(algorithm.policy, seed) for seed in (1, 2))
    before = weights(algorithm)
    algorithm.update(received(first, second), Counters())
    other.update(received(second, first), Counters())
    assert weights(algorithm) != before
    columns = [with_team(item, SEEN, AGENTS) for item in (first, second)]
    rows = [update_batch(of_a_team(name), item).observations["team_obs"] for item in columns]
    whole = of_a_team(name)
    tensors = whole._tensors(received(first, second))
    with torch.no_grad():
        whole.signals.observe_batch(received(first, second), tensors)
        together = whole.batch(tensors).observations["team_obs"]
    assert torch.equal(torch.sort(torch.cat(rows).flatten())[0], torch.sort(together.flatten())[0])


def test_policy_file_holds_team_and_value_scale() -> None:
    algorithm = of_a_team("ppo", normalize_values=True)
    algorithm.update(received(seen_by_a_team(algorithm.policy, 1)), Counters())
    again, _ = decode_policy(encode_policy(algorithm.policy, 3))
    assert again.network == {"agents": AGENTS, "normalize_values": True}
    assert encode_policy(again, 3) == encode_policy(algorithm.policy, 3)
    assert make("ppo").policy.network == {}, "nor is anything new in the file of one that has neither"


# Values in units of their own


@given(st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9), min_size=1, max_size=5))
def test_value_scale_averages_over_batches(batches: list[list[float]]) -> None:
    scale, values = ValueScale(), torch.tensor([-3.0, 0.0, 7.5])
    assert torch.equal(scale.normalized(values), values) and torch.equal(scale.restored(values), values)
    for batch in batches:
        scale.update(torch.tensor(batch))
    share = np.array([0.99999 ** (len(batches) - 1 - place) for place in range(len(batches))])
    mean, square = (
        np.sum(share * np.array([np.mean(np.asarray(batch, np.float64) ** power) for batch in batches])) / share.sum()
        for power in (1, 2)
    )
    deviation = np.sqrt(max(square - mean**2, 1e-2))
    np.testing.assert_allclose(scale.normalized(values), (values - mean) / deviation, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(scale.restored(scale.normalized(values)), values, rtol=1e-3, atol=1e-1)


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_advantages_have_reward_units_and_targets_critic_units(name: str) -> None:
    algorithm = make(name, normalize_values=True, gae_lambda=0.8)
    scale = algorithm.policy.value_scale
    scale.update(torch.tensor([100.0, 140.0]))
    assert scale.restored(torch.zeros(1)).item() == pytest.approx(120.0)
    columns = acted(algorithm.policy, 4)
    case = case_of(algorithm.policy, columns, scale.restored, gamma=0.99, decay=0.8)
    slow = case.slow_gae()
    batch = update_batch(algorithm, columns)
    np.testing.assert_allclose(batch.advantage, slow.flatten(), rtol=1e-3, atol=1e-3)
    targets = torch.from_numpy((slow + case.value).flatten())
    np.testing.assert_allclose(batch.target, scale.normalized(targets), rtol=1e-3, atol=1e-3)
    assert scale.restored(torch.zeros(1)).item() == pytest.approx((120 + float(targets.mean())) / 2, rel=1e-3)


def test_explained_variance_has_reward_units_when_scale_moves() -> None:
    algorithm, same = (make("ppo", normalize_values=True) for _ in range(2))
    columns = acted(algorithm.policy, 4)
    columns["reward"] *= 30.0
    batch = update_batch(same, columns)
    target = same.policy.value_scale.restored(batch.target).double()
    unexplained = (target - batch.value.double()).var() / target.var()  # the first scale is the environment's own
    found = algorithm.update(received(columns), Counters())["train/explained_variance"]
    assert found == pytest.approx(1 - float(unexplained), rel=1e-3)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_value_scale_lets_critic_learn_returns_of_thousands(core: str) -> None:
    """The same few gradient steps on rewards of 1000 in episodes of a step: what error is left, in units of 1000."""

    def error(normalize: bool) -> float:
        policy = {"hidden_sizes": (16,)} | ({} if core == "none" else {"core": core, "share_encoder": True})
        algorithm = make("ppo", policy=policy, normalize_values=normalize, learning_rate=3e-3)
        columns = acted(algorithm.policy, 4)
        columns["reward"][:], columns["terminated"][:], columns["truncated"][:] = 1000.0, True, False
        columns |= {"final_index": columns["final_index"][:0], "final_obs": columns["final_obs"][:0]}
        for update in range(20):
            algorithm.update(received(columns), Counters(updates=update))
        batch, scale = update_batch(algorithm, columns), algorithm.policy.value_scale
        value = batch.counted(batch.value)
        return float(((scale.restored(value) if normalize else value) / 1000 - 1).abs().mean())

    assert error(True) < 0.01 < 0.9 < error(False)


# Configs


def test_critic_fields_change_the_hash() -> None:
    plain = minimal_config()
    section = plain.algorithm.model_dump()
    assert plain.hash() != minimal_config(algorithm=section | {"normalize_values": True}).hash()
    whole, own = (minimal_config(**team(critic_observes=sees)) for sees in ("team", "own"))
    assert whole.decides_otherwise(own) == ["policies.default.critic_observes"]
