"""Each role's own credentials for Redis: from variables and mounted files, found anew when they are rotated, told to
nobody.
"""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from shared.config_sources import dump_config
from shared.connection import Address, RoleName, connect_redis, credentials
from shared.errors import ConfigError, RedisUnavailable
from shared.launch import RoleLaunch
from tests.conftest import RedisServer, minimal_config

SECRET = "pass-that-nobody-may-see"
SetUp = Callable[..., None]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> SetUp:
    """`environment(WORKER_REDIS_PASSWORD="x")` sets STAGECOACH_WORKER_REDIS_PASSWORD; nothing else is set."""
    for role in ("", "WORKER_", "EVALUATOR_", "TRAINER_", "COORDINATOR_", "VIEWER_"):
        for what in ("USERNAME", "PASSWORD", "PASSWORD_FILE"):
            monkeypatch.delenv(f"STAGECOACH_{role}REDIS_{what}", raising=False)

    def set_up(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"STAGECOACH_{name}", value)

    return set_up


def user(role: RoleName | None) -> tuple[str | None, str | None]:
    found = credentials(Address("run", "redis://x", "file:///x"), role)
    return found.redis_username, found.redis_password


def test_a_roles_own_come_before_those_for_all(environment: SetUp) -> None:
    assert user("worker") == (None, None)
    environment(REDIS_PASSWORD="all")
    assert user("worker") == user(None) == (None, "all")
    environment(REDIS_USERNAME="somebody", WORKER_REDIS_PASSWORD="own")
    assert user("worker") == ("worker", "own")
    assert user("trainer") == user(None) == ("somebody", "all")
    environment(WORKER_REDIS_USERNAME="other-name")
    assert user("worker") == ("other-name", "own")
    environment(WORKER_REDIS_PASSWORD="", WORKER_REDIS_USERNAME="")
    assert user("worker") == ("somebody", "all"), "what is empty is not set"


def test_who_may_do_more_may_also_look(environment: SetUp) -> None:
    environment(REDIS_PASSWORD="all", COORDINATOR_REDIS_PASSWORD="may do more")
    assert user("viewer") == user("coordinator") == ("coordinator", "may do more")
    environment(VIEWER_REDIS_PASSWORD="looks")
    assert user("viewer") == ("viewer", "looks")
    assert user("coordinator") == ("coordinator", "may do more")


def test_from_a_mounted_file(environment: SetUp, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    environment(TRAINER_REDIS_PASSWORD_FILE=str(file))
    assert user("trainer") == ("trainer", "from file")
    environment(REDIS_PASSWORD_FILE=str(file))
    assert user("worker") == (None, "from file")
    environment(TRAINER_REDIS_PASSWORD="set")
    assert user("trainer") == ("trainer", "set")


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe"])
def test_a_file_that_holds_no_password_is_named(environment: SetUp, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    environment(WORKER_REDIS_PASSWORD_FILE=str(file))
    with pytest.raises(ConfigError, match="STAGECOACH_WORKER_REDIS_PASSWORD_FILE") as caught:
        user("worker")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_rotated_secret_is_found_at_the_next_connection(
    environment: SetUp, redis_server: RedisServer, tmp_path: Path, unique_run_id: str
) -> None:
    file = tmp_path / "secret"
    file.write_text("first-password")
    environment(WORKER_REDIS_PASSWORD_FILE=str(file), WORKER_REDIS_USERNAME=unique_run_id)
    with redis_server.client() as admin:
        admin.acl_setuser(unique_run_id, enabled=True, passwords=["+first-password"], commands=["+@all"], keys=["*"])
        config = minimal_config(redis={"timeout_seconds": 10, "retry_seconds": 0})
        with connect_redis(Address("run", redis_server.url, ""), config, "worker") as client:
            assert client.acl_whoami() == unique_run_id
            admin.acl_setuser(unique_run_id, enabled=True, passwords=["-first-password", "+second-password"])
            client.connection_pool.disconnect()
            with pytest.raises(redis.AuthenticationError):
                client.ping()
            file.write_text("second-password")
            assert client.ping()
        admin.acl_deluser(unique_run_id)


def test_the_refusal_names_the_roles_own_variable(environment: SetUp, redis_server: RedisServer) -> None:
    environment(VIEWER_REDIS_PASSWORD=SECRET)
    config = minimal_config(redis={"retry_seconds": 0})
    with pytest.raises(RedisUnavailable, match="STAGECOACH_VIEWER_REDIS_PASSWORD, or STAGECOACH_REDIS_PASS") as caught:
        connect_redis(Address("run", redis_server.url, ""), config, "viewer")
    assert SECRET not in str(caught.value) + repr(caught.value)


def test_nothing_that_is_printed_logged_or_sent_holds_a_secret(
    environment: SetUp, redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment(WORKER_REDIS_PASSWORD=redis_server.password, WORKER_REDIS_USERNAME="default")
    caplog.set_level(logging.DEBUG)
    config, address = minimal_config(), Address("run", redis_server.url, f"file://{tmp_path}")
    launch = RoleLaunch(config.model_dump(mode="json"), address, (), None)
    role = launch.open("worker-3")
    try:
        assert role.redis.ping()
        shown = [repr(role), str(role), repr(role.redis), repr(role.redis.connection_pool), repr(launch), caplog.text]
        shown += [repr(credentials(address, "worker")), dump_config(config), str(role.redis.connection_pool.__dict__)]
        assert not any(redis_server.password in text for text in shown)
        assert redis_server.password.encode() not in pickle.dumps(launch), "Ray carries the launch to other machines"
    finally:
        role.redis.close()


def test_a_process_with_a_wrong_password_ends_with_one_line(
    environment: SetUp, redis_server: RedisServer, tmp_path: Path
) -> None:
    environment(TRAINER_REDIS_PASSWORD=SECRET, TRAINER_REDIS_USERNAME="default")
    (tmp_path / "config.yaml").write_text(dump_config(minimal_config(redis={"retry_seconds": 0})))
    command = [
        sys.executable,
        "-m",
        "trainer_node",
        "run",
        "--redis",
        redis_server.url,
        "--store",
        f"file://{tmp_path}",
    ]
    ended = subprocess.run(
        [*command, "--config", str(tmp_path / "config.yaml")], capture_output=True, text=True, timeout=100
    )
    said = [line for line in ended.stderr.splitlines() if not line.endswith("trainer begins")]
    assert (ended.returncode, len(said)) == (2, 1), ended.stderr
    assert "STAGECOACH_TRAINER_REDIS_PASSWORD" in ended.stderr
    assert SECRET not in ended.stderr + ended.stdout
