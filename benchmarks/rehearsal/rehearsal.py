"""A scale rehearsal on one machine: `python -m benchmarks.rehearsal --workers 200 --seconds 60`.

Real Redis, real S3 server, the real trainer (or, with `--trainer consuming`, one that takes no gradient steps), and
many simulated workers (crowd.py) in a few processes; they join, are drained and die, and with `--crash` a
whole process of them is killed in the middle. At the end the accounting must balance and agree with what the workers
counted themselves; else the exit code is 1. Everything is on loopback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.rehearsal.crowd import Plan, crowd
from benchmarks.usage import ProcessorTime, RedisLook
from stagecoach.coordinator.catalog.status import live_status
from stagecoach.coordinator.lifecycle.preparation import prepare_new
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.coordinator.services.embedded import BUCKET, Service, new_secret, start_redis, start_s3
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import BEAT_SECONDS, Wait, poll, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import LedgerLine, read_accounting
from stagecoach.shared.runtime.launch import LOGS, RoleLaunch
from stagecoach.shared.runtime.run_context import open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED
from stagecoach.trainer_node.process import run_trainer
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer

_RUN = "scale"
_START_SECONDS = 300.0
_END_SECONDS = 120.0
_TEND_SECONDS = 0.2
"""As often as the fleet looks at the heartbeats."""
_MOVES = ("joined", "left", "died", "crashed")
_WATCH_SECONDS = 1.0
"""As often as somebody looks at `status`, with the accounting."""


@dataclass(frozen=True)
class Measured:
    """What was measured while workers came and went."""

    seconds: float
    workers: int
    processor: dict[str, float]
    """Role → processor seconds."""
    counts: Counter[str]
    waits: list[float]
    """Seconds from asking for a claim until it was granted, each."""
    transitions: int
    """In a fragment."""
    consumed: int
    """Fragments."""
    versions: int
    redis: RedisLook
    board_bytes: int
    heartbeat_seconds: list[float]
    signals: dict[str, Any]
    load: float


class ConsumingTrainer(Trainer):
    """As ever, but without a gradient step: what is left is the limit of the log itself."""

    def _learn(self, fragments: list[Fragment], phase: Phase) -> dict[str, float]:
        self.learner.counters.train.updates += 1
        return {}


def train(launch: RoleLaunch, learns: bool) -> None:
    """The trainer's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_trainer(Incarnation(launch.open("trainer")), Trainer if learns else ConsumingTrainer)


@dataclass
class Crowded:
    """One process of workers, as seen from here."""

    plan: Plan
    process: BaseProcess
    pipe: Connection
    told: int = 0
    """How often it has told what it did."""
    killed: bool = False


@dataclass
class Totals:
    """What the workers say that they did."""

    counts: Counter[str] = field(default_factory=Counter)
    produced: Counter[str] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)


