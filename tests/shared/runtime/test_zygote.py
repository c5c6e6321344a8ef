"""A zygote and the processes that it forks: real ones, with every way in which either ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagecoach.shared.base.failure import FailureKind
from stagecoach.shared.runtime import zygote
from stagecoach.shared.runtime.role_process import Request, RoleProcess
from stagecoach.shared.runtime.zygote import HEAD, NUMBER, SOCKET, HeldZygote, zygote_folder
from tests.support.processes.page import soon

ACTOR = """
import sys
from stagecoach.shared.runtime.role_process import Request, RoleProcess
RoleProcess(Request.of("tests.support.processes.roles:waits", "here", b"", "redis"), sys.argv[1]).wait()
"""
pytestmark = pytest.mark.processes
Start = Callable[..., RoleProcess]


@pytest.fixture
def held() -> Iterator[HeldZygote]:
    held = HeldZygote()
    yield held
    held.release()


@pytest.fixture(params=["forked", "new"])
def start(request: pytest.FixtureRequest, held: HeldZygote) -> Start:
    """Starts a role as the zygote does, and as it is done without one."""
    return starting(held.token if request.param == "forked" else "")


def starting(token: str) -> Start:
    def start(function: str, name: str = "worker-0", given: bytes = b"") -> RoleProcess:
        request = Request.of(f"tests.support.processes.roles:{function}", name, given, "redis", "store")
        return RoleProcess(request, token)

    return start


def zygote_of(held: HeldZygote) -> int:
    """Its process, once it serves: the parent of what it forks."""
    return int(literal_eval(starting(held.token)("returns").wait().reason)[9])


def commands() -> Iterator[bytes]:
    """Command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_role_returns_with_its_own_environment(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OWN", "set after the zygote began")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", "secret")
    found = [literal_eval(start("returns", f"worker-{index}", b"x" * 100_000).wait().reason) for index in range(2)]
    for index, (name, _, known, group, given, folder, _, left, own, _) in enumerate(found):
        assert (name, given, folder) == (f"worker-{index}", 100_000, str(tmp_path))
        assert known == ["STAGECOACH_REDIS_PASSWORD"], "those of a role, and not Ray's"
        assert group and left == [] and own == "set after the zygote began"
    (first, second) = (entry[1] for entry in found)
    assert first[0] != second[0] and first[1] != second[1], "random numbers of its own"


def test_forked_role_has_pytorch_and_new_one_has_not(held: HeldZygote) -> None:
    assert [literal_eval(starting(token)("returns").wait().reason)[6] for token in (held.token, "")] == [True, False]


@pytest.mark.parametrize(
    ("name", "kind", "fenced"),
    [
        ("fenced", FailureKind.OTHER, True),
        ("environment", FailureKind.ENVIRONMENT, False),
        ("x", FailureKind.OTHER, False),
    ],
)
def test_role_exit_carries_the_exception(start: Start, name: str, kind: FailureKind, fenced: bool) -> None:
    found = start("fails", name).wait()
    assert found.failure is not None and (found.failure.kind, found.fenced) == (kind, fenced)
    assert found.failure.detail.endswith("as it was told to") and "roles.py" in found.trace


def test_long_failure_is_reported_whole(start: Start) -> None:
    """More than a pipe holds."""
    found = start("fails", given=(1 << 20).to_bytes(4, "big")).wait()
    assert found.failure is not None and found.trace.rstrip().endswith(f"{'x' * 1000}as it was told to")


