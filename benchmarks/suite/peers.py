"""Stagecoach against Stable-Baselines3, TorchRL and RLlib: env steps per second on the same task, one page for each
task or two. One program at a time, in turns; each one's knobs are tried for a moment first, and the fastest taken.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.contest.contestants import (
    CARTPOLE,
    CHEETAH_PPO,
    CHEETAH_SAC,
    IMAGES,
    NATIVE,
    OURS,
    RLLIB,
    STABLE_BASELINES3,
    Contestant,
    Task,
    contestants,
)  # fmt: skip
from benchmarks.contest.virtual_environments import REQUIREMENTS, NotInstalled, mujoco_path, python_of
from benchmarks.contest.watching import Program, ProgramFailed, cores, env_steps_per_second
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.provenance import ROOT

PAGES: Mapping[str, tuple[Task, ...]] = {
    "peers": (CARTPOLE,),
    "peers-native": (NATIVE,),
    "peers-control": (CHEETAH_PPO, CHEETAH_SAC),
    "peers-images": (IMAGES,),
}
_AIMS: Mapping[tuple[str, str], float] = {
    (CARTPOLE.name, STABLE_BASELINES3): 2.6, (CARTPOLE.name, RLLIB): 6.5, (CHEETAH_PPO.name, STABLE_BASELINES3): 1.5,
    (CHEETAH_SAC.name, STABLE_BASELINES3): 1.5, (IMAGES.name, STABLE_BASELINES3): 1.2,
    (NATIVE.name, STABLE_BASELINES3): 3.0, (NATIVE.name, RLLIB): 3.0,
}  # fmt: skip
"""Of the first of ours, for a task beside a library."""
_LOCKSTEP_AIM, _FLOOR_AIM, _NATIVE_AIM = 1.7, 0.85, 150_000.0
_SPEED = "env steps/s"
_QUESTION = (
    "How many env steps per second does each library train, with the same network, batch, passes, minibatches and "
    "number of environments on the same two cores? The env steps are those that each counts itself, between two "
    "instants. The floor is what one would train who pays only for the bare environment's step and the networks' "
    "arithmetic, on both cores without ever waiting (benchmarks/contest/floor.py)."
)


@dataclass(frozen=True)
class Times:
    """How long things are measured, in seconds."""

    warm: float = 2.0
    """After the first thing told, which comes after the first batch."""
    window: float = 6.0
    tried_warm: float = 1.0
    tried_window: float = 3.0
    floor: float = 1.0
    """For each of a floor's three costs."""


QUICK = Times(0.5, 1.0, 0.5, 0.5, 0.1)


