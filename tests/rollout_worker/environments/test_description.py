"""Description of an environment, and checks of policies and leagues against it."""

from __future__ import annotations

from typing import Any

import pytest

from stagecoach import DQN, DQNConfig
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.rollout_worker.environments.description import check_new, describe_environment
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.league import League
from tests.conftest import minimal_config
from tests.support.environments.games import MODULE
from tests.support.environments.small import CHASE, CHASE_POLICIES, Chase


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "agents of policy 'default' have different spaces; give 'mouse' a policy of its own"),
        ({"policies": {"a": {}, "b": {}}, "agents": {"cat": "a"}}, r"agent 'mouse' is mapped to no policy; add agents"),
        ({"policies": {"a": {}, "b": {}}, "agents": {"cat": "a", "mouse": "a"}}, "different spaces"),
        (
            {"policies": {name: {} for name in "abc"}, "agents": {"cat": "a", "mouse": "b"}},
            r"policies \['c'\] have no agent",
        ),
        (
            {"policies": {"a": {}, "b": {}}, "agents": {"c*": "a"}},
            r"agent 'mouse' .*one of \['a', 'b'\] .*names \['c\*'\]",
        ),
        ({"agents": {"cat": "default", "d*": "default"}}, r"agents names \['d\*'\], but the environment has"),
        ({"agents": {"dog": "default"}}, r"agents names \['dog'\], but the environment has \['cat', 'mouse'\]"),
    ],
)
def test_describe_refuses_mismatched_agents_and_policies(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_environment(minimal_config(environment=CHASE, **sections))


POLICIES = CHASE_POLICIES["policies"] | {"exploiter": {}}


FROZEN = {name: {"trainable": False} for name in ("hunter", "prey")}


EXPLOITER = {
    "learners": {
        "a": {"policy": "prey"}, "b": {"policy": "exploiter", "plays": ["hunter"]}, "c": {"policy": "hunter"},
    }
}  # fmt: skip


class Three(Chase):
    """Chase with a second prey, `vole`."""

    possible_agents = ["cat", "mouse", "vole"]


def described(league: dict[str, Any], **sections: Any) -> EnvironmentDescription:
    sections = {"environment": CHASE} | CHASE_POLICIES | sections
    return describe_environment(minimal_config(league=league, **sections))


def test_seats_give_exploiter_spaces_and_slots() -> None:
    found = described({})
    assert found.seats == {"hunter": "hunter", "prey": "prey"}
    found = described(EXPLOITER, policies=POLICIES)
    assert found.seats == {"prey": "prey", "exploiter": "hunter", "hunter": "hunter"}
    assert found.policies["exploiter"] == found.policies["hunter"] != found.policies["prey"]
    assert [found.slots(policy) for policy in ("hunter", "prey", "exploiter")] == [1, 1, 1]
    assert EnvironmentDescription.from_dict(found.as_dict()) == found


def test_league_reports_opponents_of_seated_learner() -> None:
    config = minimal_config(environment=CHASE, league=EXPLOITER, **CHASE_POLICIES | {"policies": POLICIES})
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
    league = League(config, description, policies)
    assert league.drain_events() == ["b takes the seats of hunter, where it meets prey alone (plays)"]
    assert not league.drain_events()
    opponents = league.table(Counters()).learners["b"].opponents
    assert list(opponents) == ["prey"] and all(player.startswith("prey") for player, _ in opponents["prey"])


@pytest.mark.parametrize(
    ("league", "sections", "message"),
    [
        ({"sides": [["cat"], ["dog"]]}, {},
         r"league.sides names \['dog'\], but the environment has \['cat', 'mouse'\]"),
        ({"sides": [["cat"], ["mouse", "dog"]]}, {}, r"names \['dog'\]"),
        ({"learners": {"a": {"policy": "exploiter"}}}, {"policies": POLICIES | FROZEN},
         "'exploiter' would take the seats of 'exploiter', to which no agent is mapped"),
        ({"learners": {"a": {"policy": "prey", "plays": ["hunter"]}}}, {"policies": FROZEN | {"prey": {}}},
         "'prey' plays in the seats of 'hunter', and has agents of its own"),
        ({"learners": {"a": {"policy": "prey"}}},
         {"policies": POLICIES | {"hunter": {"trainable": False}, "exploiter": {"trainable": False}}},
         r"policies \['exploiter'\] have no agent"),
    ],
)  # fmt: skip
def test_describe_refuses_mismatched_sides_and_learners(
    league: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        described(league, **sections)


def test_check_new_refuses_shadowed_agent_pattern() -> None:
    def new(more: dict[str, str]) -> None:
        three, agents = CHASE | {"id": f"{__name__}:Three"}, {"cat": "hunter", "mouse": "other"} | more
        config = minimal_config(environment=three, agents=agents, policies={"hunter": {}, "prey": {}, "other": {}})
        check_new(config, describe_environment(config))

    with pytest.raises(
        ConfigError, match=r"agents\.v\*=other maps no agent: 'vole' is mapped by '\*', which comes first"
    ):
        new({"*": "prey", "v*": "other"})
    new({"*": "prey", "v*": "prey", "c*": "other"})
    new({"v*": "prey", "*": "other"})


@pytest.mark.parametrize("name", ["vdn", "qmix"])
def test_describe_refuses_team_playing_itself(name: str) -> None:
    pairs = {"environment": {"api": "pettingzoo", "id": f"{MODULE}:Pairs"}, "algorithm": {"name": name}}
    league, sides = {"sides": [["a0", "a1"], ["b0", "b1"]]}, {"agents": {"a*": "a", "b*": "b"}}
    with pytest.raises(ConfigError, match=rf"'one' learns by {name}.* plays the sides .*'a0', 'a1'.*'b0', 'b1'"):
        described(league, **pairs, policies={"one": {}}, agents={"*": "one"})
    assert described(league, **pairs, policies={"a": {}, "b": {}}, **sides).slots("a") == 2
    del pairs["algorithm"]
    with pytest.raises(ConfigError, match=r"'one' learns by a critic that observes its team.* plays the sides .*'a0'"):
        described(league, **pairs, policies={"one": {"critic_observes": "team"}}, agents={"*": "one"})


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_at": {"mean_return": {"exploiter": 1.0}}},
        {"environment": CHASE | {"parameters": {"cat_steps": {"lessons": [
            {"value": 2, "until": {"return": 1, "policy": "exploiter"}}, {"value": 3}
        ]}}}},
    ],
)  # fmt: skip
def test_seated_learner_has_no_return_target(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'exploiter' has no agents, and so no return: it plays in the seats of 'hun"):
        described(EXPLOITER, policies=POLICIES, **asked)


class LikeDQN(DQN):
    """User-defined algorithm, whose section is known once its class is imported."""

    Config = DQNConfig


def test_league_reset_refuses_user_replay_algorithm() -> None:
    own = {"algorithm": {"name": f"{__name__}:LikeDQN"}, "heatup": "0 env_steps"}
    league = {
        "learners": {"cat": {"policy": "hunter", "reset": {"or_after": "9 episodes"}}, "mouse": {"policy": "prey"}}
    }
    config = minimal_config(environment=CHASE, league=league, **CHASE_POLICIES, **own)
    with pytest.raises(
        ConfigError, match=r"learners\.cat\.reset with the algorithm .*LikeDQN.* of 'hunter': its replay"
    ):
        check(config, inline=True)


def test_check_new_refuses_cnn_without_image() -> None:
    def new(**policy: Any) -> None:
        environment = {"api": "pettingzoo", "id": "classic/connect_four-v3"}
        config = minimal_config(environment=environment, policies={"default": policy})
        check_new(config, describe_environment(config))

    new()
    message = r"policies\.default\.cnn would change nothing: .* and observed is observation \[6, 7, 2\] of int8; return"
    with pytest.raises(ConfigError, match=message):
        new(cnn=[[128, 4, 1]])


def test_check_new_refuses_return_summed_over_sides() -> None:
    """Evaluations play current weights on all of them: of a zero-sum game it is always 0."""

    def new(asked: Any, **more: Any) -> None:
        config = minimal_config(**({"environment": CHASE, "league": {}, "stop_at": {"mean_return": asked}} | more))
        check_new(config, describe_environment(config))

    pairs = {"environment": {"api": "pettingzoo", "id": f"{MODULE}:Pairs"}}
    alone = pairs | {"policies": {"main": {}}, "agents": {"*": "main"}}
    with pytest.raises(ConfigError, match=r"mean_return would add up the returns of 2 sides of the league"):
        new(0.5, **CHASE_POLICIES)
    with pytest.raises(ConfigError, match=r"mean_return\.main would add up the returns of 4 sides"):
        new({"main": 0.5}, **alone)
    new({"hunter": 0.5}, **CHASE_POLICIES)


def test_rating_lesson_requires_learner() -> None:
    until = {"rating": 30, "policy": "prey"}
    lessons = {"parameters": {"cat_steps": {"lessons": [{"value": 2, "until": until}, {"value": 3}]}}}
    policies = {"hunter": {}, "prey": {"trainable": False}}
    with pytest.raises(ConfigError, match=r"'prey' has no rating; the learners have: \['hunter'\]"):
        described({}, environment=CHASE | lessons, policies=policies)


def test_seated_team_critic_has_seat_agents() -> None:
    three = CHASE | {"id": f"{__name__}:Three"}
    agents = {"cat": "hunter", "mouse": "prey", "vole": "prey"}
    league = {"learners": {"a": {"policy": "exploiter", "plays": ["prey"]}}, "sides": [["cat"], ["mouse", "vole"]]}
    policies = POLICIES | {"exploiter": {"critic_observes": "team"}, **FROZEN}
    config = minimal_config(environment=three, agents=agents, policies=policies, league=league)
    description = describe_environment(config)
    made = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
    assert getattr(made["exploiter"], "agents", None) == 2


def test_describe_refuses_incomplete_or_mixed_sides() -> None:
    three = CHASE | {"id": f"{__name__}:Three"}
    agents = {"cat": "hunter", "mouse": "prey", "vole": "prey"}
    for sides, message in (
        ([["cat"], ["mouse"]], r"league.sides has no side for \['vole'\]"),
        (
            [["cat", "mouse"], ["vole"]],
            r"\['cat', 'mouse'\] of one side are mapped to the policies \['hunter', 'prey'\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            described({"sides": sides}, environment=three, agents=agents)
    assert described({"sides": [["cat"], ["mouse", "vole"]]}, environment=three, agents=agents).slots("prey") == 2
