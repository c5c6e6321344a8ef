"""A run that goes on in the background while others look at it and change it: scaling, outside clients, a second run
beside it, `watch`, `stop`. The tests share one run and stand in the order of its life.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
import pytest
import redis

from coordinator.status import Status
from tests.end_to_end.command_line import CommandLine, check_ledger

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
    done = terminal.run("train", config, "--run-id", RUN, "--profile", "--detach")
    assert done.code == 0, done
    terminal.until(RUN, "the first checkpoint after training", lambda status: (status.latest or "0_")[:2] != "0_")
    yield terminal
    terminal.close()


@pytest.fixture(scope="module")
def services(terminal: CommandLine) -> dict[str, Any]:
    """Where the run's services are, as its folder says."""
    content: dict[str, Any] = json.loads((terminal.folder / "runs" / RUN / "services.json").read_text())["address"]
    return content


@pytest.fixture(scope="module")
def credentials(services: dict[str, Any]) -> dict[str, str]:
    content: dict[str, str] = json.loads(Path(services["credentials_file"]).read_text())
    return content


def alive(status: Status) -> set[str]:
    return {beat.id for beat in status.roles if beat.role == "worker" and beat.alive}


def pids(status: Status, role: str) -> dict[str, int]:
    return {beat.id: beat.pid for beat in status.roles if beat.role == role}


def consumed(status: Status, worker: str) -> int:
    line = status.ledger.get(worker)
    return int(line["consumed"]["fragments"]) if line else 0


def test_it_scales_from_1_to_4_to_2_and_nothing_restarts(terminal: CommandLine) -> None:
    before = terminal.until(
        RUN,
        "worker-0 at work, the evaluator too",
        lambda s: consumed(s, "worker-0") > 0 and "evaluator" in pids(s, "evaluator"),
    )
    assert alive(before) == {"worker-0"}

    assert terminal.run("scale", RUN, "4").code == 0
    four = {f"worker-{index}" for index in range(4)}
    at_work = terminal.until(
        RUN, "four workers, all learnt from", lambda s: alive(s) == four and all(consumed(s, w) > 0 for w in four)
    )
    assert at_work.desired_workers == 4
    assert at_work.version > before.version

    assert terminal.run("scale", RUN, "2").code == 0
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
    assert status["signals"]["train/policy_loss"] is not None
    assert status["bottleneck"]
    text = terminal.run("status", RUN).out
    for word in ("waits for", "trainer", "worker-0", "ledger", "balances"):
        assert word in text


def test_an_s3_client_lists_the_bucket_and_verifies_a_checkpoint(
    services: dict[str, Any], credentials: dict[str, str]
) -> None:
    client = boto3.client(
        "s3", endpoint_url=services["endpoint_url"], region_name="us-east-1",
        aws_access_key_id=credentials["s3_access_key"], aws_secret_access_key=credentials["s3_secret_key"],
    )  # fmt: skip

    def get(key: str) -> bytes:
        return bytes(client.get_object(Bucket="stagecoach", Key=f"{RUN}/{key}")["Body"].read())

    def get_json(key: str) -> tuple[bytes, Any]:
        """The run goes on, and this server writes in place."""
        for _ in range(50):
            with contextlib.suppress(ValueError, botocore.exceptions.IncompleteReadError):
                raw = get(key)
                return raw, json.loads(raw)
            time.sleep(0.1)
        raise AssertionError(f"{key} is not JSON")

    listed = client.list_objects_v2(Bucket="stagecoach", Prefix=f"{RUN}/")["Contents"]
    names = {item["Key"].removeprefix(f"{RUN}/") for item in listed}
    assert {".ready", ".checkpoint", "config.yaml", "training_status.json"} <= names
    assert ".finished" not in names
    _, pointer = get_json(".checkpoint")
    (key,) = (
        name for name in names if re.fullmatch(f"checkpoints/{pointer['latest']}/[0-9a-f]{{16}}/manifest.json", name)
    )
    raw, manifest = get_json(key)
    assert hashlib.sha256(raw).hexdigest() == pointer["manifest_sha256"]
    folder = key.rpartition("/")[0]
    for name, item in manifest["objects"].items():
        assert hashlib.sha256(get(f"{folder}/{name}")).hexdigest() == item["sha256"]
    client.close()


