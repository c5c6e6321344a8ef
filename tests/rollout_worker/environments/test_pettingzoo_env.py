"""Agents that join, leave and rejoin, in parallel or in turns: each transition against a plain loop."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.rollout_worker.environments.description import check_new, describe_environment
from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from stagecoach.rollout_worker.exploration.base import Acted, Exploration, Tensors
from stagecoach.shared.base.errors import ConfigError, EnvironmentFailure
from stagecoach.shared.config.recorded import DatasetConfig
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.fragment import Fragment, kept_rows
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.actor_critic import RecurrentActorCritic
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.building_blocks.batch import forward_pass, log_probs
from stagecoach.trainer_node.learning.learner import make_learner, turns_lost
from tests.conftest import minimal_config
from tests.support.environments.games import MODULE, NAMES, AllAtOnce, InTurns
from tests.support.environments.stage import Stage, same
from tests.support.experience.datasets import write_archive

TURNS = {"api": "pettingzoo", "id": f"{MODULE}:InTurns"}
AT_ONCE = {"api": "pettingzoo", "id": f"{MODULE}:AllAtOnce"}
THREE = {"ann": "a", "bob": "b", "cy": "of"}
CORES = {"policies": {"default": {"core": "gru", "core_size": 4, "share_encoder": True}}}


def chosen(observation: Any) -> int:
    return int(observation[0] + observation[1]) % 3


class ByRule(Exploration):
    """Acts as `chosen` does, so that a plain loop can do the same."""

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        seen = observations["obs"]
        rows: Tensor = seen[:, 0] + seen[:, 1]
        return {"action": rows.to(torch.int64) % 3}, policy.action_parameters(observations)


class Turn(NamedTuple):
    """Transition of a plain loop; `began` and `known` are the steps of its action and of its outcome."""

    began: int
    known: int
    seen: tuple[float, ...]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    after: tuple[float, ...] | None


def listed(observation: Any) -> tuple[float, ...]:
    return tuple(np.asarray(observation, np.float32).tolist())


def plain_turns(seed: int, steps: int) -> dict[str, list[Turn]]:
    """Runs PettingZoo's loop over an AEC environment, episode after episode."""
    env, turns, step, episode = InTurns(), defaultdict[str, list[Turn]](list), 0, 0
    while step < steps:
        env.reset(seed=episode_seed(seed, episode))
        episode += 1
        open_turns: dict[str, tuple[int, tuple[float, ...], int]] = {}
        for agent in env.agent_iter(10**6):
            observation, reward, terminated, truncated, _ = env.last()
            if agent in open_turns:
                after = listed(observation)
                turn = Turn(
                    open_turns[agent][0], step - 1, *open_turns[agent][1:], reward, terminated, truncated, after
                )
                turns[agent].append(turn)
                del open_turns[agent]
            over = terminated or truncated
            if not over:
                open_turns[agent] = (step, listed(observation), chosen(observation))
                step += 1
            env.step(None if over else chosen(observation))
    return turns


def plain_steps(seed: int, steps: int) -> dict[str, list[Turn]]:
    """Runs the loop of a parallel environment; an agent that leaves without a flag has terminated."""
    env, turns, step, episode = AllAtOnce(), defaultdict[str, list[Turn]](list), 0, 0
    while step < steps:
        seen, _ = env.reset(seed=episode_seed(seed, episode))
        episode += 1
        while env.agents:
            acting = {agent: chosen(seen[agent]) for agent in env.agents}
            after, rewards, terminated, truncated, _ = env.step(acting)
            for agent, action in acting.items():
                ends = terminated[agent] or (agent not in env.agents and not truncated[agent])
                its = listed(seen[agent]), action, rewards[agent], ends, truncated[agent], listed(after[agent])
                turns[agent].append(Turn(step, step, *its))
            seen, step = after, step + 1
    return turns


