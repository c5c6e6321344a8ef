"""A walk: one seed decides a run, what happens to it, and in which order; then it is left in peace and must go on.

`make simulate` walks from a seed on (`SEED=1 SECONDS=60`). After a violation what happened is shrunk to what is needed
for it, and printed with the plan that `--replay` takes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from typing import Self

from stagecoach.shared.storage.metric_log import EVALUATIONS, segments
from tests.simulation.faults import Fault, Faults, planned
from tests.simulation.oracles import PROGRESS_SECONDS, RESUME_SECONDS, Oracles, Violation
from tests.simulation.run import Setting, simulated
from tests.simulation.store import Store

_FAULTY_SECONDS = 30.0
_MEAN_SECONDS = 0.9
_MEAN_SECONDS_FOR_LONG = 20.0
"""Between two faults."""
_ENDING_SECONDS = 60.0
"""In which a run that is stopped has ended."""
_SEGMENT_SECONDS = 0.15
"""More for each segment of evaluations: the last trainer reads those of all former ones, and some requests are slow."""
_SHRINKING = 150
"""Walks that shrinking may take."""


@dataclass(frozen=True)
class Plan:
    """All that decides a walk."""

    seed: int
    setting: Setting
    faults: tuple[Fault, ...]

    @classmethod
    def drawn(cls, seed: int, hours: float = 0.0) -> Self:
        """With faults for half a minute or, a few in a minute, for so many hours."""
        draw = random.Random(seed)
        setting = Setting.drawn(draw)
        slow = 1 + setting.update_seconds
        seconds = (3600 * hours, _MEAN_SECONDS_FOR_LONG) if hours else (_FAULTY_SECONDS * slow, _MEAN_SECONDS * slow)
        return cls(seed, setting, planned(draw, setting, *seconds))

    @classmethod
    def parsed(cls, text: str) -> Self:
        seed, setting, faults = json.loads(text)
        return cls(seed, Setting(**setting), tuple(Fault(*fault) for fault in faults))

    def __str__(self) -> str:
        faults = [[fault.at, fault.kind, fault.seed] for fault in self.faults]
        return json.dumps([self.seed, asdict(self.setting), faults])


@dataclass(frozen=True)
class Walked:
    """What came of a walk."""

    plan: Plan
    violation: str
    """Empty if all held."""
    told: tuple[str, ...]
    steps: int
    seconds: float
    """Virtual."""
    versions: int
    replayed: int

    def __str__(self) -> str:
        head = f"seed {self.plan.seed}: {self.violation or 'no violation'}"
        counts = f"{self.steps} steps, {self.seconds:.1f} virtual seconds, version {self.versions}"
        return "\n  ".join([head, f"{counts}, {self.replayed} versions replayed", str(self.plan.setting), *self.told])


def walk(plan: Plan) -> Walked:
    violation = ""
    with simulated(plan.seed, plan.setting) as run:
        scheduler, oracles = run.scheduler, Oracles(run)
        run.begin()
        scheduler.run_until(scheduler.now + 60, lambda: "trainer" in run.processes)
        faults = Faults(run, plan.faults)

        def in_peace() -> None:
            """Until it has continued for a while, or for longer than it may take; after a stop that was ordered."""
            scheduler.run_until(scheduler.now + _ENDING_SECONDS, lambda: not run.stop_ordered)
            oracles.progress_at = max(oracles.progress_at, scheduler.now)
            began, version, slow = scheduler.now, oracles.published, plan.setting.version_seconds

            def continues() -> bool:
                return oracles.published >= version + 3 and scheduler.now > began + 10 + slow

            scheduler.run_until(began + RESUME_SECONDS + PROGRESS_SECONDS + 10 + 6 * slow, continues)
            oracles.check_progress()

        try:
            scheduler.run_until(scheduler.now + (plan.faults[-1].at + 1 if plan.faults else _FAULTY_SECONDS))
            faults.stop()
            in_peace()
            run.kill_roles()  # whatever has been: a resume starts the next ones, and they continue
            in_peace()
            run.ends = True
            run.stop()
            slow = 4 * plan.setting.version_seconds + _SEGMENT_SECONDS * len(segments(Store(run.bucket), EVALUATIONS))
            scheduler.run_until(scheduler.now + _ENDING_SECONDS + slow, lambda: run.over)
            oracles.check_end()
            oracles.check_bounded()
            oracles.check_ledger()
            oracles.check_replay()
            oracles.check()
        except Exception as error:
            cause = f" ({_in_words(error.__cause__)})" if error.__cause__ else ""
            violation = f"{'' if isinstance(error, Violation) else type(error).__name__ + ': '}{error}{cause}"
        told, counted = tuple(faults.told), (scheduler.steps, scheduler.now, oracles.published, oracles.replayed)
    return Walked(plan, violation, told, *counted)


def _in_words(error: BaseException) -> str:
    """Returns the error, and where in the product it was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/stagecoach/" in frame.filename]
    where = ", ".join(f"{frame.filename.rpartition('/stagecoach/')[2]}:{frame.lineno}" for frame in frames[-6:])
    return f"{type(error).__name__}: {error}; at {where}"


def shrink(found: Walked) -> Walked:
    """Leaves out faults, many at first, as long as the same kind of thing is violated."""
    kind, size, left = _kind(found), len(found.plan.faults), _SHRINKING
    while size >= 1:
        start = 0
        while start < len(found.plan.faults) and left > 0:
            faults, left = found.plan.faults, left - 1
            tried = walk(replace(found.plan, faults=faults[:start] + faults[start + size :]))
            if _kind(tried) == kind:
                found = tried
            else:
                start += size
        size //= 2
    return found


def _kind(found: Walked) -> str:
    """Returns the violation without its numbers."""
    return re.sub(r"\d", "", found.violation)[:60]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.walk", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first walk")
    parser.add_argument("--walks", type=int, default=1_000_000, help="how many")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long walks begin")
    parser.add_argument("--hours", type=float, default=0.0, help="virtual, for which each has faults")
    parser.add_argument("--keep-going", action="store_true", help="go on after a violation, and shrink none")
    parser.add_argument("--replay", help="the plan of one walk, as it was printed")
    given = parser.parse_args()
    if given.replay:
        found = walk(Plan.parsed(given.replay))
        print(found)
        return bool(found.violation)
    began, walks, steps, virtual, bad = time.monotonic(), 0, 0, 0.0, 0
    while walks < given.walks and time.monotonic() - began < given.seconds:
        found = walk(Plan.drawn(given.seed + walks, given.hours))
        walks, steps, virtual = walks + 1, steps + found.steps, virtual + found.seconds
        if not found.violation:
            continue
        bad += 1
        print(found, flush=True)
        if not given.keep_going:
            smaller = shrink(found)
            print(f"shrunk: {smaller}\npython -m tests.simulation.walk --replay '{smaller.plan}'", flush=True)
            break
    took = time.monotonic() - began
    print(
        f"{walks} walks from seed {given.seed}, {bad} violations, {steps} steps, {virtual / 3600:.2f} virtual hours in "
        f"{took:.0f} s ({steps / took:,.0f} steps/s)"
    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
