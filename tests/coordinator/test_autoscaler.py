"""With Ray's own autoscaler: room is what it may add as well, as the head's monitor has been told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.speed import stretched

_ISOLATED = ["unshare", "--net", "--pid", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
_PREPARE = "ip link set lo up && mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray && "
_SECONDS = stretched(120)
"""It takes some twenty on a quiet machine."""


@pytest.fixture
def isolated() -> list[str]:
    """Ray's test cluster ends every Ray that it sees, so it gets namespaces in which it sees only its own."""
    tried = subprocess.run([*_ISOLATED, f"{_PREPARE} true"], capture_output=True, text=True, timeout=20, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces are not allowed here: {tried.stderr.strip()}")
    return _ISOLATED


@pytest.mark.ray
@pytest.mark.timeout(_SECONDS + 20)
def test_what_the_autoscaler_may_add_counts(isolated: list[str]) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `ray` is
    script = f"{sys.executable} -m tests.coordinator.autoscaled"
    root = Path(__file__).parents[2]
    done = subprocess.run(  # bash stays the first process: it buries the dead
        [*isolated, f"{_PREPARE} timeout {_SECONDS} {script}; exit $?"],
        env=os.environ | {"PATH": path}, cwd=root, capture_output=True, text=True, timeout=_SECONDS + 10, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"refused"')))
    assert told == {
        "refused": "6 workers with 1 CPU each asked for; the cluster (1 machine, 2 CPUs; the trainer takes 1 CPU), "
        "with the 2 machines that its autoscaler may add, has room for 5: --set rollout.workers=5, or add machines",
        "now": 1,
    }
