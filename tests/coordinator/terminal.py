"""The command line in this process: what it is given and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.end_to_end.command_line import Ended

Stagecoach = Callable[..., Ended]
CONFIG: dict[str, Any] = {
    "environment": {"id": "CartPole-v1", "num_envs": 2},
    "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2},
    "algorithm": {"minibatch_size": 32, "epochs": 1},
    "evaluation": {"episodes": 1},
    "stop_at": {"updates": 2},
}


def check_refused(done: Ended, *words: str) -> None:
    assert done.code == 2, done
    assert done.err.startswith("Error: "), done.err
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err
