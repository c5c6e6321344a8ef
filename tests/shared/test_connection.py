"""Reaching Redis: what is wrong is said in one line, with what to do, and never with a secret in it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shared.config import Config
from shared.connection import Address, Credentials, check_redis, connect_redis, credentials
from shared.errors import RedisUnavailable, UserError
from shared.role import open_role
from tests.conftest import MakeRole, RedisServer, minimal_config

SECRET = "pass-that-nobody-may-see"
AOF = "MISCONF Errors writing to the AOF file: "


@pytest.fixture(autouse=True)
def no_credentials_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests doesn't matter."""
    monkeypatch.delenv("STAGECOACH_REDIS_USERNAME", raising=False)
    monkeypatch.delenv("STAGECOACH_REDIS_PASSWORD", raising=False)


def impatient() -> Config:
    """Gives up at once."""
    return minimal_config(redis={"timeout_seconds": 10, "retry_seconds": 0})


def address(url: str, tmp_path: Path, password: str | None = None, username: str | None = None) -> Address:
    """Where, with credentials in a file."""
    file = tmp_path / "credentials.json"
    stored = {"redis_password": password, "redis_username": username}
    file.write_text(json.dumps({name: value for name, value in stored.items() if value}))
    return Address("run", url, f"file://{tmp_path}", None, str(file))


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """A port that answers everything with `reply`, or with nothing at all; its URL."""
    ended = threading.Event()

    def serve() -> None:
        held = []
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            held.append(connection)
            if reply is not None:
                connection.recv(1000)
                connection.sendall(reply)
        for connection in held:
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def refusal(where: Address) -> str:
    """The message for a Redis that cannot be used."""
    with pytest.raises(RedisUnavailable) as caught:
        connect_redis(where, impatient())
    message = str(caught.value)
    assert SECRET not in message and SECRET not in repr(caught.value)
    assert "\n" not in message and isinstance(caught.value, UserError)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    return message


def test_a_good_address_is_a_checked_connection(redis_server: RedisServer, tmp_path: Path) -> None:
    with connect_redis(address(redis_server.url, tmp_path, redis_server.password), impatient()) as client:
        check_redis(client, redis_server.url)
        assert client.ping()


def test_the_password_may_come_from_the_environment(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", redis_server.password)
    with connect_redis(Address("run", redis_server.url, f"file://{tmp_path}"), impatient()) as client:
        assert client.ping()


def test_the_file_of_embedded_services_comes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", "another")
    monkeypatch.setenv("STAGECOACH_REDIS_USERNAME", "somebody")
    found = credentials(address("redis://x", tmp_path, SECRET))
    assert (found.redis_password, found.redis_username) == (SECRET, None)


def test_a_port_where_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    message = refusal(address(f"redis://127.0.0.1:{port}", tmp_path, SECRET))
    assert f"127.0.0.1:{port}" in message and "does not answer" in message and "redis.url" in message


def test_a_host_that_does_not_exist(tmp_path: Path) -> None:
    message = refusal(address("redis://no-such-host.invalid:6379", tmp_path, SECRET))
    assert "no-such-host.invalid:6379 does not answer" in message


def test_a_wrong_password(redis_server: RedisServer, tmp_path: Path) -> None:
    message = refusal(address(redis_server.url, tmp_path, SECRET))
    assert "refuses the credentials" in message and "STAGECOACH_REDIS_PASSWORD" in message
    assert redis_server.password not in message


def test_no_password_where_one_is_needed(redis_server: RedisServer, tmp_path: Path) -> None:
    assert "refuses the credentials" in refusal(address(redis_server.url, tmp_path))


def test_a_user_that_does_not_exist(redis_server: RedisServer, tmp_path: Path) -> None:
    message = refusal(address(redis_server.url, tmp_path, SECRET, "nobody"))
    assert "STAGECOACH_REDIS_USERNAME" in message


def test_a_user_who_may_not_do_what_is_needed(redis_server: RedisServer, tmp_path: Path, unique_run_id: str) -> None:
    with redis_server.client() as client:
        client.acl_setuser(unique_run_id, enabled=True, passwords=[f"+{SECRET}"], commands=["+ping"], keys=["*"])
    message = refusal(address(redis_server.url, tmp_path, SECRET, unique_run_id))
    assert "refuses to serve" in message and "info" in message.lower()


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\x01\x02\r\n", b""],
    ids=["http", "ssh", "binary", "empty"],
)
def test_a_port_that_is_not_redis(tmp_path: Path, reply: bytes) -> None:
    with answering(reply) as url:
        assert "does not answer" in refusal(address(url, tmp_path, SECRET))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"{AOF}No space left on device", "its disk is full (No space left on device)"),
        (
            f"ERR Error running script (call to f_1): @user_script:1: -{AOF}Disk quota exceeded",
            "its disk is full (Disk",
        ),
        (f"{AOF}Input/output error script: 1, on @user_script:2.", "it cannot write to its disk (Input/output error)"),
        ("MISCONF Redis is unable to persist.", "it cannot write to its disk (Redis is unable to persist)"),
    ],
)
@pytest.mark.parametrize("folder", [None, "/runs/a/redis"])
def test_a_redis_that_cannot_write_to_its_disk_says_why_where_and_what_to_do(
    said: str, told: str, folder: str | None, tmp_path: Path
) -> None:
    with answering(f"-{said}\r\n".encode()) as url:
        message = refusal(replace(address(url, tmp_path), redis_folder=folder))
    assert message.partition("refuses to serve: ")[2].startswith(told)
    assert message.endswith(f"the file system of {folder or 'Redis'}")


def test_a_port_that_says_nothing(tmp_path: Path) -> None:
    with answering(None) as url:
        assert "does not answer" in refusal(address(url, tmp_path, SECRET))


@pytest.mark.parametrize("url", ["redis://127.0.0.1:99999", "redis://127.0.0.1:port", f"redis://:{SECRET}@[half"])
def test_an_address_that_is_none(tmp_path: Path, url: str) -> None:
    assert "redis.url" in refusal(address(url, tmp_path, SECRET))


def test_secrets_are_not_printable(make_role: MakeRole, redis_server: RedisServer, tmp_path: Path) -> None:
    stored = Credentials("user", SECRET, "access", "another-secret")
    for text in (repr(stored), str(stored), f"{[stored]}"):
        assert SECRET not in text and "another-secret" not in text and "access" not in text
    role = make_role()
    for shown in (role, role.redis, role.address, role.flow, role.checkpoints, role.config, role.address.as_dict()):
        assert redis_server.password not in repr(shown) and redis_server.password not in str(shown)


def test_a_role_opens_with_the_same_error(redis_server: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(RedisUnavailable, match="refuses the credentials"):
        open_role(impatient(), address(redis_server.url, tmp_path, SECRET))
