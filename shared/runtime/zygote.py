"""The client of a machine's zygote: finds or starts it, requests processes, and holds it for a run.

Its socket, with mode 0600, lies in a private folder, named after a token of the coordinator's process and after the
Python that it runs. A process that starts a zygote passes it the lock on that folder, which it keeps until it ends. A
zygote that does not reply is replaced; without any, each role is a new Python.
"""

import contextlib
import fcntl
import hashlib
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.base.local_disk import private_folder
from stagecoach.shared.base.process import child_environment

SERVER = "stagecoach.shared.runtime.zygote_server"
SOCKET, LOCK, LOG = "socket", "lock", "log"
SERVES = b"serves"
"""Content of the lock's file once the socket exists."""
HEAD = 8
"""Bytes before a request: its length."""
NUMBER = 8
"""Bytes of what the zygote replies: a process id (0: its code is old), and then the status with which that ended."""
_PREFIX = "sc-z-"
_START_SECONDS = 30.0
_REPLY_SECONDS = 10.0
_END_SECONDS = 2.0
_POLL_SECONDS = 0.02
_ATTEMPTS = 3
_BEFORE_START = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that a process reads when it starts: another value needs another zygote."""
_SPACES = ("cgroup", "mnt", "net", "pid", "user")
"""Namespaces that a forked process inherits: containers may share a folder, and each needs a zygote of its own."""


class Forked:
    """A process that a zygote has forked for this one, used like a `Popen`; ends when the connection is closed."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid, self._connection = pid, connection
        self.returncode: int | None = None
        """Exit code, or the negative number of the signal that ended it; None before `wait`."""
        self._process: int | None = None
        with contextlib.suppress(ProcessLookupError, AttributeError):  # it has ended already, or Linux is old
            self._process = os.pidfd_open(pid)

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            self._connection.sendall(bytes([number]))  # the zygote knows whether the process is still there

    def poll(self) -> int | None:
        """Returns `returncode`; None means that the process is running."""
        return self.wait(0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits `timeout` seconds, by default until it has ended; returns `returncode`."""
        waited: list[Any] = [self._connection, *([] if self._process is None else [self._process])]
        if self.returncode is None and select.select(waited, [], [], timeout)[0]:
            self._connection.settimeout(_REPLY_SECONDS)
            status = _number(self._connection)  # from a zygote that hangs or has died, nothing
            if self._process is not None:
                os.close(self._process)
            self._connection.close()
            self.returncode = -signal.SIGKILL if status is None else status
        return self.returncode


def fork(token: str, request: bytes, files: Sequence[int]) -> Forked | None:
    """Asks this machine's zygote for a process with these standard output, standard error and result.

    Returns None without a `token`, where the system cannot fork safely, and where no zygote replies.
    """
    if not token or not sys.platform.startswith("linux"):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        folder = zygote_folder(token)
        for _ in range(_ATTEMPTS):
            if (connection := _connected(folder)) is None:
                return None
            there = (folder / SOCKET).stat().st_ino
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [len(request).to_bytes(HEAD, "big")], files)
                connection.sendall(request)
                if pid := _number(connection):
                    return Forked(connection, pid)
            connection.close()
            if (folder / SOCKET).stat().st_ino == there:  # it hangs, has died, or its code is old
                for name in (SOCKET, LOCK):
                    (folder / name).unlink(missing_ok=True)
    return None


class HeldZygote:
    """This machine's zygote, started for the runs of this process; it ends with them, or with this process."""

    def __init__(self) -> None:
        self.token = world.token_hex(8)
        self.pipe = os.pipe()
        """The zygote ends once nobody holds it open."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # roles then start without it
            _sweep()
            _start(zygote_folder(self.token), self.pipe[0])

    def release(self) -> None:
        """Ends the zygote, also one that hangs, that another replaced, or that is still importing."""
        for end in self.pipe:
            os.close(end)
        folders = [*_parent().glob(f"{_PREFIX}{self.token}-*")]
        deadline = world.monotonic() + _END_SECONDS
        while any((folder / SOCKET).exists() for folder in folders) and world.monotonic() < deadline:
            world.sleep(_POLL_SECONDS / 4)  # it sees to what its roles leave behind, and removes its folder
        mark = f"/{_PREFIX}{self.token}-".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if mark in (command := path.read_bytes()) and SERVER.encode() in command:
                    os.kill(int(path.parent.name), signal.SIGKILL)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def zygote_folder(token: str) -> Path:
    """Returns the private folder of the zygote that fits this process; raises `OSError` if somebody else has it."""
    kept = [sys.executable, *(os.environ.get(name, "") for name in _BEFORE_START)]
    kept += [Path("/proc/sys/kernel/random/boot_id").read_text()]
    kept += [os.readlink(f"/proc/self/ns/{space}") for space in _SPACES]
    fits = hashlib.sha256("\0".join(kept).encode()).hexdigest()[:8]
    return private_folder(_parent() / f"{_PREFIX}{token}-{fits}")  # short: a socket's path has at most 107 characters


def _parent() -> Path:
    return Path("/tmp") if os.access("/tmp", os.W_OK) else Path(tempfile.gettempdir())


def _connected(folder: Path) -> socket.socket | None:
    """Connects to the zygote once it is ready; starts one if none is there. Returns None if that ends at once."""
    deadline, started = world.monotonic() + _START_SECONDS, 0
    while world.monotonic() < deadline and started <= 1:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_REPLY_SECONDS)
        try:
            connection.connect(str(folder / SOCKET))
            return connection
        except OSError:
            connection.close()
        started += _start(folder)
        world.sleep(_POLL_SECONDS)
    return None


def _number(connection: socket.socket) -> int | None:
    """The next number that the zygote sends; None if it does not."""
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < NUMBER and (more := connection.recv(NUMBER - len(said))):
            said += more
    return int.from_bytes(said, "big", signed=True) if len(said) == NUMBER else None


def _start(folder: Path, hold: int | None = None) -> bool:
    """Starts a zygote that ends with `hold`, or once nobody has needed it for a while; returns False if one is there,
    or starting."""
    with open(folder / LOCK, "a+b") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            if lock.read() == SERVES and not (folder / SOCKET).exists():  # it was removed, and nobody can ask
                (folder / LOCK).unlink(missing_ok=True)
            return False
        lock.truncate(0)
        (folder / SOCKET).unlink(missing_ok=True)  # of one that was killed
        given = [lock.fileno()] if hold is None else [lock.fileno(), hold]
        command = [sys.executable, "-P", "-m", SERVER, str(folder), *map(str, given)]
        environment = child_environment(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        with open(folder / LOG, "ab") as log:  # it detaches itself, from Ray's processes, too, and this returns then
            subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=given, env=environment, check=True,
                timeout=_START_SECONDS,
            )  # fmt: skip
    return True


def _sweep() -> None:
    """Removes the folders of zygotes that were killed."""
    for folder in _parent().glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                with open(folder / LOCK, "a+b") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
