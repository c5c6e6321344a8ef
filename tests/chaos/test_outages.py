"""Redis or the store is away for longer than every deadline of a role: the run waits by name, and continues."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import live_status
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import outage
from tests.support.processes.command_line import check_ledger
from tests.support.processes.role_processes import ended, start_process
from tests.support.processes.waiting import eventually
from tests.support.runs.game import small
from tests.support.runs.store_fault_run import StoreFaultRun
from tests.support.services import store_faults as faults
from tests.support.services.own_redis import OwnRedis

pytestmark = pytest.mark.timeout(300)
DEADLINE_SECONDS = 8
"""Roles that start together need to find each other within it, on a busy machine as well."""
OUTAGE_SECONDS = 1.75 * DEADLINE_SECONDS
ROLES = (
    ("stagecoach.trainer_node",),
    ("stagecoach.rollout_worker", "--index", "0"),
    ("stagecoach.rollout_worker", "--evaluator"),
)


def patient_in_outages_only(**sections: Any) -> Config:
    """Each wait has a short deadline; versions travel through the store, so that nothing moves without it."""
    rollout = {"fragment_steps": 8, "fragments_per_update": 2, "wait_deadline_seconds": DEADLINE_SECONDS}
    return small(
        stop_at={"updates": 10**6}, rollout=rollout, policy_versions={"transport": "object_store"},
        redis={"timeout_seconds": 2}, store={"retries": 0, "timeout_seconds": 5}, **sections,
    )  # fmt: skip


@pytest.fixture
def away(tmp_path: Path, s3_servers: dict[str, tuple[str, str, str]]) -> Iterator[tuple[OwnRedis, StoreFaultRun]]:
    with ExitStack() as running:
        server = OwnRedis(tmp_path / "redis")
        running.callback(server.kill)
        here = StoreFaultRun(server.through(server.port), s3_servers["rclone"], tmp_path, patient_in_outages_only())
        running.callback(here.close)
        yield server, here


def test_roles_wait_for_the_end_of_an_outage(away: tuple[OwnRedis, StoreFaultRun], tmp_path: Path) -> None:
    """Outages of Redis, and then of the store."""
    server, here = away
    role = here.open()
    processes: list[subprocess.Popen[str]] = []

    def wait_for_versions() -> None:
        version = role.flow.read().version
        eventually(lambda: role.flow.read().version > version + 2)
        assert [process.poll() for process in processes] == [None, None, None]

    try:
        processes += [start_process(role, tmp_path, *command) for command in ROLES]
        eventually(lambda: role.flow.read().version > 2 and len(live_status(role.redis, role.run_id).roles) == 3)
        server.stopped(True)
        time.sleep(OUTAGE_SECONDS)
        server.stopped(False)
        wait_for_versions()
        here.proxy.fail(faults.SLOW_DOWN)
        eventually(lambda: outage(role.redis, role.run_id) == "the store")
        time.sleep(OUTAGE_SECONDS)
        assert outage(role.redis, role.run_id) == "the store"
        here.proxy.heal()
        wait_for_versions()
        role.flow.set_state(RunState.STOPPING, "stopped", RunState.RUNNING)
        assert [ended(process).returncode for process in processes] == [0, 0, 0]
        finished = here.reader.marker(".finished") or {}
        assert finished["reason"] == "stopped"
        check_ledger(finished)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_role_ends_when_an_outage_exceeds_its_deadline(away: tuple[OwnRedis, StoreFaultRun], tmp_path: Path) -> None:
    """And a role that starts without its Redis is refused at once."""
    server, here = away
    redis = here.config.redis.model_copy(update={"retry_seconds": 2.0})
    here.config = here.config.model_copy(update={"redis": redis})
    role = here.open()
    process = start_process(role, tmp_path, "stagecoach.trainer_node")
    try:
        eventually(lambda: role.flow.read().version == 0)
        server.kill()
        done = ended(process)
        assert done.returncode not in (0, 2)
        assert "could not be used for" in done.stderr
    finally:
        process.kill()
    refused = ended(start_process(role, tmp_path, *ROLES[1]))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused
    assert "does not answer" in refused.stderr
