"""Number of workers to run: as ordered, or with `rollout.scaling=auto` as the waiting times suggest.

In: heartbeats (seconds waited so far, by the wait's name) of the trainer and of the workers that are at work, and how
many workers fit. Out: a number, an event for each decision that says why, and one where more are wanted but cannot be.
Nothing that is learned depends on it: the number of workers decides when fragments come, not which a version learns
from once they stand in the log.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stagecoach.shared.base.printable import counted
from stagecoach.shared.config.rollout import window
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.flow_control import FlowState
from stagecoach.shared.protocol.heartbeat import BEAT_SECONDS, Beat
from stagecoach.shared.runtime.run_context import RunContext

_SHORT = 0.10
"""The trainer waits for experience for more than this share: more workers, where they make up for as much."""
_ENOUGH = 0.05
"""Fewer workers if it waits for less than this share, or would with fewer workers."""
_SPARE = 0.05
"""Workers keep this much more than the trainer needs, so that fewer do not turn out to be too few."""
_BARREN = 0.25
"""More workers that bring less than this part of what they should have brought are removed."""
_WINDOWS_HELD = 30
"""Then no more are tried for so many windows."""
_UPDATES = 4
"""A window lasts until there have been so many, since waits are counted when they end or the next beat comes."""


@dataclass(frozen=True)
class Shares:
    """Shares of waiting time in the last window, each from 0 to 1."""

    seconds: float
    experience: float
    elsewhere: float
    """Trainer's share for anything else (mostly the store)."""
    credit: float
    """Mean share of the workers."""
    updates_per_second: float

    @property
    def trainer(self) -> str:
        return f"the trainer waited {_percent(self.experience)} of the last {self.seconds:.0f} s for experience"

    @property
    def workers(self) -> str:
        return f"workers waited {_percent(self.credit)} of the last {self.seconds:.0f} s for credit"

    def as_dict(self) -> dict[str, float]:
        """Data of an event."""
        return {
            "window_seconds": round(self.seconds, 1), "waited_for_experience": round(self.experience, 4),
            "waited_for_others": round(self.elsewhere, 4), "waited_for_credit": round(self.credit, 4),
            "updates_per_second": round(self.updates_per_second, 4),
        }  # fmt: skip


class Held(NamedTuple):
    """Obstacle to a change; the same `kind` is reported once."""

    kind: str
    text: str


class Wish(NamedTuple):
    """Desired number of workers, without bounds."""

    workers: int
    why: str = ""
    held: Held | None = None


@dataclass(frozen=True)
class Decision:
    """`workers` is the number to run; `wanted` is what it would be without bounds."""

    workers: int
    wanted: int
    why: str
    shares: Shares
    held: Held | None = None


class Bounds(NamedTuple):
    least: int
    most: int
    text: str
    """Origin of the upper bound."""


@dataclass(frozen=True)
class _Sample:
    at: float
    waited: dict[str, float]
    version: int


class Window:
    """Newest samples of a fixed set of roles; restarts when a role joins, leaves or is replaced."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Discards all samples."""
        self._crew: tuple[tuple[str, int], ...] = ()
        self._samples: dict[str, deque[_Sample]] = {}

    def add(self, trainer: Beat, workers: Sequence[Beat]) -> Shares | None:
        crew = (trainer, *workers)
        if (names := tuple((beat.id, beat.pid) for beat in crew)) != self._crew:
            self._crew, self._samples = names, {beat.id: deque() for beat in crew}
        for beat in crew:
            samples, at = self._samples[beat.id], float(beat.stamp)
            if not samples or at > samples[-1].at:
                samples.append(_Sample(at, beat.waited, int(beat.progress.get("version", 0))))
        begin = self._begin(self._samples[trainer.id])
        if begin is None or any(self._samples[beat.id][0].at > begin + 2 * BEAT_SECONDS for beat in workers):
            return None
        first, last = self._samples[trainer.id][0], self._samples[trainer.id][-1]
        seconds = last.at - first.at
        waited = {name: total - first.waited.get(name, 0.0) for name, total in last.waited.items()}
        return Shares(
            seconds=seconds,
            experience=_share(waited.pop("experience", 0.0), seconds),
            elsewhere=_share(sum(waited.values()), seconds),
            credit=sum(self._credit(worker.id, begin) for worker in workers) / max(1, len(workers)),
            updates_per_second=(last.version - first.version) / seconds,
        )

    def _begin(self, samples: deque[_Sample]) -> float | None:
        """Start of the window: at least its seconds and some updates ago."""
        found = None
        for sample in samples:
            if samples[-1].at - sample.at < self._seconds or samples[-1].version - sample.version < _UPDATES:
                break
            found = sample.at
        while found is not None and samples[0].at < found:
            samples.popleft()
        return found

    def _credit(self, worker: str, begin: float) -> float:
        samples = self._samples[worker]
        while len(samples) > 2 and samples[1].at <= begin:
            samples.popleft()
        first, last = samples[0], samples[-1]
        waited = last.waited.get("credit", 0.0) - first.waited.get("credit", 0.0)
        return _share(waited, last.at - first.at) if last.at > first.at else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _share(waited: float, seconds: float) -> float:
    return min(1.0, max(0.0, waited / seconds))


