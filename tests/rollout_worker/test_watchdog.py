"""Watchdog of a worker whose environments hang or leak: its message, its released claim, and no process left behind.

The worker is a separate process, since the watchdog ends its process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.rollout_worker.watchdog import OWN_WORK, Watchdog, resident_bytes
from stagecoach.shared.base.failure import FailureKind
from stagecoach.shared.base.process import exit_diagnostics
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Heartbeat, Wait, poll, read_heartbeats
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole, minimal_config
from tests.support.environments.small import MODULE
from tests.support.processes.role_processes import ended, events, start_process
from tests.support.runs.game import published
from tests.support.suite.groups import some_quick

RunWorker = Callable[..., tuple[RunContext, subprocess.CompletedProcess[str]]]
MIB = 1 << 20


def hanging(tally: Path, place: str, **fields: Any) -> Config:
    kwargs = {"tally": str(tally), "times": 1, "place": place}
    environment = {"id": f"{MODULE}:Hangs", "num_envs": 2, "kwargs": kwargs, "step_deadline_seconds": 3.0}
    return minimal_config(environment=environment | fields)


@pytest.fixture
def run_worker(make_role: MakeRole, tmp_path: Path) -> RunWorker:
    """Runs `python -m stagecoach.rollout_worker` on a run of a config until it ends."""

    def run(config: Config, *arguments: str) -> tuple[RunContext, subprocess.CompletedProcess[str]]:
        role = make_role(config)
        with published(make_role, config):
            return role, ended(start_process(role, tmp_path, "rollout_worker", *(arguments or ("--index", "0"))))

    return run


def left_behind(folder: Path) -> list[str]:
    """Processes whose environment variables or arguments name the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(folder).encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


@pytest.mark.parametrize(
    ("place", "vectorization", "where"),
    some_quick(
        [*((place, "sync", "in hang") for place in ("step", "reset", "start")), ("step", "async", "")],
        ("step", "sync", "in hang"),
    ),
)
def test_watchdog_ends_process_of_hanging_environment(
    make_role: MakeRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, vectorization: str, where: str
) -> None:
    seconds = 12.0 if vectorization == "async" else 3.0  # the start of its processes counts as well
    config = hanging(tmp_path / "tally", place, vectorization=vectorization, step_deadline_seconds=seconds)
    monkeypatch.setenv("THIS_TEST", str(tmp_path))
    if place == "start":
        (tmp_path / "tally").write_text("x")  # not while the test looks at the spaces
    role = make_role(config)
    with published(make_role, config):
        (tmp_path / "tally").unlink(missing_ok=True)
        done = ended(start_process(role, tmp_path, "rollout_worker", "--index", "0"))
        assert done.returncode == 1, done
        assert f"worker-0 hangs in {place} of its environments" in done.stderr.replace("the start", "start")
        assert where in done.stderr and "step_deadline_seconds" in done.stderr
        assert f"worker-0 hangs in {place}" in events(role).replace("the start", "start")
        assert role.flow.read().claimed == 0, "the claim is free again"
        (beat,) = [beat for beat in read_heartbeats(role.redis, role.run_id) if beat.id == "worker-0"]
        last = (beat.ended or "").startswith("worker-0 hangs"), beat.failure
        assert last == (True, FailureKind.ENVIRONMENT), (beat, done)
        assert read_accounting(role.redis, role.run_id)["total"].produced.fragments == 0
        assert left_behind(tmp_path) == []


@pytest.mark.processes
def test_watchdog_ends_process_that_holds_gil(run_worker: RunWorker, tmp_path: Path) -> None:
    kwargs = {"tally": str(tmp_path / "tally"), "times": 1, "locks": True}
    environment = {"id": f"{MODULE}:Hangs", "num_envs": 2, "kwargs": kwargs}
    config = minimal_config(environment=environment, rollout={"silent_seconds": 10.5})
    _, done = run_worker(config)
    assert done.returncode == 1, done
    words = exit_diagnostics(done.stderr)
    assert words.how == "its watchdog: one call kept Python's lock for 0:00:08", done.stderr
    assert "in hang" in words.lines[-4], words


