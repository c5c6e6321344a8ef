"""`doctor` warns of what strangers could use: each server here is a real one, open or not."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis

from coordinator.doctor import Finding, examine
from coordinator.exposure import in_the_clear, open_bucket, open_ray, open_redis
from coordinator.services import BUCKET, LOOPBACK_VARIABLE, free_port, new_secret, start_redis, start_s3
from shared.config import Config
from shared.config_sources import dump_config
from tests.conftest import RedisServer, minimal_config
from tests.deploy.acl_server import ROLES, acl_server
from tests.support.speed import stretched

ACCESS, SECRET = new_secret(), new_secret()
Findings = Callable[[Config], dict[str, Finding]]


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("", "COORDINATOR_"):
        monkeypatch.delenv(f"STAGECOACH_{role}REDIS_PASSWORD", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[Config, redis.Redis]]:
    """A Redis with one password for everything, as most people begin; and who may change that."""
    password = new_secret()
    service = start_redis(tmp_path / "redis", tmp_path / "redis.log", password)
    try:
        with redis.Redis(port=service.port, password=password) as admin:
            yield minimal_config(redis={"url": f"redis://127.0.0.1:{service.port}"}), admin
    finally:
        service.stop()


def test_a_redis_without_a_password(own_redis: tuple[Config, redis.Redis]) -> None:
    config, admin = own_redis
    admin.config_set("requirepass", "")
    stranger, mighty = open_redis(config)
    assert "answers without a password" in stranger and "deploy/users.acl" in stranger
    assert "the user default may do everything" in mighty


def test_a_redis_with_one_password_for_everything(
    own_redis: tuple[Config, redis.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, admin = own_redis
    password: Any = admin.config_get("requirepass")
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", password["requirepass"])
    assert open_redis(config) == [
        "the user default may do everything; give each role its own (deploy/users.acl)"
    ]  # and nobody comes in without the password
    admin.acl_setuser("team", enabled=True, passwords=[f"+{SECRET}"], commands=["+@all"], keys=["*"])
    monkeypatch.setenv("STAGECOACH_REDIS_USERNAME", "team")
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", SECRET)
    (found,) = open_redis(config)
    assert found.startswith("the user team and the user default may do everything")


def test_the_redis_that_we_ship_is_nothing_to_warn_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with acl_server(tmp_path) as server:
        for name, value in server.variables(*ROLES).items():
            monkeypatch.setenv(name, value)
        config = minimal_config(redis={"url": server.url}, runs_dir=str(tmp_path))
        assert open_redis(config) == []
        found = first_of(config, "Redis", "access to Redis")
        assert [finding.outcome for finding in found] == ["ok", "ok"]
        assert "refused" in found[1].text


def first_of(config: Config, *names: str) -> list[Finding]:
    """The findings of these names; what would be examined after the last of them is not."""
    found = []
    for finding in examine(config):
        if finding.name in names:
            found.append(finding)
        if len(found) == len(names):
            return found
    raise AssertionError(found)


def test_doctor_warns_and_does_not_fail(own_redis: tuple[Config, redis.Redis], tmp_path: Path) -> None:
    config, admin = own_redis
    admin.config_set("requirepass", "")
    config = config.model_copy(update={"runs_dir": tmp_path})
    works, warned = first_of(config, "Redis", "access to Redis")
    assert (works.outcome, warned.outcome, warned.ok) == ("ok", "warn", True)
    assert "answers without a password" in warned.text
    (tmp_path / "config.yaml").write_text(dump_config(config))
    ended = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "doctor", str(tmp_path / "config.yaml"), "--json"],
        capture_output=True, text=True, timeout=110, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended
    said = {finding["name"]: finding for finding in json.loads(ended.stdout)}
    assert (said["access to Redis"]["outcome"], said["access to Redis"]["ok"]) == ("warn", True)
    assert {said[name]["outcome"] for name in ("Redis", "encryption")} == {"ok"}


def test_what_cannot_be_reached_is_not_looked_at(tmp_path: Path) -> None:
    config = minimal_config(redis={"url": f"redis://127.0.0.1:{free_port()}"}, runs_dir=str(tmp_path))
    names = []
    for finding in examine(config):
        names.append(finding.name)
        if finding.name.startswith("embedded S3"):
            break
    assert "Redis" in names and "access to Redis" not in names


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"redis": {"url": "redis://192.0.2.5:6379"}}, ["redis.url", "rediss://"]),
        ({"redis": {"url": "redis://no-such-host.invalid"}}, ["redis.url", "rediss://"]),
        ({"store": {"url": "s3://b", "endpoint_url": "http://192.0.2.7:9000"}}, ["store.endpoint_url", "https://"]),
        ({"redis": {"url": "rediss://192.0.2.5"}, "store": {"url": "s3://b", "endpoint_url": "https://192.0.2.7"}}, []),
        ({"redis": {"url": "redis://127.0.0.1"}, "store": {"url": "s3://b", "endpoint_url": "http://localhost:1"}}, []),
        ({"redis": {"url": "redis://[::1]:6379"}, "store": {"url": "s3://b"}}, []),
        ({"store": {"url": "file:///folder"}}, []),
        ({}, []),
    ],
)
def test_what_goes_over_the_network_in_plain_text(sections: dict[str, Any], words: list[str]) -> None:
    found = in_the_clear(minimal_config(**sections))
    assert len(found) == (1 if words else 0)
    assert all(word in found[0] for word in words)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Config]:
    def config(endpoint: str) -> Config:
        return minimal_config(store={"url": f"s3://{BUCKET}/team", "endpoint_url": endpoint, "retries": 0})

    return config


def test_a_bucket_of_a_server_with_and_without_keys(
    bucket: Callable[[str], Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = start_s3(tmp_path / "closed", tmp_path / "closed.log", ACCESS, SECRET)
    try:
        assert open_bucket(bucket(f"http://127.0.0.1:{service.port}")) == []
        assert not list((tmp_path / "closed" / BUCKET).rglob("probe")), "it leaves nothing behind"
    finally:
        service.stop()


def test_a_public_bucket(
    s3_servers: dict[str, tuple[str, str, str]], bucket: Callable[[str], Config], tmp_path: Path
) -> None:
    """moto asks nobody for credentials, but for an object that no policy gives away."""
    client = boto3.client("s3", endpoint_url=s3_servers["moto"][0], region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    (listed,) = open_bucket(bucket(s3_servers["moto"][0]))
    assert "without credentials (it can be listed);" in listed and "block public access" in listed
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [everybody]}))
    try:
        config = bucket(s3_servers["moto"][0]).model_copy(update={"runs_dir": tmp_path})
        works, warned = first_of(config, "store", "access to store")
        assert (works.outcome, warned.outcome) == ("ok", "warn")
        assert "without credentials (it can be listed, read, its policy says so);" in warned.text
    finally:
        client.delete_bucket_policy(Bucket=BUCKET)


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("guarded", [True, False], ids=["token", "no token"])
def test_a_ray_with_and_without_token(
    guarded: bool, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look comes from outside, so it does not matter what this process knows."""
    (tmp_path / "store").mkdir()
    dashboard = free_port()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    head = RayWithDashboard(tmp_path, dashboard, new_secret() + new_secret() if guarded else None)
    try:
        found = open_ray(head.address, f"127.0.0.1:{dashboard}")
        if guarded:
            assert found == []
        else:
            token, board = found
            assert "asks for no token" in token and "RAY_AUTH_MODE=token" in token
            assert "dashboard" in board and str(dashboard) in board
            config = minimal_config(
                ray={"address": head.address}, redis={"url": redis_server.url}, store={"url": f"file://{tmp_path}/store"},
                runs_dir=str(tmp_path),
            )  # fmt: skip
            (tmp_path / "config.yaml").write_text(dump_config(config))
            monkeypatch.setenv(LOOPBACK_VARIABLE, "0")
            ended = subprocess.run(
                [sys.executable, "-m", "coordinator.cli", "doctor", str(tmp_path / "config.yaml")], cwd=tmp_path,
                capture_output=True, text=True, timeout=110,
                env={**os.environ, "STAGECOACH_REDIS_PASSWORD": redis_server.password, "COLUMNS": "500"},
            )  # fmt: skip
            assert ended.returncode == 0, ended
            assert "ok   Ray: " in ended.stdout and "warn access to Ray: it asks for no token" in ended.stdout
            assert f"dashboard at 127.0.0.1:{dashboard} answers" in ended.stdout
    finally:
        head.stop()


class RayWithDashboard:
    """`ray start --head` with a dashboard, which the embedded one does not have."""

    def __init__(self, folder: Path, port: int, token: str | None) -> None:
        self._folder = tempfile.mkdtemp(prefix="t-", dir="/tmp")  # Ray's sockets need a short path
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled"}
        if token is not None:
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={self.port}",
            "--node-ip-address=127.0.0.1", f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--num-cpus=1",
            f"--temp-dir={self._folder}", "--object-store-memory=100000000", "--disable-usage-stats",
            "--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0",
            f"--ray-client-server-port={free_port()}",
        ]  # fmt: skip
        with (folder / "ray.log").open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self._wait(port, folder / "ray.log")

    def _wait(self, port: int, log: Path) -> None:
        deadline = time.monotonic() + stretched(120)
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
                connection.request("GET", "/api/gcs_healthz")  # which nobody needs a token for
                if connection.getresponse().status == 200:
                    return
            assert time.monotonic() < deadline and self._process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends all of it."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
