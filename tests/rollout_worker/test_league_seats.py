"""A league's sides and learners against the environment's agents."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_worker.environments.description import describe_environment
from shared.errors import ConfigError
from shared.experience.spaces import EnvironmentDescription
from tests.conftest import minimal_config
from tests.support.environments import CHASE, CHASE_POLICIES, Chase

POLICIES = CHASE_POLICIES["policies"] | {"exploiter": {}}
EXPLOITER = {"learners": {"a": {"policy": "prey"}, "b": {"policy": "exploiter", "plays": ["hunter"]}}}


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
    assert found.seats == {"prey": "prey", "exploiter": "hunter"}
    assert found.policies["exploiter"] == found.policies["hunter"] != found.policies["prey"]
    assert [found.slots(policy) for policy in ("hunter", "prey", "exploiter")] == [1, 1, 1]
    assert EnvironmentDescription.from_dict(found.as_dict()) == found


@pytest.mark.parametrize(
    ("league", "sections", "message"),
    [
        ({"sides": [["cat"], ["dog"]]}, {},
         r"league.sides names \['dog'\], but the environment has \['cat', 'mouse'\]"),
        ({"sides": [["cat"], ["mouse", "dog"]]}, {}, r"names \['dog'\]"),
        ({"learners": {"a": {"policy": "exploiter"}}}, {"policies": POLICIES},
         "'exploiter' would take the seats of 'exploiter', to which no agent is mapped"),
        ({"learners": {"a": {"policy": "prey", "plays": ["hunter"]}}}, {},
         "'prey' plays in the seats of 'hunter', and has agents of its own"),
        ({"learners": {"a": {"policy": "prey"}}}, {"policies": POLICIES}, r"policies \['exploiter'\] have no agent"),
    ],
)  # fmt: skip
def test_sides_and_learners_that_do_not_fit_the_environment_are_told(
    league: dict[str, Any], sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        described(league, **sections)


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
