"""What memory things take: a replay buffer of a million Atari frames, small transitions, each process of a real run."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np

from benchmarks.contest.contestants import (
    CARTPOLE,
    OURS,
    RLLIB,
    STABLE_BASELINES3,
    TORCHRL,
    Contestant,
    rllib,
    stable_baselines3,
    stagecoach,
    torchrl,
)  # fmt: skip
from benchmarks.contest.virtual_environments import NotInstalled
from benchmarks.contest.watching import ProgramFailed
from benchmarks.contest.watching import memory as memory_of
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options, in_turns, median_seconds
from benchmarks.suite.memory_filling import SIDE, SOURCES, STACK, fill, fragments, spaces_of
from benchmarks.suite.peers import prepared
from benchmarks.suite.resident import RUNS, sizes_of
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer

_STEPS, _SLOTS = 128, 8
"""Of a fragment of examples/breakout.yaml."""
_IMAGES = "1 M Atari transitions in DQN's replay buffer"
_RAW = "their frames alone"
_SMALL = {
    "uniform": ("vector", 29),
    "prioritized": ("vector", 29),
    "balanced": ("vector", 29),
    "hindsight": ("goals", 37),
}
"""Memory → observations, and the bytes of observation, action, reward and termination of one transition."""
_DRAWN = 256


def measure(options: Options) -> Result:
    """Each memory is filled in a process of its own, beyond its capacity; runs are real ones."""
    images, small = (4_000, 20_000) if options.quick else (1_000_000, 1_000_000)
    calls = {_IMAGES: lambda: _filled("images", "uniform", images, _STEPS, _SLOTS)["bytes"]}
    for kind, (spaces, _) in _SMALL.items():
        calls[_small(kind)] = lambda kind=kind, spaces=spaces: _each(spaces, kind, small)  # type: ignore[misc]
    samples = in_turns(options, {name: call for name, call in calls.items() if options.wants(name)})
    measures = []
    if _IMAGES in samples:
        raw = float(_whole_fragments(images) * SIDE * SIDE) / 1e9
        measures.append(Measure(_RAW, "GB", [raw] * options.repeats, note="worked out: one frame for each transition"))
        gigabytes = [value / 1e9 for value in samples[_IMAGES]]
        measures.append(Measure(_IMAGES, "GB", gigabytes, against=_RAW, aim=1.10, better="less"))
    for kind, (_, raw_bytes) in _SMALL.items():
        if _small(kind) in samples:
            note = f"{raw_bytes} of them are observation, action, reward and termination"
            measures.append(Measure(_small(kind), "B", samples[_small(kind)], better="less", note=note))
    measures += _draws(options)
    for run in RUNS:
        measures += _processes(options, run)
    together, remarks = _together(options)
    measures += together
    return Result(
        "memory",
        "What a replay buffer of Atari-like stacked frames takes beside the frames themselves, what one of small "
        "observations takes for each transition, how large the processes of a run are (resident, MB), and what all "
        "processes of a run with two workers take together, beside those of other libraries.",
        measures,
        settings={
            "Atari": {
                "transitions": images, "observations": [STACK, SIDE, SIDE], "frames": "noise; a reset repeats one",
                "fragment": [_STEPS, _SLOTS], "put in": "1.1 × the capacity", "sources": SOURCES,
                "counted": "growth of the process's resident size",
            },
            "small": {"transitions": small, "fragment": [64, 64], "observations": {"vector": 4, "goals": [2, 2, 2]}},
            "runs": RUNS,
            "resident size": "VmRSS; libraries that several processes share count in each",
            "all processes": "PSS of /proc/PID/smaps_rollup, so that shared pages count once, and the files of "
            "Stagecoach's runs in /dev/shm, which no process maps",
        },
        remarks=remarks,
    )  # fmt: skip


def _small(kind: str) -> str:
    return f"a transition of {'a goal environment' if kind == 'hindsight' else 'CartPole'}, {kind}"


def _whole_fragments(transitions: int) -> int:
    return -(-transitions // (_STEPS * _SLOTS)) * _STEPS * _SLOTS


def _each(spaces: str, kind: str, transitions: int) -> float:
    found = _filled(spaces, kind, transitions, 64, 64)
    return found["bytes"] / found["transitions"]


def _filled(spaces: str, kind: str, transitions: int, steps: int, slots: int) -> dict[str, float]:
    """By benchmarks/suite/memory_filling.py."""
    section = json.dumps({"kind": kind, "capacity": transitions})
    command = [sys.executable, "-m", "benchmarks.suite.memory_filling", spaces, section]
    command += ["--steps", str(steps), "--slots", str(slots)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    found: dict[str, Any] = json.loads(answer.stdout)
    return {"bytes": float(found["after"] - found["before"]), "transitions": float(found["transitions"])}


def _draws(options: Options) -> list[Measure]:
    """A minibatch from the memory beside the least that whole stacks would cost: two gathers from one array."""
    ours, plain = f"draw {_DRAWN} transitions of stacked frames", f"gather 2 × {_DRAWN} whole stacks with NumPy"
    if not options.wants(ours):
        return []
    places, times = (2, 3) if options.quick else (20, 30)
    spaces = spaces_of("images")
    memory = ReplayBuffer(spaces, _STEPS, _SLOTS, places * _STEPS * _SLOTS)
    fill(memory, fragments(spaces, _STEPS, _SLOTS), places)
    whole = np.concatenate([memory.ring.observations(rows)["obs"] for rows in np.split(np.arange(len(memory)), places)])
    random = np.random.default_rng(0)

    def gather() -> None:
        rows = random.integers(0, len(whole) - 1, _DRAWN)
        whole.take(rows, axis=0), whole.take(rows + 1, axis=0)

    calls = {
        plain: lambda: 1e3 * median_seconds(gather, times),
        ours: lambda: 1e3 * median_seconds(lambda: memory.sample(_DRAWN, random, gamma=0.99), times),
    }
    samples = in_turns(options, calls)
    return [
        Measure(plain, "ms", samples[plain], better="less"),
        Measure(ours, "ms", samples[ours], against=plain, better="less"),
    ]


def _together(options: Options) -> tuple[list[Measure], list[str]]:
    """PPO on CartPole with two processes that act, ours beside the others: all processes of each at work."""
    wanted = {
        OURS: stagecoach(CARTPOLE, 1)["2 workers, 1 thread"], TORCHRL: torchrl(CARTPOLE)["2 collectors, 2 threads"],
        RLLIB: rllib(CARTPOLE)["2 env runners"],
        STABLE_BASELINES3: next(iter(stable_baselines3(CARTPOLE).values()))
        | {"vector": "subproc", "num_envs": 2, "arguments": {"n_steps": 2048, "batch_size": 1024, "n_epochs": 4}},
    }  # fmt: skip
    measures, remarks, times = list[Measure](), list[str](), (0.5, 1.0) if options.quick else (3.0, 6.0)
    for library, settings in wanted.items():
        line = f"{library}: all processes"
        if not options.wants(line):
            continue
        try:
            program = prepared(Contestant(line, library), settings, options)
            rounds = range(1, min(3, options.repeats) + 1)
            samples = [memory_of(program.seeded(seed), *times) / 1e6 for seed in rounds]
        except (NotInstalled, ProgramFailed) as error:
            remarks.append(f"{line}: not measured, {error}")
            continue
        options.tell(f"{line}: {samples} MB")
        measures.append(Measure(line, "MB (PSS)", samples, better="less"))
    ours = [measure for measure in measures if measure.what.startswith(OURS)]
    return measures + [
        Measure(f"{ours[0].what}, compared with {other.what.partition(':')[0]}", "MB (PSS)", ours[0].samples,
                against=other.what, better="less")
        for other in measures if ours and other not in ours
    ], remarks  # fmt: skip


def _processes(options: Options, run: str) -> list[Measure]:
    """A line for each process of a run, at its start and while it works; once, whatever the repeats."""
    if not options.wants(f"{run}: "):
        return []
    repeats = 1 if options.quick else min(3, options.repeats)
    found = [sizes_of(run, options) for _ in range(repeats)]
    names = [name for name in found[0] if all(name in sizes for sizes in found)]
    return [Measure(f"{run}: {name}", "MB", [sizes[name] for sizes in found], better="less") for name in names]
