"""How a process ended of itself, from what real processes leave on their standard error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.last_words import last_words

BEGIN = (
    "import faulthandler, os, sys; from shared.last_words import tell_of_exits; faulthandler.enable(); tell_of_exits()"
)


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", f"{BEGIN}\n{code}"], stderr=subprocess.PIPE, text=True).stderr


@pytest.mark.parametrize(
    ("code", "how", "words"),
    [
        ("def simulate():\n    os._exit(3)\nsimulate()", "exit code 3", "simulate"),
        ("print('no licence', file=sys.stderr)\ndef a(): os._exit(3)\ndef b(): a()\nb()", "exit code 3", "no licence"),
        ("print('no licence', file=sys.stderr); os.abort()", "SIGABRT", "no licence"),
        ("def simulate():\n    import ctypes; ctypes.string_at(0)\nsimulate()", "SIGSEGV", "simulate"),
        ("def simulate():\n    os.abort()\nsimulate()", "SIGABRT", "simulate"),
        ("print('about to go', file=sys.stderr); os.kill(os.getpid(), 9)", None, "about to go"),
        (
            "def simulate():\n    import ctypes; ctypes.PyDLL(None).sleep(30)\n"
            "faulthandler.dump_traceback_later(1, exit=True)\nsimulate()",
            "its watchdog: one call kept Python's lock for 0:00:01",
            "in simulate",
        ),
        ("os.fork() or os._exit(7)\nos.wait()\nprint('done', file=sys.stderr)", None, "done"),
    ],
    ids=["os._exit", "os._exit with words", "abort with words", "segfault", "abort", "killed", "locked", "of a child"],
)  # fmt: skip
def test_what_a_process_says_of_its_end(code: str, how: str | None, words: str) -> None:
    found = last_words(said(code))
    assert found.how == how
    assert words in "\n".join(found.lines)


def test_of_a_long_crash_the_innermost_frames_are_kept_and_marks_of_ray_are_not() -> None:
    frames = "\n".join(f'  File "f{number}.py", line 1 in f{number}' for number in range(50))
    crash = f"Fatal Python error: Bus error\n\n{frames}"
    text = f":job_id:01000000\n*** SIGBUS received at time=1 on cpu 1 ***\nPC: @ 0x1\n{crash}"
    found = last_words(text)
    assert found.how == "SIGBUS"
    assert found.lines[0] == "Fatal Python error: Bus error"
    assert 'File "f0.py"' in found.lines[1]
    assert "f49.py" not in "".join(found.lines)
