"""`make soak`: a real run, real faults at random, and whether anything was lost.

Embedded Redis, S3 server and Ray, a trainer, an evaluator and several workers; for so many minutes one of them is
killed or stopped at a time, chosen by a seed. Then the run is stopped as a user stops it, and its whole log is trained
again. Ends with code 1 where the run did not come through, the ledger was ever out of balance, or the replay differs.

With `--calm-minutes`, nothing happens for so long after each `--faulty-minutes`: the goodput is the versions a second
with faults, of those without, both of one run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from stagecoach.coordinator.services.embedded import process_stat
from tests.support.processes.command_line import CommandLine
from tests.support.processes.process_faults import AWAY, Fault, Watched, go_on, kill, stop
from tests.support.runs import lockstep_run

RUN = "soak"
KINDS = ("trainer", "worker", "evaluator", "Redis", "store", "raylet", "GCS", "coordinator")
_WEIGHTS = (5, 5, 3, 3, 3, 1, 1, 1)
"""Ray's processes and the coordinator take everything with them, so they come less often."""
_RAY = ("raylet", "GCS")
_STOPPED_SECONDS = (0.5, 4.0)
RECOVERY_SECONDS = 300.0
"""No promise: a run that is not well again after so long has not come through."""
_POLL_SECONDS = 0.05


class NotThrough(Exception):
    """The run did not survive what was done to it."""