class Rehearsal:
    """One rehearsal: `start`, `measure`, `end`; then `problems` are those of the accounting."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given, self._folder = given, folder
        self._random = random.Random(given.seed)
        self._crowds: list[Crowded] = []
        self._uncertain: set[int] = set()
        """Remainders of the numbers of workers whose process was killed before it could tell what it did last."""
        self._running = ExitStack()
        self._all = Totals()
        self._imbalances: list[str] = []
        self.processor = ProcessorTime()
        self.poll_seconds: list[float] = []
        """What reading all heartbeats took, each time."""
        self.accounting: dict[str, LedgerLine] = {}

    def start(self) -> None:
        """Services, a new run, the trainer, and all workers; returns once all of them beat."""
        config = config_of(self._given)
        address = self._start_services()
        (self._folder / LOGS).mkdir()
        self.role = open_run_context(config, address, "coordinator")
        self._running.callback(self.role.redis.close)
        description = check(config)
        prepare_new(self.role, description)
        self._launch = RoleLaunch(config.model_dump(mode="json"), address, (os.getcwd(),), str(self._folder))
        self._spawner = multiprocessing.get_context("spawn")
        self._trainer = self._spawner.Process(
            target=train, args=(self._launch, self._given.trainer == "learning"), daemon=True
        )
        self._trainer.start()
        self._running.callback(self._kill_all)
        self._crowds = [self._start_crowd(index) for index in range(self._given.processes)]
        poll(Wait("all workers to join", _START_SECONDS), self._all_there, 0.2)

    def measure(self, seconds: float) -> Measured:
        """Joins, leaves and deaths for so long; looks on as coordinator and console do."""
        for each in self._crowds:
            each.pipe.send("churn")
        self._drain_pipes()
        before, told = RedisLook.at(self.role.redis), Totals(Counter(self._all.counts), Counter(self._all.produced))
        first_wait, flow = len(self._all.waits), self.role.flow.read()
        self.processor = ProcessorTime()
        self._look_at_processes()
        begun = time.monotonic()
        watch, crash = begun, begun + seconds / 2 if self._given.crash else float("inf")
        while (now := time.monotonic()) < begun + seconds:
            self._tend()
            if now >= watch:
                watch = now + _WATCH_SECONDS
                self._watch()
            if now >= crash:
                crash = float("inf")
                self._crash()
            time.sleep(_TEND_SECONDS)
        self._look_at_processes()
        took, after = time.monotonic() - begun, self.role.flow.read()
        self._drain_pipes()
        status = live_status(self.role.redis, _RUN, accounting=False)
        return Measured(
            seconds=took, workers=self._given.workers, processor=dict(self.processor.seconds),
            counts=self._all.counts - told.counts, waits=self._all.waits[first_wait:],
            transitions=self.role.config.rollout.fragment_steps * self.role.config.environment.num_envs,
            consumed=after.consumed - flow.consumed, versions=after.version - flow.version,
            redis=RedisLook.at(self.role.redis).since(before), board_bytes=self._board_bytes(),
            heartbeat_seconds=self.poll_seconds, signals=status.metrics, load=os.getloadavg()[0],
        )  # fmt: skip

    def end(self) -> None:
        """Stops the run as `stagecoach stop` does; everybody ends in order."""
        self.role.flow.set_state(RunState.STOPPING, "stopped", RunState.RUNNING)
        for each in self._crowds:
            each.pipe.send("end")
        for each in self._crowds:
            deadline = time.monotonic() + _END_SECONDS
            while each.process.is_alive() and time.monotonic() < deadline:
                self._drain_pipes()
                each.process.join(0.1)
            self._drain_pipes()
        self._trainer.join(_END_SECONDS)
        self.accounting = read_accounting(self.role.redis, _RUN)

    def problems(self) -> list[str]:
        """Whatever is wrong with the accounting, or was at any poll; empty where each transition is accounted for."""
        found = list(self._imbalances)
        finished = self.role.checkpoints.marker(FINISHED)
        if self._trainer.exitcode != 0 or finished is None or finished["reason"] != "stopped":
            found.append(f"the trainer ended with code {self._trainer.exitcode}, .finished says {finished}")
        if self._all.counts["failed"]:
            found.append(f"{self._all.counts['failed']} workers failed; see {self._folder / LOGS}")
        found += [f"{worker} does not balance: {line.as_dict()}" for worker, line in self.accounting.items()
                  if not line.balances]  # fmt: skip
        for worker in sorted({*self.accounting, *self._all.produced} - {"total"}):
            line, own = self.accounting.get(worker), self._all.produced[worker]
            produced = line.produced.fragments if line else 0
            if produced < own or (produced > own and self._certain(worker)):
                found.append(f"{worker} has pushed {own} fragments, the ledger says {produced}")
        return found

    def certain_worker(self) -> str:
        """Some worker whose process lived to tell all that it did."""
        return next(worker for worker in sorted(self._all.produced) if self._certain(worker))

    def _certain(self, worker: str) -> bool:
        return int(worker.rpartition("-")[2]) % self._given.processes not in self._uncertain

    def close(self) -> None:
        """Ends whatever is still there."""
        self._running.close()

    def _start_services(self) -> Address:
        secret = {name: new_secret() for name in ("redis_password", "s3_access_key", "s3_secret_key")}
        (self._folder / "keys.json").write_text(json.dumps(secret))
        self._redis = start_redis(self._folder / "redis", self._folder / "redis.log", secret["redis_password"])
        self._running.callback(self._redis.stop)
        self._s3: Service = start_s3(
            self._folder / "s3", self._folder / "s3.log", secret["s3_access_key"], secret["s3_secret_key"]
        )
        self._running.callback(self._s3.stop)
        return Address(
            _RUN, f"redis://127.0.0.1:{self._redis.port}/0", f"s3://{BUCKET}", f"http://127.0.0.1:{self._s3.port}",
            str(self._folder / "keys.json"),
        )  # fmt: skip

    def _start_crowd(self, index: int) -> Crowded:
        given, ours = self._given, range(index, self._given.workers, self._given.processes)
        plan = Plan(
            self._launch, f"worker-crowd-{index}", index, given.processes, len(ours), given.think_ms / 1000,
            given.leaves_per_minute / 60 / given.processes, given.deaths_per_minute / 60 / given.processes,
            self._random.getrandbits(32),
        )  # fmt: skip
        here, there = self._spawner.Pipe()
        process = self._spawner.Process(target=crowd, args=(plan, there), daemon=True)
        process.start()
        there.close()
        return Crowded(plan, process, here)

    def _all_there(self) -> bool:
        self._drain_pipes()
        gone = [each.plan.name for each in self._crowds if not each.process.is_alive()]
        if gone or not self._trainer.is_alive():
            raise RuntimeError(f"{gone or 'the trainer'} ended at once; see {self._folder / LOGS}")
        return bool(self._all.counts["joined"] >= self._given.workers)

    def _tend(self) -> None:
        """What the fleet does in each turn: all heartbeats, and the flow."""
        self._drain_pipes()
        started = time.perf_counter()
        read_heartbeats(self.role.redis, _RUN)
        self.poll_seconds.append(time.perf_counter() - started)
        self.role.flow.read()

    def _watch(self) -> None:
        self._look_at_processes()
        lines = live_status(self.role.redis, _RUN).ledger
        self._imbalances += [f"{worker} did not balance: {line}" for worker, line in lines.items()
                             if not line["balances"]]  # fmt: skip

    def _crash(self) -> None:
        """A machine is lost with all workers on it, and another comes in its place."""
        victim = self._random.choice(self._crowds)
        victim.process.kill()
        victim.process.join()
        self._uncertain.add(victim.plan.first)
        self._all.counts["crashed"] += victim.plan.workers
        self._crowds[self._crowds.index(victim)] = fresh = self._start_crowd(victim.plan.first)
        fresh.pipe.send("churn")

    def _drain_pipes(self) -> None:
        for each in self._crowds:
            try:
                while each.pipe.poll():
                    counts, produced, waits = each.pipe.recv()
                    self._all.counts.update(counts)
                    self._all.produced.update(produced)
                    self._all.waits += waits
            except (EOFError, ConnectionResetError):
                continue  # it has ended; what it did is known by now

    def _look_at_processes(self) -> None:
        pids: dict[str, list[int | None]] = {
            "redis-server": [self._redis.process.pid], "S3 server": [self._s3.process.pid],
            "trainer": [self._trainer.pid], "workers": [each.process.pid for each in self._crowds],
            "coordinator (its looks)": [os.getpid()],
        }  # fmt: skip
        self.processor.look({role: [pid for pid in found if pid is not None] for role, found in pids.items()})

    def _board_bytes(self) -> int:
        return int(self.role.redis.hstrlen(RunKeys(_RUN).board, "blob"))

    def _kill_all(self) -> None:
        for process in (self._trainer, *(each.process for each in self._crowds)):
            process.kill()
            process.join()


def config_of(given: argparse.Namespace) -> Config:
    """CartPole, since its fragments can be made of any size and the network is small."""
    transitions = given.steps * given.envs
    window = (given.lag + 2) * given.per_update
    return parse_config({
        "environment": {"id": "CartPole-v1", "num_envs": given.envs},
        "rollout": {
            "workers": given.workers, "fragment_steps": given.steps, "fragments_per_update": given.per_update,
            "max_policy_lag": given.lag, "lease_seconds": given.lease_seconds,
            "max_log_bytes": max(256 << 20, 8 * window * transitions * 64),
        },
        "policies": {"default": {"hidden_sizes": given.hidden}},
        "algorithm": {"epochs": 4, "minibatch_size": max(1, min(transitions * given.per_update // 4, 8192))},
        "checkpoint": {"every": f"{given.checkpoint_every} updates"},
        "evaluation": {"episodes": 1},
        "metrics": {"writers": []},
        "stop_at": {"updates": 10**9},
    })  # fmt: skip


@contextmanager
def rehearsal(given: argparse.Namespace) -> Iterator[Rehearsal]:
    """One that is cleared away in any case."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        made = Rehearsal(given, Path(folder))
        try:
            yield made
        finally:
            made.close()


