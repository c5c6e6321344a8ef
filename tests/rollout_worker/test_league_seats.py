"""A league's sides and learners against the environment's agents."""

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
from tests.support.environments import CHASE, CHASE_POLICIES, Chase
from tests.support.games import MODULE

POLICIES = CHASE_POLICIES["policies"] | {"exploiter": {}}
FROZEN = {name: {"trainable": False} for name in ("hunter", "prey")}
EXPLOITER = {
    "learners": {
        "a": {"policy": "prey"}, "b": {"policy": "exploiter", "plays": ["hunter"]}, "c": {"policy": "hunter"},
    }
}  # fmt: skip


class Three(Chase):
    """A second prey, `vole`."""

    possible_agents = ["cat", "mouse", "vole"]


def described(league: dict[str, Any], **sections: Any) -> EnvironmentDescription:
    sections = {"environment": CHASE} | CHASE_POLICIES | sections
    return describe_environment(minimal_config(league=league, **sections))


def test_each_agent_is_a_side_and_an_exploiter_has_the_spaces_and_slots_of_whose_seats_it_takes() -> None:
    found = described({})
    assert found.seats == {"hunter": "hunter", "prey": "prey"}
    found = described(EXPLOITER, policies=POLICIES)
    assert found.seats == {"prey": "prey", "exploiter": "hunter", "hunter": "hunter"}
    assert found.policies["exploiter"] == found.policies["hunter"] != found.policies["prey"]
    assert [found.slots(policy) for policy in ("hunter", "prey", "exploiter")] == [1, 1, 1]
    assert EnvironmentDescription.from_dict(found.as_dict()) == found


def test_who_takes_the_seats_of_a_policy_that_it_does_not_meet_is_told_whom_it_meets() -> None:
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
def test_sides_and_learners_that_do_not_fit_the_environment_are_told(
    league: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        described(league, **sections)


def test_a_pattern_that_another_swallows_is_told_where_it_says_something_else() -> None:
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
def test_a_team_that_plays_against_itself_is_refused(name: str) -> None:
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
def test_a_learner_in_the_seats_of_another_has_no_return_that_could_be_asked_for(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'exploiter' has no agents, and so no return: it plays in the seats of 'hun"):
        described(EXPLOITER, policies=POLICIES, **asked)


class LikeDQN(DQN):
    """A user's own: what it has of a section is known once its class is imported."""

    Config = DQNConfig


def test_an_own_algorithm_with_a_replay_buffer_begins_not_again() -> None:
    own = {"algorithm": {"name": f"{__name__}:LikeDQN"}, "heatup": "0 env_steps"}
    league = {
        "learners": {"cat": {"policy": "hunter", "reset": {"or_after": "9 episodes"}}, "mouse": {"policy": "prey"}}
    }
    config = minimal_config(environment=CHASE, league=league, **CHASE_POLICIES, **own)
    with pytest.raises(
        ConfigError, match=r"learners\.cat\.reset with the algorithm .*LikeDQN.* of 'hunter': its replay"
    ):
        check(config, inline=True)


def test_convolutions_without_an_image_are_told() -> None:
    def new(**policy: Any) -> None:
        environment = {"api": "pettingzoo", "id": "classic/connect_four-v3"}
        config = minimal_config(environment=environment, policies={"default": policy})
        check_new(config, describe_environment(config))

    new()
    message = r"policies\.default\.cnn would change nothing: .* and observed is observation \[6, 7, 2\] of int8; let"
    with pytest.raises(ConfigError, match=message):
        new(cnn=[[128, 4, 1]])


def test_a_return_that_adds_up_sides_ends_no_new_run() -> None:
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


def test_a_lesson_by_rating_is_of_a_learner() -> None:
    until = {"rating": 30, "policy": "prey"}
    lessons = {"parameters": {"cat_steps": {"lessons": [{"value": 2, "until": until}, {"value": 3}]}}}
    policies = {"hunter": {}, "prey": {"trainable": False}}
    with pytest.raises(ConfigError, match=r"'prey' has no rating; the learners have: \['hunter'\]"):
        described({}, environment=CHASE | lessons, policies=policies)


def test_a_team_s_critic_of_a_learner_in_the_seats_of_another_has_as_many_agents() -> None:
    three = CHASE | {"id": f"{__name__}:Three"}
    agents = {"cat": "hunter", "mouse": "prey", "vole": "prey"}
    league = {"learners": {"a": {"policy": "exploiter", "plays": ["prey"]}}, "sides": [["cat"], ["mouse", "vole"]]}
    policies = POLICIES | {"exploiter": {"critic_observes": "team"}, **FROZEN}
    config = minimal_config(environment=three, agents=agents, policies=policies, league=league)
    description = describe_environment(config)
    made = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
    assert getattr(made["exploiter"], "agents", None) == 2


def test_an_agent_without_a_side_and_a_side_of_two_policies_are_told() -> None:
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
