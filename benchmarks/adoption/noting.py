"""An environment that does nothing but note when the first step of each fragment is taken."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

NOTES = "STAGECOACH_BENCHMARK_NOTES"
"""Environment variable of a worker's process: the file for its notes. Without it nothing is noted."""
_NOTE = struct.Struct("<q")


class Noting(gym.Env[Any, Any]):
    """Observations of four zeros, no reward, no end; each note is the monotonic clock, in nanoseconds."""

    def __init__(self, fragment_steps: int) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._nothing = np.zeros(4, np.float32)
        self._fragment_steps, self._step = fragment_steps, 0
        path = os.environ.get(NOTES)
        self._notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if path else -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The one episode that there is."""
        super().reset(seed=seed)
        return self._nothing, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Looks at the clock before anything else."""
        now = time.monotonic_ns()
        if self._step % self._fragment_steps == 0 and self._notes >= 0:
            os.write(self._notes, _NOTE.pack(now))
        self._step += 1
        return self._nothing, 0.0, False, False, {}

    def close(self) -> None:
        """Closes the notes."""
        if self._notes >= 0:
            os.close(self._notes)
            self._notes = -1


def make(fragment_steps: int) -> Noting:
    """The factory for the config's `environment.id`."""
    return Noting(fragment_steps)


def read_notes(path: Path) -> list[int]:
    """When the first step of each fragment of this worker was taken, in order."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) - len(data) % _NOTE.size
    return [int(note) for (note,) in _NOTE.iter_unpack(data[:whole])]
