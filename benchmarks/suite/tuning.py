"""How many workers, environments and steps for a slow, a fast and an image environment? `python -m benchmarks tuning`.

Real runs of PPO, all roles as processes, nothing pinned; workers may act one version ahead. The learner's work for each
transition is the same in all runs of a kind. Each setting is measured once for each repeat, in turns.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options, in_turns
from benchmarks.suite.real_runs import one_ray, real_run, speed, wait_for_first_versions
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config

_WINDOW_SECONDS = 4.0
_TRANSITIONS = 2048
"""Of an update, whatever fragments it comes in."""
_SLOW_SECONDS = 0.002
_RAY_CPUS = 8
"""For the runs with four workers; the machine has what it has."""
QUESTION = (
    "Env steps/s of real PPO runs with all their processes on this machine, against the smallest setting of the same "
    "environment: so many workers × environments of each × steps of a fragment. An update always learns from "
    f"{_TRANSITIONS:,} transitions (one epoch, minibatches of 512), workers may be one version ahead."
)
_KINDS: dict[str, dict[str, Any]] = {
    "fast": {"id": "CartPole-v1"},
    "slow": {"id": "benchmarks.suite.environments:slow", "kwargs": {"seconds": _SLOW_SECONDS}},
    "images": {
        "id": "benchmarks.suite.environments:moving_square",
        "wrappers": [{"path": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 4}}],
    },
}
_NETWORKS: dict[str, dict[str, Any]] = {"images": {"cnn": "nature", "hidden_sizes": [], "share_encoder": True}}


@dataclass(frozen=True)
class Setting:
    """Workers × environments × steps."""

    kind: str
    workers: int
    envs: int
    steps: int
    vectorization: str = "sync"

    @property
    def name(self) -> str:
        """For the table."""
        how = "" if self.vectorization == "sync" else f", {self.vectorization}"
        return f"{self.kind}: {self.workers} × {self.envs} × {self.steps}{how}"

    def config(self, folder: Path) -> Config:
        """Of its run."""
        return parse_config({
            "runs_dir": str(folder),
            "environment": {**_KINDS[self.kind], "num_envs": self.envs, "vectorization": self.vectorization},
            "policies": {"default": _NETWORKS.get(self.kind, {})},
            "algorithm": {"epochs": 1, "minibatch_size": 512},
            "rollout": {
                "workers": self.workers, "fragment_steps": self.steps, "max_policy_lag": 1,
                "fragments_per_update": max(1, _TRANSITIONS // (self.envs * self.steps)),
            },
            "checkpoint": {"every": "1000 updates"},
            "evaluation": {"episodes": 1, "num_envs": 1},
            "trainer": {"device": "cpu"},
            "stop_at": {"updates": 10**9},
        })  # fmt: skip


SETTINGS = (
    Setting("fast", 1, 1, 64),
    Setting("fast", 1, 8, 64),
    Setting("fast", 1, 64, 8),
    Setting("fast", 1, 64, 32),
    Setting("fast", 2, 32, 32),
    Setting("fast", 1, 64, 32, "native"),
    Setting("slow", 1, 1, 64),
    Setting("slow", 1, 8, 64),
    Setting("slow", 1, 8, 64, "async"),
    Setting("slow", 4, 8, 64),
    Setting("images", 1, 1, 64),
    Setting("images", 1, 8, 64),
    Setting("images", 1, 32, 64),
    Setting("images", 2, 8, 64),
)


def measure(options: Options) -> Result:
    """A line for each setting, against the first one of its kind."""
    wanted = [setting for setting in SETTINGS if options.wants(setting.name)]
    with one_ray(_RAY_CPUS):
        samples = in_turns(options, {one.name: partial(_speed_of, one, options.quick) for one in wanted})
    first = {setting.kind: setting.name for setting in reversed(wanted)}
    measures = []
    for one in wanted:
        against = "" if one.name == first[one.kind] else first[one.kind]
        measures.append(Measure(one.name, "env steps/s", samples[one.name], against=against))
    settings = {one.name: one.config(Path("runs")).model_dump(mode="json", exclude_unset=True) for one in wanted}
    remarks = (
        f"slow: an environment that sleeps {_SLOW_SECONDS * 1000:g} ms in each step, as one that waits for a simulator "
        "or a network does: many of them share a core. One that computes needs a core of its own.",
        "images: 84×84 frames of benchmarks/suite/environments.py, four stacked, sent once.",
    )
    return Result("tuning", QUESTION, measures, settings, remarks=remarks)


def _speed_of(setting: Setting, quick: bool) -> float:
    with ExitStack() as running:
        folder = running.enter_context(TemporaryDirectory(prefix="tuning-"))
        config = setting.config(Path(folder))
        run, role = running.enter_context(real_run(config))
        wait_for_first_versions(run, role.flow)
        time.sleep(0.5)  # all workers are there
        return speed(role.flow, config, 0.3 if quick else _WINDOW_SECONDS)
