"""Vectorised environments: what each step tells, in every vectorisation, on environments worked out by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_worker.environments import make_vector
from rollout_worker.making import describe_environment
from rollout_worker.vector import Step, VectorEnvironment
from shared.config import Config
from shared.errors import EnvironmentFailure
from shared.fragment import EpisodeRecord
from shared.spaces import Columns
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE

AGENTS = {"api": "pettingzoo", "id": f"{MODULE}:Chase"}
TWO_POLICIES: dict[str, Any] = {
    "policies": {"hunter": {}, "prey": {}},
    "agents": {"cat": "hunter", "mouse": "prey"},
}


def config_of(environment: dict[str, Any], **sections: Any) -> Config:
    return minimal_config(environment={"num_envs": 2} | environment, algorithm={"minibatch_size": 1}, **sections)


@contextmanager
def started(environment: dict[str, Any], **sections: Any) -> Iterator[VectorEnvironment]:
    config = config_of(environment, **sections)
    vector = make_vector(config.environment, describe_environment(config))
    try:
        yield vector
    finally:
        vector.close()


def act(vector: VectorEnvironment, *choices: int) -> Step:
    """The same choice everywhere, or one for each environment."""
    actions = np.array(choices if len(choices) > 1 else choices * vector.num_envs)
    return vector.step({"default": {"action": actions}})


def counting(**kwargs: Any) -> dict[str, Any]:
    return {"id": f"{MODULE}:Counting", "kwargs": kwargs}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_each_step_tells_ends_apart_and_starts_again_at_once(vectorization: str, ends: str) -> None:
    with started(counting(length=2, ends=ends) | {"vectorization": vectorization}) as vector:
        first = vector.reset([1, 2])["default"]
        assert first[0]["obs"].tolist() == [[0, 0], [0, 0]] and first[1].all()
        middle = act(vector, 0)
        assert middle.policies["default"].obs["obs"].tolist() == [[1, 0], [1, 0]] and not middle.episodes
        step = act(vector, 0)
        told = step.policies["default"]
        assert told.obs["obs"].tolist() == [[0, 1], [0, 1]], "the next episode has begun"
        assert told.reward.tolist() == [2.0, 2.0] and told.mask.all()
        assert told.terminated.tolist() == [ends == "terminated"] * 2
        assert told.truncated.tolist() == [ends == "truncated"] * 2
        assert told.final_slots.tolist() == [0, 1] and told.final_obs["final_obs"].tolist() == [[2, 0], [2, 0]]
        record = EpisodeRecord(3.0, 2, success=False, metrics={"depth": 20.0})
        assert step.episodes == [(0, record), (1, record)]
        act(vector, 0)
        assert act(vector, 0).episodes[0][1] == EpisodeRecord(3.0, 2, success=True, metrics={"depth": 20.0})


def test_a_step_limit_truncates_by_the_config() -> None:
    with started(counting(ends="never") | {"max_episode_steps": 2}) as vector:
        vector.reset([1, 2])
        act(vector, 0)
        step = act(vector, 0)
        told = step.policies["default"]
        assert told.truncated.all() and not told.terminated.any() and told.final_obs["final_obs"][0].tolist() == [2, 0]
        assert step.episodes[0][1].length == 2


def test_wrappers_are_applied_in_their_order() -> None:
    wrappers = [
        {"path": f"{MODULE}:AddOne", "kwargs": {"amount": 3.0}},
        {"path": "gymnasium.wrappers:TransformReward", "kwargs": {"func": float}},
        "tests.environments_for_tests:AddOne",
    ]
    with started(counting() | {"wrappers": wrappers}) as vector:
        vector.reset([1, 2])
        assert act(vector, 0).policies["default"].reward.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_native_environments_tell_the_same_whatever_way_they_start_again(mode: str, ends: str) -> None:
    native = {"id": f"{MODULE}:counting_vector", "vectorization": "native", "num_envs": 3}
    with started(native | {"kwargs": {"mode": mode, "ends": ends}}) as vector:
        assert vector.reset([1, 2, 3])["default"][0]["obs"].tolist() == [[0, 0]] * 3
        rows: list[list[tuple[Any, ...]]] = [[] for _ in range(3)]
        records: list[list[EpisodeRecord]] = [[] for _ in range(3)]
        for _ in range(12):
            step = act(vector, 0)
            told = step.policies["default"]
            finals = {int(slot): told.final_obs["final_obs"][row].tolist() for row, slot in enumerate(told.final_slots)}
            for index in range(3):
                if told.mask[index]:
                    ended = bool(told.terminated[index]), bool(told.truncated[index])
                    rows[index].append((float(told.reward[index]), *ended, finals.get(index)))
                else:
                    assert mode == "NEXT_STEP" and told.reward[index] == 0 and index not in finals
                    assert not told.terminated[index] and not told.truncated[index]
                    assert told.obs["obs"][index].tolist() == [0, len(records[index])]
            for index, record in step.episodes:
                records[index].append(record)
    for index in range(3):
        length = 2 + index
        assert len(rows[index]) == (12 - 12 // (length + 1) if mode == "NEXT_STEP" else 12)
        for number, row in enumerate(rows[index]):
            over, episode = number % length == length - 1, number // length
            final = [length, episode] if over else None
            assert row == (number % length + 1, over and ends == "terminated", over and ends == "truncated", final)
        expected = EpisodeRecord(length * (length + 1) / 2, length, metrics={"depth": 10.0 * length})
        assert records[index] == [expected] * (len(rows[index]) // length)


def test_cartpoles_own_vector_version_masks_the_step_in_which_it_resets() -> None:
    with started({"id": "CartPole-v1", "vectorization": "native", "num_envs": 4, "max_episode_steps": 12}) as vector:
        observation = vector.reset([1, 2, 3, 4])["default"][0]["obs"]
        over, returns, seen = np.zeros(4, np.bool_), np.zeros(4), {"terminated": 0, "truncated": 0}
        random = np.random.default_rng(0)
        for _ in range(80):
            step = act(vector, *random.integers(0, 2, 4).tolist())
            told = step.policies["default"]
            assert (told.mask == ~over).all()
            assert (np.abs(told.obs["obs"][over]) <= 0.05).all(), "a new episode starts near zero"
            returns += told.reward
            over = told.terminated | told.truncated
            assert {index for index, _ in step.episodes} == set(np.flatnonzero(over).tolist())
            for index, record in step.episodes:
                assert record.episode_return == record.length == returns[index] <= 12
                assert told.truncated[index] == (record.length == 12) or told.terminated[index]
                returns[index] = 0
            assert np.array_equal(told.final_slots, np.flatnonzero(over))
            assert np.array_equal(told.final_obs["final_obs"], told.obs["obs"][over])
            seen = {name: count + int(getattr(told, name).sum()) for name, count in seen.items()}
            observation = told.obs["obs"]
        assert observation.shape == (4, 4) and min(seen.values()) > 3


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_raises_in_step_is_named_with_its_traceback(vectorization: str) -> None:
    failing = counting(fails="action", message="arm 3 is 100% stuck") | {"vectorization": vectorization}
    with started(failing) as vector:
        vector.reset([1, 2])
        with pytest.raises(EnvironmentFailure) as caught:
            act(vector, 0, 1)
    first, *rest = str(caught.value).splitlines()
    assert first == "environment 1 raised ValueError in step: arm 3 is 100% stuck"
    assert rest[0].startswith("Traceback") and "environments_for_tests.py" in str(caught.value)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_an_environment_that_raises_in_reset_is_named_with_its_traceback(vectorization: str) -> None:
    with (
        started(counting(fails="reset") | {"vectorization": vectorization, "num_envs": 1}) as vector,
        pytest.raises(EnvironmentFailure, match=r"^environment 0 raised ValueError in reset: the gripper is stuck\n"),
    ):
        vector.reset([1])


def test_a_process_that_dies_is_a_failure_and_the_others_are_closed() -> None:
    with started(counting(fails="exit", fails_at=1) | {"vectorization": "async"}) as vector:
        vector.reset([1, 2])
        act(vector, 0)
        with pytest.raises(EnvironmentFailure, match="in step: "):
            act(vector, 0)


def test_an_environment_that_raises_in_a_later_reset_is_named() -> None:
    with started(counting(length=1, fails="reset", fails_at=1)) as vector:
        vector.reset([1, 2])
        with pytest.raises(EnvironmentFailure, match="environment 0 raised ValueError in reset: the gripper"):
            act(vector, 0)


def test_a_native_environment_that_raises_is_named() -> None:
    native = {"id": f"{MODULE}:counting_vector", "vectorization": "native"}
    with started(native | {"kwargs": {"mode": "SAME_STEP", "fails_at": 1}}) as vector:
        vector.reset([1, 2])
        act(vector, 0)
        with pytest.raises(
            EnvironmentFailure, match=r"raised ValueError in step: the simulator lost its licence\nTrace"
        ):
            act(vector, 0)


def chase(vector: VectorEnvironment, cat: list[int], mouse: list[float]) -> Step:
    return vector.step({"hunter": {"action": np.array(cat)}, "prey": {"action": np.array(mouse, np.float32)[:, None]}})


def test_agents_of_a_parallel_environment_end_each_at_their_own_time() -> None:
    with started(AGENTS | {"kwargs": {"cat_steps": 1, "mouse_steps": 3}}, **TWO_POLICIES) as vector:
        first = vector.reset([1, 2])
        assert first["hunter"][0]["obs"].shape == (2, 3) and first["prey"][0]["obs"].tolist() == [[0, 0], [0, 0]]
        cat_ends = chase(vector, [0, 1], [0.5, 0.5])
        hunter, prey = cat_ends.policies["hunter"], cat_ends.policies["prey"]
        assert hunter.terminated.tolist() == [True, True] and hunter.reward.tolist() == [1.0, 2.0]
        assert hunter.final_slots.tolist() == [0, 1] and hunter.final_obs["final_obs"][:, :2].tolist() == [[1, 0]] * 2
        assert prey.mask.all() and not prey.truncated.any() and not cat_ends.episodes
        alone = chase(vector, [1, 1], [0.0, 3.0])
        hunter, prey = alone.policies["hunter"], alone.policies["prey"]
        assert not hunter.mask.any() and not hunter.reward.any() and not hunter.terminated.any()
        assert not hunter.obs["obs"].any() and hunter.final_slots.size == 0
        assert prey.reward.tolist() == [1.0, 0.0], "an action beyond its box is clipped"
        last = chase(vector, [1, 1], [1.0, 1.0])
        prey = last.policies["prey"]
        assert prey.truncated.all() and prey.final_slots.tolist() == [0, 1]
        assert prey.final_obs["final_obs"].tolist() == [[3, 0], [3, 0]] and prey.obs["obs"].tolist() == [[0, 1], [0, 1]]
        assert last.policies["hunter"].obs["obs"][:, :2].tolist() == [[0, 1], [0, 1]], "the cat is back"
        assert [record.agent_returns for _, record in last.episodes] == [
            {"cat": 1.0, "mouse": 1.75}, {"cat": 2.0, "mouse": 0.75},
        ]  # fmt: skip
        assert last.episodes[0] == (0, EpisodeRecord(2.75, 3, agent_returns={"cat": 1.0, "mouse": 1.75}))
        assert chase(vector, [0, 0], [0.0, 0.0]).policies["hunter"].mask.all()


def test_a_parallel_environment_is_truncated_after_its_most_steps() -> None:
    """The cat terminates just then; the mouse, which would go on to step 9, is cut off and has a last observation."""
    limited = AGENTS | {"kwargs": {"cat_steps": 2, "mouse_steps": 9}, "max_episode_steps": 2}
    with started(limited, **TWO_POLICIES) as vector:
        vector.reset([1, 2])
        first = chase(vector, [0, 0], [0.0, 0.0])
        assert not first.episodes and not first.policies["prey"].truncated.any()
        second = chase(vector, [0, 0], [0.0, 0.0])
        hunter, prey = second.policies["hunter"], second.policies["prey"]
        assert hunter.terminated.all() and not hunter.truncated.any()
        assert prey.truncated.all() and not prey.terminated.any()
        assert prey.final_obs["final_obs"].tolist() == [[2, 0], [2, 0]] and prey.obs["obs"].tolist() == [[0, 1], [0, 1]]
        assert [record.length for _, record in second.episodes] == [2, 2]


def test_a_parallel_environment_that_raises_is_named() -> None:
    with started(AGENTS | {"kwargs": {"fails_at": 0}}, **TWO_POLICIES) as vector:
        vector.reset([1, 2])
        with pytest.raises(EnvironmentFailure, match="environment 0 raised ValueError in step: the mouse escaped"):
            chase(vector, [0, 0], [0.0, 0.0])


@pytest.mark.parametrize("environment", [{"id": f"{MODULE}:Noise"}, {"id": "CartPole-v1", "vectorization": "native"}])
def test_starts_follow_from_the_seeds(environment: dict[str, Any]) -> None:
    def first(seeds: list[int]) -> Columns:
        with started(environment) as vector:
            return {name: array.copy() for name, array in vector.reset(seeds)["default"][0].items()}

    assert np.array_equal(first([1, 2])["obs"], first([1, 2])["obs"])
    assert not np.array_equal(first([1, 2])["obs"], first([3, 4])["obs"])
    assert not np.array_equal(first([1, 2])["obs"][0], first([1, 2])["obs"][1])


def test_what_an_environment_of_its_own_process_starts_inherits_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "STAGECOACH_REDIS_PASSWORD", "STAGECOACH_WORKER_REDIS_PASSWORD_FILE", "OF_THE_USER"):
        monkeypatch.setenv(name, f"value of {name}")
    told = tmp_path / "environment"
    environment = {"id": f"{MODULE}:StartsAProcess", "kwargs": {"path": str(told)}, "vectorization": "async"}
    with started(environment):
        assert re.findall("value of .*", told.read_text()) == ["value of OF_THE_USER"]