@dataclass(frozen=True)
class _Trial:
    """Workers were added; did they bring anything?"""

    before: int
    after: int
    updates_per_second: float
    expected: float
    """Times as many updates per second."""


class Autoscale:
    """Grows while the trainer waits for experience, shrinks while workers wait for credit, else leaves all as it is."""

    def __init__(self, window_seconds: float, fragments_per_update: int, max_policy_lag: int) -> None:
        self._window = Window(window_seconds)
        self._hold_seconds = _WINDOWS_HELD * window_seconds
        self._batch, self._lag = fragments_per_update, max_policy_lag
        self._useful = window(max_policy_lag, fragments_per_update)
        """More workers than this can never hold a claim at the same time."""
        self._trial: _Trial | None = None
        self._held, self._held_until = 0, -math.inf
        """No more than this number until then, since more brought nothing."""
        self._calm = False
        """True if this window has already decided to change nothing."""

    def restart(self) -> None:
        """Restarts the window, because workers have changed."""
        self._window.restart()
        self._calm = False

    def decide(self, trainer: Beat, workers: Sequence[Beat], least: int, most: int) -> Decision | None:
        """The number to run, now that these are at work; None while too little was seen."""
        shares = self._window.add(trainer, workers)
        if shares is None:
            return None
        now, present = float(trainer.stamp), len(workers)
        wanted, why, held = self._untried(
            self._judge(shares, present, now) or self._rule(shares, present), present, now
        )
        if wanted != present and self._calm:  # something has changed in the midst of this window: one that is all new
            self.restart()
            return None
        self._calm = self._calm or wanted == present
        workers_next = max(least, min(wanted, most))
        if workers_next > present:
            gain = self._expected(shares, present, workers_next)
            self._trial = _Trial(present, workers_next, shares.updates_per_second, gain)
        return Decision(workers_next, wanted, why, shares, held)

    def _untried(self, wish: Wish, present: int, now: float) -> Wish:
        """No more than have been seen to bring something, until it is time to try again."""
        most = max(present, self._held)
        if wish.workers <= most or now >= self._held_until:
            return wish
        until = f"no more than {most} are tried for another {self._held_until - now:.0f} s: more brought too little"
        text = f"{wish.workers} workers are wanted ({wish.why}), but {until}"
        return Wish(most, f"{wish.why}; {wish.workers} wanted, {until}", Held(f"tried {most}", text))

    def _rule(self, shares: Shares, present: int) -> Wish:
        if present > self._useful:
            return Wish(self._useful, f"{self._claims}; {shares.workers}")
        wish = self._lockstep(shares, present) if self._lag == 0 else self._overlapping(shares, present)
        if shares.elsewhere > _SHORT and wish.workers != present:  # the store, or whatever it is, decides the speed
            others = (
                f"the trainer waited {_percent(shares.elsewhere)} of that time for something else, mostly the store"
            )
            text = f"{counted(wish.workers, 'worker')} would do ({wish.why}), but {others}"
            return Wish(present, held=Held("elsewhere", text))
        return wish

    @property
    def _claims(self) -> str:
        return f"no more than {self._useful} can hold a claim at the same time"

    def _overlapping(self, shares: Shares, present: int) -> Wish:
        """Acting and learning run side by side: the trainer should be the slower of the two, by a little."""
        if shares.experience > max(_SHORT, shares.credit):
            enough = max(present + 1, math.ceil(present / max(0.5, 1.0 - shares.experience)))
            bound = "; no more than twice as many at once" if shares.experience > 0.5 else ""
            bound = f"; {self._claims}" if enough > self._useful else bound
            return Wish(min(enough, self._useful), shares.trainer + bound)
        if shares.experience < _ENOUGH:
            needed = present * (1.0 - shares.credit) * (1.0 + _SPARE)
            fewer = max(1, math.ceil(needed), math.ceil(present / 2))
            if fewer < present:
                bound = "; no fewer than half as many at once" if fewer > max(1, math.ceil(needed)) else ""
                return Wish(fewer, shares.workers + bound)
        return Wish(present)

    def _lockstep(self, shares: Shares, present: int) -> Wish:
        """Acting and learning take turns, so workers always wait for the trainer, and only its own wait counts.

        That wait lasts as many rounds as the workers need for the fragments of an update.
        """
        upward = range(present + 1, min(2 * present, self._batch) + 1)
        best = min(upward, key=lambda workers: (self._rounds(workers), workers), default=present)
        if shares.experience * (1.0 - self._rounds(best) / self._rounds(present)) > _SHORT:
            return Wish(best, shares.trainer)
        for fewer in range(max(1, math.ceil(present / 2)), present):
            slower = shares.experience * (self._rounds(fewer) / self._rounds(present) - 1.0)
            if slower < _ENOUGH:
                faster = f"with {counted(present, 'worker')} an update is less than {_percent(_ENOUGH)} faster"
                return Wish(fewer, f"{faster}; {shares.trainer}")
        return Wish(present)

    def _rounds(self, workers: int) -> int:
        return math.ceil(self._batch / workers)

    def _expected(self, shares: Shares, before: int, after: int) -> float:
        """Expected factor of the update rate."""
        if self._lag == 0:
            acting = self._rounds(after) / self._rounds(before)
            return 1.0 / (1.0 - shares.experience * (1.0 - acting))
        return 1.0 / max(before / after, 1.0 - shares.experience)

    def _judge(self, shares: Shares, present: int, now: float) -> Wish | None:
        """Removes the last added workers if they brought too few updates."""
        trial, self._trial = self._trial, None
        if trial is None or trial.after != present:
            return None
        gained = shares.updates_per_second / trial.updates_per_second - 1.0
        if gained >= _BARREN * (trial.expected - 1.0):
            return None
        self._held, self._held_until = trial.before, now + self._hold_seconds
        more = f"{counted(trial.after, 'worker')} brought {_percent(max(0.0, gained))} more updates than {trial.before}"
        return Wish(trial.before, f"{more}; {shares.trainer}")


