"""Roles that are asked to leave, as processes of their own: SIGTERM while they act, while they wait, with no store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.services.embedded import BUCKET, start_s3
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import FINISHED
from tests.conftest import RedisServer, minimal_config
from tests.support.environments.small import MODULE
from tests.support.processes.role_processes import ended, events, start_process
from tests.support.processes.waiting import eventually
from tests.support.runs.builders import make_run

MakeRole = Callable[..., RunContext]
Start = Callable[..., subprocess.Popen[str]]
FOR_EVER = {"updates": 10**6}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start(role, module, …)`; ends what is left."""
    started: list[subprocess.Popen[str]] = []

    def begin(role: RunContext, module: str, *arguments: str) -> subprocess.Popen[str]:
        started.append(start_process(role, tmp_path, module, *arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def assert_preempted(process: subprocess.Popen[str], seconds: float = 100.0) -> None:
    """It has ended as one that was asked to, and says so."""
    done = ended(process, seconds)
    assert (done.returncode, done.stdout.strip()) == (0, "preempted"), done


def open_claims(role: RunContext) -> int:
    return int(role.redis.zcard(RunKeys(role.run_id).claims))


def waits_for(role: RunContext, what: str) -> bool:
    return any(beat.waiting_for == what for beat in read_heartbeats(role.redis, role.run_id))


def acts(role: RunContext) -> bool:
    """Whether the worker acts its first fragment: who only has its claim may still wait for the policy, and leave."""
    return role.log().left("worker-0").tries == 1


PATIENT = {"grace_seconds": 90}
"""A last checkpoint is some twenty writes that wait for the disk."""


def slow(seconds: float, **sections: Any) -> Config:
    """A fragment takes eight times this long."""
    environment = {"id": f"{MODULE}:Leaks", "num_envs": 1, "kwargs": {"kept": 1, "seconds": seconds}}
    rollout = {"fragment_steps": 8, "fragments_per_update": 1}
    return minimal_config(environment=environment, rollout=rollout, algorithm={"minibatch_size": 8}, **sections)


def test_signalled_trainer_leaves_checkpoint_and_next_continues(make_role: MakeRole, start: Start) -> None:
    role = make_role(minimal_config(stop_at=FOR_EVER, checkpoint={"every": "1000000 updates"}, trainer=PATIENT))
    trainer, worker = start(role, "trainer_node"), start(role, "rollout_worker", "--index", "0")
    eventually(lambda: role.flow.read().version > 5)
    trainer.send_signal(signal.SIGTERM)
    assert_preempted(trainer)
    state = role.flow.read()
    assert state.state == "running"
    assert role.checkpoints.marker(FINISHED) is None
    latest = role.checkpoints.load_latest()
    assert latest is not None and latest.manifest.version == state.version > 5
    assert "the trainer leaves with a checkpoint" in events(role)

    eventually(lambda: waits_for(role, "credit"))
    worker.send_signal(signal.SIGTERM)
    assert_preempted(worker)
    assert open_claims(role) == 0

    trainer, worker = start(role, "trainer_node"), start(role, "rollout_worker", "--index", "0")
    eventually(lambda: role.flow.read().version > state.version)
    assert read_accounting(role.redis, role.run_id)["total"].balances
    assert f"restored {latest.manifest.name}" in events(role)


def test_signalled_worker_finishes_its_fragment(make_role: MakeRole, start: Start) -> None:
    role = make_role(slow(0.5, stop_at=FOR_EVER))
    start(role, "trainer_node")
    worker = start(role, "rollout_worker", "--index", "0")
    eventually(lambda: acts(role) or read_accounting(role.redis, role.run_id)["total"].produced.fragments > 0)
    worker.send_signal(signal.SIGTERM)
    assert_preempted(worker)
    assert read_accounting(role.redis, role.run_id)["worker-0"].produced.fragments > 0
    assert open_claims(role) == 0


@pytest.mark.processes
def test_second_signal_ends_process_at_once(make_role: MakeRole, start: Start) -> None:
    role = make_role(slow(10.0, stop_at=FOR_EVER))
    start(role, "trainer_node")
    worker = start(role, "rollout_worker", "--index", "0")
    eventually(lambda: acts(role))
    worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert worker.poll() is None, "it acts its fragment"
    worker.send_signal(signal.SIGINT)
    assert_preempted(worker, 30)
    assert read_accounting(role.redis, role.run_id)["total"].produced.fragments == 0
    assert open_claims(role) == 0


@pytest.mark.processes
def test_signalled_worker_leaves_while_waiting_for_checkpoint(make_role: MakeRole, start: Start) -> None:
    role = make_role(slow(0.0))
    worker = start(role, "rollout_worker", "--index", "0")
    eventually(lambda: waits_for(role, "the first checkpoint (.ready)"))
    worker.send_signal(signal.SIGTERM)
    assert_preempted(worker)


@pytest.mark.processes
def test_trainer_without_store_leaves_after_grace(
    redis_server: RedisServer, tmp_path: Path, unique_run_id: str, start: Start
) -> None:
    s3 = start_s3(tmp_path / "s3", tmp_path / "s3.log", "access", "secret")
    try:
        config = minimal_config(stop_at=FOR_EVER, checkpoint={"every": "1000000 updates"}, trainer={"grace_seconds": 1})
        secrets = {"redis_password": redis_server.password, "s3_access_key": "access", "s3_secret_key": "secret"}
        (tmp_path / "keys.json").write_text(json.dumps(secrets))
        endpoint = f"http://127.0.0.1:{s3.port}"
        address = Address(unique_run_id, redis_server.url, f"s3://{BUCKET}", endpoint, str(tmp_path / "keys.json"))
        role = make_run(config, address)
        trainer, _ = start(role, "trainer_node"), start(role, "rollout_worker", "--index", "0")
        eventually(lambda: role.flow.read().version > 5)
        os.kill(s3.process.pid, signal.SIGSTOP)
        trainer.send_signal(signal.SIGTERM)
        assert_preempted(trainer)
        os.kill(s3.process.pid, signal.SIGCONT)
        state = role.flow.read()
        assert state.state == "running"
        latest = role.checkpoints.load_latest()
        assert latest is not None and latest.manifest.version < state.version
        start(role, "trainer_node")
        eventually(lambda: role.flow.read().version > state.version)
        assert read_accounting(role.redis, role.run_id)["total"].balances
    finally:
        s3.stop()


SCRIPT = """
import os, signal, sys, time
from stagecoach.shared.runtime.launch import shutdown_on_signal
before = signal.getsignal(signal.SIGTERM)
try:
    with shutdown_on_signal(lambda: os.write(1, b"asked\\n"), grace_seconds=float(sys.argv[1]) or None):
        print("ready", flush=True)
        time.sleep(100)
except KeyboardInterrupt:
    print("at once", signal.getsignal(signal.SIGTERM) == before, signal.getitimer(signal.ITIMER_REAL)[0])
"""


@pytest.mark.parametrize(("grace", "signals"), [("0.2", 1), ("0", 2)])
def test_grace_expiry_acts_as_second_signal(grace: str, signals: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, grace], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline().strip()]
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        said.append(process.stdout.readline().strip())
    out, _ = process.communicate(timeout=30)
    assert [*said, *out.split("\n")][:3] == ["ready", "asked", "at once True 0.0"]