def arguments(command_line: Sequence[str] | None = None) -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rehearsal", description="A scale rehearsal on one machine."
    )
    add = parser.add_argument
    add("--workers", type=int, default=200)
    add("--seconds", type=float, default=60.0, help="of measurement, once all workers have joined")
    add("--processes", type=int, default=4, help="that hold the workers")
    add("--trainer", choices=("learning", "consuming"), default="learning", help="consuming: no gradient steps")
    add("--think-ms", type=float, default=40.0, help="how long a worker acts one fragment; 0 is a flood")
    add("--steps", type=int, default=64, help="steps of a fragment (T)")
    add("--envs", type=int, default=8, help="environments of a worker (N); 64×8 is 22 KB, 64×24 64 KB, 64×400 1 MB")
    add("--hidden", type=int, nargs="+", default=[64, 64], help="layers of the policy, so how large a version is")
    add("--per-update", type=int, default=50, help="fragments that an update consumes (K)")
    add("--lag", type=int, default=1, help="policy lag that is allowed (L)")
    add("--lease-seconds", type=float, default=5.0, help="after which a dead worker's claim goes to another")
    add("--checkpoint-every", type=int, default=20, help="updates")
    add("--leaves-per-minute", type=float, default=30.0, help="workers that are drained; others join")
    add("--deaths-per-minute", type=float, default=30.0, help="workers that stop without a word")
    add("--crash", action="store_true", help="kill a whole process of workers in the middle, as a lost machine")
    add("--seed", type=int, default=1, help="of the leaving and dying")
    return parser.parse_args(command_line)


