"""Reaching Redis with each role's own credentials: what is wrong is said in one line, and never with a secret in it."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from stagecoach.shared.base.address import Address, Credentials, RoleName, credentials
from stagecoach.shared.base.errors import ConfigError, RedisUnavailable, RunNotFound, UserError
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.redis_client import check_redis, connect_redis
from stagecoach.shared.runtime.launch import RoleLaunch
from tests.conftest import RedisServer, minimal_config
from tests.support.services.own_redis import OwnRedis

SECRET = "pass-that-nobody-may-see"
WITHOUT_RETRIES = minimal_config(redis={"timeout_seconds": 10, "retry_seconds": 0})
AOF = "MISCONF Errors writing to the AOF file: "


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

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if reply is not None:
                self.request.recv(1000)
                self.request.sendall(reply)
            ended.wait()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"redis://127.0.0.1:{server.server_address[1]}"
        finally:
            ended.set()
            server.shutdown()
            thread.join()


def refusal(where: Address, role: RoleName | None = None, timeout_seconds: float = 10) -> str:
    """The message for a Redis that cannot be used."""
    config = minimal_config(redis={"timeout_seconds": timeout_seconds, "retry_seconds": 0})
    with pytest.raises(RedisUnavailable) as caught:
        connect_redis(where, config, role)
    message = str(caught.value)
    assert SECRET not in message and SECRET not in repr(caught.value)
    assert "\n" not in message and isinstance(caught.value, UserError)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    return message


def test_password_file_precedes_environment(redis_server: RedisServer, environment: SetUp, tmp_path: Path) -> None:
    with connect_redis(address(redis_server.url, tmp_path, redis_server.password), WITHOUT_RETRIES) as client:
        assert client.ping()
    environment(REDIS_PASSWORD=redis_server.password)
    with connect_redis(Address("run", redis_server.url, f"file://{tmp_path}"), WITHOUT_RETRIES) as client:
        assert client.ping()
    environment(REDIS_USERNAME="somebody")
    found = credentials(address("redis://x", tmp_path, SECRET))
    assert (found.redis_username, found.redis_password) == (None, SECRET)


def test_address_without_server_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    places = [f"redis://127.0.0.1:{port}", "redis://no-such-host.invalid:6379", f"unix://{tmp_path}/none.sock"]
    for server, url in ((place.partition("//")[2], place) for place in places):
        message = refusal(address(url, tmp_path, SECRET))
        assert f"{server} does not answer" in message and "redis.url" in message


@pytest.mark.parametrize(("password", "username"), [(SECRET, None), (None, None), (SECRET, "nobody")])
def test_wrong_credentials(
    redis_server: RedisServer, tmp_path: Path, password: str | None, username: str | None
) -> None:
    message = refusal(address(redis_server.url, tmp_path, password, username))
    assert "refuses the credentials" in message and redis_server.password not in message
    assert "STAGECOACH_REDIS_PASSWORD" in message and "STAGECOACH_REDIS_USERNAME" in message


def test_refusal_names_the_variable_of_the_role(environment: SetUp, redis_server: RedisServer) -> None:
    environment(VIEWER_REDIS_PASSWORD=SECRET)
    message = refusal(Address("run", redis_server.url, ""), "viewer")
    assert "STAGECOACH_VIEWER_REDIS_PASSWORD, or STAGECOACH_REDIS_PASS" in message


def test_user_without_permissions_is_named(redis_server: RedisServer, tmp_path: Path, unique_run_id: str) -> None:
    with redis_server.client() as client:
        client.acl_setuser(unique_run_id, enabled=True, passwords=[f"+{SECRET}"], commands=["+ping"], keys=["*"])
    message = refusal(address(redis_server.url, tmp_path, SECRET, unique_run_id))
    assert "refuses to serve" in message and "info" in message.lower()


@pytest.mark.parametrize(
    "reply",
    [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\x01\x02\r\n", b""],
    ids=["silence", "http", "ssh", "binary", "empty"],
)
def test_port_of_another_protocol_is_named(tmp_path: Path, reply: bytes | None) -> None:
    with answering(reply) as url:
        assert "does not answer" in refusal(address(url, tmp_path, SECRET), timeout_seconds=2)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (f"{AOF}No space left on device", "its disk is full (No space left on device)"),
        (f"ERR Error running script (call to f_1): @user_script: -{AOF}Disk quota exceeded", "its disk is full (Disk"),
        (f"{AOF}Input/output error script: 1, on @user_script:2.", "it cannot write to its disk (Input/output error)"),
        ("MISCONF Redis is unable to persist.", "it cannot write to its disk (Redis is unable to persist)"),
    ],
)
@pytest.mark.parametrize("folder", [None, "/runs/a/redis"])
def test_redis_with_full_disk_is_named_with_remedy(said: str, told: str, folder: str | None, tmp_path: Path) -> None:
    with answering(f"-{said}\r\n".encode()) as url:
        message = refusal(replace(address(url, tmp_path), redis_folder=folder))
    assert message.partition("refuses to serve: ")[2].startswith(told)
    assert message.endswith(f"the file system of {folder or 'Redis'}")


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:99999", "redis://127.0.0.1:port", f"redis://:{SECRET}@[half", f"unix://:{SECRET}@/a",
        "unix:///a?db=1", "unix://a",
    ],
)  # fmt: skip
def test_invalid_address_is_named(tmp_path: Path, url: str) -> None:
    assert "redis.url" in refusal(address(url, tmp_path, SECRET))


@pytest.mark.parametrize(
    "end", ["/?db=1", "/0?decode_responses=True", "?protocol=3", "?socket_timeout=1", "/0?health_check_interval=5"]
)
def test_redis_url_with_options_is_refused(tmp_path: Path, end: str) -> None:
    """redis-py would take them: another database than the one shown, text instead of bytes, other time-outs."""
    url, option = f"redis://127.0.0.1:1{end}", end.partition("?")[2].partition("=")[0]
    told = f"redis.url sets {option}; expected redis://host:port/db and no options"
    assert told in refusal(address(url, tmp_path))
    with pytest.raises(ConfigError, match="no options") as caught:
        minimal_config(redis={"url": url})
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("end", ["/x", "/0/1", "/0#part", f"/{SECRET}@h/0", f"?{SECRET}@h", f"?password={SECRET}"])
def test_redis_url_without_database_number_is_refused(tmp_path: Path, end: str) -> None:
    assert "expected redis://host:port/db" in refusal(address(f"redis://127.0.0.1:1{end}", tmp_path))
    with pytest.raises(ConfigError) as caught:
        minimal_config(redis={"url": f"redis://127.0.0.1:1{end}"})
    assert SECRET not in str(caught.value)


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OwnRedis]:
    """A Redis with the settings of the test's parameter."""
    server = OwnRedis(tmp_path / "own", settings=request.param)
    yield server
    server.kill()


