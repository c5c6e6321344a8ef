"""Options with one controller: transitions against a plain loop, unused choices, successors, invalid input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from stagecoach.coordinator.diagnostics.environment_trial import try_environment
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_environment
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Acted, Exploration, Tensors
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.policy import Policy
from tests.conftest import minimal_config
from tests.support.environments.levels import CORRIDOR, PlainOptions, listed, recorded, with_options
from tests.support.environments.stage import Stage, same

OPTIONS = 4


def rule(place: Any, option: Any) -> Any:
    """Returns action, length and option for arrays or tensors, by place and acting agent; 0 for unused parts."""
    number = (place[..., 0] * 37 + place[..., 1] * 11).round() + option
    acts = option < OPTIONS
    return number % 3 * acts, number % 2 * ~acts, number % 4 * ~acts


class ByRule(Exploration):
    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        parts = rule(observations["obs.observation"], observations["obs.option"])
        names = ("action.action", "action.length", "action.option")
        actions = {name: part.long() for name, part in zip(names, parts, strict=True)}
        return actions, policy.action_parameters(observations)


def plainly(seen: Mapping[str, Any], option: int) -> list[int]:
    return [int(part) for part in rule(seen["observation"], np.asarray(option))]


def stage(**more: Any) -> Stage:
    """Returns a stage with these fields of the environment."""
    sections = with_options(**more)
    return Stage(sections.pop("environment"), **sections)


@pytest.mark.parametrize("seed", range(4))
def test_option_transitions_equal_plain_loop(seed: int) -> None:
    steps, sections = 37, with_options()
    its = Stage(sections.pop("environment"), seed=seed, **sections)
    expected = [PlainOptions(plainly, each).play(4 * steps) for each in SeedLineage(seed, 0, 0, 0).environments(2)]
    told = {"controller": 0, "option": 0}
    for number in range(3):
        sample = its.sample(steps, ByRule())
        columns = places_only(sample.columns["default"])
        first, beyond = number * steps, (number + 1) * steps
        for place, name in enumerate(told):
            for env in range(2):
                turns = [turn for turn in expected[env][name] if first <= turn.began and turn.known < beyond]
                assert recorded(columns, 2 * place + env) == [
                    (
                        listed([turn.seen["observation"]]), listed([np.asarray(each) for each in turn.action]),
                        float(np.float32(turn.reward)), turn.terminated, turn.truncated,
                        listed([turn.after["observation"]]),
                    )
                    for turn in turns
                ]  # fmt: skip
                told[name] += len(turns)
        assert all(record.episode_return in (0.0, 1.0) for record in sample.episodes), "the environment's own"
    assert min(told.values()) > 50


def places_only(columns: Columns) -> Columns:
    """Returns the columns with only the place of the observations."""
    return {name: array for name, array in columns.items() if "obs." not in name or name.endswith("obs.observation")}


@pytest.mark.parametrize("choices", [True, False], ids=["choices", "box"])
def test_options_ignore_unused_choices(choices: bool) -> None:
    its = stage(kwargs=CORRIDOR | {"choices": choices})
    columns, policy = its.sample(32).columns["default"], its.policies["default"]
    assert isinstance(policy, ActorCritic)
    acts = 4 if choices else 2
    head = {"action": slice(0, acts), "length": slice(acts, acts + 2), "option": slice(acts + 2, None)}
    for slots, chosen in ((slice(0, 2), {"length", "option"}), (slice(2, 4), {"action"})):
        there = columns["mask"][:, slots]
        kept = [name for name in columns if name.startswith(("obs", "action", "log_prob"))]
        rows = {name: torch.from_numpy(columns[name][:, slots][there]) for name in kept}
        params = policy.action_parameters(rows)
        log_prob, entropy = policy.distribution.log_prob_and_entropy(params, rows)
        assert torch.allclose(log_prob, rows["log_prob"], atol=1e-5)
        if "length" in chosen:
            parts = torch.split(params[:, -6:], [2, 4], dim=1)
            logs = torch.cat([torch.log_softmax(part, dim=1) for part in parts], dim=1)
            assert torch.allclose(entropy, -(logs.exp() * logs).sum(dim=1), atol=1e-6)
        torch.autograd.backward(log_prob.square().sum() + entropy.sum())
        weights, deviations = policy.get_parameter("head.weight").grad, policy.get_parameter("log_std").grad
        assert weights is not None
        for name, part in head.items():
            assert bool(weights[part].any()) == (name in chosen), name
        assert bool(deviations is not None and deviations.any()) == (not choices and "action" in chosen)
        policy.zero_grad()


class Counter(gym.Env[Any, Any]):
    """Counts to 4 in an array that it uses again, for 1 a step."""

    observation_space = gym.spaces.Box(0, 4, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._count = np.zeros(1, np.float32)
        return self._count, {}

    def step(self, action: Any) -> Any:
        self._count += 1
        return self._count, 1.0, bool(self._count[0] == 4), False, {}


def ahead(before: Any, action: Any, after: Any, info: Any) -> float:
    gone = float(10 * (after[0] - before[0]))
    after += 100  # what it is given is its own
    info["told"] = 100.0
    return gone


def counter(*rewards: str) -> Any:
    options = {"rewards": [f"{__name__}:ahead", *rewards], "lengths": [1, 3]}
    game = make_environment(
        minimal_config(environment={"id": f"{__name__}:Counter", "hierarchy": {"options": options}}).environment
    )
    game.reset(seed=0)
    game.step({"action": 1, "length": 1, "option": 0})
    return game


def test_option_ends_with_its_time_or_the_episode() -> None:
    game, told = counter(), []
    for _ in range(3):
        game.step({"action": 1, "length": 0, "option": 0})
        told.append((game.agent_selection, *game.last()[1:4]))
    game.step(None)
    told.append((game.agent_selection, *game.last()[1:4]))
    game.step({"action": 0, "length": 0, "option": 0})
    game.step({"action": 0, "length": 0, "option": 0})
    told.append((game.agent_selection, *game.last()[1:4]))
    game.step(None)
    told.append((game.agent_selection, *game.last()[1:4]))
    assert told == [
        ("option", 10, False, False), ("option", 10, False, False), ("option", 10, False, True),
        ("controller", 3, False, False), ("option", 10, True, False), ("controller", 1, True, False),
    ]  # fmt: skip


def test_first_step_computes_all_option_rewards() -> None:
    with pytest.raises(EnvironmentUnusable, match=r"rewards\.1=speed: the info of a step has only \[\]; name one"):
        counter("speed").step({"action": 1, "length": 0, "option": 0})


class Doors(gym.Env[Any, Any]):
    """Two of three doors are open, as a mask in the observation or in `info` says."""

    def __init__(self, told: str = "observation") -> None:
        self._told, self._open = told, np.array([0, 1, 1], np.int8)
        seen: dict[str, gym.spaces.Space[Any]] = {"observation": gym.spaces.Box(0, 1, (1,), np.float32)}
        mask = {"action_mask": gym.spaces.Box(0, 1, (3,), np.int8)} if told == "observation" else {}
        self.observation_space = gym.spaces.Dict(seen | mask)
        self.action_space = gym.spaces.Discrete(3, start=5)

    def _seen(self) -> tuple[dict[str, Any], dict[str, Any]]:
        mask = {"action_mask": self._open.copy()}
        seen = {"observation": np.zeros(1, np.float32)}
        return (seen | mask, {}) if self._told == "observation" else (seen, mask)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._seen()

    def step(self, action: Any) -> Any:
        assert self._open[action - 5]
        self._open = np.roll(self._open, 1)
        seen, info = self._seen()
        return seen, 1.0, False, False, info


@pytest.mark.parametrize("told", ["observation", "info"])
def test_options_keep_environment_masks(told: str) -> None:
    environment = {
        "id": f"{__name__}:Doors", "kwargs": {"told": told}, "max_episode_steps": 9,
        "action_mask": told, "hierarchy": {"options": {"rewards": ["environment"], "lengths": [2, 3]}},
    }  # fmt: skip
    its = Stage(environment, rollout={"fragment_steps": 32})
    columns = its.sample(32).columns["default"]
    there = columns["mask"]
    assert (columns["obs.action_mask"][:, 2:, :3].sum(axis=2)[there[:, 2:]] == 2).all(), "the environment's"
    assert (columns["obs.action_mask"][:, :2, :3].sum(axis=2)[there[:, :2]] == 1).all(), "the controller has none"
    config = minimal_config(environment=its.config.environment, rollout={"fragment_steps": 32})
    try_environment(config, whole=True).refuse(config, strict=True)


@pytest.mark.parametrize("choices", [True, False], ids=["choices", "box"])
def test_options_successor_equals_undisturbed_worker(choices: bool) -> None:
    sections = with_options(kwargs=CORRIDOR | {"choices": choices})
    environment = sections.pop("environment")
    worker = Stage(environment, **sections)
    for _ in range(4):
        worker.sample(13)
        successor, ahead = (Stage(environment, left=worker.left, **sections) for _ in range(2))
        assert successor.past is not None and successor.sampler.position_digest == successor.past.digest
        assert same(ahead.sample(13), successor.sample(13))


def test_options_async_equals_sync() -> None:
    assert same(stage(vectorization="async").sample(32), stage().sample(32))


def test_evaluation_reports_option_shares() -> None:
    config, its = minimal_config(**with_options()), stage()
    for record in evaluate_policies(config, its.description, its.policies, seed=1):
        assert record.success is (record.episode_return == 1.0)
        shares = {name: share for name, share in record.metrics.items() if ".share_of_" in name}
        assert shares.keys() == {
            f"controller.share_of_{name}" for name in ("east", "north", "environment", "is_success")
        }
        assert sum(shares.values()) == pytest.approx(1) and record.metrics["controller.option_length"] in (1, 4)
        assert record.agent_returns["controller"] == record.episode_return
    assert try_environment(config, whole=True).refuse(config, strict=True).agents.keys() == {"controller", "option"}


def not_a_number(before: Any, action: Any, after: Any, info: Any) -> float:
    return float("nan")


CONSTANT = 3


def of_two(before: Any, after: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("rewards", [], r"rewards: expected a list of 1 or more, found \[\]"),
        ("lengths", [], r"lengths: expected a list of 1 or more, found \[\]"),
        ("lengths", [0], r"lengths.0: expected 1 or more, found 0$"),
        ("lengths", [2, 2], "lengths: '2' occurs more than once"),
        ("rewards", ["a:same", "b:same"], "rewards: 'same' occurs more than once"),
        ("rewards", ["benchmarks.learning.mazes:up"], r"rewards.0=.*cannot be imported.*'up'.*expected package"),
        ("rewards", [f"{__name__}:CONSTANT"], r"expected a function \(before, action, after, info\), found 3"),
        ("rewards", [f"{__name__}:of_two"], r"expected a function \(before, action, after, info\), found <function"),
        ("rewards", ["environment", "speed"], r"rewards.1=speed: the info of a step has only \['is_success'\]"),
        ("rewards", ["environment", f"{__name__}:not_a_number"], "not_a_number is nan in a step; expected"),
        ("lengths", [1, 16], r"fragment_steps=32 .* lasts up to 17 steps.*set rollout.fragment_steps to 34"),
    ],
)  # fmt: skip
def test_describe_refuses_invalid_options(path: str, value: Any, words: str) -> None:
    sections = with_options()
    sections["environment"]["hierarchy"]["options"][path] = value
    refused(sections, words)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"environment": {"max_episode_steps": 3}}, r"lengths has 4, .* episodes have 3 steps at most"),
        ({"environment": {"vectorization": "native"}}, "hierarchy with vectorization=native"),
        ({"algorithm": {"name": "dqn"}}, r"policies \['default'\] of \['dqn'\]: .*use ppo, appo, a2c or impala"),
        ({"policies": {"default": {}, "other": {}}}, r"options with policies \['default', 'other'\]"),
        ({"agents": {"option": "default"}}, "the only agents"),
        (
            {"environment": {"parameters": {"length": {"replay": {"of": 4}}}}},
            r"length\.replay scores levels by the advantages.* found .* and environment\.hierarchy; use choice",
        ),
        ({"environment": {"hierarchy": {}}}, "found 0 levels and no options"),
        (
            {"environment": {"hierarchy": {"options": {"rewards": ["environment"]}, "test_subgoals": 0.5}}},
            "options with levels or test_subgoals",
        ),
    ],
)
def test_describe_refuses_incompatible_options(changed: dict[str, Any], words: str) -> None:
    sections = with_options()
    for name, section in changed.items():
        sections[name] = {**sections.get(name, {}), **section} if name == "environment" else section
    refused(sections, words)


def refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, EnvironmentUnusable), match=words) as raised:
        tried(sections)
    assert "\n" not in str(raised.value)


def tried(sections: dict[str, Any]) -> None:
    config = minimal_config(**sections)
    describe_environment(config)
    try_environment(config).refuse(config, strict=False)


def test_options_refuse_reserved_observation_names() -> None:
    environment = {"id": f"{__name__}:Doors", "hierarchy": {"options": {"rewards": ["environment"], "lengths": [1]}}}
    with pytest.raises(ConfigError, match="observes 'action_mask', a name that controller and options need"):
        describe_environment(minimal_config(environment=environment | {"action_mask": "off"}))