def recorded(columns: Columns, slot: int) -> list[tuple[Any, ...]]:
    """Returns a slot's transitions in a fragment: observation, action, reward, flags and next observation."""
    finals = {(step, at): listed(columns["final_obs"][row]) for row, (step, at) in enumerate(columns["final_index"])}
    rows = []
    for step in np.flatnonzero(columns["mask"][:, slot]):
        flags = [bool(columns[name][step, slot]) for name in ("terminated", "truncated")]
        last = step + 1 == len(columns["mask"])
        after = finals.get((step, slot)) or listed(
            columns["bootstrap_obs"][slot] if last else columns["obs"][step + 1, slot]
        )
        brought = round(float(columns["reward"][step, slot]), 4)
        rows.append((listed(columns["obs"][step, slot]), int(columns["action"][step, slot]), brought, *flags, after))
    return rows


@pytest.mark.parametrize(
    ("environment", "plain"), [(TURNS, plain_turns), (AT_ONCE, plain_steps)], ids=["turns", "at once"]
)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 3))
@settings(max_examples=12)
def test_game_transitions_equal_plain_loop(
    environment: dict[str, Any], plain: Any, seed: int, steps: int, copies: int
) -> None:
    stage = Stage(environment | {"num_envs": copies}, seed=seed)
    seeds = SeedLineage(seed, 0, 0, 0).environments(copies)
    expected = [plain(its, 4 * steps) for its in seeds]
    for number in range(4):
        columns = stage.sample(steps, ByRule()).columns["default"]
        first, beyond = number * steps, (number + 1) * steps
        for slot in range(3 * copies):
            turns = expected[slot % copies][NAMES[slot // copies]]
            its = [turn for turn in turns if first <= turn.began and turn.known < beyond]
            wanted = [(*turn[2:4], round(turn.reward, 4), *turn[5:]) for turn in its]
            assert recorded(columns, slot) == wanted
        assert not columns["obs"][~kept_rows(columns)].any() or environment is AT_ONCE


@pytest.mark.parametrize(
    ("environment", "plain"), [(TURNS, plain_turns), (AT_ONCE, plain_steps)], ids=["turns", "at once"]
)
def test_archive_returns_episodes_per_agent(tmp_path: Path, environment: dict[str, Any], plain: Any) -> None:
    """Fragments cut episodes in turns: the turn that is open at the end is in no fragment."""
    steps, count, in_turns = 11, 6, environment is TURNS
    stage = Stage(environment, policies={"a": {}, "b": {}, "of": {"trainable": False}}, agents=THREE)
    sent = []
    for seq in range(count):
        sample = stage.sample(steps, ByRule())
        sent.append(Fragment(replace(stage.header(sample, steps), run_id="a-run", seq=seq), sample.columns))
    write_archive(tmp_path, sent)
    found = read_dataset(DatasetConfig(path=str(tmp_path / "a-run")), stage.description.of(["a", "b"]))
    expected = [plain(its, 2 * steps * count) for its in SeedLineage(1, 0, 0, 0).environments(2)]
    for policy_id, agent in (("a", "ann"), ("b", "bob")):
        episodes = found[policy_id].episodes()
        for first in range(0, steps * count, steps if in_turns else steps * count):
            beyond = first + (steps if in_turns else steps * count)
            for turns in (its[agent] for its in expected):
                whole = first == 0
                left = [turn for turn in turns if first <= turn.began and turn.known < beyond]
                while left:
                    ends = next((row for row, its in enumerate(left) if its.terminated or its.truncated), None)
                    rows, left = (
                        left[: ends + 1 if ends is not None else None],
                        left[ends + 1 :] if ends is not None else [],
                    )
                    its = next(episodes)
                    assert [listed(row) for row in its.observations["obs"]] == [*(r.seen for r in rows), rows[-1].after]
                    assert its.actions["action"].tolist() == [row.action for row in rows]
                    np.testing.assert_allclose(its.reward, [row.reward for row in rows], rtol=1e-6)
                    assert its.terminated == rows[-1].terminated
                    assert (its.record is not None) == (whole and ends is not None)
                    whole = True
        assert next(episodes, None) is None


@pytest.mark.parametrize("sections", [{}, CORES], ids=["plain", "core"])
@pytest.mark.parametrize("environment", [TURNS, AT_ONCE], ids=["turns", "at once"])
def test_game_successor_equals_undisturbed_worker(environment: dict[str, Any], sections: dict[str, Any]) -> None:
    worker = Stage(environment | {"num_envs": 3}, **sections)
    for _ in range(4):
        worker.sample(5)
        successor = Stage(environment | {"num_envs": 3}, left=worker.left, **sections)
        assert successor.past is not None and successor.sampler.position_digest == successor.past.digest
        ahead = Stage(environment | {"num_envs": 3}, left=worker.left, **sections)
        assert same(ahead.sample(5), successor.sample(5))


@pytest.mark.parametrize("steps", [5, 6])
@pytest.mark.parametrize("environment", [TURNS, AT_ONCE], ids=["turns", "at once"])
def test_learner_log_prob_equals_worker_with_core(environment: dict[str, Any], steps: int) -> None:
    core = {"core": "gru", "core_size": 6, "share_encoder": True}
    stage = Stage(environment | {"num_envs": 2}, policies={"default": core})
    policy = cast(RecurrentActorCritic, stage.policies["default"])
    policy.head.weight.data.mul_(200)
    for _ in range(4):
        columns = {name: torch.from_numpy(array) for name, array in stage.sample(steps).columns["default"].items()}
        assert columns["state_in"].shape == (6, 6)
        with torch.no_grad():
            params = forward_pass(policy, columns, with_params=True).params
            again = log_probs(policy, columns, params)[columns["mask"]]
        torch.testing.assert_close(again, columns["log_prob"][columns["mask"]])


TWO: dict[str, Any] = {
    "policies": {"a": {"core": "gru", "core_size": 4, "share_encoder": True}, "b": {}},
    "agents": {"ann": "a", "*": "b"},
}


@pytest.mark.parametrize("kind", [TURNS, pytest.param(AT_ONCE, marks=pytest.mark.exhaustive)], ids=["turns", "at once"])
def test_async_games_equal_sync_and_resume(kind: dict[str, Any]) -> None:
    limited = kind | {"max_episode_steps": 7}
    here, there = (Stage(limited | {"vectorization": its}, **TWO) for its in ("sync", "async"))
    for _ in range(3):
        assert same(there.sample(9), here.sample(9))
    there.sampler.close()
    successor = Stage(limited | {"vectorization": "async"}, left=there.left, **TWO)
    assert successor.past is not None and successor.sampler.position_digest == successor.past.digest
    assert same(successor.sample(9), here.sample(9))
    multiprocessing.active_children()[0].kill()
    with pytest.raises(EnvironmentFailure, match=r"the vectorized environment raised .* in step"):
        successor.sample(9)
    successor.sampler.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("blind", "step: 'no observation of"), ("empty", "reset: no agent can act; expected at least one"),
        ("strange", "step: 'agents has dee; expected only names in possible_agents'"),
        ("unpaid", "environment . raised KeyError in step: 'no reward for (ann|bob|cy); expected one for each agent"),
        ("wordy", "environment . raised TypeError in step: the info of (ann|bob|cy) is 'x'; expected a dict"),
        ("wide", r"reset: an observation of policy default has the shape \(5,\); expected \(3,\)"),
    ],
)  # fmt: skip
def test_invalid_agent_data_is_environment_failure(kind: str, says: str) -> None:
    with pytest.raises(EnvironmentFailure, match=says):
        Stage({"api": "pettingzoo", "id": f"{MODULE}:Odd", "kwargs": {"kind": kind}}).sample(20)