class Scaling:
    """Decides at each poll (`desired`); `cores` are those of the only machine, where Ray's count is a number only."""

    def __init__(self, context: RunContext, cores: int | None = None) -> None:
        self._redis, self._run_id, self._flow, self._cores = context.redis, context.run_id, context.flow, cores
        rollout = context.config.rollout
        self._autoscale = Autoscale(
            rollout.scaling_window_seconds, rollout.fragments_per_update, rollout.max_policy_lag
        )
        self._reported = ""

    def desired(
        self, flow: FlowState, beats: Mapping[str, Beat], workers: Sequence[str], unplaced: Sequence[str], capacity: int
    ) -> int:
        """Returns the number of workers to run; `workers` names all that the fleet has, also those that leave."""
        if flow.scaling != "auto":
            self._autoscale.restart()
            return flow.desired_workers
        bounds = self._bounds(flow, capacity)
        least, most, _ = bounds
        if not least <= flow.desired_workers <= most:
            self._autoscale.restart()
            allowed = max(least, min(flow.desired_workers, most))
            return self._order(flow, allowed, f"the bounds are {least} and {most}", bounds, {})
        at_work = [beats[name] for name in workers if name in beats and _at_work(beats[name])]
        steady = len(at_work) + len(unplaced) == len(workers) <= flow.desired_workers
        trainer = beats.get("trainer")
        if trainer is None or not _learns(trainer) or not steady or not at_work:
            self._autoscale.restart()
            return flow.desired_workers
        decision = self._autoscale.decide(trainer, at_work, least, most)
        return flow.desired_workers if decision is None else self._follow(flow, decision, at_work, unplaced, bounds)

    def _bounds(self, flow: FlowState, capacity: int) -> Bounds:
        found = [(capacity, "all that fit")]
        if flow.max_workers is not None:
            found.append((flow.max_workers, "the bound (rollout.max_workers, or --max)"))
        elif self._cores is not None:
            found.append((max(self._cores, flow.desired_workers), "one for each core (--max allows more)"))
        fewest, text = min(found, key=lambda bound: bound[0])
        most = max(1, fewest)
        return Bounds(min(flow.min_workers, most), most, text)

    def _follow(
        self, flow: FlowState, decision: Decision, at_work: Sequence[Beat], unplaced: Sequence[str], bounds: Bounds
    ) -> int:
        """Applies a decision, or reports once why it cannot."""
        present = len(at_work)
        data = {"wanted": decision.wanted, **decision.shares.as_dict()}
        if decision.held is not None and decision.workers == present:
            self._report(decision.held, present, bounds, data)
        if unplaced and decision.wanted > present:
            wanted = f"more than {counted(present, 'worker')} {'is' if present == 1 else 'are'} wanted"
            text = f"{wanted} ({decision.why}), but no machine has capacity for another"
            self._report(Held(f"no capacity beyond {present}", text), present, bounds, data)
            return flow.desired_workers
        if decision.wanted > decision.workers == present:
            text = f"{decision.wanted} workers are wanted ({decision.why}), but {present} is {bounds.text}"
            self._report(Held(f"{present} is {bounds.text}", text), present, bounds, data)
        if decision.workers == flow.desired_workers:
            return flow.desired_workers
        unneeded = f"{', '.join(unplaced)} had no place, and are not needed; {decision.shares.trainer}"
        why = unneeded if decision.workers == present else decision.why
        if decision.wanted != decision.workers:
            fewest = "the fewest (rollout.min_workers, or --min)"
            bound = bounds.text if decision.wanted > decision.workers else fewest
            why = f"{why}; {decision.wanted} wanted, {decision.workers} is {bound}"
        return self._order(flow, decision.workers, why, bounds, data)

    def _order(self, flow: FlowState, workers: int, why: str, bounds: Bounds, data: Mapping[str, float]) -> int:
        """Writes it where `scale` writes, unless a person was faster."""
        if not self._flow.set_desired_workers(workers, "auto"):
            return flow.desired_workers
        text = f"scaled {flow.desired_workers} → {workers}: {why}"
        self._emit(text, flow.desired_workers, workers, bounds, data)
        self._reported = ""
        self._autoscale.restart()
        return workers

    def _report(self, held: Held, present: int, bounds: Bounds, data: Mapping[str, float]) -> None:
        """An event for what is not done; the same thing once."""
        if held.kind != self._reported:
            self._emit(held.text, present, present, bounds, data)
            self._reported = held.kind

    def _emit(self, text: str, before: int, workers: int, bounds: Bounds, data: Mapping[str, float]) -> None:
        numbers = {"least": bounds.least, "most": bounds.most, **data}
        emit(self._redis, self._run_id, "scaling", text, before=before, workers=workers, **numbers)


def _at_work(worker: Beat) -> bool:
    """Returns whether it acts or waits for credit; False while it starts or catches up."""
    return worker.alive and bool(worker.progress.get("fragments") or worker.waiting_for == "credit")


def _learns(trainer: Beat) -> bool:
    """Returns whether it learns from new experience, past warm-up and rereading."""
    progress: dict[str, Any] = trainer.progress
    return trainer.alive and progress.get("phase") == Phase.TRAIN.value and not progress.get("reads_again", True)
