"""A run of one worker in lockstep, whose log has one order: what is disturbed ends with the weights of what is not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tests.support.processes.command_line import CommandLine
from tests.support.runs.checkpoints import upload_in

ENVIRONMENT = """
import time

import gymnasium


class Slow(gymnasium.Wrapper):
    # so that the run lasts while it is killed, and the one that it is compared with need not
    def __init__(self, env, seconds):
        super().__init__(env)
        self._seconds = seconds

    def step(self, action):
        time.sleep(self._seconds)
        return self.env.step(action)
"""


def write_config(terminal: CommandLine, seconds: float, **sections: Any) -> Path:
    """One worker in lockstep: the log has one order."""
    wrappers = [{"path": "slow:Slow", "kwargs": {"seconds": seconds}}]
    data: dict[str, Any] = {
        "environment": {"id": "CartPole-v1", "num_envs": 4, "wrappers": wrappers},
        "rollout": {
            "workers": 1,
            "fragment_steps": 16,
            "fragments_per_update": 2,
            "restarts_allowed": 100,
            "catch_up_seconds": 600,  # a machine that stands still is no slow environment
        },
        "checkpoint": {"every": "10 updates"},
        "evaluation": {"episodes": 1},
        "archive": "all",
    }
    return terminal.write_config(**(data | sections))


def final_weights(terminal: CommandLine, run_id: str) -> dict[str, str]:
    """SHA-256 of the final checkpoint's objects, but for those that have log positions in them."""
    folder = upload_in(terminal.store(run_id) / "checkpoints" / terminal.marker(run_id, ".finished")["final"])
    files = [path for path in sorted(folder.rglob("*.safetensors")) if path.name != "memory.safetensors"]
    assert files
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