def test_a_redis_client_sees_the_stream(services: dict[str, Any], credentials: dict[str, str]) -> None:
    log = f"stagecoach:{{{RUN}}}:log"
    with redis.Redis.from_url(services["redis_url"], password=credentials["redis_password"]) as client:
        assert client.type(log) == b"stream"
        info: Any = client.xinfo_stream(log)
        assert info["entries-added"] > 20
        assert 0 <= client.xlen(log) < info["entries-added"], "checkpoints trim what they cover"
        assert client.config_get("appendonly") == {"appendonly": "yes"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with (
        redis.Redis.from_url(services["redis_url"]) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.xlen(log)


def test_no_secret_stands_in_a_command_line(terminal: CommandLine, credentials: dict[str, str]) -> None:
    commands = terminal.left().values()
    assert len(commands) > 5
    assert not any(secret in command for secret in credentials.values() for command in commands)


def test_ray_starts_nothing_that_nobody_uses(terminal: CommandLine) -> None:
    commands = list(terminal.left().values())
    assert any("raylet" in command for command in commands)
    for unused in ("ray.util.client.server", "autoscaler", "log_monitor"):
        assert not any(unused in command for command in commands), unused


def test_everything_listens_on_loopback_only(terminal: CommandLine) -> None:
    inodes = {inode for pid in terminal.left() for inode in sockets_of(pid)}
    listening = {address for inode, address in listeners() if inode in inodes}
    assert len(listening) >= 2
    assert {address for address in listening if not address.startswith(("127.", "::ffff:127.", "::1"))} == set()


def sockets_of(pid: int) -> set[str]:
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            found |= {match[1]} if match else set()
    except OSError:
        pass
    return found


def listeners() -> Iterator[tuple[str, str]]:
    """Inode and local address of every listening TCP socket of the machine."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            yield fields[9], ".".join(str(byte) for byte in reversed(bytes.fromhex(fields[1].split(":")[0])))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            address = fields[1].split(":")[0]
            mapped = address.startswith("0000000000000000FFFF0000")
            last = ".".join(str(byte) for byte in reversed(bytes.fromhex(address[24:])))
            loopback = address == "00000000000000000000000001000000"
            yield fields[9], f"::ffff:{last}" if mapped else "::1" if loopback else address


def test_a_live_run_is_neither_resumed_nor_overwritten(terminal: CommandLine) -> None:
    again = terminal.run("resume", RUN)
    assert (again.code, again.err.count("\n")) == (2, 1)
    assert "is live already" in again.err
    same = terminal.run("train", terminal.folder / "config.yaml", "--run-id", RUN)
    assert same.code == 2
    assert "exists" in same.err
    assert terminal.handle(RUN).folder.live


def test_a_second_run_works_beside_it(terminal: CommandLine, tmp_path: Path) -> None:
    other = CommandLine(tmp_path)
    try:
        done = other.run("train", other.write_config(), "--run-id", RUN)
        assert done.code == 0, done
        check_ledger(other.marker(RUN, ".finished"))
        other.check_nothing_left()
    finally:
        other.close()
    status = terminal.handle(RUN).status()
    assert status.live and status.state == "running"
    terminal.until(RUN, "the first run going on", lambda now: now.version > status.version)


def test_watch_shows_it_and_stop_ends_it(terminal: CommandLine) -> None:
    watching = terminal.start("watch", RUN)
    terminal.wait_until("a line of watch", lambda: " env steps" in terminal.output(watching))
    before = terminal.handle(RUN).status()

    stopped = terminal.run("stop", RUN)
    assert stopped.code == 0, stopped
    assert f"{RUN}: stopped" in stopped.out

    watched = terminal.ended(watching)
    assert watched.code == 0, watched.err
    assert "finished" in watched.out and "stopped" in watched.out
    finished, pointer = terminal.marker(RUN, ".finished"), terminal.marker(RUN, ".checkpoint")
    assert finished["reason"] == "stopped"
    assert pointer["final"] == pointer["latest"] == finished["final"]
    assert finished["version"] >= before.version
    check_ledger(finished)
    assert {"worker-0", "worker-1", "total"} <= set(finished["ledger"])
    terminal.wait_until("all processes to end", lambda: not terminal.left())
    assert list(terminal.temporary.glob("sc-*")) == []

    profile = terminal.run("profile", RUN, "--json")
    told = json.loads(profile.out)["seconds"]
    assert {"worker-0 / acting", "worker-1 / acting", "trainer / training", "evaluator / evaluating"} <= told.keys()
    assert told["worker-0 / acting"]["env"] > 0 and told["trainer / training"]["update"] > 0

    for order in (("scale", RUN, "3"), ("stop", RUN)):
        done = terminal.run(*order)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "not live" in done.err