@pytest.mark.parametrize("who", ["worker-0", "evaluator"])
def test_watchdog_ends_process_when_close_hangs(make_role: MakeRole, tmp_path: Path, who: str) -> None:
    """A worker closes when it is drained, an evaluator after its first episodes."""
    (tmp_path / "tally").write_text("x")  # not while the test looks at the spaces
    role = make_role(config := hanging(tmp_path / "tally", "close"))
    with published(make_role, config):
        (tmp_path / "tally").unlink()
        arguments = ("--evaluator",) if who == "evaluator" else ("--index", "0")
        process = start_process(role, tmp_path, "rollout_worker", *arguments)
        if who == "worker-0":
            poll(Wait("the worker", 60), lambda: "worker-0 joined" in events(role))
            role.flow.drain(who)
        done = ended(process)
    assert done.returncode == 1 and f"{who} hangs in close of its environments, at " in done.stderr, done
    assert f"{who} hangs in close of its environments, at " in events(role)


def test_memory_limit_ends_worker_after_fragment(run_worker: RunWorker) -> None:
    kwargs = {"kept": 4 * MIB, "seconds": 0.05}
    config = minimal_config(
        environment={"id": f"{MODULE}:Leaks", "num_envs": 1, "kwargs": kwargs},
        rollout={
            "fragment_steps": 32,
            "fragments_per_update": 1,
            "max_policy_lag": 10,
            "memory_limit_bytes": 700 * MIB,
        },
    )
    role, done = run_worker(config)
    assert (done.returncode, done.stdout.strip()) == (1, "outgrew its memory limit"), done
    line = read_accounting(role.redis, role.run_id)["worker-0"]
    assert line.balances and line.produced.fragments > 0
    assert role.flow.read().claimed == line.produced.fragments, "no claim is left open"


@pytest.mark.processes
def test_memory_far_beyond_limit_ends_worker_at_once(run_worker: RunWorker) -> None:
    config = minimal_config(
        environment={"id": f"{MODULE}:Leaks", "num_envs": 1, "kwargs": {"kept": 600 * MIB, "seconds": 3.0}},
        rollout={"fragment_steps": 64, "fragments_per_update": 1, "memory_limit_bytes": 512 * MIB},
    )
    role, done = run_worker(config)
    assert done.returncode == 1, done
    assert "far beyond rollout.memory_limit_bytes=536870912" in events(role)
    assert role.flow.read().claimed == 0


def test_resident_bytes_include_children() -> None:
    alone = resident_bytes(os.getpid())
    code = "import sys; kept = bytearray(b'x') * (200 << 20); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    both = resident_bytes(os.getpid())
    child.communicate()
    assert both - alone > 190 * MIB
    assert resident_bytes(2**22 + 1) == 0, "no such process"


def test_watchdog_ignores_progress_and_named_waits(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks are called directly, so that no time passes."""
    role = make_role(hanging(Path("/nowhere"), "none", step_deadline_seconds=1.0))
    heartbeat = Heartbeat(role.redis, role.run_id, "worker", "worker-0")
    orders: list[str] = []
    watchdog = Watchdog(
        "worker-0", role.config, heartbeat, lambda failure: orders.append(failure.detail), orders.append
    )
    for _ in range(3):
        watchdog.check_progress()  # nothing is being done
    with watchdog.during(OWN_WORK):
        for _ in range(3):
            watchdog.steps += 1
            watchdog.check_progress()
        with heartbeat.waiting("credit", 600.0):
            for _ in range(3):
                watchdog.check_progress()
        assert orders == []
        monkeypatch.setattr(os, "_exit", lambda code: orders.append(f"exit {code}"))
        watchdog.check_progress()
        watchdog.check_progress()
    assert orders[0].startswith("worker-0 hangs in its own work") and orders[1] == "exit 1"
