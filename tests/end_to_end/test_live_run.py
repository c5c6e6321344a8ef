"""A run that goes on in the background while others look at it and change it: scaling, outside clients, a second run
beside it, `watch`, `stop`. The tests share one run and stand in the order of its life.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from stagecoach.coordinator.catalog.status import Status
from tests.support.processes.command_line import CommandLine

RUN = "live"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """The run, detached, with one worker and no end in sight."""
    terminal = CommandLine(tmp_path_factory.mktemp("live"))
    config = terminal.write_config(
        rollout={"workers": 1, "fragment_steps": 32, "fragments_per_update": 4},
        checkpoint={"every": "20 updates", "keep_last": 20},
        stop_at={"env_steps": 10**9},
    )
    terminal.run("train", config, "--run-id", RUN, "--profile", "--detach").ok()
    terminal.until_checkpoint(RUN, 0)
    yield terminal
    terminal.close()


def alive(status: Status) -> set[str]:
    return {beat.id for beat in status.roles if beat.role == "worker" and beat.alive}


def pids(status: Status, role: str) -> dict[str, int]:
    return {beat.id: beat.pid for beat in status.roles if beat.role == role}


def consumed(status: Status, worker: str) -> int:
    line = status.ledger.get(worker)
    return int(line["consumed"]["fragments"]) if line else 0


def test_live_run_scales_from_1_to_4_to_2_without_restarts(terminal: CommandLine) -> None:
    before = terminal.until(
        RUN, "evaluator and worker-0 at work", lambda s: bool(pids(s, "evaluator")) and consumed(s, "worker-0") > 0
    )
    assert alive(before) == {"worker-0"}

    terminal.run("scale", RUN, "4").ok()
    four = {f"worker-{index}" for index in range(4)}
    at_work = terminal.until(
        RUN, "four workers, all learned from", lambda s: alive(s) == four and all(consumed(s, w) > 0 for w in four)
    )
    assert at_work.desired_workers == 4
    assert at_work.version > before.version

    terminal.run("scale", RUN, "2").ok()
    two = {"worker-0", "worker-1"}
    after = terminal.until(
        RUN, "two workers, and training goes on", lambda s: alive(s) == two and s.version > at_work.version + 20
    )
    assert after.desired_workers == 2
    assert pids(after, "trainer") == pids(before, "trainer")
    assert pids(after, "evaluator") == pids(before, "evaluator")
    assert {w: pids(after, "worker")[w] for w in two} == {w: pids(at_work, "worker")[w] for w in two}
    assert {beat.progress["incarnation"] for beat in after.roles if beat.role == "worker"} == {0}
    assert all(line["balances"] for line in after.ledger.values())


def test_status_tells_scripts_and_people(terminal: CommandLine) -> None:
    status = terminal.json("status", RUN)
    assert (status["state"], status["live"], status["run_id"]) == ("running", True, RUN)
    assert {role["role"] for role in status["roles"]} == {"coordinator", "trainer", "evaluator", "worker"}
    assert status["flow"]["in_flight"] <= status["flow"]["window"] == 4
    assert status["metrics"]["train/policy_loss"] is not None
    assert status["bottleneck"]
    text = terminal.run("status", RUN).out
    for word in ("waits for", "trainer", "worker-0", "ledger", "balances"):
        assert word in text


def test_redis_client_sees_the_stream(terminal: CommandLine) -> None:
    log = f"stagecoach:{{{RUN}}}:log"
    address = json.loads((terminal.folder / "runs" / RUN / "services.json").read_text())["address"]
    secrets = json.loads(Path(address["credentials_file"]).read_text())
    with redis.Redis.from_url(address["redis_url"], password=secrets["redis_password"]) as client:
        info: Any = client.xinfo_stream(log)
        assert info["entries-added"] > 20
        assert 0 <= client.xlen(log) < info["entries-added"], "checkpoints trim what they cover"
    commands = terminal.left().values()
    assert len(commands) > 5
    assert not any(secret in command for secret in secrets.values() for command in commands)


def test_ray_starts_nothing_that_nobody_uses(terminal: CommandLine) -> None:
    commands = list(terminal.left().values())
    assert any("raylet" in command for command in commands)
    for unused in ("ray.util.client.server", "autoscaler", "log_monitor"):
        assert not any(unused in command for command in commands), unused


def test_everything_listens_on_loopback_only(terminal: CommandLine) -> None:
    sockets = set[str]()
    for pid in terminal.left():
        with contextlib.suppress(OSError):
            sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    lines = [line.split() for line in itertools.chain(*tables)]
    listening = {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}
    assert len(listening) >= 2
    loopback = re.compile("(0{16}FFFF0000)?[0-9A-F]{6}7F:.*|0{24}01000000:.*")  # bytes in the order of the machine
    assert [address for address in listening if not loopback.fullmatch(address)] == []


def test_watch_shows_it_and_stop_ends_it(terminal: CommandLine) -> None:
    watching = terminal.start("watch", RUN)
    terminal.wait_until("a line of watch", lambda: " env steps" in terminal.output(watching))
    before = terminal.handle(RUN).status()

    assert f"{RUN}: stopped" in terminal.run("stop", RUN).ok()
    watched = terminal.ended(watching).ok()
    assert "finished" in watched and "stopped" in watched
    finished = terminal.check_ended(RUN)
    assert list(terminal.temporary.glob("sc-*")) == []
    assert finished["version"] >= before.version
    assert {"worker-0", "worker-1", "total"} <= set(finished["ledger"])
    told = terminal.json("profile", RUN)["seconds"]
    assert {"worker-0 / acting", "worker-1 / acting", "trainer / training", "evaluator / evaluating"} <= told.keys()
    assert told["worker-0 / acting"]["env"] > 0 and told["trainer / training"]["update"] > 0
