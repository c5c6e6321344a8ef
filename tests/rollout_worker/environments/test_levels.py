"""Levels of one agent: each transition against a plain loop, tests of subgoals, successors, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stagecoach.coordinator.diagnostics.environment_trial import try_environment
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_environment
from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from stagecoach.rollout_worker.exploration.base import Acted, Exploration, Greedy, RandomActing, Tensors
from stagecoach.rollout_worker.exploration.discrete import EpsilonGreedy
from stagecoach.rollout_worker.exploration.noise import GaussianNoise
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.policy import Policy
from tests.conftest import minimal_config
from tests.support.environments.levels import (
    CORRIDOR,
    THREE,
    PlainLevels,
    corridor,
    listed,
    off_policy,
    recorded,
    with_options,
)
from tests.support.environments.stage import Stage, same


def chosen(seen: dict[str, Any]) -> Any:
    """Returns actions for arrays or tensors: upper levels wander, the bottom level moves toward its goal."""
    if "achieved_below" in seen:
        return seen["observation"] * 0.5 + seen["desired_goal"] * 0.25
    return (seen["desired_goal"] - seen["achieved_goal"]) * 0.25


class ByRule(Exploration):
    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        action: Tensor = chosen({name.removeprefix("obs."): its for name, its in observations.items()})
        return {"action": action}, policy.action_parameters(observations)


@pytest.mark.parametrize("levels", [THREE, [THREE[0], THREE[2]]], ids=["three", "two"])
@given(st.integers(0, 2**32 - 1), st.integers(12, 40), st.integers(1, 2))
@settings(max_examples=10)
def test_level_transitions_equal_plain_loop(levels: list[dict[str, Any]], seed: int, steps: int, copies: int) -> None:
    policies: dict[str, Any] = {level["policy"]: {} for level in levels}
    rollout = {"fragment_steps": 32}
    stage = Stage(corridor(levels, num_envs=copies), seed=seed, policies=policies, rollout=rollout)
    expected = [
        PlainLevels(levels, chosen, its).play(4 * steps) for its in SeedLineage(seed, 0, 0, 0).environments(copies)
    ]
    told = 0
    for number in range(3):
        sample = stage.sample(steps, ByRule())
        first, beyond = number * steps, (number + 1) * steps
        for name in policies:
            order = sorted(leaf for leaf in expected[0][name][0].seen)
            for slot in range(copies):
                turns = [its for its in expected[slot][name] if first <= its.began and its.known < beyond]
                wanted = [
                    (
                        listed([its.seen[leaf] for leaf in order]),
                        listed([its.action]),
                        *its[4:7],
                        listed([its.after[leaf] for leaf in order]),
                    )
                    for its in turns
                ]
                assert recorded(sample.columns[name], slot) == wanted
                told += len(wanted)
        assert all(record.episode_return in (0.0, 1.0) for record in sample.episodes), "the environment's own"
    assert told


def test_levels_successor_continues_during_subgoal_test() -> None:
    sections = off_policy()
    environment = sections.pop("environment")
    worker = Stage(environment, **sections)
    missed = set()
    for _ in range(5):
        worker.sample(13)
        successor = Stage(environment, left=worker.left, **sections)
        assert successor.past is not None and successor.sampler.position_digest == successor.past.digest
        ahead = Stage(environment, left=worker.left, **sections)
        one, other = ahead.sample(13), successor.sample(13)
        assert same(one, other)
        missed |= set(one.columns["middle"]["info/subgoal_missed"].ravel().tolist())
    assert 1.0 in missed


def as_the_best(stage: Stage, name: str, its: Columns) -> Array:
    """`[n]`: whether each action is the policy's best."""
    observations = {key: torch.from_numpy(array[its["mask"]]) for key, array in its.items() if key.startswith("obs")}
    best, _ = Greedy().act(stage.policies[name], observations, torch.Generator())
    close: Array = np.isclose(best["action"].detach().numpy(), its["action"][its["mask"]], atol=1e-5).all(axis=1)
    return close


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_tested_subgoal_is_pursued_greedily(share: float) -> None:
    sections = off_policy(test_subgoals=share)
    environment = sections.pop("environment")
    stage = Stage(environment, **sections)
    columns = stage.sample(64, RandomActing()).columns
    for name, its in columns.items():
        close, there = as_the_best(stage, name, its), its["mask"]
        assert close.all() if share and name != "top" else not close.any()
        if name != "bottom" and share:
            told = its["info/subgoal_missed"][there]
            assert set(told[~np.isnan(told)]) <= {0.0, 1.0} and (~np.isnan(told)).any()


