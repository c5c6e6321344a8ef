"""Vectorized environments: each step, in each vectorization, against values computed manually."""

from __future__ import annotations

import ctypes
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from stagecoach.rollout_worker.environments.copies import Copies
from stagecoach.rollout_worker.environments.vector_env import RunningEpisodes, Step, VectorEnvironment, usable
from stagecoach.shared.base.errors import EnvironmentFailure, EnvironmentUnusable
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord
from tests.support.environments.small import CHASE, CHASE_POLICIES, MODULE
from tests.support.environments.vector import act, started

_PR_GET_PDEATHSIG = 2


def counting(**kwargs: Any) -> dict[str, Any]:
    return {"id": f"{MODULE}:Counting", "kwargs": kwargs}


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_step_distinguishes_ends_and_resets_at_once(vectorization: str, ends: str) -> None:
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


def test_copies_refuse_lengths_that_add_up() -> None:
    def long_or_short(length: int) -> gym.Env[Any, Any]:
        def resized(seen: Any) -> Any:
            return np.resize(seen, length)

        made = gym.make("CartPole-v1")
        return gym.wrappers.TransformObservation(made, resized, made.observation_space)

    copies = Copies([partial(long_or_short, 5), partial(long_or_short, 3)], copy=False)
    with pytest.raises(ValueError, match="same shape"):
        copies.reset(seed=[1, 2])


@pytest.mark.parametrize("kind", ["sync", "async", "native", "pettingzoo"])
def test_set_phase_reaches_environments_and_wrappers(kind: str) -> None:
    environment: dict[str, Any] = {"id": f"{MODULE}:TellsPhase", "vectorization": kind}
    factor, sections = 11.0, dict[str, Any]()
    if kind in ("sync", "async"):
        environment["wrappers"] = [f"{MODULE}:AddOne", f"{MODULE}:PhaseWrapper", {"path": f"{MODULE}:AddOne"}]
    elif kind == "native":
        environment["id"], factor = f"{MODULE}:phase_vector", 1.0
    else:
        environment, sections, factor = CHASE | {"id": f"{MODULE}:PhaseChase"}, CHASE_POLICIES, 1.0
    added = 2.0 if kind in ("sync", "async") else 0.0
    with started(environment, **sections) as vector:
        for number, phase in enumerate((Phase.HEATUP, Phase.TRAIN, Phase.TEST), start=1):
            vector.set_phase(phase)
            vector.reset([1, 2])
            if kind == "pettingzoo":
                cat, mouse = np.zeros(2, np.int64), np.zeros((2, 1), np.float32)
                step = vector.step({"hunter": {"action": cat}, "prey": {"action": mouse}})
            else:
                step = act(vector, 0)
            for its in step.policies.values():
                assert its.reward.tolist() == [factor * number + added] * 2, (kind, phase)


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_native_steps_are_equal_in_all_autoreset_modes(mode: str, ends: str) -> None:
    native = NATIVE | {"num_envs": 3, "kwargs": {"mode": mode, "ends": ends}, "info_columns": ["depth"]}
    with started(native) as vector:
        assert vector.reset([1, 2, 3])["default"][0]["obs"].tolist() == [[0, 0]] * 3
        rows: list[list[tuple[Any, ...]]] = [[] for _ in range(3)]
        records: list[list[EpisodeRecord]] = [[] for _ in range(3)]
        for _ in range(12):
            step = act(vector, 0)
            told = step.policies["default"]
            np.testing.assert_array_equal(told.info["info/depth"], np.where(told.mask, 10 * told.reward, np.nan))
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
        total = length * (length + 1) / 2
        record = EpisodeRecord(total, length, metrics={"depth": 10.0 * length, "depth_sum": 10 * total})
        expected = [replace(record, success=number % 2 == 1) for number in range(len(rows[index]) // length)]
        assert records[index] == expected


NATIVE = {"id": f"{MODULE}:counting_vector", "vectorization": "native"}


AT_ONCE: dict[str, Any] = {"id": f"{MODULE}:starts_again_at_once", "vectorization": "native", "num_envs": 2}


@pytest.mark.parametrize("says", [None, "SAME_STEP"])
@pytest.mark.parametrize("tells", ["final_obs", "final_observation"])
def test_same_step_mode_is_detected_by_last_observation(says: str | None, tells: str) -> None:
    with started(AT_ONCE | {"kwargs": {"says": says, "tells": tells}}) as vector:
        vector.reset([1, 2])
        for number in range(1, 13):
            told = act(vector, 1).policies["default"]
            assert told.mask.all() and told.truncated.all() == (number % 3 == 0)
            if number % 3 == 0:
                assert told.final_obs["final_obs"].tolist() == [[3, 3]] * 2 and told.obs["obs"].tolist() == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"says": "SAME_STEP"}, r"gave no info\['final_obs'\] .* expected the last observation"),
        ({}, "paid or ended an episode in the step after an end.*expected"),
        ({"says": "NEXT_STEP"}, "paid or ended an episode in the step after an end.*says NEXT_STEP"),
        ({"says": "NEXT_STEP", "tells": "final_obs"}, "info has final_obs.*says NEXT_STEP"),
        ({"pays": 0.0, "counts": True}, "_elapsed_steps is 0.*is missing"),
        ({"says": "same-step"}, "autoreset_mode.* is 'same-step'; expected"),
    ],
)
def test_native_refuses_contradicting_autoreset_metadata(kwargs: dict[str, Any], message: str) -> None:
    def play() -> None:
        with started(AT_ONCE | {"kwargs": kwargs}) as vector:
            vector.reset([1, 2])
            for _ in range(4):
                act(vector, 1)

    with pytest.raises((EnvironmentFailure, EnvironmentUnusable), match=message):
        play()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_info_columns_come_with_each_step(vectorization: str) -> None:
    names = ["depth", "nan", "digits", "object", "array", "absent"]
    odd = {"id": f"{MODULE}:OddInfo", "vectorization": vectorization, "info_columns": names}
    with started(odd) as vector:
        vector.reset([1, 2])
        for number in range(1, 8):
            step = act(vector, 0)
            told = step.policies["default"].info
            assert list(told) == [f"info/{name}" for name in names]
            assert told["info/depth"].tolist() == [10.0 * ((number - 1) % 3 + 1)] * 2
            assert all(column.dtype == np.float32 and column.shape == (2,) for column in told.values())
            assert all(np.isnan(column).all() for name, column in told.items() if name != "info/depth")
            sums = [record.metrics["depth_sum"] for _, record in step.episodes]
            assert sums == ([60.0] * 2 if number % 3 == 0 else [])
        taken = {"default": {"action": np.zeros((2, 2), np.int64)}}
        vector.reset([1, 2], RunningEpisodes((0, 0), (2, 2), taken))
        assert act(vector, 0).episodes[0][1].metrics["depth_sum"] == 60.0, "a successor knows what was told before it"