@pytest.mark.parametrize("own", [{"cluster-enabled": "yes"}], indirect=True)
def test_redis_cluster_is_refused_by_name(own: OwnRedis, tmp_path: Path) -> None:
    """Each of its nodes knows the runs whose ids fall to it, and no others."""
    second = OwnRedis(tmp_path / "second", own.password, {"cluster-enabled": "yes"})
    try:
        for node, slots in ((own, (0, 8191)), (second, (8192, 16383))):
            node.command("CLUSTER", "ADDSLOTSRANGE", *slots)
        own.command("CLUSTER", "MEET", "127.0.0.1", second.port)
        for node in (own, second):
            with pytest.raises(RedisUnavailable, match=r"runs in cluster mode .*; expected a standalone server"):
                connect_redis(address(node.url, tmp_path, own.password), WITHOUT_RETRIES)
    finally:
        second.kill()


@pytest.mark.parametrize("own", [{"maxmemory": "100mb"}], indirect=True)
def test_redis_that_evicts_is_refused_before_start(own: OwnRedis, environment: SetUp) -> None:
    """Also where CONFIG is forbidden, as on managed servers."""
    config = minimal_config(redis={"url": own.url}, store={"url": "file:///"})
    own.command("ACL", "SETUSER", "managed", "on", f">{SECRET}", "~*", "+@all", "-config")
    environment(REDIS_USERNAME="managed", REDIS_PASSWORD=SECRET)
    for policy in ("allkeys-lru", "allkeys-lfu", "allkeys-random"):
        own.command("CONFIG", "SET", "maxmemory-policy", policy)
        with pytest.raises(RedisUnavailable, match=f"maxmemory-policy is {policy}; set it to noeviction"):
            check_redis(Address("run", config.redis.url, ""), config, "coordinator")
    for policy in ("volatile-lru", "noeviction"):  # nothing of a run ever expires
        own.command("CONFIG", "SET", "maxmemory-policy", policy)
        check_redis(Address("run", config.redis.url, ""), config, "coordinator")


@pytest.mark.parametrize("own", [{"maxmemory": "3mb", "maxmemory-policy": "allkeys-random"}], indirect=True)
def test_unknown_run_names_evicted_keys(own: OwnRedis) -> None:
    with own.client() as client:
        with pytest.raises(RunNotFound, match="is this the Redis it was started on"):
            Flow(client, "gone").read()
        for number in range(100):
            client.set(f"other:{number}", b"x" * 100_000)
        with pytest.raises(RunNotFound, match=r"has evicted \d+ keys since it started.*noeviction"):
            Flow(client, "gone").read()
        with pytest.raises(RunNotFound, match=r"has evicted \d+ keys since it started.*noeviction"):
            Flow(client, "gone").register("worker-0")


