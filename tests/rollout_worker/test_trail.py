"""The trail: a successor stands where its predecessor's last fragment ended, and acts what that would have acted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout_worker import trail
from rollout_worker.environments import make_vector
from rollout_worker.exploring import make_exploration
from rollout_worker.making import describe_environment
from rollout_worker.sampler import Sample, Sampler
from rollout_worker.trail import Life, episode_seed
from shared.policies.registry import build_policies
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE
from tests.rollout_worker.test_environments import AGENTS, TWO_POLICIES

STEPS = 7
LIFE = Life(3, 1, 4, 0)


STACKED = {"path": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 3}}


ENSEMBLE = {"name": "dqn", "heads": 5, "prior_scale": 3, "exploration": {"kind": "bootstrapped"}}


def spaces(observation: str, action: str) -> dict[str, Any]:
    """An environment with these spaces; its episodes end in the midst of a fragment, at its end, and later."""
    return {"id": f"{MODULE}:AnySpaces", "kwargs": {"observation": observation, "action": action, "length": 14}}


class Line:
    """A worker's line of fragments, and the trail that it leaves."""

    def __init__(self, environment: dict[str, Any], sections: dict[str, Any], left: list[bytes] | None = None) -> None:
        sections = {"policies": {"default": {"cnn": "small"}}} | sections
        sections = {"algorithm": {"minibatch_size": 8}} | sections
        config = minimal_config(environment={"num_envs": 3} | environment, **sections)
        description = describe_environment(config)
        self.policies = build_policies(description.policies, config.policies, config.algorithm, 0)
        self._acting = config.algorithm.acting
        self.left = list(left or [])
        self.past = trail.read(self.left)
        vector = make_vector(config.environment, description)
        self.sampler = Sampler(vector, description, self.past.life if self.past else LIFE, past=self.past)

    def sample(self) -> Sample:
        """The next fragment; its part of the trail is left."""
        sample = self.sampler.sample(self.policies, make_exploration(self._acting, Counters()), STEPS)
        step = self.sampler.trace(sample)
        if step is not None:
            self.left.append(trail.encode(step))
            self.left = self.left[-step.fragments :]
        return sample


def same(one: Sample, other: Sample) -> bool:
    """Whether two fragments hold the same, bit for bit."""
    return one.episodes == other.episodes and all(
        np.array_equal(array, other.columns[policy][name]) and array.dtype == other.columns[policy][name].dtype
        for policy, columns in one.columns.items()
        for name, array in columns.items()
    )


@pytest.mark.parametrize(
    ("environment", "sections"),
    [
        ({"id": "CartPole-v1"}, {}),
        pytest.param({"id": "CartPole-v1", "vectorization": "async"}, {}, marks=pytest.mark.exhaustive),
        ({"id": "Pendulum-v1", "max_episode_steps": 20}, {}),
        (
            {"id": "Pendulum-v1", "max_episode_steps": 20},
            {"policies": {"default": {"core": "gru", "share_encoder": True}}},
        ),
        ({"id": "CartPole-v1"}, {"policies": {"default": {"core": "lstm", "share_encoder": True}}}),
        (
            AGENTS | {"kwargs": {"cat_steps": 12, "mouse_steps": 100}},
            TWO_POLICIES | {"policies": {"hunter": {"core": "lstm", "share_encoder": True}, "prey": {}}},
        ),
        ({"id": "CartPole-v1"}, {"algorithm": ENSEMBLE}),
        ({"id": "Acrobot-v1", "max_episode_steps": 9}, {}),
        (AGENTS | {"kwargs": {"cat_steps": 12, "mouse_steps": 100}}, TWO_POLICIES),
        (AGENTS | {"kwargs": {"cat_steps": 21, "mouse_steps": 42, "counts": False}}, TWO_POLICIES),
        (AGENTS | {"kwargs": {"cat_steps": 3, "mouse_steps": 8, "counts": False}}, TWO_POLICIES),
        (spaces("dict", "dict"), {}),
        (spaces("tuple", "tuple"), {}),
        (spaces("image", "multi_discrete_matrix") | {"wrappers": [STACKED]}, {}),
        (spaces("matrix", "box64"), {}),
        (spaces("multi_discrete", "multi_binary"), {}),
    ],
    ids=lambda value: str(value.get("id", "")).removeprefix(MODULE) + value.get("vectorization", ""),
)
def test_a_successor_goes_on_as_its_predecessor_would_have(
    environment: dict[str, Any], sections: dict[str, Any]
) -> None:
    line = Line(environment, sections)
    for _ in range(5):
        line.sample()
        successor = Line(environment, sections, line.left)
        assert successor.past is not None and successor.sampler.stands == successor.past.digest
        assert same(line.sample(), successor.sample())
        successor.sampler.close()
    line.sampler.close()


