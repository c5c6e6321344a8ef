"""What a process of a role does of itself: its last words, the garbage collector at rest, the bound on restarts."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading

import pytest

from stagecoach.shared.base.process import at_rest, handling, last_words
from stagecoach.shared.runtime.restarts import RestartBound
from tests.support.environments.small import StartsAChild

BEGIN = (
    "import faulthandler, os, sys; from stagecoach.shared.base import process as p; "
    "faulthandler.enable(); p.tell_of_exits()"
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
def test_what_a_process_says_of_its_end(code: str, how: str | None, words: str) -> None:
    ended = subprocess.run([sys.executable, "-c", f"{BEGIN}\n{code}"], stderr=subprocess.PIPE, text=True)
    found = last_words(ended.stderr)
    assert found.how == how and words in "\n".join(found.lines)


def test_of_a_long_crash_the_innermost_frames_are_kept_and_marks_of_ray_are_not() -> None:
    frames = "\n".join(f'  File "f{number}.py", line 1 in f{number}' for number in range(50))
    crash = f"Fatal Python error: Bus error\n\n{frames}"
    text = f":job_id:01000000\n*** SIGBUS received at time=1 on cpu 1 ***\nPC: @ 0x1\n{crash}"
    found = last_words(text)
    assert (found.how, found.lines[0]) == ("SIGBUS", "Fatal Python error: Bus error")
    assert 'File "f0.py"' in found.lines[1] and "f49.py" not in "".join(found.lines)


def test_the_collector_rests_for_the_block_and_works_again_also_after_an_error_unless_it_was_off() -> None:
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


@pytest.mark.parametrize(
    ("allowed", "lives", "number"),
    [
        (2, [0, 0, 0, 0], 3),
        (0, [0], 1),
        (2, [0, 0, 1, 1, 1, 2, 2, 2, 2], 9),  # what made progress counts anew, its own end not at all
        (2, [5, 3, 4, 5], 4),  # what a former life had reached already is no progress
        (1, [1, 2, 3, 4, 5, 6, 7, 8], None),
    ],
)
def test_it_is_given_up_after_so_many_ends_in_a_row_without_progress(
    allowed: int, lives: list[int], number: int | None
) -> None:
    bound, given_up = RestartBound(allowed), list[bool]()
    bound.saw((0,))
    for progress in lives:
        bound.saw((progress,))
        given_up.append(bound.ended())
    assert (given_up.index(True) + 1 if any(given_up) else None) == number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGALRM], ids=lambda its: its.name)
@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("by", ["fork", "spawn", "forkserver", "popen"])
def test_children_of_an_environment_get_default_signals(by: str, thread: bool, number: signal.Signals) -> None:
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
