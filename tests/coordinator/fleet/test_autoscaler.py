"""The number of workers that `auto` finds, against a model of a run whose true demand is known; and what is ordered,
what comes of it and what is said of it, in a real Redis.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from stagecoach.coordinator.fleet.autoscaler import Autoscale, Decision, Scaling, Window
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.heartbeat import Beat
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole, minimal_config

WINDOW = 10.0
WHY = "the trainer waited 50 % of the last 2 s for experience"


def beat(
    role: str, index: int, at: float, waited: dict[str, float], version: int = 0, pid: int = 1, **progress: Any
) -> Beat:
    return Beat(
        role=role, id=role if role == "trainer" else f"worker-{index}", stamp=f"{at:.3f}", age_seconds=0.1, pid=pid,
        host="here", ended=None, waiting_for=None, waiting_seconds=0.0, deadline_seconds=0.0,
        progress={"version": version} | progress, waited=dict(waited),
    )  # fmt: skip


class Model:
    """A run in seconds: acting a fragment takes `act`, learning from an update `learn`; beats come once a second."""

    def __init__(
        self, act: float, learn: float, batch: int = 4, lag: int = 9, workers: int = 1, cores: float = math.inf
    ) -> None:
        self.act, self.learn, self.batch, self.lag, self.workers, self.cores = act, learn, batch, lag, workers, cores
        self.at, self.version = 1000.0, 0.0
        self.waited: dict[str, dict[str, float]] = {}
        self.autoscale = Autoscale(WINDOW, batch, lag)
        self.history: list[int] = []
        self.decisions: list[Decision] = []
        """Those that change the number."""
        self.all: list[Decision] = []

    def shares(self) -> tuple[float, float, float]:
        """The trainer's wait, the workers' wait, and updates per second, as this many workers give them."""
        act = self.act * max(1.0, self.workers / self.cores)
        if self.lag == 0:
            acting = math.ceil(self.batch / self.workers) * act
            total = acting + self.learn
            busy = self.batch * act / (min(self.workers, self.batch) * total)
            return acting / total, 1.0 - busy * min(1.0, self.batch / self.workers), 1.0 / total
        offered = min(self.workers, (self.lag + 1) * self.batch) / act / self.batch
        updates = min(offered, 1.0 / self.learn)
        return 1.0 - updates * self.learn, 1.0 - updates * self.batch * act / self.workers, updates

    def run(self, seconds: int) -> None:
        """Second after second; what is decided is done at once."""
        for _ in range(seconds):
            trainer, worker, updates = self.shares()
            self.at += 1.0
            self.version += updates
            self._wait("trainer", "experience", trainer)
            for index in range(self.workers):
                self._wait(f"worker-{index}", "credit", worker)
            beats = [beat("worker", i, self.at, self.waited[f"worker-{i}"]) for i in range(self.workers)]
            told = beat("trainer", 0, self.at, self.waited["trainer"], int(self.version))
            decision = self.autoscale.decide(told, beats, 1, 1000)
            self.all += [] if decision is None else [decision]
            if decision is not None and decision.workers != self.workers:
                self.decisions.append(decision)
                self.workers = decision.workers
            self.history.append(self.workers)

    def _wait(self, who: str, name: str, seconds: float) -> None:
        waits = self.waited.setdefault(who, {})
        waits[name] = waits.get(name, 0.0) + seconds


@pytest.mark.parametrize("needed", [0.4, 0.97, 1.05, 1.2, 2.0, 2.5, 3.3, 7.1, 12.0, 19.9])
@pytest.mark.parametrize("begin", [1, 2, 5, 16, 40])
def test_autoscale_converges_to_demand(needed: float, begin: int) -> None:
    model = Model(act=0.05 * needed, learn=0.2, workers=begin)  # `needed` workers keep the trainer just busy
    model.run(400)
    assert needed * 0.9 <= model.workers <= max(math.ceil(needed * 1.05), 1), model.history
    assert len(set(model.history[200:])) == 1, "it stays"
    ups = [after > before for before, after in zip(model.history, model.history[1:], strict=False) if after != before]
    assert len(set(ups)) <= 1, f"it goes one way only: {model.history}"


@pytest.mark.parametrize(
    ("model", "decided", "why"),
    [
        (Model(act=0.8, learn=0.2), [2, 4, 8, 16], "the trainer waited 94 % of the last 10 s for experience"),
        (Model(act=0.05, learn=0.2, workers=9), [5, 3, 2], "workers waited 89 % of the last 10 s for credit"),
        (Model(act=1.0, learn=0.1, batch=2, lag=1, workers=12), [4], "no more than 4 can hold a claim at the same"),
    ],
)
def test_each_step_is_bounded_and_says_why(model: Model, decided: list[int], why: str) -> None:
    model.run(100)
    assert [decision.workers for decision in model.decisions] == decided
    assert model.decisions[0].why.startswith(why)


def test_autoscale_follows_changed_demand() -> None:
    model = Model(act=0.2, learn=0.2, lag=3)
    model.run(200)
    assert model.workers == 4
    model.act = 0.5  # the environment has become slower
    model.run(200)
    assert model.workers == 10
    model.learn = 1.0  # two are just enough, and a little is kept to spare
    model.run(200)
    assert model.workers == 3


@pytest.mark.parametrize(("learn", "expected"), [(0.001, 8), (0.3, 8), (3.0, 2), (60.0, 1)])
@pytest.mark.parametrize("begin", [1, 3, 8, 30])
def test_lockstep_takes_as_many_as_make_an_update_faster(learn: float, expected: int, begin: int) -> None:
    model = Model(act=0.1, learn=learn, batch=8, lag=0, workers=begin)
    model.run(2000)
    assert len(set(model.history[-500:])) == 1, "it stays"
    if begin == 1 or expected == 8:
        assert model.workers == expected, model.history[::50]
    assert model.workers <= 8, "more than K can never hold a claim"


def test_autoscale_removes_useless_workers_and_waits() -> None:
    model = Model(act=0.4, learn=0.2, cores=2)
    model.run(250)
    assert model.history.count(4) < 40
    assert model.workers == 2
    whys = [decision.why for decision in model.decisions if decision.workers == 2]
    assert re.fullmatch(r"4 workers brought \d % more updates than 2; the trainer waited .*", whys[-1])
    assert sum(decision.workers > 2 for decision in model.decisions) == 1
    held = [decision.held.text for decision in model.all if decision.held is not None]
    assert re.fullmatch(
        r"4 workers are wanted \(the trainer waited \d+ % of the last 10 s for experience.*\), but no more than 2 are "
        r"tried for another \d+ s: more brought too little", held[0],
    ), held[0]  # fmt: skip


def test_window_restarts_when_workers_change() -> None:
    window = Window(3.0)

    def look(at: float, crew: list[tuple[int, int]]) -> bool:
        told = beat("trainer", 0, at, {"experience": at / 2}, version=int(at * 10))
        return window.add(told, [beat("worker", index, at, {}, pid=pid) for index, pid in crew]) is not None

    for number, crew in enumerate(([(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 2)], [(1, 2)]), start=1):
        assert [look(100.0 * number + second, crew) for second in range(4)] == [False, False, False, True]
    window.restart()
    assert not look(404.0, [(1, 2)])


def test_window_lasts_some_updates() -> None:
    window = Window(3.0)
    full = []
    for second in range(100):
        told = beat("trainer", 0, 50.0 + second, {"experience": 0.5 * second}, version=second // 10)
        shares = window.add(told, [beat("worker", 0, 50.0 + second, {"credit": 0.25 * second})])
        full.append(shares is not None)
    assert full.index(True) == 40
    assert shares is not None
    assert (shares.experience, shares.credit) == (0.5, 0.25)
    assert 40 <= shares.seconds <= 51


@pytest.fixture
def role(make_role: MakeRole) -> RunContext:
    rollout = {"scaling": "auto", "max_workers": 8, "fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 9}
    return make_role(minimal_config(rollout=rollout | {"scaling_window_seconds": 2}))


class Crew:
    """A fleet whose heartbeats say what a test wants them to say."""

    def __init__(self, role: RunContext) -> None:
        self.role, self.scaling = role, Scaling(role)
        self.at, self.workers, self.unplaced = 100.0, 2, 0
        self.phase, self.reads_again, self.version = "train", False, 0
        self.waited = {"experience": 0.0, "credit": 0.0, "the store": 0.0}
        self.starting: set[str] = set()

    def look(self, experience: float = 0.0, credit: float = 0.0, room: int = 100, others: float = 0.0) -> int:
        """A second later: what the fleet would be brought to."""
        self.at += 1
        self.waited["experience"] += experience
        self.waited["credit"] += credit
        self.waited["the store"] += others
        self.version += 2 * self.workers
        flow = self.role.flow.read()
        trainer: dict[str, Any] = {"version": self.version, "phase": self.phase, "reads_again": self.reads_again}
        names = [f"worker-{index}" for index in range(self.workers + self.unplaced)]
        beats = {
            "trainer": beat(
                "trainer", 0, self.at, {name: self.waited[name] for name in ("experience", "the store")}, **trainer
            )
        }
        for index, name in enumerate(names[: self.workers]):
            fragments = 0 if name in self.starting else 5
            beats[name] = beat("worker", index, self.at, {"credit": self.waited["credit"]}, fragments=fragments)
        return self.scaling.desired(flow, beats, names, names[self.workers :], room)

    def after(self, looks: int, **waits: Any) -> int:
        """What the fleet would be brought to after so many seconds."""
        return [self.look(**waits) for _ in range(looks)][-1]

    def told(self) -> list[str]:
        """The events of scaling."""
        return [event.text for event in read_events(self.role.redis, self.role.run_id) if event.kind == "scaling"]

    def data(self) -> list[dict[str, Any]]:
        """Their numbers."""
        return [event.data for event in read_events(self.role.redis, self.role.run_id) if event.kind == "scaling"]


def test_scaling_writes_and_explains_decisions(role: RunContext) -> None:
    crew = Crew(role)
    assert crew.after(2, experience=0.5) == 2, "too little seen"
    assert crew.after(1, experience=0.5) == 4
    assert role.flow.read().desired_workers == 4
    crew.workers = 4
    assert crew.after(3, credit=0.5) == 3
    assert crew.told() == [f"scaled 2 → 4: {WHY}", "scaled 4 → 3: workers waited 50 % of the last 2 s for credit"]
    up, down = crew.data()
    shares = {"waited_for_experience": 0.5, "waited_for_others": 0.0, "waited_for_credit": 0.0}
    window = {"window_seconds": 2.0, "updates_per_second": 4.0}
    assert up == {"before": 2, "workers": 4, "wanted": 4, "least": 1, "most": 8} | shares | window
    assert (down["before"], down["workers"], down["waited_for_credit"]) == (4, 3, 0.5)


def test_fewer_than_the_bound_are_wanted_and_the_step_says_so(role: RunContext) -> None:
    crew = Crew(role)
    role.flow.set_scaling("auto", 6, 8, 8)
    crew.workers = 8
    assert crew.after(3, credit=0.9) == 6
    waited = "workers waited 90 % of the last 2 s for credit; no fewer than half as many at once"
    fewest = "4 wanted, 6 is the fewest (rollout.min_workers, or --min)"
    role.flow.set_scaling("auto", 1, 8, 8)
    assert crew.told() == [f"scaled 8 → 6: {waited}; {fewest}"]


def test_scaling_reports_an_obstacle_once(role: RunContext) -> None:
    crew = Crew(role)
    assert crew.after(20, experience=0.5, others=0.3) == 2
    assert crew.after(20, experience=0.5, others=0.3, room=2) == 2, "that of the store comes first"
    assert crew.after(20, experience=0.5, room=2) == 2
    role.flow.set_scaling("auto", 1, 2)
    assert crew.after(20, experience=0.5) == 2
    others, room, bound = crew.told()
    assert others.endswith("but the trainer waited 30 % of that time for something else, mostly the store")
    assert (
        others.startswith(f"4 workers would do ({WHY})")
        and room == f"4 workers are wanted ({WHY}), but 2 is all that fit"
    )
    assert bound == f"4 workers are wanted ({WHY}), but 2 is the bound (rollout.max_workers, or --max)"
    assert [(each["before"], each["workers"], each["most"]) for each in crew.data()[:2]] == [(2, 2, 8), (2, 2, 2)]
    assert crew.data()[0]["waited_for_others"] == 0.3


def test_scaling_leaves_fixed_number(role: RunContext) -> None:
    crew = Crew(role)
    role.flow.set_scaling("fixed", 1, 8, 5)
    crew.workers = 5
    assert crew.after(10, experience=1.0) == 5
    assert crew.told() == []
    role.flow.set_scaling("auto", 6, 8)
    assert crew.look() == 6, "new bounds hold at once"
    role.flow.set_scaling("auto", 1, 1)
    assert crew.look() == 1
    assert crew.told() == ["scaled 5 → 6: the bounds are 6 and 8", "scaled 6 → 1: the bounds are 1 and 1"]


def test_scaling_keeps_concurrent_order(role: RunContext) -> None:
    crew = Crew(role)
    crew.after(2, experience=0.5)
    flow = role.flow.read()
    role.flow.set_scaling("fixed", 1, 8, 7)
    assert not role.flow.set_desired_workers(4, "auto")
    assert (role.flow.read().desired_workers, flow.desired_workers) == (7, 2)
    assert crew.look(experience=0.5) == 7


def test_scaling_waits_for_start_reread_and_warmup(role: RunContext) -> None:
    crew = Crew(role)
    crew.starting = {"worker-1"}
    assert crew.after(6, experience=1.0) == 2
    crew.starting = set()
    crew.reads_again = True
    assert crew.after(6, credit=1.0) == 2, "a trainer that reads the log again needs its workers soon"
    crew.reads_again, crew.phase = False, "heatup"
    assert crew.after(6, experience=1.0) == 2
    assert crew.told() == []


def test_scaling_stops_growth_for_unplaced_workers(role: RunContext) -> None:
    crew = Crew(role)
    role.flow.set_desired_workers(4)
    crew.unplaced = 2
    assert crew.after(20, experience=0.5) == 4, "they wait for a machine"
    assert crew.after(20, credit=0.02) == 2, "nobody waits for them any more"
    assert crew.told() == [
        f"more than 2 workers are wanted ({WHY}), but no machine has capacity for another",
        "scaled 4 → 2: worker-2, worker-3 had no place, and are not needed; "
        "the trainer waited 0 % of the last 2 s for experience",
    ]


def test_scaling_without_bound_grows_to_cores(role: RunContext) -> None:
    crew = Crew(role)
    crew.scaling = Scaling(role, cores=3)
    role.flow.set_scaling("auto", 1, None)
    assert crew.after(3, experience=0.5) == 3
    role.flow.set_scaling("auto", 1, None, 5)
    crew.workers = 5
    assert crew.after(9) == 5
    assert crew.told() == [f"scaled 2 → 3: {WHY}; 4 wanted, 3 is one for each core (--max allows more)"]
