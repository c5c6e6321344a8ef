"""What is ordered, what `auto` makes of it, and what it says, in a real Redis."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.scaling import Scaling
from shared.events import read_events
from shared.heartbeat import Beat
from shared.role import Role
from tests.conftest import MakeRole, minimal_config


@pytest.fixture
def role(make_role: MakeRole) -> Role:
    rollout = {"scaling": "auto", "max_workers": 8, "fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 9}
    return make_role(minimal_config(rollout=rollout | {"scaling_window_seconds": 2}))


class Crew:
    """A fleet whose heartbeats say what a test wants them to say."""

    def __init__(self, role: Role) -> None:
        self.role, self.scaling = role, Scaling(role)
        self.at, self.workers, self.unplaced = 100.0, 2, 0
        self.phase, self.reads_again, self.version = "train", False, 0
        self.waited = {"experience": 0.0, "credit": 0.0}
        self.starting: set[str] = set()

    def beat(self, name: str, wait: str, progress: dict[str, Any]) -> Beat:
        return Beat(
            role="trainer" if name == "trainer" else "worker", id=name, stamp=str(self.at), age_seconds=0.1, pid=1,
            host="here", ended=None, waiting_for=None, waiting_seconds=0.0, deadline_seconds=0.0, progress=progress,
            waited={wait: self.waited[wait]},
        )  # fmt: skip

    def look(self, experience: float = 0.0, credit: float = 0.0, room: int = 100) -> int:
        """A second later: what the fleet would be brought to."""
        self.at += 1
        self.waited["experience"] += experience
        self.waited["credit"] += credit
        self.version += 2 * self.workers
        flow = self.role.flow.read()
        progress = {"phase": self.phase, "version": self.version, "reads_again": self.reads_again}
        names = [f"worker-{index}" for index in range(self.workers + self.unplaced)]
        beats = {"trainer": self.beat("trainer", "experience", progress)}
        for name in names[: self.workers]:
            beats[name] = self.beat(name, "credit", {"fragments": 0 if name in self.starting else 5})
        return self.scaling.desired(flow, beats, names, names[self.workers :], room)

    def after(self, looks: int, **waits: Any) -> int:
        """The answer to the last of so many looks."""
        return [self.look(**waits) for _ in range(looks)][-1]

    def told(self) -> list[str]:
        """The events of scaling."""
        return [event.text for event in read_events(self.role.redis, self.role.run_id) if event.kind == "scaling"]


def test_it_grows_and_shrinks_writes_what_it_decides_and_says_why(role: Role) -> None:
    crew = Crew(role)
    assert crew.after(2, experience=0.5) == 2, "too little seen"
    assert crew.after(1, experience=0.5) == 4
    assert role.flow.read().desired_workers == 4
    crew.workers = 4
    assert crew.after(3, credit=0.5) == 3
    assert crew.told() == [
        "scaled 2 → 4: the trainer waited 50 % of the last 2 s for experience",
        "scaled 4 → 3: workers waited 50 % of the last 2 s for credit",
    ]


def test_a_fixed_number_is_left_alone(role: Role) -> None:
    crew = Crew(role)
    role.flow.set_scaling("fixed", 1, 8, 5)
    crew.workers = 5
    assert crew.after(10, experience=1.0) == 5
    assert crew.told() == []


def test_an_order_that_came_meanwhile_stands(role: Role) -> None:
    crew = Crew(role)
    crew.after(2, experience=0.5)
    flow = role.flow.read()
    role.flow.set_scaling("fixed", 1, 8, 7)
    assert not role.flow.set_desired_workers(4, "auto")
    assert (role.flow.read().desired_workers, flow.desired_workers) == (7, 2)
    assert crew.look(experience=0.5) == 7


def test_nothing_is_decided_while_workers_start_or_the_trainer_reads_again_or_in_heatup(role: Role) -> None:
    crew = Crew(role)
    crew.starting = {"worker-1"}
    assert crew.after(6, experience=1.0) == 2
    crew.starting = set()
    crew.reads_again = True
    assert crew.after(6, credit=1.0) == 2, "a trainer that reads the log again needs its workers soon"
    crew.reads_again, crew.phase = False, "heatup"
    assert crew.after(6, experience=1.0) == 2
    assert crew.told() == []


def test_new_bounds_hold_at_once(role: Role) -> None:
    crew = Crew(role)
    role.flow.set_scaling("auto", 3, 8)
    assert crew.look() == 3
    role.flow.set_scaling("auto", 1, 1)
    assert crew.look() == 1
    assert crew.told() == ["scaled 2 → 3: the bounds are 3 and 8", "scaled 3 → 1: the bounds are 1 and 1"]


def test_what_is_wanted_and_cannot_be_is_said_once(role: Role) -> None:
    crew = Crew(role)
    assert crew.after(20, experience=0.5, room=2) == 2
    role.flow.set_scaling("auto", 1, 2)
    assert crew.after(20, experience=0.5) == 2
    why = "the trainer waited 50 % of the last 2 s for experience"
    assert crew.told() == [
        f"4 workers are wanted ({why}), but 2 is all that there is room for",
        f"4 workers are wanted ({why}), but 2 is the bound (rollout.max_workers, or --max)",
    ]


def test_workers_without_a_place_stop_the_growth_and_go_when_they_are_not_needed(role: Role) -> None:
    crew = Crew(role)
    role.flow.set_desired_workers(4)
    crew.unplaced = 2
    assert crew.after(20, experience=0.5) == 4, "they wait for a machine"
    assert crew.told() == [
        "more than 2 workers are wanted (the trainer waited 50 % of the last 2 s for experience), but no machine has "
        "room for another"
    ]
    assert crew.after(20, credit=0.02) == 2, "nobody waits for them any more"
    assert crew.told()[1:] == ["scaled 4 → 2: worker-2, worker-3 had no place, and are not needed"]


def test_without_a_bound_one_machine_grows_to_its_cores_and_what_is_more_already_may_stay(role: Role) -> None:
    crew = Crew(role)
    crew.scaling = Scaling(role, cores=3)
    role.flow.set_scaling("auto", 1, None)
    assert crew.after(3, experience=0.5) == 3
    role.flow.set_scaling("auto", 1, None, 5)
    crew.workers = 5
    assert crew.after(9) == 5
    assert crew.told() == ["scaled 2 → 3: the trainer waited 50 % of the last 2 s for experience"]