@pytest.mark.parametrize(
    ("name", "limit", "acted", "terminated", "truncated"),
    [
        ("Struck", 2, [1, 1, 0], [1, 0, 0], [0, 1, 0]),
        ("Dropped", 3, [1, 1, 1], [1, 0, 0], [0, 1, 1]),
        ("Reborn", 5, [1], [1], [0]),
    ],
)
def test_agent_ended_before_limit_has_terminated(
    name: str, limit: int, acted: list[int], terminated: list[int], truncated: list[int]
) -> None:
    """Ended in the last turn, dropped without a flag, or dropped and rejoined."""
    stage = Stage({"api": "pettingzoo", "id": f"{MODULE}:{name}", "num_envs": 1, "max_episode_steps": limit})
    columns = stage.sample(6).columns["default"]
    first = [columns[flag][0, : len(acted)].astype(int).tolist() for flag in ("mask", "terminated", "truncated")]
    assert first == [acted, terminated, truncated]


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 8])
def test_limit_in_mid_cycle_pays_rewards_once(limit: int) -> None:
    stage = Stage({"api": "pettingzoo", "id": f"{MODULE}:paid_by_cycle", "num_envs": 1, "max_episode_steps": limit})
    sample = stage.sample(3 * limit)
    assert sample.episodes
    for record in sample.episodes:
        assert record.agent_returns == pytest.approx(dict.fromkeys(NAMES, (0.0, 1.0, 11.0)[limit // 3]))


@pytest.mark.parametrize("limit", [{}, {"max_episode_steps": 5}])
@pytest.mark.parametrize("kwargs", [{}, {"leaves": True}])
def test_record_has_last_info_of_waiting_agents(limit: dict[str, Any], kwargs: dict[str, Any]) -> None:
    told = {"api": "pettingzoo", "id": f"{MODULE}:Telling", "num_envs": 1, "kwargs": kwargs}
    (first, *_) = Stage(told | limit).sample(7).episodes
    steps = 5 if limit else 6
    assert first.success is False
    assert (first.metrics["ann.score"], first.metrics["bob.score"]) == (steps, steps)
    assert first.agent_returns == {"ann": steps, "bob": steps}


def test_record_has_reward_of_agent_without_turn() -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:Telling", "num_envs": 1}
    (kept, *_), (dropped, *_) = (
        Stage(game | {"kwargs": {"until": 1, "leaves": leaves}}).sample(3).episodes for leaves in (False, True)
    )
    assert dropped == kept and dropped.agent_returns == {"ann": 1.0, "bob": 1.0}
    assert dropped.metrics == {"ann.score": 1.0, "bob.score": 1.0}


@pytest.mark.parametrize("listed", [False, True])
def test_return_includes_rewards_of_inactive_agents(listed: bool) -> None:
    stage = Stage({"api": "pettingzoo", "id": f"{MODULE}:Trap", "num_envs": 1, "kwargs": {"listed": listed}})
    (first, *_) = (sample := stage.sample(8)).episodes
    assert first.agent_returns == {"ann": 1.0, "bob": 1.0} and first.length == 4
    assert not sample.columns["default"]["reward"].any()


@pytest.mark.parametrize("limits", [{"max_episode_steps": 4}, {"max_episode_steps": 3, "episode_ends": "any"}])
def test_environment_may_reuse_observation_array(limits: dict[str, Any]) -> None:
    game = {"api": "pettingzoo", "num_envs": 2, "kwargs": {"until": 99}} | limits
    reused, fresh = (Stage(game | {"id": f"{MODULE}:{name}"}).sample(14) for name in ("Reused", "Telling"))
    assert same(reused, fresh) and fresh.columns["default"]["truncated"].any()


def test_nan_reward_before_first_turn_is_failure() -> None:
    with pytest.raises(EnvironmentFailure, match=r"in an episode they add up to \{'ann': 6.0, 'bob': nan\}"):
        Stage({"api": "pettingzoo", "id": f"{MODULE}:NeverPaid", "num_envs": 1}).sample(9)


@pytest.mark.parametrize("name", ["Telling", "AllAtOnce"])
def test_info_column_is_nan_where_nobody_acted(name: str) -> None:
    stage = Stage({"api": "pettingzoo", "id": f"{MODULE}:{name}", "num_envs": 3, "info_columns": ["score"]})
    columns = stage.sample(40).columns["default"]
    assert not columns["mask"].all() and np.isnan(columns["info/score"][~columns["mask"]]).all()


def test_final_mask_of_waiting_agent_at_limit() -> None:
    told = {"api": "pettingzoo", "id": f"{MODULE}:Telling", "num_envs": 1, "max_episode_steps": 5}
    columns = Stage(told | {"action_mask": "info"}).sample(6).columns["default"]
    assert columns["final_obs.action_mask"].tolist() == [[1, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("game", "ends", "length"),
    [
        ({"id": f"{MODULE}:Leaver"}, "any", 2),
        ({"id": f"{MODULE}:OutOfTime", "kwargs": {"dies": True}}, "any", 1),
        ({"id": f"{MODULE}:OutOfTime", "kwargs": {"dies": True}}, "all", 6),
    ],
)
def test_episode_ends_any_counts_each_agent(game: dict[str, Any], ends: str, length: int) -> None:
    """Also an agent that leaves without a flag, and one that has not acted yet."""
    stage = Stage(game | {"api": "pettingzoo", "num_envs": 1, "episode_ends": ends})
    assert {record.length for record in stage.sample(14).episodes} == {length}


def test_agent_truncated_at_game_end_is_bootstrapped() -> None:
    kept, cleared = (
        Stage({"api": "pettingzoo", "id": f"{MODULE}:OutOfTime", "num_envs": 1, "kwargs": {"clears": clears}}).sample(9)
        for clears in (False, True)
    )
    assert same(cleared, kept)
    columns = cleared.columns["default"]
    assert np.flatnonzero(columns["truncated"].any(axis=1)).tolist() == [1] and not columns["terminated"].any()
    assert columns["final_obs"][:3, 1].tolist() == [6.0] * 3


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_return_includes_reward_before_first_turn(limit: int) -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:OutOfTime", "num_envs": 1, "max_episode_steps": limit}
    (first, *_) = Stage(game).sample(6).episodes
    assert {*first.agent_returns.values()} == {float(limit)} and first.length == limit


def test_state_critic_accepts_dead_agent_without_obs() -> None:
    game = {"api": "pettingzoo", "id": f"{MODULE}:Odd", "kwargs": {"kind": "none_at_death"}, "num_envs": 1}
    columns = Stage(game, policies={"default": {"critic_observes": "state"}}).sample(6).columns["default"]
    assert columns["terminated"].any()


def test_deployed_state_critic_has_no_value() -> None:
    policies = {"default": {"critic_observes": "state"}}
    policy = Stage({"api": "pettingzoo", "id": f"{MODULE}:AllAtOnce"}, policies=policies).policies["default"]
    seen = DeployedPolicy(policy, 0).inspect(np.zeros(3, np.float32))
    assert seen.value is None and seen.probabilities is not None


BOOTSTRAPPED = {"name": "dqn", "minibatch_size": 8, "heads": 3, "exploration": {"kind": "bootstrapped", "epsilon": 0.1}}
WANDERING = {"name": "td3", "minibatch_size": 8, "exploration": {"kind": "ou", "sigma": 0.2, "theta": 0.15}}


@pytest.mark.parametrize(
    ("algorithm", "kwargs"), [(BOOTSTRAPPED, {}), (WANDERING, {"boxes": True})], ids=["one head", "ou noise"]
)
def test_slot_exploration_is_deterministic_in_turns(algorithm: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Two runs from the same start are equal, whichever slots have a turn together."""
    samples = []
    for _ in range(2):
        stage = Stage(TURNS | {"num_envs": 3, "kwargs": kwargs}, algorithm=algorithm)
        samples.append([stage.sample(9) for _ in range(2)])
    assert all(same(one, other) for one, other in zip(*samples, strict=True))
    assert samples[0][1].columns["default"]["mask"].any()


STATES: dict[str, Any] = {
    "policies": {"default": {"critic_observes": "state"}, "bob": {}},
    "agents": {"bob": "bob", "*": "default"},
}


@pytest.mark.parametrize("told", [True, False], ids=["its own", "of observations"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12)
def test_state_critic_sees_state_or_all_observations(told: bool, seed: int) -> None:
    name = "Told" if told else "AllAtOnce"
    stage = Stage({"api": "pettingzoo", "id": f"{MODULE}:{name}", "num_envs": 1}, seed=seed, **STATES)
    columns = stage.sample(12).columns
    assert not [column for column in columns["bob"] if "state()" in column], "its critic sees what it acts on"
    its = columns["default"]
    masks, over, cut = (
        np.insert(its[name], 1, columns["bob"][name][:, 0], axis=1) for name in ("mask", "terminated", "truncated")
    )
    finals = [(step, slot, "final_", row) for row, (step, slot) in enumerate(its["final_index"])]
    acted = [(step, slot, "", (step, slot)) for step, slot in zip(*np.nonzero(its["mask"]), strict=True)]
    for step, slot, prefix, place in finals + acted:
        seen = {key.removeprefix(prefix): array[place] for key, array in its.items() if key.startswith(f"{prefix}obs")}
        number, *moment = seen["obs"].tolist()
        assert number == seen["obs.state().agent"] == 2 * slot
        if told:
            assert seen["obs.state().seen"][:2].tolist() == moment
            assert prefix or seen["obs.state().seen"][2:].tolist() == masks[step].tolist()
            continue
        for other, agent in enumerate(NAMES):
            found = seen[f"obs.state().seen.{agent}"].tolist()
            assert found in ([other, *moment], [0, 0, 0])
            if not prefix or masks[step, other]:
                dead = over[step, other] and not cut[step, other] if prefix else not masks[step, other]
                assert any(found) != dead, "who has died is not there, from that step on"


def test_minibatch_limit_counts_acting_agents() -> None:
    def checked(size: int, environment: dict[str, Any] = AT_ONCE) -> None:
        policies = {"one": {}, "rest": {"algorithm": {"minibatch_size": size}}}
        sections = {"environment": environment | {"num_envs": 1}, "agents": {NAMES[0]: "one", "*": "rest"}}
        rollout = {"fragments_per_update": 2, "fragment_steps": 40}
        config = minimal_config(rollout=rollout, policies=policies, algorithm={"minibatch_size": 16}, **sections)
        check_new(config, describe_environment(config))

    most = 80 * (len(NAMES) - 1)
    checked(most)
    with pytest.raises(
        ConfigError, match=rf"^policies.rest.algorithm.minibatch_size={most + 1} is more than .* {most} "
    ):
        checked(most + 1)
    checked(80, TURNS)
    with pytest.raises(ConfigError, match="minibatch_size=81 is more than one update's batch of 80 transitions"):
        checked(81, TURNS)


def test_fragment_steps_refuse_lost_turns() -> None:
    def lost(steps: int, environment: dict[str, Any] = TURNS, **sections: Any) -> str:
        config = minimal_config(environment=environment, rollout={"fragment_steps": steps}, **sections)
        check_new(config, description := describe_environment(config))
        return turns_lost(config, description)

    agents = len(NAMES)
    with pytest.raises(ConfigError, match=f"fragment_steps={2 * agents - 1} counts the turns of all {agents}"):
        lost(2 * agents - 1)
    assert "up to 50% of all turns are not learned from" in lost(2 * agents)
    assert lost(9 * agents) and not lost(10 * agents) and not lost(1, AT_ONCE)
    dqn = minimal_config(environment=TURNS, algorithm={"name": "dqn"})
    assert turns_lost(dqn, describe_environment(dqn)), "by its defaults too"


def test_archive_is_read_without_critic_state(tmp_path: Path) -> None:
    """A run without state critics can imitate an archive of a run with them, and vice versa."""
    found = {}
    for wrote in ("own", "state"):
        stage = Stage(AT_ONCE, policies={"default": {"critic_observes": wrote}})
        sample = stage.sample(11, ByRule())
        write_archive(tmp_path / wrote, [Fragment(replace(stage.header(sample, 11), run_id="a-run"), sample.columns)])
    for wrote in ("own", "state"):
        for reads in ("own", "state"):
            stage = Stage(AT_ONCE, policies={"default": {"critic_observes": reads}})
            path = str(tmp_path / wrote / "a-run")
            found[wrote, reads] = read_dataset(DatasetConfig(path=path), stage.description)
    assert len({recordings.sha256 for recordings in found.values()}) == 1
    config = minimal_config(
        environment=AT_ONCE, policies={"default": {"critic_observes": "state"}}, demonstrations={"path": path},
        algorithm={"minibatch_size": 8, "reward_signals": {"gail": {}, "rnd": {}}},
    )  # fmt: skip
    learner = make_learner(config, describe_environment(config), read_dataset=read_dataset)
    assert learner.demonstrations["default"].columns.keys() == {"obs", "action"}
    streams = cast(Any, learner.algorithms["default"]).signals.streams
    assert streams["gail"].signal.inputs.features == 3, "and so it compares what agents observe"
    streams["rnd"].signal.observe({"obs": torch.zeros(2, 3)})
