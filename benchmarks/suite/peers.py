"""Stagecoach against RLlib, Sample Factory and Stable-Baselines3: env steps per second on the same task, and seconds
from the start of the process until CartPole is solved. One program at a time, in turns; takes some 25 minutes with five
repeats, and some more the first time, when the peers' virtual environments are made.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest.contestants import OURS, Contestant, contestants
from benchmarks.contest.virtual_environments import REQUIREMENTS, NotInstalled, python_of
from benchmarks.contest.watching import Program, ProgramFailed, cores, env_steps_per_second, seconds_to
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options

_SOLVED = 475.0
_AIMS = {"RLlib": 10.0, "Sample Factory": 4.0, "Stable-Baselines3": 6.0}
_SPEED, _SOLVE = "env steps/s", "s"
_QUESTION = (
    "How many env steps per second does each library train on CartPole-v1, with the same network, batch, passes, "
    "minibatches and number of environments on the same two cores, and how long does each take, from the start of its "
    "process, to a mean return of 475 over the last 100 training episodes, with its own settings for it? The env steps "
    "are those that each counts itself, between two instants."
)


@dataclass(frozen=True)
class Times:
    """How long things are measured, in seconds."""

    warm: float = 3.0
    """After the first thing told, which comes after the first batch."""
    window: float = 12.0
    tried_warm: float = 2.0
    tried_window: float = 5.0
    at_most: float = 150.0
    """For the way to the mean return."""


@dataclass
class Found:
    """What has come out so far."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    """Line → a sample for each repeat."""
    tried: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """Contestant → knobs → env steps/s, or why there are none."""
    taken: dict[str, str] = field(default_factory=dict)
    """Contestant → its best knobs."""
    remarks: list[str] = field(default_factory=list)
    late: dict[str, int] = field(default_factory=dict)
    """Line → how often the mean return was not reached within the time."""


def measure(options: Options) -> Result:
    """All lines; a peer that cannot be installed or run here is named in a remark, and has none."""
    return contest(contestants(), options, Times(0.5, 1.0, 0.5, 0.5, 20.0) if options.quick else Times())


def contest(all_of_them: list[Contestant], options: Options, times: Times) -> Result:
    """Between these; `measure` has the real ones."""
    found = Found()
    installed = [(one, python) for one in all_of_them if (python := _python(one, options, found)) is not None]
    calls: dict[str, Callable[[int], float]] = {}
    for one, python in installed:
        if options.wants(one.name) and one.speed:
            best = _best(one, python, options, times, found)
            if best is not None:
                calls[one.name] = partial(_speed, best, times)
    for one, python in installed:
        line = _solving(one)
        if one.solve is not None and options.wants(line) and not options.quick:
            program = Program(one.program, python, one.solve)
            calls[line] = partial(_solve, program, line, times, found)
    _rounds(calls, options, found)
    return Result(
        "peers", _QUESTION, _measures(all_of_them, found, times), settings=_settings(all_of_them, found, times),
        remarks=found.remarks, versions=_versions(all_of_them),
    )  # fmt: skip


def _python(one: Contestant, options: Options, found: Found) -> Path | None:
    """None for one that is not asked for, or not there."""
    if not (options.wants(one.name) or options.wants(_solving(one))):
        return None
    if one.peer is None:
        return Path(sys.executable)
    try:
        return python_of(one.peer, options.cache, install=not options.quick, tell=options.tell)
    except NotInstalled as error:
        found.remarks.append(f"{one.name} is not measured: {error}")
        return None


def _best(one: Contestant, python: Path, options: Options, times: Times, found: Found) -> Program | None:
    """Each of its knobs for a short while; with `--quick` the first that works."""
    speeds: dict[str, float] = {}
    tried = found.tried.setdefault(one.name, {})
    for knobs, settings in one.speed.items():
        program = Program(one.program, python, {**settings, "seed": 1})
        try:
            speeds[knobs] = env_steps_per_second(program, times.tried_warm, times.tried_window)
        except ProgramFailed as error:
            tried[knobs] = str(error)
            options.tell(f"tried {one.name}, {knobs}: {error}")
            continue
        tried[knobs] = round(speeds[knobs])
        options.tell(f"tried {one.name}, {knobs}: {speeds[knobs]:,.0f} env steps/s")
        if options.quick:
            break
    if not speeds:
        found.remarks.append(f"{one.name} is not measured, it does not run here: {next(iter(tried.values()))}")
        return None
    found.taken[one.name] = max(speeds, key=lambda knobs: speeds[knobs])
    return Program(one.program, python, one.speed[found.taken[one.name]])


def _speed(program: Program, times: Times, seed: int) -> float:
    seeded = Program(program.module, program.python, {**program.settings, "seed": seed})
    return env_steps_per_second(seeded, times.warm, times.window)


def _solve(program: Program, line: str, times: Times, found: Found, seed: int) -> float:
    seeded = Program(program.module, program.python, {**program.settings, "seed": seed})
    seconds = seconds_to(seeded, _SOLVED, times.at_most)
    if seconds is None:
        found.late[line] = found.late.get(line, 0) + 1
    return times.at_most if seconds is None else seconds


def _rounds(calls: dict[str, Callable[[int], float]], options: Options, found: Found) -> None:
    """All in turn, again and again, with another seed each time; who fails twice in a row is out."""
    for repeat in range(1, options.repeats + 1):
        for line in list(calls):
            try:
                value = _twice(calls[line], repeat, line, options)
            except ProgramFailed as error:
                found.remarks.append(f"{line} is not measured, it failed in repeat {repeat}: {error}")
                found.samples.pop(line, None)
                del calls[line]
                continue
            found.samples.setdefault(line, []).append(value)
            options.tell(f"round {repeat}: {line}: {value:,.6g}")


def _twice(call: Callable[[int], float], seed: int, line: str, options: Options) -> float:
    try:
        return call(seed)
    except ProgramFailed as error:
        options.tell(f"{line} failed, once more: {error}")
        return call(seed)


def _solving(one: Contestant) -> str:
    return f"{one.name}, to a mean return of {_SOLVED:.0f}"


def _measures(all_of_them: list[Contestant], found: Found, times: Times) -> list[Measure]:
    """The lines as they are, then ours again beside each of the others' best."""
    speeds = [one for one in all_of_them if one.name in found.samples]
    solves = [one for one in all_of_them if _solving(one) in found.samples]
    lines = [Measure(one.name, _SPEED, found.samples[one.name], note=_knobs(one, found)) for one in speeds]
    for one in solves:
        line = _solving(one)
        late = found.late.get(line, 0)
        note = f"not reached within {times.at_most:.0f} s in {late} of them, counted as that" if late else ""
        lines.append(Measure(line, _SOLVE, found.samples[line], better="less", note=note))
    ours = [one for one in speeds if one.library == OURS]
    for library, aim in _AIMS.items():
        theirs = [one for one in speeds if one.library == library]
        if not theirs:
            continue
        best = max(theirs, key=lambda one: statistics.median(found.samples[one.name]))
        lines += [
            Measure(
                f"{one.name}, beside {library}", _SPEED, found.samples[one.name], against=best.name,
                aim=aim if one is ours[0] else None, note=_best_of(theirs, best),
            )
            for one in ours
        ]  # fmt: skip
    own = [one for one in solves if one.library == OURS]
    for one in own:
        for other in solves:
            if other.library != OURS:
                what = f"{_solving(one)}, beside {other.library}"
                samples = found.samples[_solving(one)]
                lines.append(Measure(what, _SOLVE, samples, against=_solving(other), aim=1.0, better="less"))
    return lines


