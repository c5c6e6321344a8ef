"""A worker whose environments hang or leak, as a process of its own (the watchdog ends the process it is in): what it
says, that its claim is free at once, and that none of its environments' processes is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_worker.watchdog import OWN_WORK, Watchdog, resident_bytes
from shared.config import Config
from shared.failure import FailureKind
from shared.heartbeat import Heartbeat, read_heartbeats
from shared.last_words import last_words
from shared.ledger import read_books
from shared.role import Role
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE
from tests.role_processes import ended, events, start_process
from tests.support.groups import some_quick
from trainer_node.trainer import Trainer

MakeRole = Callable[..., Role]
MIB = 1 << 20


def hanging(tally: Path, place: str, **fields: Any) -> Config:
    kwargs = {"tally": str(tally), "times": 1, "place": place}
    environment = {"id": f"{MODULE}:Hangs", "num_envs": 2, "kwargs": kwargs, "step_deadline_seconds": 3.0}
    return minimal_config(environment=environment | fields)


@contextmanager
def published(make_role: MakeRole, config: Config) -> Iterator[Role]:
    """A run whose trainer has put version 0 on the board."""
    role = make_role(config)
    trainer = Trainer(make_role(config), None)
    trainer.start()
    try:
        yield role
    finally:
        trainer._publisher.close()
        trainer._heartbeat.stop("the test is over")


def worker_process(role: Role, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m rollout_worker` on this run, until it ends."""
    return ended(start_process(role, folder, "rollout_worker", *arguments))


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
        [
            ("step", "sync", "in hang"),
            ("reset", "sync", "in hang"),
            ("start", "sync", "in hang"),
            ("step", "async", ""),
        ],
        ("step", "sync", "in hang"),
    ),
)
def test_environments_that_hang_end_the_process_which_says_where(
    make_role: MakeRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, vectorization: str, where: str
) -> None:
    seconds = 12.0 if vectorization == "async" else 3.0  # the start of its processes counts as well
    config = hanging(tmp_path / "tally", place, vectorization=vectorization, step_deadline_seconds=seconds)
    monkeypatch.setenv("THIS_TEST", str(tmp_path))
    if place == "start":
        (tmp_path / "tally").write_text("x")  # not while the test looks at the spaces
    with published(make_role, config) as role:
        (tmp_path / "tally").unlink(missing_ok=True)
        done = worker_process(role, tmp_path, "--index", "0")
        assert done.returncode == 1, done
        assert f"worker-0 hangs in {place} of its environments" in done.stderr.replace("the start", "start")
        assert where in done.stderr and "step_deadline_seconds" in done.stderr
        assert f"worker-0 hangs in {place}" in events(role).replace("the start", "start")
        assert role.flow.read().claimed == 0, "the claim is free again"
        (beat,) = [beat for beat in read_heartbeats(role.redis, role.run_id) if beat.id == "worker-0"]
        assert (beat.ended or "").startswith("worker-0 hangs") and beat.failure is FailureKind.ENVIRONMENT
        assert read_books(role.redis, role.run_id)["total"].produced.fragments == 0
        assert left_behind(tmp_path) == []


@pytest.mark.processes
def test_one_that_keeps_python_s_lock_ends_the_process_too_with_its_stack(make_role: MakeRole, tmp_path: Path) -> None:
    kwargs = {"tally": str(tmp_path / "tally"), "times": 1, "locks": True}
    environment = {"id": f"{MODULE}:Hangs", "num_envs": 2, "kwargs": kwargs}
    with published(make_role, minimal_config(environment=environment, rollout={"silent_seconds": 10.5})) as role:
        done = worker_process(role, tmp_path, "--index", "0")
        assert done.returncode == 1, done
        words = last_words(done.stderr)
        assert words.how == "its watchdog: one call kept Python's lock for 0:00:08", done.stderr
        assert "in hang" in words.lines[-4], words


def test_a_process_that_leaks_ends_after_its_fragment(make_role: MakeRole, tmp_path: Path) -> None:
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
    with published(make_role, config) as role:
        done = worker_process(role, tmp_path, "--index", "0")
        assert (done.returncode, done.stdout.strip()) == (1, "outgrew its memory limit"), done
        line = read_books(role.redis, role.run_id)["worker-0"]
        assert line.balances and line.produced.fragments > 0
        assert role.flow.read().claimed == line.produced.fragments, "no claim is left open"


@pytest.mark.processes
def test_a_process_far_beyond_its_limit_ends_at_once(make_role: MakeRole, tmp_path: Path) -> None:
    config = minimal_config(
        environment={"id": f"{MODULE}:Leaks", "num_envs": 1, "kwargs": {"kept": 600 * MIB, "seconds": 3.0}},
        rollout={"fragment_steps": 64, "fragments_per_update": 1, "memory_limit_bytes": 512 * MIB},
    )
    with published(make_role, config) as role:
        done = worker_process(role, tmp_path, "--index", "0")
        assert done.returncode == 1, done
        assert "far beyond rollout.memory_limit_bytes=536870912" in events(role)
        assert role.flow.read().claimed == 0


@pytest.mark.processes
def test_an_evaluator_that_hangs_ends_too(make_role: MakeRole, tmp_path: Path) -> None:
    with published(make_role, hanging(tmp_path / "tally", "step")) as role:
        done = worker_process(role, tmp_path, "--evaluator")
        assert done.returncode == 1, done
        assert "evaluator hangs in step of its environments" in events(role)


def test_resident_bytes_count_the_children() -> None:
    alone = resident_bytes(os.getpid())
    code = "import sys; kept = bytearray(b'x') * (200 << 20); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    both = resident_bytes(os.getpid())
    child.communicate()
    assert both - alone > 190 * MIB
    assert resident_bytes(2**22 + 1) == 0, "no such process"


def test_who_gets_on_or_waits_is_left_alone(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks are called by hand, so that no time passes."""
    role = make_role(hanging(Path("/nowhere"), "none", step_deadline_seconds=1.0))
    heartbeat = Heartbeat(role.redis, role.run_id, "worker", "worker-0")
    orders: list[str] = []
    watchdog = Watchdog("worker-0", role.config, heartbeat, lambda failure: orders.append(failure.detail))
    for _ in range(3):
        watchdog._look_at_progress()  # nothing is being done
    with watchdog.during(OWN_WORK):
        for _ in range(3):
            watchdog.steps += 1
            watchdog._look_at_progress()
        with heartbeat.waiting("credit", 600.0):
            for _ in range(3):
                watchdog._look_at_progress()
        assert watchdog._looks == 0
        monkeypatch.setattr(os, "_exit", lambda code: orders.append(f"exit {code}"))
        watchdog._look_at_progress()
        watchdog._look_at_progress()
    assert orders[0].startswith("worker-0 hangs in its own work") and orders[1] == "exit 1"
