"""How many workers a run with `rollout.scaling=auto` shall have, decided from what was waited for.

In: heartbeats (seconds waited so far, by the wait's name) of the trainer and of the workers that are at work. Out: a
number, and why. Nothing here knows Ray or Redis, and nothing that is learnt depends on it: the number of workers
decides when fragments come, not which a version learns from once they stand in the log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.heartbeat import BEAT_SECONDS, Beat
from shared.printable import counted

_SHORT = 0.10
"""The trainer waits for experience for more than this share: more workers, where they make up for as much."""
_ENOUGH = 0.05
"""It waits for less than this share (or fewer workers would cost less): fewer workers."""
_SPARE = 0.05
"""Workers keep this much more than the trainer needs, so that fewer do not turn out to be too few."""
_BARREN = 0.25
"""More workers that bring less than this part of what they should have brought are taken back."""
_WINDOWS_HELD = 30
"""Then no more are tried for so many windows."""
_UPDATES = 4
"""A window lasts until there have been so many, since waits are counted when they end or the next beat comes."""


@dataclass(frozen=True)
class Shares:
    """What was waited for in the last window, each from 0 to 1."""

    seconds: float
    experience: float
    """By the trainer."""
    elsewhere: float
    """By the trainer, for anything else (the store, mostly)."""
    credit: float
    """By the workers, on average."""
    updates_per_second: float

    @property
    def trainer(self) -> str:
        """For people."""
        return f"the trainer waited {_percent(self.experience)} of the last {self.seconds:.0f} s for experience"

    @property
    def workers(self) -> str:
        """For people."""
        return f"workers waited {_percent(self.credit)} of the last {self.seconds:.0f} s for credit"


@dataclass(frozen=True)
class Decision:
    """`workers` is what there shall be; `wanted` is what it would be without bounds."""

    workers: int
    wanted: int
    why: str


@dataclass(frozen=True)
class _Look:
    at: float
    waited: dict[str, float]
    version: int


class Window:
    """The newest looks at a crew that does not change; anybody who joins, leaves or is replaced begins it anew."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._crew: tuple[tuple[str, int], ...] = ()
        self._looks: dict[str, deque[_Look]] = {}

    def restart(self) -> None:
        """What was seen so far no longer tells."""
        self._crew, self._looks = (), {}

    def look(self, trainer: Beat, workers: Sequence[Beat]) -> Shares | None:
        """The shares once a window has been seen; None before."""
        crew = (trainer, *workers)
        names = tuple((beat.id, beat.pid) for beat in crew)
        if names != self._crew:
            self._crew, self._looks = names, {beat.id: deque() for beat in crew}
        for beat in crew:
            looks, at = self._looks[beat.id], float(beat.stamp)
            if not looks or at > looks[-1].at:
                looks.append(_Look(at, beat.waited, int(beat.progress.get("version", 0))))
        begin = self._begin(self._looks[trainer.id])
        if begin is None or any(self._looks[beat.id][0].at > begin + 2 * BEAT_SECONDS for beat in workers):
            return None
        return self._shares(begin, trainer, workers)

    def _begin(self, looks: deque[_Look]) -> float | None:
        """When the window begins: so long ago, and so many updates."""
        found = None
        for look in looks:
            if looks[-1].at - look.at < self._seconds or looks[-1].version - look.version < _UPDATES:
                break
            found = look.at
        while found is not None and looks[0].at < found:
            looks.popleft()
        return found

    def _shares(self, begin: float, trainer: Beat, workers: Sequence[Beat]) -> Shares:
        looks = self._looks[trainer.id]
        first, last = looks[0], looks[-1]
        seconds = last.at - first.at
        waited = {name: total - first.waited.get(name, 0.0) for name, total in last.waited.items()}
        experience = waited.pop("experience", 0.0)
        return Shares(
            seconds=seconds,
            experience=_share(experience, seconds),
            elsewhere=_share(sum(waited.values()), seconds),
            credit=sum(self._credit(worker.id, begin) for worker in workers) / max(1, len(workers)),
            updates_per_second=(last.version - first.version) / seconds,
        )

    def _credit(self, worker: str, begin: float) -> float:
        looks = self._looks[worker]
        while len(looks) > 2 and looks[1].at <= begin:
            looks.popleft()
        first, last = looks[0], looks[-1]
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
        self._window_seconds = window_seconds
        self._batch = fragments_per_update
        self._lag = max_policy_lag
        self._trial: _Trial | None = None
        self._held: tuple[int, float] | None = None
        """No more than so many until then, since more brought nothing."""
        self._calm = False
        """Whether this window has said before that all may stay as it is."""

    @property
    def useful(self) -> int:
        """More workers than this can never hold a claim at the same time: (L + 1) · K."""
        return (self._lag + 1) * self._batch

    def restart(self) -> None:
        """Somebody comes, goes or catches up: what was waited for so far no longer tells."""
        self._window.restart()
        self._calm = False

    def look(self, trainer: Beat, workers: Sequence[Beat], least: int, most: int) -> Decision | None:
        """What shall be, now that these are at work; None while too little was seen."""
        shares = self._window.look(trainer, workers)
        if shares is None:
            return None
        now, present = float(trainer.stamp), len(workers)
        wanted, why = self._judge(shares, present, now) or self._rule(shares, present)
        if wanted > present and self._held is not None and now < self._held[1]:
            wanted = min(wanted, max(present, self._held[0]))
        if wanted != present and self._calm:  # something has changed in the midst of this window: one that is all new
            self.restart()
            return None
        self._calm = self._calm or wanted == present
        workers_next = max(least, min(wanted, most))
        if workers_next > present:
            gain = self._expected(shares, present, workers_next)
            self._trial = _Trial(present, workers_next, shares.updates_per_second, gain)
        return Decision(workers_next, wanted, why)

    def _rule(self, shares: Shares, present: int) -> tuple[int, str]:
        if present > self.useful:
            return self.useful, f"no more than {self.useful} can hold a claim at the same time"
        if shares.elsewhere > _SHORT:
            return present, ""  # the store, or whatever it is, decides the speed
        return self._lockstep(shares, present) if self._lag == 0 else self._overlapping(shares, present)

    def _overlapping(self, shares: Shares, present: int) -> tuple[int, str]:
        """Acting and learning go on side by side: the slower of the two shall be the trainer, by a little."""
        if shares.experience > max(_SHORT, shares.credit):
            enough = math.ceil(present / max(0.5, 1.0 - shares.experience))
            return min(max(present + 1, enough), self.useful), shares.trainer
        if shares.experience < _ENOUGH:
            needed = present * (1.0 - shares.credit) * (1.0 + _SPARE)
            fewer = max(1, math.ceil(needed), math.ceil(present / 2))
            if fewer < present:
                return fewer, shares.workers
        return present, ""

    def _lockstep(self, shares: Shares, present: int) -> tuple[int, str]:
        """Acting and learning take turns: that workers wait for the trainer tells nothing.

        What tells is the trainer's wait, which is as many rounds long as the fragments of an update take.
        """
        upward = range(present + 1, min(2 * present, self._batch) + 1)
        best = min(upward, key=lambda workers: (self._rounds(workers), workers), default=present)
        if shares.experience * (1.0 - self._rounds(best) / self._rounds(present)) > _SHORT:
            return best, shares.trainer
        for fewer in range(max(1, math.ceil(present / 2)), present):
            slower = shares.experience * (self._rounds(fewer) / self._rounds(present) - 1.0)
            if slower < _ENOUGH:
                return fewer, f"with {counted(present, 'worker')} an update is less than {_percent(_ENOUGH)} faster"
        return present, ""

    def _rounds(self, workers: int) -> int:
        return math.ceil(self._batch / workers)

    def _expected(self, shares: Shares, before: int, after: int) -> float:
        """How many times as many updates there should be."""
        if self._lag == 0:
            acting = self._rounds(after) / self._rounds(before)
            return 1.0 / (1.0 - shares.experience * (1.0 - acting))
        return 1.0 / max(before / after, 1.0 - shares.experience)

    def _judge(self, shares: Shares, present: int, now: float) -> tuple[int, str] | None:
        """Whether the workers that came last have brought what they should: else they go again."""
        trial, self._trial = self._trial, None
        if trial is None or trial.after != present:
            return None
        gained = shares.updates_per_second / trial.updates_per_second - 1.0
        if gained >= _BARREN * (trial.expected - 1.0):
            return None
        self._held = (trial.before, now + _WINDOWS_HELD * self._window_seconds)
        more = f"{counted(trial.after, 'worker')} brought {_percent(max(0.0, gained))} more updates than {trial.before}"
        return trial.before, more
