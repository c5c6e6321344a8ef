"""The number of workers that `auto` finds, against a model of a run whose true demand is known."""

from __future__ import annotations

import math
import re

import pytest

from coordinator.autoscale import Autoscale, Decision, Window
from shared.heartbeat import Beat

WINDOW = 10.0


def beat(role: str, index: int, at: float, waited: dict[str, float], version: int = 0, pid: int = 1) -> Beat:
    return Beat(
        role=role, id=role if role == "trainer" else f"worker-{index}", stamp=f"{at:.3f}", age_seconds=0.1, pid=pid,
        host="here", ended=None, waiting_for=None, waiting_seconds=0.0, deadline_seconds=0.0,
        progress={"version": version}, waited=dict(waited),
    )  # fmt: skip


class Model:
    """A run in seconds: acting a fragment takes `act`, learning from an update `learn`; beats come once a second."""

    def __init__(self, act: float, learn: float, batch: int, lag: int, cores: float = math.inf) -> None:
        self.act, self.learn, self.batch, self.lag, self.cores = act, learn, batch, lag, cores
        self.at, self.version = 1000.0, 0.0
        self.waited: dict[str, dict[str, float]] = {}
        self.autoscale = Autoscale(WINDOW, batch, lag)
        self.workers = 1
        self.history: list[int] = []
        self.decisions: list[Decision] = []
        self.elsewhere = 0.0
        """Share of the time that the trainer waits for the store."""

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

    def run(self, seconds: int, least: int = 1, most: int = 1000) -> None:
        """Second after second; what is decided is done at once."""
        for _ in range(seconds):
            trainer, worker, updates = self.shares()
            self.at += 1.0
            self.version += updates * (1.0 - self.elsewhere)
            self._wait("trainer", "experience", trainer * (1.0 - self.elsewhere))
            self._wait("trainer", "the store", self.elsewhere)
            for index in range(self.workers):
                self._wait(f"worker-{index}", "credit", worker)
            beats = [beat("worker", i, self.at, self.waited[f"worker-{i}"]) for i in range(self.workers)]
            told = beat("trainer", 0, self.at, self.waited["trainer"], int(self.version))
            decision = self.autoscale.look(told, beats, least, most)
            if decision is not None and decision.workers != self.workers:
                self.decisions.append(decision)
                self.workers = decision.workers
            self.history.append(self.workers)

    def _wait(self, who: str, name: str, seconds: float) -> None:
        waits = self.waited.setdefault(who, {})
        waits[name] = waits.get(name, 0.0) + seconds


@pytest.mark.parametrize("needed", [0.4, 0.97, 1.05, 1.2, 2.0, 2.5, 3.3, 7.1, 12.0, 19.9])
@pytest.mark.parametrize("begin", [1, 2, 5, 16, 40])
def test_it_comes_to_what_the_trainer_needs_and_stays_there(needed: float, begin: int) -> None:
    model = Model(act=0.05 * needed, learn=0.2, batch=4, lag=9)  # `needed` workers keep the trainer just busy
    model.workers = begin
    model.run(400)
    assert needed * 0.9 <= model.workers <= max(math.ceil(needed * 1.05), 1), model.history
    assert len(set(model.history[200:])) == 1, "it stays"
    ups = [after > before for before, after in zip(model.history, model.history[1:], strict=False) if after != before]
    assert len(set(ups)) <= 1, f"it goes one way only: {model.history}"


def test_each_step_is_bounded_and_says_why() -> None:
    model = Model(act=0.8, learn=0.2, batch=4, lag=9)
    model.run(100)
    assert [decision.workers for decision in model.decisions] == [2, 4, 8, 16]
    assert model.decisions[0].why == "the trainer waited 94 % of the last 10 s for experience"
    model = Model(act=0.05, learn=0.2, batch=4, lag=9)
    model.workers = 9
    model.run(100)
    assert [decision.workers for decision in model.decisions] == [5, 3, 2]
    assert model.decisions[0].why == "workers waited 89 % of the last 10 s for credit"


def test_what_changes_is_followed() -> None:
    model = Model(act=0.2, learn=0.2, batch=4, lag=3)
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
    model = Model(act=0.1, learn=learn, batch=8, lag=0)
    model.workers = begin
    model.run(2000)
    assert len(set(model.history[-500:])) == 1, "it stays"
    if begin == 1 or expected == 8:
        assert model.workers == expected, model.history[::50]
    assert model.workers <= 8, "more than K can never hold a claim"


def test_workers_that_can_never_hold_a_claim_go() -> None:
    model = Model(act=1.0, learn=0.1, batch=2, lag=1)
    model.workers = 12
    model.run(60)
    assert model.workers == 4
    assert model.decisions[0].why == "no more than 4 can hold a claim at the same time"


def test_the_bounds_are_kept_and_what_was_wanted_is_told() -> None:
    model = Model(act=0.8, learn=0.2, batch=4, lag=9)
    model.run(100, least=2, most=6)
    assert max(model.history) == model.workers == 6
    model.learn, model.act = 1.0, 0.01
    model.run(200, least=2, most=6)
    assert model.workers == 2


def test_workers_that_bring_nothing_are_taken_back_and_not_tried_again_for_long() -> None:
    model = Model(act=0.4, learn=0.2, batch=4, lag=9, cores=2)
    model.run(250)
    assert model.history.count(4) < 40
    assert model.workers == 2
    whys = [decision.why for decision in model.decisions if decision.workers == 2]
    assert re.fullmatch(r"4 workers brought \d % more updates than 2", whys[-1])
    assert sum(decision.workers > 2 for decision in model.decisions) == 1


def test_while_the_store_is_what_the_trainer_waits_for_nothing_is_done() -> None:
    model = Model(act=0.05, learn=0.2, batch=4, lag=9)
    model.workers, model.elsewhere = 8, 0.6
    model.run(100)
    assert model.decisions == []


def test_a_window_begins_anew_with_whoever_joins_leaves_or_is_replaced() -> None:
    window = Window(3.0)

    def look(at: float, crew: list[tuple[int, int]]) -> bool:
        told = beat("trainer", 0, at, {"experience": at / 2}, version=int(at * 10))
        return window.look(told, [beat("worker", index, at, {}, pid=pid) for index, pid in crew]) is not None

    def first(begin: int, crew: list[tuple[int, int]]) -> int:
        return next(second for second in range(10) if look(float(begin + second), crew))

    for number, crew in enumerate(([(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 2)], [(1, 2)])):
        assert first(100 * (number + 1), crew) == 3
    window.restart()
    assert not look(404.0, [(1, 2)])


def test_a_window_lasts_until_there_have_been_some_updates() -> None:
    window = Window(3.0)
    full = []
    for second in range(100):
        told = beat("trainer", 0, 50.0 + second, {"experience": 0.5 * second}, version=second // 10)
        shares = window.look(told, [beat("worker", 0, 50.0 + second, {"credit": 0.25 * second})])
        full.append(shares is not None)
    assert full.index(True) == 40
    assert shares is not None
    assert (shares.experience, shares.credit) == (0.5, 0.25)
    assert 40 <= shares.seconds <= 51


def test_one_long_wait_that_goes_on_is_seen() -> None:
    window, shares = Window(3.0), None
    for second in range(20):
        told = beat("trainer", 0, 50.0 + second, {"experience": float(second)}, version=second)
        shares = window.look(told, [beat("worker", 0, 50.0 + second, {})])
    assert shares is not None
    assert (shares.experience, shares.elsewhere) == (1.0, 0.0)
