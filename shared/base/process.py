"""A process of a run: child processes, memory, and the diagnostics of one that ended.

**Children** end with their parent, also if that is killed, and get only the secrets that they need. **Memory**: the
garbage collector would scan PyTorch's many objects repeatedly, a fifth of a role's start, and glibc requests each large
array from the kernel, which takes several times as long as copying it. **Exits**: Ray drops its processes' exit codes,
so a crash is read from the standard error, where an `os._exit` reports its caller.
"""

import contextlib
import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn

_PR_SET_PDEATHSIG = 1
Secrets = Literal["redis", "store", "ray"]
"""The service whose secrets an environment may hold."""
_SECRETS: dict[Secrets, re.Pattern[str]] = {
    "redis": re.compile(r"STAGECOACH_(\w+_)?REDIS_(PASSWORD|USERNAME)(_FILE)?"),
    "store": re.compile(r"AWS_\w+|RCLONE_\w+"),
    "ray": re.compile(r"RAY_AUTH_\w+"),
}
_OWN = {"RAY_RAYLET_PID"}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
"""Bytes: glibc lets no larger array be taken from what it keeps."""
_KEPT = 512 << 20
"""Bytes that may lie unused at the end of the heap; beyond it they are given back."""
_OURS: dict[signal.Signals, Callable[[int, Any], object]] = {}
"""The last handler that `handle` has set for each signal in this process."""
_FORKING = threading.local()
"""The signal mask of a thread that forks."""
_LINES, _SAID, _LONGEST = 6, 2, 1500
"""Lines in all, those of them that came before a crash, and characters in all."""
_NOISE = re.compile(r"^(:\w+:.*|\[.* logging\.cc:\d+:.*|\s*@ .*|PC: @.*|\*\*\* SIG.*|Extension modules: .*|)$")
"""Ray's marks, and native frames without names."""
_EXITED = re.compile(r"^os\._exit\((-?\d+)\) ends this process", re.MULTILINE)
_SIGNAL = re.compile(r"^\*\*\* (SIG[A-Z]+) received", re.MULTILINE)
_FATAL = "Fatal Python error: "
_LOCKED = re.compile(r"^Timeout \((\d+:\d\d:\d\d)[.\d]*\)!\n(.*)", re.MULTILINE | re.DOTALL)
_THREAD = re.compile(r"^(?:Current thread|Thread) \w+.*\n", re.MULTILINE)
"""Head of each thread's stack from the fault handler; the main thread's is the last."""
_SIGNALS = {
    "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT", "Bus error": "SIGBUS", "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}  # fmt: skip


def handle(handler: Callable[[int, Any], object], *numbers: signal.Signals) -> dict[signal.Signals, Any]:
    """Gives these signals to `handler` in this process; returns the former handlers. Call it in the main thread.

    Forked processes, such as an environment's, get the default handlers: by ours they would ignore `terminate()`.
    """
    _OURS.update(dict.fromkeys(numbers, handler))
    return {number: signal.signal(number, handler) for number in numbers}


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], object], *numbers: signal.Signals) -> Iterator[None]:
    """Gives these signals to `handler` within the block, as `handle` does."""
    before = handle(handler, *numbers)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _before_fork() -> None:
    """Holds signals back until the child has its handlers: what a forked child hears before that is lost."""
    _FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)


def _after_fork_in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.mask)


def _after_fork_in_child() -> None:
    """Replaces our signal handlers, not those that an environment has set."""
    ours = [number for number, handler in _OURS.items() if signal.getsignal(number) is handler]
    _OURS.clear()
    for number in ours:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _FORKING.mask)  # an exception would be lost here: SIGINT ends it, too
    if signal.SIGINT in ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def shield_from_terminal() -> None:
    """Moves a process of Ray's into a process group of its own, and unblocks SIGINT.

    Ray blocks SIGINT so that Ctrl-C in a terminal does not reach its processes. An environment's processes would
    inherit that, and ignore a SIGINT that it sends them.
    """
    with contextlib.suppress(OSError):  # a session's leader is in a group of its own already
        os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Delays SIGTERM to the end of the block, and restores its handler then.

    For a library that sets handlers of its own, also in native code, which would end the process. Threads that start
    in the block never take the signal.
    """
    if threading.current_thread() is not threading.main_thread():  # it sets no handlers
        yield
        return
    handler, before = signal.getsignal(signal.SIGTERM), signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_after() -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block: a process that is just starting would have no owner."""
    mine = threading.current_thread() is threading.main_thread()  # no other thread gets signals
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if mine and signal.getsignal(n) is not None]
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
        for again in came:
            signal.raise_signal(again)


