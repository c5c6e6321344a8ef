"""A run whose roles are processes of their own, without Ray, over a Redis of their own: what the whole path costs.

In: a config, and who plays in it. Out: env steps that the trainer has learned, and what each role used for that.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import redis

from benchmarks.kit.own_run import own_services
from benchmarks.usage import ProcessorTime, RedisLook, resident_peak
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.launch import LOGS, RoleLaunch
from stagecoach.shared.runtime.run_context import open_run_context
from stagecoach.trainer_node.process import run_trainer
from stagecoach.trainer_node.recovery.incarnation import Incarnation

Part = Callable[[RoleLaunch], None]
"""What a process does all its life; it can be pickled."""
_START_SECONDS = 120.0
_END_SECONDS = 60.0
_POLL_SECONDS = 0.02


def work(launch: RoleLaunch, index: int = 0) -> None:
    """One rollout worker's process."""
    _begin()
    Worker(launch.open(f"worker-{index}"), index).run()


def train(launch: RoleLaunch) -> None:
    """The trainer's process."""
    _begin()
    run_trainer(Incarnation(launch.open("trainer")))


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class Progress:
    """How far the trainer has come, and when."""

    at: float
    env_steps: int
    updates: int


@dataclass(frozen=True)
class Measured:
    """What was measured between two versions."""

    seconds: float
    env_steps: int
    """That were learned; the steps in which native environments start again are none."""
    updates: int
    processor: dict[str, float]
    """Role → processor seconds."""
    resident: dict[str, int]
    """Role → the most bytes that one of its processes ever held."""
    redis: RedisLook
    version_bytes: int

    @property
    def rate(self) -> float:
        """Env steps a second, learned."""
        return self.env_steps / self.seconds

    @property
    def microseconds(self) -> dict[str, float]:
        """Role → processor time for each env step."""
        return {role: 1e6 * seconds / max(1, self.env_steps) for role, seconds in self.processor.items()}


class Roles:
    """One run: `start`, `measure` once or more often, `end`."""

    def __init__(self, launch: RoleLaunch, redis_pid: int, parts: Mapping[str, Part]) -> None:
        """`parts`: name → what its process does; names that differ in their number only are one role."""
        self._launch, self._redis_pid, self._parts = launch, redis_pid, parts
        self._processes: dict[str, BaseProcess] = {}
        self.role = open_run_context(parse_config(launch.config), launch.address, "coordinator")

    def start(self, seconds: float = _START_SECONDS) -> None:
        """All parts; returns once the trainer has learned something, within so many seconds.

        Raises `RuntimeError` with the last lines of the log where a part ends instead.
        """
        spawner = multiprocessing.get_context("spawn")
        for name, part in self._parts.items():
            process = spawner.Process(target=part, args=(self._launch,), name=name, daemon=True)
            process.start()
            self._processes[name] = process
        self.wait(updates=2, seconds=seconds)

    def wait(self, updates: int, seconds: float) -> Progress:
        """Until the trainer has made so many updates; raises `RuntimeError` where it does not come to it."""
        deadline = time.monotonic() + seconds
        while (found := self.progress()).updates < updates:
            gone = [name for name, process in self._processes.items() if not process.is_alive()]
            if gone or time.monotonic() > deadline:
                why = f"{', '.join(gone)} ended" if gone else f"no {updates} updates within {seconds:g} s"
                raise RuntimeError(f"{why}:\n{self._last_lines()}")
            time.sleep(_POLL_SECONDS)
        return found

    def progress(self) -> Progress:
        """Now, as of the version that is on the board."""
        header = self.role.redis.hget(RunKeys(self.role.run_id).board, "header")
        counters = json.loads(header)["counters"]["train"] if isinstance(header, bytes) else {}
        return Progress(time.perf_counter(), counters.get("env_steps", 0), counters.get("updates", 0))

    def measure(self, seconds: float, most: float = 60.0) -> Measured:
        """For at least so many seconds, from one publication to another; `most`: how long one update may take."""
        began = self.wait(self.progress().updates + 1, most)
        processor, redis_before = ProcessorTime(), RedisLook.at(self.role.redis)
        processor.look(self._pids())
        time.sleep(seconds)
        ended = self.wait(self.progress().updates + 1, most)
        processor.look(self._pids())
        return Measured(
            ended.at - began.at, ended.env_steps - began.env_steps, ended.updates - began.updates,
            dict(processor.seconds),
            {role: max(map(resident_peak, pids), default=0) for role, pids in self._pids().items()},
            RedisLook.at(self.role.redis).since(redis_before),
            int(self.role.redis.hstrlen(RunKeys(self.role.run_id).board, "blob")),
        )  # fmt: skip

    def end(self) -> None:
        """As `stagecoach stop` does; then those still there are ended."""
        try:
            self.role.flow.set_state(RunState.STOPPING, "stopped", RunState.RUNNING)
            deadline = time.monotonic() + _END_SECONDS
            for process in self._processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
        except redis.RedisError:
            pass  # it was Redis that broke; `close` ends the others

    def close(self) -> None:
        """Ends whatever is still there."""
        for process in self._processes.values():
            process.kill()
            process.join()
        self.role.redis.close()

    def _pids(self) -> dict[str, list[int]]:
        found = {"redis-server": [self._redis_pid]}
        for name, process in self._processes.items():
            if process.pid is not None:
                found.setdefault(name.partition("-")[0], []).append(process.pid)
        return found

    def _last_lines(self) -> str:
        logs = sorted((Path(str(self._launch.run_folder)) / LOGS).glob("*.log"))
        return "\n".join(f"{path.name}: {line}" for path in logs for line in path.read_text().splitlines()[-12:])


@contextmanager
def running(config: Config, parts: Mapping[str, Part], start_seconds: float = _START_SECONDS) -> Iterator[Roles]:
    """A run that has begun to learn, and is cleared away in any case."""
    with own_services() as services:
        made = Roles(services.new_run(config), services.redis_pid, parts)
        try:
            made.start(start_seconds)
            yield made
            made.end()
        finally:
            made.close()
