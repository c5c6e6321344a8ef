"""A machine's zygote: it has imported PyTorch and the roles' modules, and forks a process for each role on request.

It has one thread, no connection but those on its socket, and no secret, and it never touches a GPU: what a fork could
not take with it. The user's modules are imported in the forked process alone.

A process lasts as long as the connection of its request: the byte N there sends it signal N, the end of the
connection kills it and its group. When it has ended, the zygote replies with its status.
"""

import contextlib
import importlib
import os
import select
import selectors
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.base.process import at_rest, end_with_parent
from stagecoach.shared.runtime.zygote import HEAD, NUMBER, SERVES, SOCKET

_IDLE_SECONDS = 60.0
"""Time after which a zygote that nobody holds ends, without processes."""
_LOOK_SECONDS = 5.0
_REQUEST_SECONDS = 5.0
_LARGEST = 1 << 30
_PRELOADED = (
    "stagecoach.rollout_worker.process", "stagecoach.rollout_worker.worker", "stagecoach.rollout_worker.evaluator",
    "stagecoach.trainer_node.process", "stagecoach.shared.runtime.role_process",
    "stagecoach.rollout_worker.environments.checking.check",
)  # fmt: skip
_FILES = 3
"""Standard output, standard error, and where the result goes."""
_Work = tuple[bytes, int]
"""Request to a forked process, and the file that its result goes to."""


class _Client:
    """A connection, and the process that was forked for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid

    def ends(self) -> bool:
        """Kills the process at the end of the connection, or sends it the signals that came; returns whether it
        ended."""
        try:
            numbers = self.connection.recv(64)
        except OSError:
            numbers = b""
        with contextlib.suppress(ProcessLookupError, ValueError, OSError):
            for number in numbers:
                os.kill(self.pid, number)
            if not numbers:
                os.kill(self.pid, signal.SIGKILL)  # it may have no group of its own yet
                os.killpg(self.pid, signal.SIGKILL)
        return not numbers


class Zygote:
    def __init__(self, folder: Path, lock: int, hold: int | None) -> None:
        self._folder, self._lock, self._hold = folder, lock, hold
        self._code = _code()
        self._clients: dict[int, _Client] = {}
        """Clients by process id."""
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakes = os.pipe()
        for end in (self._wakeup, self._wakes):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._pid, self._end_with_parent = os.getpid(), end_with_parent(signal.SIGKILL)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / SOCKET))
        os.chmod(folder / SOCKET, 0o600)
        self._listener.listen(64)
        self._socket = (folder / SOCKET).stat().st_ino
        os.write(lock, SERVES)
        files: list[Any] = [self._listener, self._wakeup, *([] if hold is None else [hold])]
        for file in files:
            self._selector.register(file, selectors.EVENT_READ)

    def serve(self) -> _Work | None:
        """Returns in each forked process what it is to do, and None in the zygote once it is no longer needed."""
        needed = world.monotonic()
        released = False
        while True:
            if self._clients:
                needed = world.monotonic()
            elif released or not self._is_asked or (self._hold is None and world.monotonic() > needed + _IDLE_SECONDS):
                if self._is_asked:
                    shutil.rmtree(self._folder, ignore_errors=True)
                return None
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.fileobj is self._listener:
                    if (work := self._accept()) is not None:
                        return work
                elif key.fileobj == self._wakeup:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
                elif key.fileobj == self._hold:
                    released = True
                    self._selector.unregister(key.fileobj)
                elif key.data.ends():
                    self._selector.unregister(key.fileobj)
                    key.data.connection.close()
            self._reap()

    def _accept(self) -> _Work | None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # such as too many open files
            return None
        connection.settimeout(_REQUEST_SECONDS)
        files: list[int] = []
        try:
            head, files, _, _ = socket.recv_fds(connection, HEAD, _FILES)
            length = int.from_bytes(head, "big")
            if len(head) != HEAD or len(files) != _FILES or length > _LARGEST:
                raise ConnectionError("not a request")
            request = bytearray()
            while len(request) < length:
                if not (more := connection.recv(min(length - len(request), 1 << 20))):
                    raise ConnectionError("an incomplete request")
                request += more
            if select.select([connection], [], [], 0)[0]:  # its end: nothing else comes before the reply
                raise ConnectionError("the client has left")
            if _code() != self._code:
                connection.sendall((0).to_bytes(NUMBER, "big"))
                raise ConnectionError("its code has changed since")
            if (pid := os.fork()) == 0:
                return self._begin(bytes(request), connection, files)
            self._clients[pid] = client = _Client(connection, pid)
            self._selector.register(connection, selectors.EVENT_READ, client)
            with contextlib.suppress(OSError):
                connection.sendall(pid.to_bytes(NUMBER, "big"))
        except OSError:
            connection.close()
        finally:
            for file in files:
                os.close(file)
        return None

    def _begin(self, request: bytes, connection: socket.socket, files: list[int]) -> _Work:
        """Detaches the forked process from the zygote."""
        os.setsid()
        self._end_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for end in (self._listener, connection, *(client.connection for client in self._clients.values())):
            end.close()
        for file in (self._lock, self._wakeup, self._wakes, *([] if self._hold is None else [self._hold])):
            os.close(file)
        if os.getppid() != self._pid:  # it died before the kernel knew that this process is to end with it
            os._exit(1)
        os.dup2(files[0], 1)
        os.dup2(files[1], 2)
        result = os.dup(files[2])
        import numpy as np

        np.random.seed()  # random numbers of its own; Python's `random` sees to itself
        return request, result

    def _reap(self) -> None:
        for pid, client in [*self._clients.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._clients[pid]
            with contextlib.suppress(OSError):  # what it left behind
                os.killpg(pid, signal.SIGKILL)
            with contextlib.suppress(OSError, KeyError, ValueError):  # nobody waits for it any more
                self._selector.unregister(client.connection)
                code = os.waitstatus_to_exitcode(status)
                client.connection.sendall(code.to_bytes(NUMBER, "big", signed=True))
            client.connection.close()

    @property
    def _is_asked(self) -> bool:
        """False once its socket was removed, or another zygote has taken its place."""
        with contextlib.suppress(OSError):
            return (self._folder / SOCKET).stat().st_ino == self._socket
        return False


def _code() -> int:
    """A number that changes with the files of the modules of Stagecoach that this process has imported."""
    files = [module.__file__ for name, module in [*sys.modules.items()] if name.partition(".")[0] == "stagecoach"]
    marks = []
    for path in filter(None, files):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            marks.append((path, found.st_mtime_ns, found.st_size))
    return hash(tuple(marks))


def main(folder: str, lock: str, hold: str | None = None) -> int:
    if os.fork():
        os._exit(0)  # the caller's process; the other one belongs to nobody
    os.setsid()
    with at_rest():
        for name in _PRELOADED:
            importlib.import_module(name)
        importlib.import_module("stagecoach.shared.storage.s3_store").preload()
    tasks = len(os.listdir("/proc/self/task"))
    if tasks > 1:
        print(f"an import has started threads ({tasks} in all): no process can be forked", file=sys.stderr)
        return 1
    work = Zygote(Path(folder), int(lock), None if hold is None else int(hold)).serve()
    if work is None:
        return 0
    from stagecoach.shared.runtime.role_process import Request, act

    request, result = work
    return act(Request.decoded(request), result)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