def test_usable_replaces_invalid_numbers_by_nan() -> None:
    told = np.array([True, True, True, False])
    found = usable([1e12, -1e13, np.inf, 5.0], told)
    assert found.dtype == np.float32 and found[0] == np.float32(1e12) and np.isnan(found[1:]).all()
    for odd in (None, "text", [[1.0]], [1.0], [object()] * 4):
        assert np.isnan(usable(odd, told)).all()
    assert usable(np.array([True, None, 2, 3], object), told)[[0, 2]].tolist() == [1.0, 2.0]


def test_info_columns_are_per_agent_and_nan_when_absent() -> None:
    environment = CHASE | {"id": f"{MODULE}:TellsOfTheChase", "info_columns": ["depth"]}
    with started(environment, **CHASE_POLICIES) as vector:
        vector.reset([1, 2])
        steps = [chase(vector, [0, 0], [0.0, 0.0]) for _ in range(4)]
        hunter, prey = ([step.policies[name].info["info/depth"] for step in steps] for name in ("hunter", "prey"))
        nan = np.nan
        np.testing.assert_array_equal(hunter, np.array([[10, 10], [20, 20], [nan, nan], [nan, nan]], np.float32))
        np.testing.assert_array_equal(prey, np.array([[1, 1], [nan, nan], [3, 3], [nan, nan]], np.float32))
        metrics = steps[-1].episodes[0][1].metrics
        assert (metrics["cat.depth_sum"], metrics["mouse.depth_sum"]) == (30.0, 4.0)


