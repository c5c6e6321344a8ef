"""A run with real services and without Ray, whose roles are plain processes started here: for measuring one side alone.

`LoneRun.open` starts Redis and an S3 server and records a new run; `spawn` starts a role's process on a core.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.kit.own_run import own_services
from benchmarks.rehearsal.rehearsal import ConsumingTrainer
from benchmarks.suite.pinning import begin_on
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.runtime.launch import LOGS, RoleLaunch
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.trainer_node.process import run_trainer
from stagecoach.trainer_node.recovery.incarnation import Incarnation


@dataclass
class LoneRun:
    """Services, a new run in them, and the processes that were started for it."""

    role: RunContext
    launch: RoleLaunch
    processes: list[BaseProcess] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(cls, config: Config) -> Iterator[LoneRun]:
        """Everything that was started is ended again, in any case."""
        with ExitStack() as running:
            launch = running.enter_context(own_services(s3=True)).new_run(config)
            role = open_run_context(config, launch.address, "coordinator")
            running.callback(role.redis.close)
            made = cls(role, launch)
            running.callback(made._end)
            yield made

    @property
    def pids(self) -> list[int]:
        """Of the roles' processes."""
        return [process.pid for process in self.processes if process.pid is not None]

    def spawn(self, life: Callable[..., None], core: int, *more: Any) -> BaseProcess:
        """Starts `life(launch, *more)` in a process of its own on this core."""
        process = multiprocessing.get_context("spawn").Process(
            target=_live, args=(life, core, self.launch, *more), daemon=True
        )
        process.start()
        self.processes.append(process)
        return process

    def refuse_losses(self) -> None:
        """Raises `RuntimeError` where a process has ended, with its log."""
        for process in self.processes:
            if not process.is_alive():
                logs = "\n".join(path.read_text() for path in (Path(str(self.launch.run_folder)) / LOGS).glob("*.log"))
                raise RuntimeError(f"process {process.pid} has ended with code {process.exitcode}:\n{logs[-4000:]}")

    def _end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _live(life: Callable[..., None], core: int, launch: RoleLaunch, *more: Any) -> None:
    """Before anything starts a thread: all of them have the core of the first."""
    begin_on(core)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    life(launch, *more)


def act(launch: RoleLaunch) -> None:
    """A rollout worker's process."""
    Worker(launch.open("worker-0"), 0).run()


def consume(launch: RoleLaunch) -> None:
    """The process of a trainer that takes fragments in and publishes, but learns nothing."""
    run_trainer(Incarnation(launch.open("trainer")), ConsumingTrainer)
