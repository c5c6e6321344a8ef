"""EnvPool environments, with a stand-in for the package, and CartPole against Gymnasium."""

from __future__ import annotations

import sys
import types
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.envpool_env import PREFIX
from stagecoach.rollout_worker.environments.factory import (
    evaluation_environment,
    make_environment,
    make_native,
    make_vector,
)
from stagecoach.shared.base.errors import EnvironmentUnusable
from tests.support.environments.vector import act, config_of, started

LENGTH = 3


TASK = "Count-v1"


class FakePool:
    """Counts from its seed; an episode has `LENGTH` steps, and the step after its end only resets."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, num_envs: int, seed: int, players: int = 1, ends: str = "truncated", **kwargs: Any) -> None:
        self.config = {"num_envs": num_envs, "max_num_players": players}
        self.seed, self.kwargs, self._ends = seed, kwargs, ends
        self._steps = np.zeros(num_envs, np.int64)
        self.closed = False

    def _answer(self) -> tuple[Any, dict[str, Any]]:
        count = len(self._steps)
        ids = np.arange(count, dtype=np.int32)
        info = {"env_id": ids, "players": {"env_id": ids}, "elapsed_step": self._steps, "lives": 3 - self._steps}
        return np.stack([np.full(count, self.seed), self._steps], axis=1).astype(np.float32), info

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self._steps[:] = 0
        return self._answer()

    def step(self, actions: Any) -> tuple[Any, ...]:
        assert isinstance(actions, np.ndarray) and actions.shape == self._steps.shape
        again = self._steps == LENGTH
        self._steps = np.where(again, 0, self._steps + 1)
        over = self._steps == LENGTH
        none = np.zeros_like(over)
        observations, info = self._answer()
        ends = (none, over) if self._ends == "truncated" else (over, none)
        return observations, np.where(again, 0, actions + 1.0).astype(np.float32), *ends, info

    def render(self) -> Any:
        return np.zeros((1, 4, 4, 3), np.uint8)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[FakePool]:
    """Pools created by a stand-in for the package."""
    made: list[FakePool] = []

    def make(task: str, env_type: str, **kwargs: Any) -> FakePool:
        assert task == TASK, f"{task} is not supported"
        assert env_type == "gymnasium"
        made.append(FakePool(**kwargs))
        return made[-1]

    module = types.ModuleType("envpool")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "envpool", module)
    return made


def envpool(task: str = TASK, **environment: Any) -> dict[str, Any]:
    return {"id": PREFIX + task, "num_envs": 2, "vectorization": "native"} | environment


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_envpool_distinguishes_ends_and_masks_reset_step(ends: str) -> None:
    masks, episodes, lives = [], [], []
    with started(envpool(kwargs={"ends": ends}, info_columns=["lives"])) as vector:
        assert vector.reset([7, 8])["default"][0]["obs"].tolist() == [[7, 0], [7, 0]], "one seed for all copies"
        for step in range(1, 6):
            told = act(vector, 0, 2)
            its = told.policies["default"]
            masks.append(its.mask.tolist())
            lives.append(its.info["info/lives"].tolist())
            episodes += told.episodes
            over = step == LENGTH
            assert its.truncated.tolist() == [over and ends == "truncated"] * 2
            assert its.terminated.tolist() == [over and ends == "terminated"] * 2
            assert its.final_obs["final_obs"].tolist() == ([[7, LENGTH]] * 2 if over else [])
    assert masks == [[True, True]] * 3 + [[False, False], [True, True]]
    assert [(index, record.episode_return, record.length) for index, record in episodes] == [(0, 3.0, 3), (1, 9.0, 3)]
    np.testing.assert_array_equal(lives, [[2.0] * 2, [1.0] * 2, [0.0] * 2, [np.nan] * 2, [2.0] * 2])
    assert episodes[0][1].metrics == {"lives": 0.0, "lives_sum": 3.0}, (
        "what the environment tells, without EnvPool's own"
    )


def test_envpool_evaluation_seeds_each_episode(fake: list[FakePool]) -> None:
    env = make_environment(evaluation_environment(config_of(envpool(max_episode_steps=9))), render_mode="rgb_array")
    assert env.reset(seed=5)[0].tolist() == [5, 0] and env.reset()[0].tolist() == [5, 0]
    observation, reward, terminated, truncated, info = env.step(1)
    assert observation.tolist() == [5, 1] and (reward, terminated, truncated) == (2.0, False, False)
    assert info == {"lives": 2} and env.render().shape == (4, 4, 3) and env.render_mode == "rgb_array"
    assert fake[-1].kwargs == {"num_threads": 1, "max_episode_steps": 9, "render_mode": "rgb_array"}
    env.close()


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"task": "Chess-v1"}, "envpool:Chess-v1 cannot be created: AssertionError: Chess-v1 is not supported"),
        ({"kwargs": {"batch_size": 1}}, r"environment.kwargs \['batch_size'\] of envpool:Count-v1 are Stagecoach's"),
        ({"kwargs": {"players": 2}}, "has several players"),
    ],
)
def test_envpool_refuses_unusable_task_or_arguments(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvironmentUnusable, match=says):
        make_native(config_of(envpool(**fields)).environment)


def test_envpool_cartpole_equals_gymnasium() -> None:
    pytest.importorskip("envpool", reason="the extra `envpool` installs it")
    config = config_of(envpool("CartPole-v1", num_envs=16, max_episode_steps=25))
    vector = make_vector(config.environment, describe_environment(config))
    observations = vector.reset([3, *range(15)])["default"][0]["obs"].copy()
    single = gym.make("CartPole-v1", max_episode_steps=None).unwrapped
    single.reset(seed=0)
    random, ended, over = np.random.default_rng(0), {"terminated": 0, "truncated": 0}, np.zeros(16, np.bool_)
    lengths = np.zeros(16, np.int64)
    for _ in range(120):
        actions = random.integers(0, 2, 16)
        step = vector.step({"default": {"action": actions}})
        told = step.policies["default"]
        assert (told.mask == ~over).all()
        lengths = np.where(over, 0, lengths + 1)
        for index in np.flatnonzero(told.mask):
            single.state, single.steps_beyond_terminated = tuple(observations[index].astype(np.float64)), None  # type: ignore[attr-defined]
            expected, reward, fell, _, _ = single.step(int(actions[index]))
            assert np.allclose(expected, told.obs["obs"][index], atol=1e-5) and reward == told.reward[index]
            limit = lengths[index] == 25
            assert bool(told.truncated[index]) == limit and bool(told.terminated[index]) == (fell and not limit)
        assert not told.reward[over].any() and (np.abs(told.obs["obs"][over]) <= 0.05).all()
        over = told.terminated | told.truncated
        assert np.array_equal(told.final_slots, np.flatnonzero(over))
        assert np.array_equal(told.final_obs["final_obs"], told.obs["obs"][over])
        assert {index for index, _ in step.episodes} == set(np.flatnonzero(over).tolist())
        assert all(record.length == lengths[index] == record.episode_return for index, record in step.episodes)
        ended = {name: count + int(getattr(told, name).sum()) for name, count in ended.items()}
        observations = told.obs["obs"].copy()
    vector.close()
    assert min(ended.values()) > 3
