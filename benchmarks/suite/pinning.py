"""Which processes share a processor core, and which of them stand still.

One core is the trainer's, another one belongs to all the rest. Linux only, as /proc and `sched_setaffinity` are.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stagecoach.shared.base.errors import UserError


@dataclass(frozen=True)
class Cores:
    """Numbers of processor cores; where there is only one, both are it."""

    trainer: int
    others: int

    @property
    def apart(self) -> bool:
        """Whether there are two."""
        return self.trainer != self.others


def two_cores() -> Cores:
    """The first and the last one that this process may use; raises `UserError` where that cannot be asked."""
    if not hasattr(os, "sched_getaffinity"):
        raise UserError("this benchmark pins processes to cores, which needs Linux; run it there")
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[0], usable[-1])


RAY_NICENESS = 15
"""What Ray gives its workers (RAY_worker_niceness); who is compared with them must not be more important."""


def begin_on(core: int) -> None:
    """This process, before it starts a thread: on this core, and as important as one of Ray's."""
    os.sched_setaffinity(0, {core})
    os.setpriority(os.PRIO_PROCESS, 0, RAY_NICENESS)


def first_cores(count: int) -> list[int]:
    """The first so many that this process may use."""
    return sorted(os.sched_getaffinity(0))[:count]


@contextlib.contextmanager
def on_cores(*cores: int) -> Iterator[None]:
    """This thread, and all threads and processes that it starts meanwhile, run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin(pid: int, core: int) -> None:
    """All threads of a process that runs already."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), {core})


def stand_still(pids: Iterable[int]) -> None:
    """Until `go_on`: they keep all that they have, and take no processor time."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def go_on(pids: Iterable[int]) -> None:
    """After `stand_still`."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
