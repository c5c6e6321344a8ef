"""`python -m benchmarks.gateway_losses`: what is lost when client, server or trainer of an environment in another
program is killed; Stagecoach's gateway, and RLlib's external environment with Ray Tune.

One client takes 100 steps a second, and notes each. An update has 256 of them. After some updates a process gets
SIGKILL in mid-episode. A client that has ended is started again a second later; nothing else is started here. Printed:
steps that the client took, learned, lost (not learned, of those before the last step that was), dropped by the server's
own count, learned twice, and learned but forgotten by a restored checkpoint; and seconds to the next update.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from benchmarks.contest.programs.numbered_steps import number_of
from benchmarks.contest.virtual_environments import python_of
from benchmarks.kit.outside import outside_run
from benchmarks.provenance import ROOT
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.storage.log_archive import read_experience

_BATCH, _UPDATES, _VICTIMS, _PORT = 256, 4, ("client", "server", "trainer"), 15_601
_START_SECONDS, _DEADLINE_SECONDS, _INTO_SECONDS, _PAUSE_SECONDS = 240.0, 240.0, 1.3, 1.0
"""`_INTO_SECONDS`: after an update, when the client has half of the next batch."""

_COLUMNS = (
    "killed", "steps taken", "learned", "lost", "counted as dropped", "twice", "forgotten", "next update after (s)",
    "client starts",
)  # fmt: skip


class Side(Protocol):
    """A trainer and a server that wait for a client."""

    command: list[str]
    """Starts the client."""

    def trained(self) -> int:
        """Returns how many steps were learned so far."""

    def process(self, victim: str) -> int:
        """Returns the process of the server or the trainer."""

    def learned(self) -> tuple[list[int], int, int]:
        """Returns the steps that the last policy has learned, how many were forgotten, and how many are counted as
        dropped; after the end."""


class Gateway:
    """A run with one worker, which is a gateway."""

    def __init__(self, run: Run, url: str, token: str, folder: Path, acting: str) -> None:
        self._run = run
        module = "benchmarks.contest.programs.numbered_steps"
        self.command = [sys.executable, "-m", module, str(folder), url, token, acting]

    def trained(self) -> int:
        return int(self._run.status().ledger["total"]["consumed"]["transitions"])

    def process(self, victim: str) -> int:
        role = {"server": "worker-0", "trainer": "trainer"}[victim]
        return next(its.pid for its in self._run.status(accounting=False).roles if its.id == role and its.alive)

    def learned(self) -> tuple[list[int], int, int]:
        self._run.stop()
        self._run.wait(120)
        total: dict[str, Any] = self._run.status().ledger["total"]
        assert total["balances"]
        dropped = sum(its["transitions"] for its in total["dropped"].values())
        columns = [its.columns["default"] for its in read_experience(self._run.folder.path / "s3/stagecoach/run")]
        return [number_of(seen) for its in columns for seen in its["obs"][its["mask"]]], 0, dropped


@contextmanager
def gateway(folder: Path, acting: str) -> Iterator[Gateway]:
    """Starts a run."""
    rollout = {"workers": 1, "fragment_steps": _BATCH, "fragments_per_update": 1}
    algorithm = {"name": "ppo", "minibatch_size": 64, "epochs": 10}
    port = {"port": _PORT + 1}
    with outside_run(folder, 1, rollout=rollout, algorithm=algorithm, archive="all", gateway=port) as (run, url, _):
        yield Gateway(run, url, add_token(run.checkpoint_store().store, "client"), folder, acting)


class RLlib:
    """A trial of Ray Tune; `events.jsonl` has its updates."""

    def __init__(self, python: Path, folder: Path) -> None:
        self._events = folder / "events.jsonl"
        self.command = [str(python), "-c", _RLLIB.format("play", str(folder))]

    def _notes(self) -> list[dict[str, Any]]:
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [json.loads(line) for line in lines]

    def trained(self) -> int:
        notes = self._notes()
        complete = max((at for at, its in enumerate(notes) if "result" in its), default=0)
        return sum(len(its.get("update", ())) for its in notes[:complete])

    def process(self, victim: str) -> int:
        return int([its[victim] for its in self._notes() if victim in its][-1])

    def learned(self) -> tuple[list[int], int, int]:
        kept, steps, forgotten = list[tuple[int, list[int]]](), list[int](), 0
        for its in self._notes():
            if "update" in its:
                steps += its["update"]
            elif "result" in its:
                kept, steps = [*kept, (its["result"], steps)], []
            elif "loaded" in its:
                forgotten += len(steps) + sum(len(more) for at, more in kept if at > its["loaded"])
                kept, steps = [each for each in kept if each[0] <= its["loaded"]], []
        return [step for _, more in kept for step in more], forgotten, 0


_RLLIB = f"from benchmarks.contest.programs.rllib_external import *; {{}}({{!r}}, {_PORT})"


@contextmanager
def rllib(python: Path, folder: Path) -> Iterator[RLlib]:
    """Starts Ray and a trial."""
    with (folder / "trainer.log").open("w") as log:
        process = subprocess.Popen([str(python), "-c", _RLLIB.format("train", str(folder))], stdout=log, stderr=log,
                                   cwd=ROOT, env=_environment(folder))  # fmt: skip
    try:
        yield RLlib(python, folder)
    finally:
        process.terminate()
        process.wait(60)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "NOTES": str(folder), "RAY_worker_niceness": "0"}


class Supervisor:
    """Keeps a client alive: one that has ended is started again."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder, self._ended = command, folder, 0.0
        self.starts = 0
        self._start()

    def _start(self) -> None:
        with (self._folder / "client.log").open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=ROOT,
                                            env=_environment(self._folder))  # fmt: skip
        self.starts, self._ended = self.starts + 1, 0.0

    def until(self, reached: Callable[[], bool], seconds: float) -> float | None:
        """Waits; returns the seconds that it took, None if it took longer."""
        began = time.monotonic()
        while not reached():
            if (now := time.monotonic()) > began + seconds:
                return None
            if self.process.poll() is not None:
                self._ended = self._ended or now
                if now > self._ended + _PAUSE_SECONDS:
                    self._start()
            time.sleep(0.1)
        return time.monotonic() - began