def end_with_parent(number: signal.Signals) -> Callable[[], object]:
    """Returns a function to call in the child: on Linux the kernel then sends it this signal when the thread that
    started it ends. The library is loaded here, in the parent, since loading may hang in a forked child."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def spawn(command: list[str], given: bytes, ended_by: signal.Signals, **popen: Any) -> subprocess.Popen[bytes]:
    """Starts a process in its own session and writes all of `given` to it, even during Ctrl-C.

    The process receives the signal `ended_by` when the starting thread ends.
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


def child_environment(*needs: Secrets, **given: str) -> dict[str, str]:
    """Returns this process's environment for a child, without secrets except those that it needs, and with `given`."""
    hidden = [pattern for kind, pattern in _SECRETS.items() if kind not in needs]
    kept = [name for name in os.environ if name not in _OWN and not any(each.fullmatch(name) for each in hidden)]
    return {name: os.environ[name] for name in kept} | given


def forget_secrets(*kept: Secrets) -> None:
    """Removes secrets from this process's environment, so that its children do not inherit them."""
    for name in os.environ.keys() - child_environment(*kept).keys():
        del os.environ[name]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Runs a command's imports like `at_rest`; Ctrl-C ends the process at once, since nothing has been started and some
    modules would not survive an exception."""

    def interrupted(*_: object) -> None:
        os.write(2, b"Interrupted.\n")
        os._exit(130)

    with handling(interrupted, signal.SIGINT), keeping_sigterm(), at_rest():
        yield


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Disables the garbage collector for a process's imports, and exempts their objects from it afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


def keep_freed_memory() -> bool:
    """Makes this process's allocator keep freed memory; returns False unless it is glibc's."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):  # musl has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST) and mallopt(_M_TRIM_THRESHOLD, _KEPT))
    return False


class ExitDiagnostics(NamedTuple):
    """Cause of a process's end, and the last lines of its standard error."""

    how: str | None
    """`exit code 3`, `SIGSEGV`, a call that kept Python's lock; None if it was killed, or native code ended it."""
    lines: tuple[str, ...]


def report_exits(on_exit: Callable[[int], int] = lambda status: status) -> Callable[[int], NoReturn]:
    """Makes `os._exit` in this process (not in forks) print its caller. `on_exit` maps its exit code to the final one.
    Returns the former `os._exit`."""
    end, own = os._exit, os.getpid()

    def exit_with_report(status: int) -> NoReturn:
        if os.getpid() == own:
            frames = "".join(traceback.format_stack(sys._getframe(1), limit=_LINES // 2))
            print(f"os._exit({status}) ends this process, called from\n{frames}", file=sys.stderr, flush=True)
            status = on_exit(status)
        end(status)

    os._exit = exit_with_report
    return end


def exit_diagnostics(said: str) -> ExitDiagnostics:
    """Extracts the last messages, and the innermost frames of a crash or exit, from the end of a standard error."""
    exits, signals, (before, fatal, crash) = [*_EXITED.finditer(said)], _SIGNAL.findall(said), said.rpartition(_FATAL)
    named = next((name for words, name in _SIGNALS.items() if crash.startswith(words)), None) if fatal else None
    how = next(iter(signals[-1:]), named) or (f"exit code {exits[-1][1]}" if exits else None)
    lines = _told(said)[-_LINES:]
    if locked := _LOCKED.search(said):
        how = f"its watchdog: one call kept Python's lock for {locked[1]}"
        lines = [*_told(said[: locked.start()])[-_SAID:], *_told(_THREAD.split(locked[2])[-1])[: _LINES - _SAID]]
    elif fatal:
        lines = [*_told(before)[-_SAID:], *_told(fatal + crash)[: _LINES - _SAID]]
    elif exits:
        after = said[exits[-1].end() :].partition("\n")[2]
        lines = [*_told(said[: exits[-1].start()])[-_LINES + 2 :], *_told(after)[-2:]]
    return ExitDiagnostics(how, tuple(line[: _LONGEST // _LINES] for line in lines))


def _told(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if not _NOISE.match(line)]