def test_gaussian_noise_takes_share_of_uniform_actions() -> None:
    sections = off_policy(test_subgoals=0.0)
    stage = Stage(sections.pop("environment"), **sections)
    exploration = GaussianNoise(0.0, None, uniform=0.3)
    samples = [stage.sample(64, exploration).columns["bottom"] for _ in range(6)]
    best = np.concatenate([as_the_best(stage, "bottom", its) for its in samples])
    assert len(best) > 300 and 0.2 < 1 - best.mean() < 0.4


@pytest.mark.parametrize("reward", ["environment", "sparse"])
def test_environment_end_terminates_levels_that_it_pays(reward: str) -> None:
    goal = {"of": "observation", "low": [-1.0] * 4, "high": [1.0] * 4, "threshold": 1e-6, "reward": reward}
    levels = [{"policy": "top"}, {"policy": "bottom", "every": 3} | goal]
    stage = Stage(
        {"id": "CartPole-v1", "hierarchy": {"levels": levels}},
        policies={"top": {}, "bottom": {}}, rollout={"fragment_steps": 128},
    )  # fmt: skip
    sample = stage.sample(128)
    top, bottom = (sample.columns[name] for name in ("top", "bottom"))
    fell = len(sample.episodes)
    assert fell > 3 and top["terminated"].sum() == fell
    assert bottom["terminated"].sum() == (fell if reward == "environment" else 0)
    assert bottom["truncated"].sum() > fell


def test_evaluation_reports_goals_of_levels() -> None:
    sections = off_policy()
    config = minimal_config(**sections)
    stage = Stage(sections.pop("environment"), **sections)
    played = evaluate_policies(config, stage.description, stage.policies, seed=1)
    assert len(played) == config.evaluation.episodes
    for record in played:
        assert record.success is (record.episode_return == 1.0)
        assert 0 <= record.metrics["bottom.goals_achieved"] <= 1
    assert not try_environment(config, whole=True).refuse(config, strict=True).policies.keys() ^ {
        "top",
        "middle",
        "bottom",
    }


def test_subgoal_test_uses_recurrent_state() -> None:
    levels = [{"policy": "top", "threshold": 0.5}, {"policy": "low", "every": 5, "threshold": 0.4}]
    environment = corridor(levels, test_subgoals=0.4, num_envs=1, kwargs=CORRIDOR | {"choices": True})
    policies = {"top": {"core": "none"}, "low": {"core": "gru", "algorithm": {"name": "r2d2"}}}
    stage = Stage(environment, algorithm={"name": "td3"}, policies=policies, rollout={"fragment_steps": 40})
    low, exploring = stage.policies["low"], {"top": GaussianNoise(0.1, None), "low": EpsilonGreedy(0.0)}
    with torch.no_grad():
        for weights in low.parameters():
            weights.add_(torch.randn(weights.shape, generator=torch.Generator().manual_seed(weights.numel())) / 2)
        columns = stage.sampler.sample(stage.policies, exploring, 120).columns["low"]
        state = torch.from_numpy(columns["state_in"])
        over = torch.from_numpy(columns["terminated"] | columns["truncated"]).unsqueeze(2)
        for row in range(int(columns["mask"].sum())):
            seen = {name: torch.from_numpy(array[row]) for name, array in columns.items() if name.startswith("obs")}
            values, state = low.step(seen, state)
            assert values.argmax(dim=1).tolist() == columns["action"][row].tolist(), row
            state = state.masked_fill(over[row], 0.0)
    known = columns["log_prob"][columns["mask"]]
    assert 0 < np.isnan(known).sum() < len(known)


