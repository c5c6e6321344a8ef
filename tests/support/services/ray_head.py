"""Ray as `ray start --head` makes it on this machine.

It is not the embedded Ray: nothing of it belongs to a run, and what runs on it knows only its own environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagecoach.coordinator.services.embedded import free_port
from stagecoach.shared.base.process import end_with_parent
from tests.support.suite.speed import stretched

_SECONDS = 120.0


def actors() -> dict[str, Any]:
    """Ray's protobuf `ActorTableData` of all actors of the Ray that this process has joined, by id. The public list
    asks the dashboard, which may not be there."""
    import ray
    from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]

    state: Any = ray._private.state
    table = state.state._connect_and_get_accessor().get_actor_table(None, None)
    return {its.actor_id.hex(): its for its in map(ActorTableData.FromString, table)}


class DashboardHead:
    """A head with dashboard and job server, in a home folder of its own; with `token` it asks for that one."""

    def __init__(self, cpus: int, token: str | None, environ: Mapping[str, str]) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="c-", dir="/tmp"))  # Ray's sockets need a short path
        port, dashboard = free_port(), free_port()
        self.address, self.dashboard = f"127.0.0.1:{port}", f"127.0.0.1:{dashboard}"
        bin_ = Path(sys.executable).parent
        access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token} if token else {"RAY_AUTH_MODE": "disabled"}
        known = {**os.environ, **environ, **access, "PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(self.home)}
        known.pop("PYTHONPATH", None)  # the code that runs there is what travels with the job
        command = [
            str(bin_ / "ray"), "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1",
            "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", "--dashboard-agent-listen-port=0",
            f"--ray-client-server-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0",
            f"--num-cpus={cpus}", "--object-store-memory=100000000", f"--temp-dir={self.home / 'ray'}",
            "--disable-usage-stats",
        ]  # fmt: skip
        with (self.home / "ray.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env=known, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGTERM),
            )  # fmt: skip
        try:
            self._until_up({"Authorization": f"Bearer {token}"} if token else {})
        except BaseException:
            self.stop()
            raise

    def _until_up(self, headers: dict[str, str]) -> None:
        request = urllib.request.Request(f"http://{self.dashboard}/api/version", headers=headers)
        deadline = time.monotonic() + stretched(_SECONDS)
        while True:
            try:
                urllib.request.urlopen(request, timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.home / "ray.log").read_text()[-4000:]
                time.sleep(0.2)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        shutil.rmtree(self.home, ignore_errors=True)