@pytest.mark.parametrize(
    ("environment", "actions", "says"),
    [
        *[
            (counting(fails="action", message="arm 3 is 100% stuck") | {"vectorization": kind}, [[0, 1]],
             r"^environment 1 raised ValueError in step: arm 3 is 100% stuck\nTraceback(.|\n)*environments/small.py")
            for kind in ("sync", "async")
        ],
        *[
            (counting(fails="reset") | {"vectorization": kind, "num_envs": 1}, [],
             r"^environment 0 raised ValueError in reset: the gripper is stuck\n")
            for kind in ("sync", "async")
        ],
        (counting(length=1, fails="reset", fails_at=1), [[0, 0]], "environment 0 raised ValueError in reset: the grip"),
        (counting(fails="exit", fails_at=1) | {"vectorization": "async"}, [[0, 0]] * 2, "in step: "),
        (NATIVE | {"kwargs": {"mode": "SAME_STEP", "fails_at": 1}}, [[0, 0]] * 2,
         r"raised ValueError in step: the simulator lost its license\nTrace"),
        (CHASE | {"kwargs": {"fails_at": 0}}, [[]], "environment 0 raised ValueError in step: the mouse escaped"),
        (CHASE | {"kwargs": {"fails_at": 0}, "vectorization": "async"}, [[]],
         r"^environment [01] raised ValueError in step: the mouse escaped\nTraceback"),
    ],
)  # fmt: skip
def test_failure_names_environment_with_traceback(
    environment: dict[str, Any], actions: list[list[int]], says: str
) -> None:
    with started(environment, **(CHASE_POLICIES if "api" in environment else {})) as vector:
        turn = partial(chase, vector, [0, 0], [0.0, 0.0]) if "api" in environment else partial(act, vector)
        *calls, last = [partial(vector.reset, [1, 2][: vector.num_envs]), *(partial(turn, *each) for each in actions)]
        for call in calls:
            call()
        with pytest.raises(EnvironmentFailure, match=says):
            last()


def chase(vector: VectorEnvironment, cat: list[int], mouse: list[float]) -> Step:
    return vector.step({"hunter": {"action": np.array(cat)}, "prey": {"action": np.array(mouse, np.float32)[:, None]}})


def test_parallel_agents_end_independently() -> None:
    with started(CHASE | {"kwargs": {"cat_steps": 1, "mouse_steps": 3}}, **CHASE_POLICIES) as vector:
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


def test_parallel_is_truncated_at_max_episode_steps() -> None:
    """The cat terminates at the limit; the mouse is truncated and has a last observation."""
    limited = CHASE | {"kwargs": {"cat_steps": 2, "mouse_steps": 9}, "max_episode_steps": 2}
    with started(limited, **CHASE_POLICIES) as vector:
        vector.reset([1, 2])
        first = chase(vector, [0, 0], [0.0, 0.0])
        assert not first.episodes and not first.policies["prey"].truncated.any()
        second = chase(vector, [0, 0], [0.0, 0.0])
        hunter, prey = second.policies["hunter"], second.policies["prey"]
        assert hunter.terminated.all() and not hunter.truncated.any()
        assert prey.truncated.all() and not prey.terminated.any()
        assert prey.final_obs["final_obs"].tolist() == [[2, 0], [2, 0]] and prey.obs["obs"].tolist() == [[0, 1], [0, 1]]
        assert [record.length for _, record in second.episodes] == [2, 2]


@pytest.mark.parametrize(("cat", "mouse", "length"), [(2, 9, 2), (9, 3, 3), (2, 2, 2)])
def test_episode_ends_any_ends_with_first_agent(cat: int, mouse: int, length: int) -> None:
    kwargs = {"cat_steps": cat, "mouse_steps": mouse}
    with started(CHASE | {"kwargs": kwargs, "episode_ends": "any"}, **CHASE_POLICIES) as vector:
        vector.reset([1, 2])
        for number in range(1, 2 * length + 1):
            step, over = chase(vector, [0, 0], [0.0, 0.0]), number % length == 0
            hunter, prey = step.policies["hunter"], step.policies["prey"]
            assert [record.length for _, record in step.episodes] == [length] * 2 * over
            assert hunter.mask.all() and prey.mask.all()
            assert (hunter.terminated == (over and cat == length)).all()
            assert (hunter.truncated == (over and cat != length)).all() and (prey.truncated == over).all()
            for its in (hunter, prey):
                assert [row[0] for row in its.final_obs["final_obs"].tolist()] == [length] * 2 * over


def test_environment_process_hides_tokens_from_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "STAGECOACH_REDIS_PASSWORD", "STAGECOACH_WORKER_REDIS_PASSWORD_FILE", "OF_THE_USER"):
        monkeypatch.setenv(name, f"value of {name}")
    told = tmp_path / "environment"
    environment = {"id": f"{MODULE}:StartsAProcess", "kwargs": {"path": str(told)}, "vectorization": "async"}
    with started(environment):
        assert re.findall("value of .*", told.read_text()) == ["value of OF_THE_USER"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_async_does_not_tie_worker_to_its_parent() -> None:
    """Otherwise a shell that ends would kill `train --inline`."""
    with started(counting() | {"vectorization": "async"}):
        signal_at_death = ctypes.c_int(-1)
        assert ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(signal_at_death), 0, 0, 0) == 0
        assert signal_at_death.value == 0