@pytest.mark.parametrize("sections", [off_policy(), with_options()], ids=["levels", "options"])
def test_aec_loop_equals_evaluation(sections: dict[str, Any]) -> None:
    config = minimal_config(**sections)
    policies = Stage(sections["environment"], **{k: v for k, v in sections.items() if k != "environment"}).policies
    played = evaluate_policies(config, describe_environment(config), policies, seed=7, episodes=1)
    deployed = {name: DeployedPolicy(policy, 0) for name, policy in policies.items()}
    game = make_environment(config.environment)
    game.reset(seed=episode_seed(7, 0))
    turns = 0
    for agent in game.agent_iter():
        seen, _, terminated, truncated, _ = game.last()
        over = terminated or truncated
        game.step(None if over else deployed[config.policy_of(agent)].act(seen))
        turns += not over
    assert (game.episode_return, turns) == (played[0].episode_return, played[0].length)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Returns `off_policy` with another value for one field, given by its dotted path."""
    sections = off_policy()
    *above, last = path.split(".")
    place: Any = sections
    for name in above:
        place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
    place[last] = value
    return sections


_LEVELS = "environment.hierarchy.levels"
_BUFFER = "algorithm.replay_buffer"


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (_LEVELS, [THREE[0], THREE[1] | {"policy": "top"}], "policy 'top' stands on two levels"),
        (_LEVELS, [THREE[0] | {"every": 3}, THREE[1]], "'top' is the top level, which nothing directs"),
        (_LEVELS, [THREE[0], {"policy": "bottom"}], "'bottom' has no `every`"),
        (_LEVELS, [THREE[0], THREE[2]], r"policies has \['bottom', 'middle', 'top'\]"),
        (_LEVELS, [THREE[0], THREE[1] | {"every": 9}, THREE[2] | {"every": 1}], "every=9.* 9 steps.*episodes have 8"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"of": "speed"}], "levels.2 needs 'speed'.*achieved_goal"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"elements": [2]}], "has 2 elements; name some of 0 to 1"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"elements": [0, 0]}], "name some of 0 to 1, each once"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"low": [0, 0, 0]}], "low=.*, and the goal has 2 elements"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"low": 5}], "is not below high"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"low": [0.5]}], "low=.0.5., and the goal has 2 elements"),
        (_LEVELS, [THREE[0], THREE[1], THREE[2] | {"threshold": -1}], "expected 0 or more"),
        ("environment.id", "CartPole-v1", r"levels\.1 needs 'achieved_goal'.*it has \['observation'\]"),
        ("environment.vectorization", "native", "hierarchy with vectorization=native"),
        ("environment.api", "pettingzoo", "the only agents"),
        ("agents", {"top": "top"}, "the only agents"),
        ("rollout.fragment_steps", 17, "'top' lasts up to 9 steps.*set rollout.fragment_steps to 18"),
        ("policies.bottom.algorithm", {"name": "ppo", "minibatch_size": 8}, "use an algorithm with a replay buffer"),
        (f"policies.middle.{_BUFFER}.threshold", 0.3, "set the same values on both"),
        (f"policies.bottom.{_BUFFER}.hindsight_actions", True, "it needs a level below"),
        ("policies.middle.algorithm.n_step", 2, "set n_step=1"),
        (f"policies.bottom.{_BUFFER}.missed_penalty", 3, "goals of 'bottom' are never tested"),
        ("environment.hierarchy.test_subgoals", 0, "are never tested"),
    ],
)  # fmt: skip
def test_describe_refuses_invalid_levels(path: str, value: Any, words: str) -> None:
    sections = changed(path, value)
    if "episodes have" in words:
        sections["environment"]["max_episode_steps"], sections["rollout"]["fragment_steps"] = 8, 64
    if "achieved_goal'" in words:
        sections["environment"]["kwargs"] = {}
    with pytest.raises(ConfigError, match=words) as raised:
        describe_environment(minimal_config(**sections))
    assert "\n" not in str(raised.value)


def test_unbounded_goals_require_bounds() -> None:
    levels: list[dict[str, Any]] = [
        {"policy": "top"},
        {"policy": "bottom", "every": 3, "of": "observation", "elements": [0, 1]},
    ]
    environment = {"id": "CartPole-v1", "hierarchy": {"levels": levels}}
    sections: dict[str, Any] = {"policies": {"top": {}, "bottom": {}}, "rollout": {"fragment_steps": 32}}
    with pytest.raises(ConfigError, match=r"levels\.1\.low is not given, and 'observation' is unbounded"):
        describe_environment(minimal_config(environment=environment, **sections))
    levels[1] |= {"low": [-1, -2], "high": [1, 2]}
    assert Stage(environment, **sections).sample(32).columns["bottom"]["action"].dtype == np.int64