@dataclass
class Found:
    """What has come out so far."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    """Line → a sample for each repeat."""
    tried: dict[str, dict[str, float | str]] = field(default_factory=dict)
    """Line → knobs → env steps/s, or why there are none."""
    taken: dict[str, str] = field(default_factory=dict)
    """Line → its best knobs."""
    remarks: list[str] = field(default_factory=list)


def measure(options: Options, page: str = "peers") -> Result:
    """All lines; a peer that cannot be installed or run here is named in a remark, and has none."""
    entered = {task: contestants(task) for task in PAGES[page]}
    return contest(page, entered, options, QUICK if options.quick else Times())


def contest(page: str, entered: Mapping[Task, list[Contestant]], options: Options, times: Times) -> Result:
    """Between these; `measure` has the real ones."""
    found, measures = Found(), list[Measure]()
    settings: dict[str, Any] = {"cores": len(cores()), "seconds": vars(times), "seeds": "the repeat's number"}
    for task, all_of_them in entered.items():
        programs = {}
        for one in all_of_them:
            if options.wants(one.name) and (program := _program(one, task, options, times, found)) is not None:
                programs[one.name] = program
        _rounds(task, programs, options, times, found)
        measures += _measures(task, [one for one in all_of_them if _line(task, one) in found.samples], found)
        taken = {name: dict(program.settings) for name, program in programs.items()}
        settings[task.name] = {"task": vars(task) | {"batch": task.batch}, "settings": taken}
    settings["tried (env steps/s)"] = found.tried
    versions = versions_of({one.peer for all_of_them in entered.values() for one in all_of_them})
    return Result(page, _QUESTION, measures, settings=settings, remarks=found.remarks, versions=versions)


def prepared(one: Contestant, settings: Mapping[str, Any], options: Options, environment: str = "") -> Program:
    """What is started; raises `NotInstalled`."""
    install = {"install": not options.quick, "tell": options.tell}
    if one.peer is not None:
        return Program(one.module, python_of(one.peer, options.cache, **install), settings)  # type: ignore[arg-type]
    path = mujoco_path(options.cache, **install) if "Cheetah" in environment else ()  # type: ignore[arg-type]
    return Program(one.module, Path(sys.executable), settings, path)


def versions_of(peers: set[str | None]) -> dict[str, str]:
    """Of the peers themselves, and of what they are stepped and trained with."""
    named = ("ray", "torchrl", "tensordict", "stable_baselines3", "gymnasium", "mujoco", "numpy", "torch")
    found = {}
    for peer in sorted(filter(None, peers)):
        pinned = dict(line.split("==") for line in (REQUIREMENTS / f"{peer}.txt").read_text().split() if "==" in line)
        found[peer] = ", ".join(f"{name} {pinned[name]}" for name in named if name in pinned)
    return found


def _line(task: Task, one: Contestant) -> str:
    return f"{task.name}: {one.name}"


def _program(one: Contestant, task: Task, options: Options, times: Times, found: Found) -> Program | None:
    """With the best of its knobs, each tried for a short while; with `--quick` the first that works."""
    line, speeds = _line(task, one), dict[str, float]()
    tried = found.tried.setdefault(line, {})
    for knobs, settings in one.speed.items():
        try:
            program = prepared(one, settings, options, task.environment)
            speeds[knobs] = env_steps_per_second(program.seeded(1), times.tried_warm, times.tried_window)
        except NotInstalled as error:
            found.remarks.append(f"{line} is not measured: {error}")
            return None
        except ProgramFailed as error:
            tried[knobs] = str(error)
            options.tell(f"tried {line}, {knobs}: {error}")
            continue
        tried[knobs] = round(speeds[knobs])
        options.tell(f"tried {line}, {knobs}: {speeds[knobs]:,.0f} env steps/s")
        if options.quick:
            break
    if not speeds:
        found.remarks.append(f"{line} is not measured, it does not run here: {next(iter(tried.values()))}")
        return None
    found.taken[line] = max(speeds, key=lambda knobs: speeds[knobs])
    return prepared(one, one.speed[found.taken[line]], options, task.environment)


def _rounds(task: Task, programs: dict[str, Program], options: Options, times: Times, found: Found) -> None:
    """All in turn, again and again, with another seed each time; who fails twice in a row is out."""
    floor, has_floor = _floor_line(task), True
    for repeat in range(1, options.repeats + 1):
        if programs and has_floor:
            try:
                found.samples.setdefault(floor, []).append(_floor(task, times, options))
            except (NotInstalled, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                found.remarks.append(f"{floor} is not measured: {error}")
                found.samples.pop(floor, None)
                has_floor = False
        for name in list(programs):
            line = f"{task.name}: {name}"
            try:
                value = _twice(programs[name].seeded(repeat), times, line, options)
            except ProgramFailed as error:
                found.remarks.append(f"{line} is not measured, it failed in repeat {repeat}: {error}")
                found.samples.pop(line, None)
                del programs[name]
                continue
            found.samples.setdefault(line, []).append(value)
            options.tell(f"round {repeat}: {line}: {value:,.6g}")


def _twice(program: Program, times: Times, line: str, options: Options) -> float:
    try:
        return env_steps_per_second(program, times.warm, times.window)
    except ProgramFailed as error:
        options.tell(f"{line} failed, once more: {error}")
        return env_steps_per_second(program, times.warm, times.window)


def _floor_line(task: Task) -> str:
    return f"{task.name}: the floor"


def _floor(task: Task, times: Times, options: Options) -> float:
    """In a process of its own, with one thread."""
    path = mujoco_path(options.cache, install=False, tell=options.tell) if "Cheetah" in task.environment else ()
    variables = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *path))), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.contest.floor", task.name, str(times.floor)]
    answer = subprocess.run(command, cwd=ROOT, env=os.environ | variables | {"OPENBLAS_NUM_THREADS": "1"}, check=True,
                            stdout=subprocess.PIPE, timeout=300)  # fmt: skip
    costs = json.loads(answer.stdout)
    options.tell(f"{_floor_line(task)}: {costs}")
    return float(costs[_SPEED])


def _measures(task: Task, there: list[Contestant], found: Found) -> list[Measure]:
    """The lines as they are, then ours again beside each of the others."""
    if not there:
        return []
    floor = _floor_line(task) if _floor_line(task) in found.samples else ""
    lines = [Measure(floor, _SPEED, found.samples[floor])] if floor else []
    ours = [one for one in there if one.library == OURS]
    for one in there:
        aim = _NATIVE_AIM if task is NATIVE and one in ours[:1] else None
        samples, note = found.samples[_line(task, one)], _knobs(task, one, found)
        lines.append(Measure(_line(task, one), _SPEED, samples, aim=aim, note=note, floor=floor))
    for number, one in enumerate(ours):
        samples = found.samples[_line(task, one)]
        for other in there:
            if other.library != OURS:
                aim = _AIMS.get((task.name, other.library)) if number == 0 else None
                if number and other.library == STABLE_BASELINES3:
                    aim = _LOCKSTEP_AIM
                what = f"{_line(task, one)}, compared with {other.library}"
                lines.append(Measure(what, _SPEED, samples, against=_line(task, other), aim=aim))
    if ours and floor and task is CARTPOLE:
        samples, what = found.samples[_line(task, ours[0])], f"{_line(task, ours[0])}, compared with the floor"
        lines.append(Measure(what, _SPEED, samples, against=floor, aim=_FLOOR_AIM))
    return lines


def _knobs(task: Task, one: Contestant, found: Found) -> str:
    line = _line(task, one)
    speeds = [value for value in found.tried[line].values() if not isinstance(value, str)]
    median = statistics.median(found.samples[line])
    return (
        f"{found.taken[line]}, the best of {len(found.tried[line])} tried ({max(speeds):,.0f} then, {median:,.0f} here)"
    )
