"""For tests of the page: its token, a run at work, and waiting for what is seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coordinator.run import Run
from shared.protocol.heartbeat import Wait, poll
from tests.conftest import minimal_config
from tests.support.speed import stretched

TOKEN = "a-token-of-24-characters"


@contextlib.contextmanager
def live_run(folder: Path, **sections: Any) -> Iterator[Run]:
    """A run at work, `live`, in a thread of this process, its folder in `runs` there; abandoned at the end."""
    config = minimal_config(
        runs_dir=str(folder / "runs"), stop_at={"updates": 10**6},
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 4}, **sections,
    )  # fmt: skip
    run = Run.start(config, "live", inline=True)
    yield run
    run.abandon()
    soon("the run to end", lambda: run.ended)


def soon(what: str, done: Callable[[], Any]) -> None:
    poll(Wait(what, stretched(60)), lambda: bool(done()), 0.05)