def _knobs(one: Contestant, found: Found) -> str:
    return f"the best of {len(found.tried[one.name])} tried: {found.taken[one.name]}"


def _best_of(theirs: list[Contestant], best: Contestant) -> str:
    return f"{best.name} is the best of its {len(theirs)}" if len(theirs) > 1 else ""


def _settings(all_of_them: list[Contestant], found: Found, times: Times) -> dict[str, Any]:
    """What everyone ran with; of the knobs that were tried and not taken, the figures."""
    speed: dict[str, Mapping[str, Any]] = {
        one.name: one.speed[found.taken[one.name]] for one in all_of_them if one.name in found.taken
    }
    solve = {_solving(one): {"from": one.solve_source, **one.solve} for one in all_of_them if one.solve is not None}
    return {
        "cores": len(cores()), "seconds": vars(times), "seeds": "the repeat's number",
        "tried (env steps/s)": found.tried, "taken": found.taken, "speed": speed, "solve": solve,
    }  # fmt: skip


def _versions(all_of_them: list[Contestant]) -> dict[str, str]:
    """Of the peers themselves, and of what they are stepped and trained with."""
    named = ("ray", "sample-factory", "stable_baselines3", "gymnasium", "numpy", "torch")
    found = {}
    for peer in sorted({one.peer for one in all_of_them if one.peer is not None}):
        pinned = dict(line.split("==") for line in (REQUIREMENTS / f"{peer}.txt").read_text().split() if "==" in line)
        found[peer] = ", ".join(f"{name} {pinned[name]}" for name in named if name in pinned)
    return found