def test_role_that_ends_at_once_leaves_its_zygote(held: HeldZygote, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is gone before its client has looked at it."""
    before, pidfd_open = zygote_of(held), os.pidfd_open

    def late(pid: int) -> int:
        time.sleep(1)
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", late)
    found = starting(held.token)("ends", "exit").wait()
    assert found.died is not None and found.died.how == "exit code 3"
    monkeypatch.undo()
    assert zygote_of(held) == before


@pytest.mark.parametrize(("name", "how"), [("exit", "exit code 3"), ("SIGSEGV", "SIGSEGV"), ("SIGKILL", None)])
def test_role_exit_describes_its_death(start: Start, name: str, how: str | None) -> None:
    found = start("ends", name).wait()
    assert found.died is not None and (found.reason, found.failure, found.died.how) == ("", None, how)


def test_role_process_receives_signals(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    process = start("waits", "here")
    soon("the role to wait", (tmp_path / "here").exists)
    process.signal(signal.SIGTERM)
    assert process.wait().reason == "told to end"


def test_closed_connection_kills_the_whole_group(
    held: HeldZygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", ACTOR, held.token], env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ) as actor:
        soon("the role to wait", (tmp_path / "here").exists)
        pids = [int(pid) for pid in (tmp_path / "here").read_text().split()]
        assert all(alive(pid) for pid in pids)
        os.kill(pids[0], signal.SIGSTOP)  # it ignores all but SIGKILL
        actor.kill()
    soon("its processes to end", lambda: not any(alive(pid) for pid in pids))


def test_connections_closed_at_once_leave_no_process(
    held: HeldZygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was just forked has no group of its own yet."""
    monkeypatch.chdir(tmp_path)
    parent, request = zygote_of(held), Request.of("tests.support.processes.roles:waits", "here", b"", "redis").encoded()
    for _ in range(30):
        with socket.socket(socket.AF_UNIX) as connection, open(os.devnull, "wb") as nothing:
            connection.connect(str(zygote_folder(held.token) / SOCKET))
            socket.send_fds(connection, [len(request).to_bytes(HEAD, "big")], [nothing.fileno()] * 3)
            connection.sendall(request)
            assert connection.recv(NUMBER)
    soon("all to end", lambda: not Path(f"/proc/{parent}/task/{parent}/children").read_text())


@pytest.mark.parametrize("state", ["importing", "stopped", "replaced"])
def test_release_ends_every_zygote(state: str) -> None:
    held = HeldZygote()
    folder = zygote_folder(held.token)
    pids = [] if state == "importing" else [zygote_of(held)]
    if state != "importing":
        os.kill(pids[0], signal.SIGSTOP if state == "stopped" else signal.SIGKILL)
    if state == "replaced":
        pids.append(zygote_of(held))
    held.release()
    soon("all to end", lambda: not any(alive(pid) for pid in pids) and not folder.exists())
    soon("its processes to end", lambda: not any(str(folder).encode() in command for command in commands()))


def test_socket_is_private(held: HeldZygote) -> None:
    assert starting(held.token)("returns").wait().reason
    folder = zygote_folder(held.token)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / SOCKET)] == [0o700, 0o600]


def test_fifty_forks_and_user_code_with_threads_and_forks(held: HeldZygote) -> None:
    start = starting(held.token)
    assert start("lives_as_user_code_does").wait().reason == "512 7"
    processes = [start("returns", f"worker-{index}") for index in range(50)]
    assert all(process.wait().reason for process in processes)
    assert len({process.pid for process in processes}) == 50


@pytest.mark.parametrize("fault", ["killed", "hanging", "no socket", "new code", "no folder"])
def test_zygote_is_replaced_after_a_fault(
    held: HeldZygote, fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The processes of a killed zygote end with it; those of a replaced one live on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zygote, "_REPLY_SECONDS", 1.0)
    former, folder = zygote_of(held), zygote_folder(held.token)
    process = starting(held.token)("waits", "here")
    soon("the role to wait", (tmp_path / "here").exists)
    if fault == "killed":
        os.kill(former, signal.SIGKILL)
        assert process.wait().died is not None
    elif fault == "hanging":
        os.kill(former, signal.SIGSTOP)
    elif fault == "no socket":
        (folder / SOCKET).unlink()
    elif fault == "no folder":
        folder.rename(tmp_path / "moved")
    else:
        path = Path(zygote.__file__)
        before = path.stat()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert zygote_of(held) != former
    if fault != "killed":
        assert alive(process.pid)
        os.kill(former, signal.SIGCONT)
        process.signal(signal.SIGTERM)
        assert process.wait().reason == "told to end"
    soon("the former one to end", lambda: not alive(former))


def test_zygote_ends_with_its_holder_after_its_last_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = HeldZygote()
    pid = zygote_of(held)
    process = starting(held.token)("waits", "here")
    soon("the role to wait", (tmp_path / "here").exists)
    for end in held.pipe:  # as when it is killed
        os.close(end)
    time.sleep(0.3)
    assert alive(pid) and alive(process.pid)
    process.signal(signal.SIGTERM)
    assert process.wait().reason == "told to end"
    soon("the zygote to end", lambda: not alive(pid))
    assert not zygote_folder(held.token).joinpath(SOCKET).exists()
