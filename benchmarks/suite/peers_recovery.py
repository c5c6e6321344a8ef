"""What `kill -9` of all processes costs: Stagecoach, Stable-Baselines3 and TorchRL, each with its own checkpoints.

The same task for all (CartPole-v1, PPO, 64 environments, batches of 4096, checkpoints 40,960 env steps apart), run to
its end undisturbed, twice; then killed at an instant drawn by a seed, started again at once by the same command, and
run to its end. Steps lost were trained before the kill and have to be trained again; `same weights` says whether those
at the end are the undisturbed run's, bit by bit. The clock runs from the kill.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.contest.contestants import (
    CARTPOLE,
    OURS,
    STABLE_BASELINES3,
    TORCHRL,
    Contestant,
    stable_baselines3,
    stagecoach,
    torchrl,
)  # fmt: skip
from benchmarks.contest.virtual_environments import NotInstalled
from benchmarks.contest.watching import Program, ProgramFailed, Recovery, Undisturbed, recovery, undisturbed
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.suite.peers import prepared, versions_of

_EVERY = 10 * CARTPOLE.batch
_ENV_STEPS, _QUICK_ENV_STEPS = 100 * CARTPOLE.batch, 20 * CARTPOLE.batch
_SEED = 42
_EARLIEST, _LATEST = 0.3, 0.9
"""Of the env steps: when it is killed."""
_DELAY = 0.1
"""Seconds later at most, so that it is in any part of an update."""


def measure(options: Options) -> Result:
    """One contestant after the other, as none is compared in seconds with another's repeat."""
    env_steps = _QUICK_ENV_STEPS if options.quick else _ENV_STEPS
    measures, remarks, settings = list[Measure](), list[str](), dict[str, Any]()
    for one in _entered(env_steps):
        if not options.wants(one.name):
            continue
        try:
            program = prepared(one, next(iter(one.speed.values())), options).seeded(1)
            measures += _lines(one.name, program, env_steps, options, remarks)
        except (NotInstalled, ProgramFailed) as error:
            remarks.append(f"{one.name} is not measured: {error}")
            continue
        settings[one.name] = dict(program.settings)
    settings |= {"killed": f"between {_EARLIEST} and {_LATEST} of the env steps, by seed {_SEED}"}
    return Result("peers-recovery", __doc__ or "", measures, settings, remarks=remarks,
                  versions=versions_of({one.peer for one in _entered(env_steps)}))  # fmt: skip


def _entered(env_steps: int) -> list[Contestant]:
    """With an end, and checkpoints."""
    config = stagecoach(CARTPOLE, 0)["1 worker, 1 thread"]["config"]
    config |= {"checkpoint": {"every": f"{_EVERY} env_steps"}, "stop_at": {"env_steps": env_steps}}
    own = {
        STABLE_BASELINES3: next(iter(stable_baselines3(CARTPOLE).values())),
        TORCHRL: next(iter(torchrl(CARTPOLE).values())),
    }
    peers = [Contestant(name, name, {"": {**given, "total_env_steps": env_steps}}) for name, given in own.items()]
    return [Contestant(OURS, speed={"": {"config": config}}), *peers]


def _lines(name: str, program: Program, env_steps: int, options: Options, remarks: list[str]) -> list[Measure]:
    """Four lines; a remark on who is not even equal to itself."""
    alone = [_undisturbed(program) for _ in range(1 if options.quick else 2)]
    options.tell(f"{name}, undisturbed: {', '.join(f'{one.seconds:.1f} s' for one in alone)}")
    if len({one.weights for one in alone}) > 1:
        remarks.append(f"{name}: two undisturbed runs with the same seed have other weights at their end")
    instants = random.Random(_SEED)
    found = []
    for repeat in range(options.repeats):
        share = instants.uniform(_EARLIEST, _LATEST)
        found.append(_killed(program, share * env_steps, instants.uniform(0, _DELAY)))
        options.tell(f"round {repeat + 1}: {name}, killed after {share:.0%}: {found[-1]}")
    same = [float(one.weights == alone[0].weights) for one in found]
    return [
        Measure(f"{name}: env steps lost", "env steps", [float(one.env_steps_lost) for one in found], better="less"),
        Measure(f"{name}: same weights at the end", "of 1", same, aim=1.0 if name == OURS else None),
        Measure(f"{name}: learns again after", "s", [one.seconds_to_learn for one in found], better="less"),
        Measure(f"{name}: as far as before after", "s", [one.seconds_to_catch_up for one in found], better="less"),
    ]


def _undisturbed(program: Program) -> Undisturbed:
    with tempfile.TemporaryDirectory(prefix="peers-recovery-", ignore_cleanup_errors=True) as folder:
        return undisturbed(_kept(program, folder))


def _killed(program: Program, env_steps: float, delay: float) -> Recovery:
    with tempfile.TemporaryDirectory(prefix="peers-recovery-", ignore_cleanup_errors=True) as folder:
        return recovery(_kept(program, folder), env_steps, delay)


def _kept(program: Program, folder: str) -> Program:
    keep = {"folder": str(Path(folder) / "kept"), "every_env_steps": _EVERY}
    return replace(program, settings={**program.settings, "keep": keep})