def verdict(work: Rehearsal, say: Callable[[str], None] = print) -> int:
    """The exit code: 0 only where every transition is accounted for."""
    problems = work.problems()
    total = work.accounting["total"]
    dropped = ", ".join(f"{count.fragments} {reason}" for reason, count in sorted(total.dropped.items())) or "none"
    say(
        f"\nledger: {total.produced.fragments} fragments produced = {total.consumed.fragments} consumed + "
        f"{sum(count.fragments for count in total.dropped.values())} dropped ({dropped}) + "
        f"{total.in_flight.fragments} in flight; {'OUT OF BALANCE' if problems else 'balanced, worker by worker'}"
    )
    for problem in problems[:10]:
        say(f"  {problem}")
    return 1 if problems else 0


def table(m: Measured) -> str:
    """In Markdown."""
    lines = [f"| {m.workers} workers, {m.seconds:.0f} s, load {m.load:.1f} | |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows(m)])


def rows(m: Measured) -> list[tuple[str, str]]:
    """Figure and value."""
    calls = sum(m.redis.commands.values())
    granted, refused = m.counts["granted"], m.counts["refused"]
    share = sum(m.waits) / (m.workers * m.seconds)
    used = dict(m.processor)
    per_worker = used.get("workers", 0.0) / m.workers / m.seconds
    return [
        ("fragments/s, consumed", _rate(m.consumed, m)),
        ("env steps/s", _rate(m.consumed * m.transitions, m)),
        ("policy versions/s", f"{m.versions / m.seconds:.2f}"),
        ("into Redis (MB/s)", f"{m.redis.bytes_in / m.seconds / 1e6:.2f}"),
        ("out of Redis (MB/s)", f"{m.redis.bytes_out / m.seconds / 1e6:.2f}"),
        ("policy fetches/s × bytes of a version", f"{m.counts['fetches'] / m.seconds:.0f} × {m.board_bytes}"),
        ("workers' time that is waiting for credit", f"{100 * share:.0f} %"),
        ("wait for a claim, p50 / p95 (ms)", f"{1000 * _at(m.waits, 50):.0f} / {1000 * _at(m.waits, 95):.0f}"),
        ("claims granted/s; refused for each", f"{granted / m.seconds:.0f}; {refused / max(granted, 1):.1f}"),
        ("Redis commands/s, those within scripts too", _rate(calls, m)),
        ("Redis connections", str(m.redis.connections)),
        ("Redis memory (MiB)", f"{m.redis.memory_bytes / 2**20:.0f}"),
        ("heartbeats/s", f"{m.workers / BEAT_SECONDS:.0f}"),
        ("reading all heartbeats, p50 (ms)", f"{1000 * _at(m.heartbeat_seconds, 50):.1f}"),
        *((f"processor, {role}", f"{100 * value / m.seconds:.0f} %") for role, value in sorted(used.items())),
        ("processor, for each worker", f"{100 * per_worker:.2f} %"),
        ("Redis, for each fragment consumed (µs)", f"{1e6 * used.get('redis-server', 0) / max(m.consumed, 1):.0f}"),
        ("joined / left / died / lost with their process", " / ".join(str(m.counts[name]) for name in _MOVES)),
    ]  # fmt: skip


def _rate(count: int, m: Measured) -> str:
    return f"{count / m.seconds:,.0f}"


def _at(values: Sequence[float], percent: int) -> float:
    """A percentile; 0 of nothing."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else sum(values)


def main(command_line: Sequence[str] | None = None) -> int:
    """Reads the command line, prints the table, answers the exit code."""
    given = arguments(command_line)
    with rehearsal(given) as work:
        work.start()
        measured = work.measure(given.seconds)
        work.end()
        print(table(measured))
        return verdict(work)
