"""Processes of a run: exit diagnostics, the garbage collector during imports, signal handlers of children."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from stagecoach.shared.base.process import at_rest, exit_diagnostics, handling
from tests.support.environments.small import StartsAChild

BEGIN = (
    "import faulthandler, os, sys; from stagecoach.shared.base import process as p; "
    "faulthandler.enable(); p.report_exits()"
)


@pytest.mark.parametrize(
    ("code", "how", "words"),
    [
        ("def simulate():\n    os._exit(3)\nsimulate()", "exit code 3", "simulate"),
        ("print('no license', file=sys.stderr)\ndef a(): os._exit(3)\ndef b(): a()\nb()", "exit code 3", "no license"),
        ("print('no license', file=sys.stderr); os.abort()", "SIGABRT", "no license"),
        ("def simulate():\n    import ctypes; ctypes.string_at(0)\nsimulate()", "SIGSEGV", "simulate"),
        ("def simulate():\n    os.abort()\nsimulate()", "SIGABRT", "simulate"),
        ("print('about to go', file=sys.stderr); os.kill(os.getpid(), 9)", None, "about to go"),
        ("def simulate():\n    import ctypes; ctypes.PyDLL(None).sleep(30)\n"
         "faulthandler.dump_traceback_later(1, exit=True)\nsimulate()",
         "its watchdog: one call kept Python's lock for 0:00:01", "in simulate"),
        ("os.fork() or os._exit(7)\nos.wait()\nprint('done', file=sys.stderr)", None, "done"),
    ],
    ids=["os._exit", "os._exit with words", "abort with words", "segfault", "abort", "killed", "locked", "of a child"],
)  # fmt: skip
def test_exit_diagnostics_name_cause_and_place(code: str, how: str | None, words: str) -> None:
    ended = subprocess.run([sys.executable, "-c", f"{BEGIN}\n{code}"], stderr=subprocess.PIPE, text=True)
    found = exit_diagnostics(ended.stderr)
    assert found.how == how and words in "\n".join(found.lines)


def test_exit_diagnostics_keep_innermost_frames() -> None:
    frames = "\n".join(f'  File "f{number}.py", line 1 in f{number}' for number in range(50))
    crash = f"Fatal Python error: Bus error\n\n{frames}"
    text = f":job_id:01000000\n*** SIGBUS received at time=1 on cpu 1 ***\nPC: @ 0x1\n{crash}"
    found = exit_diagnostics(text)
    assert (found.how, found.lines[0]) == ("SIGBUS", "Fatal Python error: Bus error")
    assert 'File "f0.py"' in found.lines[1] and "f49.py" not in "".join(found.lines)


def test_at_rest_disables_and_restores_garbage_collection() -> None:
    frozen = gc.get_freeze_count()
    try:
        with contextlib.suppress(ImportError), at_rest():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
        gc.disable()
        with at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGALRM], ids=lambda its: its.name)
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("by", ["fork", "spawn", "forkserver", "popen"])
def test_environment_children_get_default_signal_handlers(by: str, thread: bool, number: signal.Signals) -> None:
    heard: list[int] = []
    with handling(lambda number, _: heard.append(number), signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        env = StartsAChild(by, number, thread)
        closing = threading.Thread(target=env.close, daemon=True)
        closing.start()
        closing.join(20)
        if left := closing.is_alive():
            os.kill(env.child.pid, signal.SIGKILL)
            closing.join()
        assert not left and heard == []


def test_forked_children_keep_the_handlers_that_they_set() -> None:
    """Those that the environment has set, in this process or in the child, also for grandchildren."""
    code = """
import os, signal
from stagecoach.shared.base.process import handle
handle(lambda *_: os._exit(7), signal.SIGTERM)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(3))
if os.fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(4))
    if os.fork() == 0:
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR1) if os.waitstatus_to_exitcode(os.wait()[1]) == 4 else os._exit(9)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout == "3\n"
