"""A Redis of a test's own: killed, started again on its port, made a replica, filled up, or rolled back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.coordinator.services.embedded import free_port, new_secret
from stagecoach.coordinator.services.redis_servers import redis_binary
from tests.conftest import RedisServer
from tests.support.suite.speed import stretched

_START_SECONDS = 30.0


def wait_ready(connect: Callable[[], redis.Redis], log: Path, runs: Callable[[], bool] = lambda: True) -> None:
    """Waits until a started server serves; fails with its log otherwise."""
    deadline = time.monotonic() + stretched(_START_SECONDS)
    while time.monotonic() < deadline and runs():
        try:
            with connect() as client:
                client.ping()
                return
        except (redis.ConnectionError, redis.TimeoutError):
            time.sleep(0.02)
    raise AssertionError(log.read_text()[-2000:] if log.exists() else "the server said nothing")


class OwnRedis:
    """A real server with an append-only file, written before each answer; so a kill loses nothing.

    It leaves `fsync` to the kernel: with `everysec` the file is written up to 2 s late where the disk is slow.
    """

    def __init__(self, folder: Path, password: str = "", settings: Mapping[str, str | int] | None = None) -> None:
        self.folder, self.port = folder, free_port()
        self.password = password or new_secret()
        self._settings = dict(settings or {})
        if "cluster-enabled" in self._settings:  # the default, 10,000 above its own, may be taken
            self._settings["cluster-port"] = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._past = 0
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, wait: bool = True) -> None:
        """Starts it with the data that is there; without `wait` it may still be loading."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines: dict[str, str | int] = {
            "bind": "127.0.0.1", "port": self.port, "requirepass": self.password, "masterauth": self.password,
            "dir": str(self.folder), "logfile": str(self.folder / "redis.log"), "appendonly": "yes",
            "appendfsync": "no", "save": '""', "maxmemory-policy": "noeviction", "repl-diskless-sync-delay": 0,
        }  # fmt: skip
        text = "\n".join(f"{name} {value}" for name, value in (lines | self._settings).items())
        self._process = subprocess.Popen([redis_binary(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        self._process.stdin.close()
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        wait_ready(self.client, self.folder / "redis.log")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def stopped(self, stop: bool) -> None:
        """SIGSTOP or SIGCONT: it is there and says nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    def restart(self, seconds_away: float = 0.0) -> None:
        """Killed, away for a while, back on the same port with the same data."""
        self.kill()
        time.sleep(seconds_away)
        self.start()

    def keep(self) -> Path:
        """Saves its present data for `roll_back`."""
        self._past += 1
        past = self.folder.with_name(f"{self.folder.name}-past-{self._past}")
        shutil.copytree(self.folder, past)
        return past

    def roll_back(self, past: Path) -> None:
        """Killed, and started with older data: whatever came since was acknowledged and is lost."""
        self.kill()
        shutil.rmtree(self.folder)
        shutil.copytree(past, self.folder)
        self.start()

    def client(self) -> redis.Redis:
        """A connection that tries once."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(port=self.port, password=self.password, socket_timeout=5, retry=once)

    def command(self, *words: str | int) -> Any:
        with self.client() as client:
            return client.execute_command(*words)

    def through(self, port: int) -> RedisServer:
        """Address of the server through a proxy on that port."""
        return RedisServer(f"redis://127.0.0.1:{port}", self.password)