def user(role: RoleName | None) -> tuple[str | None, str | None]:
    found = credentials(Address("run", "redis://x", "file:///x"), role)
    return found.redis_username, found.redis_password


def test_role_credentials_precede_common_credentials(environment: SetUp) -> None:
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
    environment(COORDINATOR_REDIS_PASSWORD="may do more")
    assert user("viewer") == user("coordinator") == ("coordinator", "may do more"), "whose role may do more may look"
    environment(VIEWER_REDIS_PASSWORD="looks")
    assert (user("viewer"), user("coordinator")) == (("viewer", "looks"), ("coordinator", "may do more"))


def test_password_is_read_from_mounted_file(environment: SetUp, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from file\n")
    environment(TRAINER_REDIS_PASSWORD_FILE=str(file))
    assert user("trainer") == ("trainer", "from file")
    environment(REDIS_PASSWORD_FILE=str(file))
    assert user("worker") == (None, "from file")
    environment(TRAINER_REDIS_PASSWORD="set")
    assert user("trainer") == ("trainer", "set")


@pytest.mark.parametrize("content", [None, b"", b"\n", b"\xff\xfe"])
def test_file_without_password_is_named(environment: SetUp, tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    environment(WORKER_REDIS_PASSWORD_FILE=str(file))
    with pytest.raises(ConfigError, match="STAGECOACH_WORKER_REDIS_PASSWORD_FILE") as caught:
        user("worker")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_rotated_secret_is_read_at_next_connection(
    environment: SetUp, redis_server: RedisServer, tmp_path: Path, unique_run_id: str
) -> None:
    file = tmp_path / "secret"
    file.write_text("first-password")
    environment(WORKER_REDIS_PASSWORD_FILE=str(file), WORKER_REDIS_USERNAME=unique_run_id)
    with redis_server.client() as admin:
        admin.acl_setuser(unique_run_id, enabled=True, passwords=["+first-password"], commands=["+@all"], keys=["*"])
        with connect_redis(Address("run", redis_server.url, ""), WITHOUT_RETRIES, "worker") as client:
            assert client.acl_whoami() == unique_run_id
            admin.acl_setuser(unique_run_id, enabled=True, passwords=["-first-password", "+second-password"])
            client.connection_pool.disconnect()
            with pytest.raises(redis.AuthenticationError):
                client.ping()
            file.write_text("second-password")
            assert client.ping()
        admin.acl_deluser(unique_run_id)


def test_nothing_that_is_printed_logged_or_sent_holds_a_secret(
    environment: SetUp, redis_server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment(WORKER_REDIS_PASSWORD=redis_server.password, WORKER_REDIS_USERNAME="default")
    caplog.set_level(logging.DEBUG)
    config, address = minimal_config(), Address("run", redis_server.url, f"file://{tmp_path}")
    stored = Credentials("user", redis_server.password)
    launch = RoleLaunch(config.model_dump(mode="json"), address, (), None)
    role = launch.open("worker-3")
    try:
        assert role.redis.ping()
        things = [
            role,
            role.redis,
            role.redis.connection_pool,
            role.redis.connection_pool.__dict__,
            role.flow,
            role.address,
        ]
        things += [role.checkpoints, role.config, launch, stored, [stored], credentials(address, "worker")]
        shown = [*map(repr, things), *map(str, things), dump_config(config), caplog.text]
        assert not any(redis_server.password in text for text in shown)
        assert redis_server.password.encode() not in pickle.dumps(launch), "Ray carries the launch to other machines"
    finally:
        role.redis.close()


def test_process_with_wrong_password_ends_with_one_line(
    environment: SetUp, redis_server: RedisServer, tmp_path: Path
) -> None:
    environment(TRAINER_REDIS_PASSWORD=SECRET, TRAINER_REDIS_USERNAME="default")
    (tmp_path / "config.yaml").write_text(dump_config(WITHOUT_RETRIES))
    where = ["--redis", redis_server.url, "--store", f"file://{tmp_path}", "--config", str(tmp_path / "config.yaml")]
    command = [sys.executable, "-m", "stagecoach.trainer_node", "run", *where]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    said = [line for line in ended.stderr.splitlines() if not line.endswith("trainer begins")]
    assert (ended.returncode, len(said)) == (2, 1), ended.stderr
    assert "STAGECOACH_TRAINER_REDIS_PASSWORD" in ended.stderr
    assert SECRET not in ended.stderr + ended.stdout