def test_an_episode_that_goes_on_in_other_fragments_is_acted_by_the_same_head() -> None:
    """Every head always does the same, each another of Acrobot's three actions; episodes take 9 steps of 7."""
    line = Line({"id": "Acrobot-v1", "max_episode_steps": 9}, {"algorithm": ENSEMBLE | {"prior_scale": 0, "heads": 3}})
    policy = line.policies["default"]
    for name, tensor in policy.named_parameters():
        tensor.data.zero_()
        if name == "advantage.layers.1.bias":
            tensor.data.add_(torch.eye(3).unsqueeze(1))
    columns = [line.sample().columns["default"] for _ in range(9)]
    actions = np.concatenate([part["action"] for part in columns])
    by_episode = actions.reshape(7, 9, 3)
    assert (by_episode == by_episode[:, :1]).all()
    assert (np.bincount(by_episode[:, 0].flatten(), minlength=3) > 0).all()
    line.sampler.close()


def test_the_trail_is_as_long_as_the_longest_running_episode() -> None:
    line = Line({"id": "Pendulum-v1", "max_episode_steps": 20}, {})
    lengths = []
    for _ in range(6):
        line.sample()
        lengths.append(len(line.left))
    assert lengths == [1, 2, 1, 2, 3, 1], "7, 14, 1 (after 20), 8, 15, 2 steps of 7"
    line.sampler.close()


def test_a_native_environment_leaves_none() -> None:
    line = Line({"id": "CartPole-v1", "vectorization": "native"}, {})
    line.sample()
    assert line.left == [] and line.sampler.stands == ""
    line.sampler.close()


@pytest.mark.parametrize(
    ("environment", "sections"),
    [({"id": f"{MODULE}:Unseeded"}, {}), (AGENTS, TWO_POLICIES)],
    ids=["unseeded", "counts"],
)
def test_an_environment_that_does_not_follow_from_its_seed_and_actions_is_found_out(
    environment: dict[str, Any], sections: dict[str, Any]
) -> None:
    line = Line(environment, sections)
    line.sample()
    successor = Line(environment, sections, line.left)
    assert successor.past is not None and successor.sampler.stands != successor.past.digest
    line.sampler.close()
    successor.sampler.close()


def test_a_trail_that_cannot_be_followed_is_none() -> None:
    line = Line({"id": "Pendulum-v1"}, {})
    for _ in range(3):
        line.sample()
    line.sampler.close()
    left = line.left
    assert len(left) == 3 and trail.read(left) is not None
    assert trail.read([]) is None
    assert trail.read([*left[:2], b"garbage"]) is None
    assert trail.read(left[1:]) is None, "the first is gone"
    assert trail.read([left[0], left[2]]) is None, "an older Redis came back, and lost one"


def test_seeds_differ_between_lives_fragments_environments_and_episodes() -> None:
    lives = [Life(1, 0, 0, 0), Life(2, 0, 0, 0), Life(1, 1, 0, 0), Life(1, 0, 1, 0), Life(1, 0, 0, 1)]
    seeds = [life.acting(number) for life in lives for number in range(3)]
    seeds += [seed for life in lives for seed in life.environments(4)]
    seeds += [episode_seed(lives[0].environments(1)[0], number) for number in range(1, 4)]
    assert len(set(seeds)) == len(seeds)


def test_what_is_remembered_comes_back_as_it_was() -> None:
    line = Line(
        {"id": "CartPole-v1"}, {"policies": {"default": {"core": "lstm", "core_size": 5, "share_encoder": True}}}
    )
    line.sample()
    line.sampler.close()
    past = trail.read(line.left)
    assert past is not None and past.states["default"].shape == (3, 10) and past.states["default"].any()
    assert past.states["default"].tobytes() == line.sampler._states["default"].numpy().tobytes()


def test_what_is_sound_and_no_trail_is_not_taken_up() -> None:
    """As somebody else may have written it."""

    def step(**changes: Any) -> bytes:
        made: dict[str, Any] = {
            "life": LIFE,
            "number": 0,
            "episodes": (0, 0),
            "lengths": (4, 4),
            "digest": "d",
            "actions": actions,
        }
        return trail.encode(trail.Step(**(made | changes)))

    actions = {"default": {"action": np.zeros((2, 2), np.int64)}}
    last = step(number=1)
    assert trail.read([step(), last]) is not None
    text: Any = "4"
    wrong: list[dict[str, Any]] = [
        {"actions": {"default": {"action": np.zeros((2, 2, 3), np.int64)}}},
        {"actions": {"default": {"other": np.zeros((2, 2), np.int64)}}},
        {"actions": {"default": {"action": np.zeros(2, np.int64)}}},
        {"actions": {}}, {"number": "x"}, {"number": -1}, {"lengths": ("a", 4)}, {"lengths": (4,)},
        {"episodes": (-1, 0)},
        {"life": Life(3, 1, text, 0)}, {"life": Life(3, 1, 4, -1)},
    ]  # fmt: skip
    for changes in wrong:
        assert trail.read([step(**changes), last]) is None, changes
