"""`doctor`: everything is tried for real, and each failure says what to do about it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import redis

from coordinator.doctor import Finding, examine
from coordinator.services import BUCKET, start_redis
from shared.config import Config
from tests.conftest import RedisServer, minimal_config
from tests.environments_for_tests import MODULE


def examined(config: Config | None) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(config)}


def first(name: str, config: Config) -> Finding:
    """The finding of this name; what would be examined after it is not."""
    return next(finding for finding in examine(config) if finding.name == name)


@pytest.fixture
def embedded(tmp_path: Path) -> dict[str, Any]:
    return {"runs_dir": str(tmp_path / "runs")}


def test_all_is_well_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    found = examined(None)
    assert [finding for finding in found.values() if not finding.ok] == []
    assert {"embedded Redis", "embedded S3 server", "Ray", "folder of runs", "loopback"} <= set(found)
    assert "torch" in found["Python and packages"].text
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_config_adds_its_environment_and_one_failure_does_not_hide_the_rest(embedded: dict[str, Any]) -> None:
    found = examined(minimal_config(environment={"id": f"{MODULE}:broken_factory"}, **embedded))
    assert [name for name, finding in found.items() if not finding.ok] == ["environment and policies"]
    assert "no such mesh" in found["environment and policies"].text


def test_redis_of_ones_own(
    embedded: dict[str, Any], redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = minimal_config(redis={"url": redis_server.url}, **embedded)
    refused = first("Redis", config)
    assert not refused.ok
    assert "STAGECOACH_REDIS_PASSWORD" in refused.text
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", redis_server.password)
    assert first("Redis", config).ok

    careless = start_redis(tmp_path / "redis", tmp_path / "redis.log", redis_server.password)
    try:
        config = minimal_config(redis={"url": f"redis://127.0.0.1:{careless.port}"}, **embedded)
        with redis.Redis(port=careless.port, password=redis_server.password) as client:
            client.config_set("appendonly", "no")
            assert "appendonly is off; turn it on" in first("Redis", config).text
            client.config_set("maxmemory-policy", "allkeys-lru")
            assert "maxmemory-policy is allkeys-lru; set it to noeviction" in first("Redis", config).text
    finally:
        careless.stop()
    away = first("Redis", config)
    assert not away.ok
    assert "does not answer" in away.text


def test_a_store_of_ones_own(
    embedded: dict[str, Any],
    s3_servers: dict[str, tuple[str, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)

    def store(url: str, at: str | None = endpoint) -> Finding:
        return first("store", minimal_config(store={"url": url, "endpoint_url": at, "retries": 0}, **embedded))

    assert store(f"s3://{BUCKET}/doctor").ok
    missing = store("s3://no-such-bucket")
    assert not missing.ok
    assert "create it" in missing.text
    assert "does not answer" in store(f"s3://{BUCKET}", "http://127.0.0.1:1").text
    (tmp_path / "folder").mkdir()
    assert store(f"file://{tmp_path / 'folder'}", None).ok
    assert not store(f"file://{tmp_path / 'nowhere'}", None).ok


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:  # root may write everywhere, so the answer is given for it
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    tmp_path.chmod(0o500)
    found = first("folder of runs", minimal_config(runs_dir=str(tmp_path / "runs")))
    assert not found.ok
    assert "choose another folder" in found.text


def test_a_finding_is_plain_data() -> None:
    failed = {"name": "Redis", "ok": False, "outcome": "fail", "text": "why"}
    assert Finding("Redis", False, "why").as_dict() == failed
    assert Finding("Redis", False, "why", warning=True).outcome == "fail"
    assert [Finding("Redis", True, "why", warning=warned).outcome for warned in (False, True)] == ["ok", "warn"]
