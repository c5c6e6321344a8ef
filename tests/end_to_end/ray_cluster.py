"""A Ray cluster of one machine as `ray start` makes it: job server, token, Redis and S3 beside it.

It is not the embedded Ray: nothing of it belongs to a run, and what runs on it knows only its own environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from coordinator.services import Service, free_port, new_secret, start_redis, start_s3
from shared.child import end_with_parent
from tests.support.speed import stretched

_SECONDS = 90.0


@dataclass
class RayCluster:
    """Running services; `environ` is what its machines know, and who submits to it."""

    dashboard: str
    redis: Service
    s3: Service
    environ: dict[str, str]
    config: dict[str, dict[str, str]]
    """The sections of a run's config that name its services."""
    _ray: subprocess.Popen[bytes]
    _folder: Path

    @classmethod
    def start(cls, cpus: int = 8) -> RayCluster:
        """Raises `AssertionError` with Ray's words where it does not come up."""
        folder = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))  # Ray's sockets need a short path
        password, access, secret, token = (new_secret() for _ in range(4))
        redis = start_redis(folder / "redis", folder / "redis.log", password)
        s3 = start_s3(folder / "s3", folder / "s3.log", access, secret)
        environ = {
            "STAGECOACH_REDIS_PASSWORD": password, "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret,
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token + token, "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        port = free_port()
        bin_ = Path(sys.executable).parent
        known = {**os.environ, **environ, "PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(folder)}
        known.pop("PYTHONPATH", None)  # the code that runs there is what travels with the job
        command = [
            str(bin_ / "ray"), "start", "--head", "--block", f"--port={free_port()}", "--node-ip-address=127.0.0.1",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={port}", "--dashboard-agent-listen-port=0",
            f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0",
            f"--num-cpus={cpus}", "--object-store-memory=100000000", f"--temp-dir={folder / 'ray'}",
            "--disable-usage-stats",
        ]  # fmt: skip
        with (folder / "ray.log").open("wb") as log:
            ray = subprocess.Popen(
                command, env=known, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGTERM),
            )  # fmt: skip
        config = {
            "redis": {"url": f"redis://127.0.0.1:{redis.port}/0"},
            "store": {"url": "s3://stagecoach", "endpoint_url": f"http://127.0.0.1:{s3.port}"},
        }
        made = cls(f"http://127.0.0.1:{port}", redis, s3, environ, config, ray, folder)
        try:
            made._until_up(environ["RAY_AUTH_TOKEN"])
        except BaseException:
            made.stop()
            raise
        return made

    def _until_up(self, token: str) -> None:
        request = urllib.request.Request(f"{self.dashboard}/api/version", headers={"Authorization": f"Bearer {token}"})
        deadline = time.monotonic() + stretched(_SECONDS)
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self._folder / "ray.log").read_text()
                time.sleep(0.2)

    @property
    def home(self) -> Path:
        """The home folder of its machine."""
        return self._folder

    def stop(self) -> None:
        """Ends everything."""
        if self._ray.poll() is None:
            os.killpg(self._ray.pid, signal.SIGTERM)
            try:
                self._ray.wait(5)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._ray.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._ray.wait()
        self.redis.stop()
        self.s3.stop()
        shutil.rmtree(self._folder, ignore_errors=True)