@dataclass
class Soak:
    terminal: CommandLine
    minutes: float
    per_minute: float
    random: random.Random
    watched: Watched
    faulty_minutes: float = 0.0
    calm_minutes: float = 0.0
    detached: bool = False
    coordinator: int = 0
    """Process id of a detached coordinator."""
    faults: list[Fault] = field(default_factory=list)
    stopped: list[tuple[float, Fault]] = field(default_factory=list)
    sizes: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Kind → (when, KiB of resident memory of the largest of these processes)."""
    windows: list[tuple[float, int]] = field(default_factory=list)
    """Time and version, in turns, when faults begin and when the run has recovered from the last of them."""
    looks: int = 0
    imbalances: list[str] = field(default_factory=list)
    resumes: int = 0
    process: subprocess.Popen[str] = field(init=False)
    """The command that has started or resumed the run; a detached one has ended, and its coordinator works."""

    def run(self) -> None:
        """Faults for so many minutes, then until the last of them is over."""
        began = time.monotonic()
        end, due, look = began + 60 * self.minutes, self._next(), began
        while time.monotonic() < end or self.unrecovered():
            now = time.monotonic()
            self._end_stops(now)
            self.resume_if_killed()
            faulty = now < end and self.faulty(now - began)
            if faulty and due <= now:
                self._strike()
                due = self._next()
            if look <= now:
                self.look()
                look = now + 1.0
            self.watch_recovery()
            self.note_window(faulty)
            time.sleep(_POLL_SECONDS)
        self.note_window(len(self.windows) % 2 == 0)

    def faulty(self, seconds: float) -> bool:
        cycle = 60 * (self.faulty_minutes + self.calm_minutes)
        return not self.calm_minutes or seconds % cycle < 60 * self.faulty_minutes

    def note_window(self, faulty: bool) -> None:
        """Notes when a part with faults begins or is over, once the run can say its version."""
        if faulty == (len(self.windows) % 2 == 0) and (faulty or not self.unrecovered()):
            with contextlib.suppress(*AWAY):
                self.windows.append((time.monotonic(), self.watched.version()))

    def finish(self) -> dict[str, Any]:
        """Stops the run as a user does; answers `.finished`."""
        done = self.terminal.run("stop", RUN)
        if done.code != 0:
            raise NotThrough(f"stop failed: {done.err}")
        ended = self.terminal.ended(self.process, 300)
        if self.detached:
            self.terminal.check_nothing_left()
        if ended.code != 0:
            raise NotThrough(f"the run ended with code {ended.code}: {ended.out[-500:]} {ended.err[-1000:]}")
        if self.terminal.left():
            raise NotThrough(f"left behind: {self.terminal.left()}")
        finished: dict[str, Any] = self.terminal.marker(RUN, ".finished")
        self.imbalances += [
            f"{worker} at the end" for worker, line in finished["ledger"].items() if not line["balances"]
        ]
        return finished

    def _next(self) -> float:
        return time.monotonic() + self.random.expovariate(self.per_minute / 60)

    def unrecovered(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.recovered is None]

    def _strike(self) -> None:
        """One fault to one process that is there and not already suffering one."""
        kind = self.random.choices(KINDS, _WEIGHTS)[0]
        suffering = {fault.pid for fault in self.unrecovered()}
        found = [item for item in self.watched.processes().get(kind, []) if item[1] not in suffering]
        if not found:
            return
        name, pid = self.random.choice(sorted(found))
        killed = self.random.random() < 0.7 or kind in _RAY
        fault = (kill if killed else stop)(self.watched, kind, name, pid)
        for other in (others := self.unrecovered()):
            other.alone = False
        fault.alone = not others
        self.faults.append(fault)
        if not killed:
            self.stopped.append((time.monotonic() + self.random.uniform(*_STOPPED_SECONDS), fault))

    def _end_stops(self, now: float) -> None:
        for until, fault in [item for item in self.stopped if item[0] <= now]:
            go_on(fault)
            self.stopped.remove((until, fault))

    def resume_if_killed(self) -> None:
        """Resumes a run whose coordinator was killed, as a person or systemd would."""
        if self.detached:
            if process_stat(self.coordinator) is not None:
                return
        elif self.process.poll() is None:
            return
        pid = self.coordinator if self.detached else self.process.pid
        killed = any(fault.pid == pid and fault.how == "killed" for fault in self.faults)
        ray_is_gone = any(fault.kind in _RAY for fault in self.unrecovered())  # it takes us along
        if not killed and ((self.terminal.store(RUN) / ".finished").exists() or not ray_is_gone):
            ended = self.terminal.ended(self.process)
            raise NotThrough(f"the run ended with code {ended.code}: {ended.out[-1000:]} {ended.err[-1000:]}")
        deadline = time.monotonic() + RECOVERY_SECONDS
        while self.terminal.left():
            for _, fault in self.stopped:
                go_on(fault)
            if time.monotonic() > deadline:
                raise NotThrough(f"outlived its coordinator: {self.terminal.left()}")
            time.sleep(0.1)
        self.resumes += 1
        self.launch("resume", RUN)

    def launch(self, *arguments: str | Path) -> None:
        """`train` or `resume`; in the background of the test, or as a process whose parent is no more."""
        self.process = self.terminal.start(*arguments, *(["--detach"] if self.detached else []))
        if not self.detached:
            return
        ended = self.terminal.ended(self.process)
        if ended.code != 0:
            raise NotThrough(f"it did not start: {ended.out[-1000:]} {ended.err[-1000:]}")
        self.terminal.wait_until("the coordinator", lambda: "coordinator" in self.watched.processes())
        ((_, self.coordinator),) = self.watched.processes()["coordinator"]

    def watch_recovery(self) -> None:
        """Notes which faults are over; raises `NotThrough` for one that lasts too long."""
        with contextlib.suppress(*AWAY):
            for fault in self.unrecovered():
                waits = any(fault is stopped for _, stopped in self.stopped)
                if not waits and fault.is_over(self.watched):
                    fault.recovered = time.monotonic() - fault.done
        for fault in self.unrecovered():
            if time.monotonic() - fault.done > RECOVERY_SECONDS:
                raise NotThrough(f"{fault.label} ({fault.name}): not well again after {RECOVERY_SECONDS:g} s")

    def look(self) -> None:
        """Memory of each kind of process, and the accounting."""
        for kind, found in self.watched.processes().items():
            size = max(_resident_kib(pid) for _, pid in found)
            self.sizes.setdefault(kind, []).append((time.monotonic(), size))
        with contextlib.suppress(*AWAY):
            accounting = self.watched.accounting()
            self.looks += 1
            self.imbalances += [f"{name}: {line.as_dict()}" for name, line in accounting.items() if not line.balances]


def _resident_kib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
    return 0


def config_of(folder: Path, workers: int, step_seconds: float) -> Path:
    """CartPole: all of the log is archived, and dying often is no reason to give up."""
    (folder / "slow.py").write_text(lockstep_run.ENVIRONMENT)
    wrappers = [{"path": "slow:Slow", "kwargs": {"seconds": step_seconds}}] if step_seconds else []
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({
        "environment": {"id": "CartPole-v1", "num_envs": 8, "wrappers": wrappers},
        "rollout": {
            "workers": workers, "fragment_steps": 64, "fragments_per_update": 4, "max_policy_lag": 1,
            "restarts_allowed": 1_000_000, "lease_seconds": 5.0,
        },
        "algorithm": {"minibatch_size": 512, "epochs": 4},
        "checkpoint": {"every": "50 updates"},
        "evaluation": {"episodes": 4},
        "archive": "all",
        "stop_at": {"updates": 10**9},
    }))  # fmt: skip
    return path


def soak(given: argparse.Namespace, folder: Path) -> bool:
    """Runs one; prints its table; answers whether nothing was lost."""
    terminal = CommandLine(folder)
    work = Soak(
        terminal, given.minutes, given.kills_per_minute, random.Random(given.seed), Watched(terminal, RUN),
        given.faulty_minutes, given.calm_minutes, given.detach,
    )  # fmt: skip
    try:
        work.launch("train", config_of(folder, given.workers, given.step_seconds), "--run-id", RUN)
        terminal.until(RUN, "training", lambda status: status.version > 1)
        last_error = ""
        try:
            work.run()
            finished = work.finish()
            replayed = json.loads(terminal.run("replay", RUN, "--json", seconds=10_000).out)
        except NotThrough as error:
            last_error, finished, replayed = str(error), {}, {}
        report(work, finished, replayed)
        equal = "equal" if replayed.get("equal") else "DIFFERENT"
        print(f"\nreplay of the whole log: {equal}; last_error: {last_error or 'none'}")
        return verdict(work, replayed, last_error)
    finally:
        terminal.close()


def verdict(work: Soak, replayed: dict[str, Any], last_error: str) -> bool:
    """Returns True if the run survived, the accounting always balanced, and the replay is equal."""
    survived = all(fault.recovered is not None for fault in work.faults)
    return not last_error and survived and work.looks > 0 and not work.imbalances and bool(replayed.get("equal"))


def report(work: Soak, finished: dict[str, Any], replayed: dict[str, Any]) -> None:
    print("\n| fault | survived | of these alone | recovery p50 (s) | p95 (s) |\n|---|---|---|---|---|")
    for label in sorted({fault.label for fault in work.faults}):
        faults = [fault for fault in work.faults if fault.label == label]
        survived = sum(fault.recovered is not None for fault in faults)
        seconds = sorted(fault.recovered for fault in faults if fault.recovered is not None and fault.alone)
        numbers = f"{len(seconds)} | {_at(seconds, 0.5)} | {_at(seconds, 0.95)}"
        print(f"| {label} | {survived} of {len(faults)} | {numbers} |")
    survived = sum(fault.recovered is not None for fault in work.faults)
    print(f"| all | {survived} of {len(work.faults)} | {sum(fault.alone for fault in work.faults)} | | |")
    total = finished.get("ledger", {}).get("total", {})
    if total:
        dropped = Counter({reason: count["transitions"] for reason, count in total["dropped"].items()})
        print("\n| transitions | |\n|---|---|")
        print(
            f"| produced | {total['produced']['transitions']:,} |\n| consumed | {total['consumed']['transitions']:,} |"
        )
        for reason, count in sorted((dropped | Counter()).items()):
            print(f"| {'lost' if reason == 'lost' else f'dropped as {reason}'} | {count:,} |")
        print(f"| in flight at the end | {total['in_flight']['transitions']:,} |")
    _report_trend(work)
    if work.calm_minutes:
        report_goodput(work.windows)
    print(f"\nledger: {work.looks} looks, {len(work.imbalances)} imbalanced{' ' if work.imbalances else ''}", end="")
    print("; ".join(work.imbalances[:3]))
    print(
        f"resumed after the coordinator's death: {work.resumes} times; policy versions: {finished.get('version')}",
        end="",
    )
    print(f"; trained again: {replayed.get('versions')} versions, {replayed.get('env_steps')} env steps")


def _report_trend(work: Soak) -> None:
    """The same in each quarter: recovery does not get longer, and memory does not grow."""
    looks = [when for sizes in work.sizes.values() for when, _ in sizes]
    if not looks:
        return
    began, quarter = min(looks), (max(looks) - min(looks)) / 4 + 1e-9
    print("\n| in each quarter | 1 | 2 | 3 | 4 |\n|---|---|---|---|---|")
    for kind, sizes in sorted(work.sizes.items()):
        parts = [[size for when, size in sizes if int((when - began) / quarter) == number] for number in range(4)]
        print(f"| {kind}: peak resident memory (MiB) |", *(f"{max(part, default=0) // 1024} |" for part in parts))
    for label in ("trainer killed", "worker killed"):
        alone = [fault for fault in work.faults if fault.label == label and fault.alone and fault.recovered is not None]
        times = [
            sorted(fault.recovered or 0.0 for fault in alone if min(3, int((fault.done - began) / quarter)) == number)
            for number in range(4)
        ]
        print(f"| {label}: recovery p50 (s) |", *(f"{_at(part, 0.5)} |" for part in times))


def report_goodput(windows: list[tuple[float, int]]) -> None:
    parts = [(later[0] - when, later[1] - version) for (when, version), later in pairwise(windows)]
    rates = list[float]()
    for name, some in (("with faults", parts[::2]), ("calm", parts[1::2])):
        seconds, versions = sum(part[0] for part in some), sum(part[1] for part in some)
        rates.append(versions / seconds if seconds else 0.0)
        print(f"\n{name}: {versions:,} versions in {seconds:.0f} s, {rates[-1]:.2f} a second", end="")
    print(f"\ngoodput: {rates[0] / rates[1]:.3f}" if rates[1] else "")


def _at(seconds: list[float], share: float) -> str:
    return f"{seconds[min(len(seconds) - 1, int(share * len(seconds)))]:.2f}" if seconds else "–"


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long faults are made")
    parser.add_argument("--kills-per-minute", type=float, default=12.0, help="how many a minute, on average")
    parser.add_argument("--seed", type=int, default=1, help="decides which faults, and when")
    parser.add_argument("--workers", type=int, default=2, help="rollout workers")
    parser.add_argument(
        "--detach", action="store_true", help="the run has no terminal: its coordinator's parent is gone"
    )
    parser.add_argument("--faulty-minutes", type=float, default=10.0, help="how long faults are made between calms")
    parser.add_argument("--calm-minutes", type=float, default=0.0, help="how long none is made between them")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="how long a step of each environment takes")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"{given}; everything is in {folder}, and stays there if anything is wrong", flush=True)
    if not soak(given, folder):
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
