"""Stagecoach as its user runs it: the command line in processes of its own, in a folder of the test's own.

`left()` finds whatever a run has left behind, and `close()` ends it, so that no test leaves a process to the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
import yaml

from stagecoach.coordinator.catalog.status import Status
from stagecoach.coordinator.services.embedded import BUCKET, Service, new_secret, start_redis, start_s3
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.shared.protocol.heartbeat import Wait
from stagecoach.shared.protocol.redis_client import connect_redis
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

SOURCE = Path(__file__).parents[3]
DEADLINE_SECONDS = stretched(150.0)
"""No promise: only what tells a run that hangs from one on a busy machine."""


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    def ok(self) -> str:
        """Returns its output after checking that it succeeded."""
        assert self.code == 0, self
        return self.out

    def json(self) -> Any:
        """Returns its output as JSON."""
        return json.loads(self.ok())


Stagecoach = Callable[..., Ended]
"""`stagecoach …` in this process: the fixture of `tests/coordinator`."""
CONFIG: dict[str, Any] = {
    "environment": {"id": "CartPole-v1", "num_envs": 2},
    "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2},
    "algorithm": {"minibatch_size": 32, "epochs": 1},
    "evaluation": {"episodes": 1},
    "stop_at": {"updates": 2},
}
"""A small run for it."""


class CommandLine:
    """Runs commands in `folder`; the runs are in `folder/runs`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # Ray's sockets need a short path
        self.environ = {**os.environ, "TMPDIR": str(self.temporary), "COLUMNS": "200"}
        self._started: list[subprocess.Popen[str]] = []

    def run(self, *arguments: str | Path, seconds: float = DEADLINE_SECONDS) -> Ended:
        """`stagecoach` with these arguments, until it ends."""
        return self.ended(self.start(*arguments), seconds)

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """`stagecoach` in the background."""
        return self.module("stagecoach", *arguments)

    def module(self, name: str, *arguments: str | Path, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """`python -m name` in the background; its output goes to files, which `ended` and `output` read."""
        return self._python("-m", name, *arguments, environ=environ)

    def program(self, text: str, *arguments: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """A script of a user's in the background."""
        path = self.folder / "program.py"
        path.write_text(text)
        return self._python(path, *arguments, environ=environ)

    def _python(self, *arguments: str | Path, environ: dict[str, str] | None) -> subprocess.Popen[str]:
        number = len(self._started)
        with self._file(number, "out").open("w") as out, self._file(number, "err").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, *map(str, arguments)], cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=out, stderr=err, text=True, start_new_session=True, env={**self.environ, **(environ or {})},
            )  # fmt: skip
        self._started.append(process)
        return process

    def ended(self, process: subprocess.Popen[str], seconds: float = DEADLINE_SECONDS) -> Ended:
        code = process.wait(timeout=seconds)
        return Ended(code, self.output(process), self.output(process, "err"))

    def output(self, process: subprocess.Popen[str], which: str = "out") -> str:
        return self._file(self._started.index(process), which).read_text()

    def json(self, *arguments: str | Path) -> Any:
        return self.run(*arguments, "--json").json()

    def write_config(self, **sections: Any) -> Path:
        """A small config for CartPole; `sections` replace or add top-level keys."""
        data: dict[str, Any] = {
            "environment": {"id": "CartPole-v1", "num_envs": 4},
            "rollout": {"workers": 1, "fragment_steps": 32, "fragments_per_update": 2},
            "algorithm": {"minibatch_size": 128, "epochs": 2},
            "checkpoint": {"every": "20 updates"},
            "evaluation": {"episodes": 2},
            "stop_at": {"updates": 4},
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(data | sections))
        return path

    def handle(self, run_id: str) -> Run:
        from stagecoach.coordinator.run_access.run import Run  # which imports torch

        return Run.attach(run_id, self.folder / "runs")

    def until(self, run_id: str, what: str, done: Callable[[Status], bool]) -> Status:
        """Looks at the run again and again until `done` says so."""
        deadline, seen = time.monotonic() + DEADLINE_SECONDS, "nothing"
        while time.monotonic() < deadline:
            try:
                status = self.handle(run_id).status()
                if done(status):
                    return status
                seen = str(status)
            except (StagecoachError, FileNotFoundError, redis.RedisError) as error:  # it is just starting, or ending
                seen = str(error)
            time.sleep(0.2)
        raise AssertionError(f"never saw: {what}; last: {seen}; {self._tails()}")

    def until_checkpoint(self, run_id: str, beyond: int) -> int:
        """Waits until a run at work has a checkpoint of a version after this one; returns its version then."""

        def done(status: Status) -> bool:
            return status.state == "running" and int((status.latest or "-1").partition("_")[0]) > beyond

        return self.until(run_id, f"a checkpoint after version {beyond}", done).version

    def wait_until(self, what: str, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done():
            assert time.monotonic() < deadline, f"never saw: {what}; {self._tails()}"
            time.sleep(0.1)

    def check_nothing_left(self) -> None:
        """All that belonged to this folder ends; what was killed may be there for another moment."""
        self.wait_until("the end of all processes", lambda: not self.left())

    def check_ended(self, run_id: str, reason: str = "stopped") -> dict[str, Any]:
        """A run ended as it should: a final checkpoint, balanced accounting, nothing left; returns `.finished`."""
        finished: dict[str, Any] = self.marker(run_id, ".finished")
        pointer = self.marker(run_id, ".checkpoint")
        assert finished["reason"] == reason
        assert pointer["final"] == pointer["latest"] == finished["final"]
        check_ledger(finished)
        self.check_nothing_left()
        return finished

    def marker(self, run_id: str, name: str) -> Any:
        """The JSON content of a sync file of an embedded run, read as a plain file; the server may be writing it."""
        for _ in range(50):
            with contextlib.suppress(ValueError):
                return json.loads((self.store(run_id) / name).read_text())
            time.sleep(0.1)
        raise AssertionError(f"{name} of run {run_id} is not JSON")

    def store(self, run_id: str) -> Path:
        """The folder of an embedded run's objects."""
        return self.folder / "runs" / run_id / "s3" / "stagecoach" / run_id

    def left(self) -> dict[int, str]:
        """Processes that belong to this folder: process id → command line."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                cwd = os.readlink(entry / "cwd")
                if command and (Path(cwd).is_relative_to(self.folder) or str(self.temporary) in command):
                    found[int(entry.name)] = command
        return found

    def close(self) -> None:
        for _ in range(50):
            left = self.left()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in self._started:
                process.poll()
            if not left:
                break
            time.sleep(0.1)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _file(self, number: int, which: str) -> Path:
        return self.folder / f"command-{number}.{which}"

    def _tails(self) -> str:
        return " | ".join(self.output(process, which)[-500:] for process in self._started for which in ("out", "err"))


def until(run: Run, done: Callable[[Status], bool]) -> Status:
    """The first status of a live run that is as wanted."""
    wait = Wait("what was to be seen", stretched(120))
    while not done(status := run.status()):
        wait.check()
        time.sleep(0.03)
    return status


@contextlib.contextmanager
def redis_of(run: Run) -> Iterator[redis.Redis]:
    """The coordinator's connection to a live run."""
    address = run.folder.live_address()
    assert address is not None, "the run is not live"
    with connect_redis(address, run.config, "coordinator") as client:
        yield client


@contextlib.contextmanager
def command_line(folder: Path) -> Iterator[CommandLine]:
    """Stagecoach in a folder; whatever a run leaves behind is ended."""
    terminal = CommandLine(folder)
    try:
        yield terminal
    finally:
        terminal.close()


@dataclass(frozen=True)
class OwnServers:
    """A Redis and an S3 server that belong to no run."""

    redis: Service
    s3: Service
    folder: Path
    environ: dict[str, str]
    """Secrets for a process that uses the servers."""

    @property
    def config(self) -> dict[str, dict[str, str]]:
        """The sections of a run's config that name them."""
        endpoint = f"http://127.0.0.1:{self.s3.port}"
        path = self.redis.socket_path
        return {
            "redis": {"url": f"redis://127.0.0.1:{self.redis.port}/0" if path is None else f"unix://{path}"},
            "store": {"url": f"s3://{BUCKET}", "endpoint_url": endpoint},
        }

    def address(self, run_id: str) -> Address:
        keys, names = self.folder / "keys.json", ("redis_password", "s3_access_key", "s3_secret_key")
        keys.write_text(json.dumps(dict(zip(names, self.environ.values(), strict=True))))
        store = self.config["store"]
        return Address(run_id, self.config["redis"]["url"], store["url"], store["endpoint_url"], str(keys))


@contextlib.contextmanager
def own_servers(folder: Path, socket_path: Path | None = None) -> Iterator[OwnServers]:
    password, access, secret = new_secret(), new_secret(), new_secret()
    environ = {"STAGECOACH_REDIS_PASSWORD": password, "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret}
    with contextlib.ExitStack() as running:
        redis = start_redis(folder / "redis", folder / "redis.log", password, socket_path)
        running.callback(redis.stop)
        s3 = start_s3(folder / "s3", folder / "s3.log", access, secret)
        running.callback(s3.stop)
        yield OwnServers(redis, s3, folder, environ)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by their paths in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_ledger(finished: dict[str, Any]) -> None:
    """Every line of the accounting balances, and what was consumed in all is what the counters say was trained on."""
    ledger = finished["ledger"]
    assert [worker for worker, line in ledger.items() if not line["balances"]] == []
    assert ledger["total"]["consumed"]["transitions"] == finished["counters"]["train"]["env_steps"]
    assert ledger["total"]["consumed"]["transitions"] > 0


def check_refused(done: Ended, *words: str) -> None:
    """One line that says what is wrong, and exit code 2."""
    assert done.code == 2, done
    assert done.err.startswith("Error: "), done.err
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err