def trial(side: Side, folder: Path, victim: str) -> str:
    """Kills the victim; returns a line of the table."""
    client = Supervisor(side.command, folder)
    try:
        if client.until(lambda: side.trained() >= _UPDATES * _BATCH, _START_SECONDS) is None:
            raise TimeoutError(f"no {_UPDATES} updates within {_START_SECONDS:g} s; see {folder}")
        time.sleep(_INTO_SECONDS)
        before = side.trained()
        os.kill(client.process.pid if victim == "client" else side.process(victim), signal.SIGKILL)
        seconds = client.until(lambda: side.trained() > before, _DEADLINE_SECONDS)
        if seconds is not None:
            client.until(lambda: side.trained() >= before + _UPDATES * _BATCH, _DEADLINE_SECONDS)
    finally:
        client.process.kill()
        client.process.wait()
    steps, forgotten, dropped = side.learned()
    counts, last = Counter(steps), max(steps)
    taken = [int(line) for line in (folder / "taken.txt").read_text().split()]
    lost = sum(step <= last and step not in counts for step in taken)
    twice = sum(count - 1 for count in counts.values())
    assert set(counts) <= set(taken)
    again = "no" if seconds is None else f"{seconds:.1f}"
    learned = sum(step <= last for step in taken) - lost
    cells = (victim, learned + lost, learned, lost, dropped, twice, forgotten, again, client.starts)
    return " | ".join(map(str, cells))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rllib", type=Path, help="Python with Ray's RLlib; by default one is installed.")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where it is installed")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", choices=("remote", "local", "rllib"))
    given = parser.parse_args()
    print(f"| | {' | '.join(_COLUMNS)} |\n{'|---' * (len(_COLUMNS) + 1)}|")
    for side in [given.only] if given.only else ["remote", "local", "rllib"]:
        for victim in given.repeats * _VICTIMS:
            with tempfile.TemporaryDirectory(prefix="losses-", ignore_cleanup_errors=True) as name:
                folder = Path(name)
                if side == "rllib":
                    python = given.rllib or python_of("rllib", given.cache, install=True, tell=print)
                    with rllib(python, folder) as its:
                        line = trial(its, folder, victim)
                else:
                    with gateway(folder, side) as its_run:
                        line = trial(its_run, folder, victim)
            print(f"| {side} | {line} |", flush=True)


if __name__ == "__main__":
    main()
