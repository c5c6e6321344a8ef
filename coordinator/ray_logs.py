"""What Ray keeps in its session's logs of the processes of its actors; the only place that knows their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ray

from shared.last_words import LastWords, last_words

_TAIL_BYTES = 16 << 10
_PID = re.compile(r"\bpid: (\d+)")
_ADDRESS = re.compile(r"\bip: ([0-9a-fA-F.:]+)")
_NODE = re.compile(r"node (has died|died|was terminated|is (dead|preempted))", re.IGNORECASE)


def how_it_died(error: ray.exceptions.RayError) -> tuple[str, LastWords]:
    """In words how an actor's process ended, and what it said last, as far as it can be known here.

    The logs of processes on other machines stay there.
    """
    said = str(error)
    pid, address = _PID.search(said), _ADDRESS.search(said)
    who = f"its process ({f'pid {pid[1]}' if pid else 'no pid'} on {address[1] if address else 'an unknown machine'})"
    if _NODE.search(said):
        return f"{who} went with its machine", LastWords(None, ())
    path = _standard_error(int(pid[1])) if pid else None
    if path is None:
        there = f"; its last words are in Ray's logs there, worker-*-{pid[1]}.err" if pid else ""
        return f"{who} has died{there}", LastWords(None, ())
    words = last_words(_tail(path))
    if words.how is None:
        return f"{who} was killed: it said nothing of its end (by hand, or by the kernel for want of memory?)", words
    how = f"ended with {words.how}" if words.how.startswith("exit") else f"was ended by {words.how}"
    return f"{who} {how}", words


def _standard_error(pid: int) -> Path | None:
    """Of a process of the Ray that this one is connected to, on this machine; None where it was on another one."""
    node: Any = ray._private.worker._global_node
    logs = Path(node.get_logs_dir_path()) if node is not None else None
    found = sorted(logs.glob(f"worker-*-{pid}.err"), key=lambda path: path.stat().st_mtime) if logs else []
    return found[-1] if found else None


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")
