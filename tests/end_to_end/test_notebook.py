"""A notebook, run headless: a class that a cell defines trains with Ray's workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.processes.command_line import CommandLine

nbformat: Any = pytest.importorskip("nbformat")
nbclient: Any = pytest.importorskip("nbclient")
pytestmark = pytest.mark.timeout(400)
CLASS = """
import asyncio, threading
import gymnasium as gym, numpy as np
import stagecoach as sc

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = {steps}
        return np.zeros(2, np.float32), {{}}

    def step(self, action):
        self.left -= 1
        return np.zeros(2, np.float32), float(action), self.left == 0, False, {{}}

small = {{"environment.num_envs": 2, "rollout.fragment_steps": 8, "evaluation.episodes": 2}}
"""
CELLS = [
    CLASS.format(steps=5),
    "run = sc.train(Mine, env_steps=320, workers=2, seed=1, **small)",
    "asyncio.get_running_loop().is_running(), threading.current_thread() is threading.main_thread()",
    "run.wait(200).reason, run.config.environment.id, run.evaluate(episodes=2).scores['mean_length']",
    "run.policy().act(np.zeros(2, np.float32)) in (0, 1)",
    CLASS.format(steps=7),  # the cell is changed and run again
    "again = sc.train(Mine, env_steps=320, **small)",
    "again.wait(200).reason, again.evaluate(episodes=2).scores['mean_length']",
    "live = sc.train(Mine, env_steps=10**8, run_id='live', **small)",
    """
import os, signal
threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    live.wait()
except KeyboardInterrupt:  # the cell was interrupted
    ended = live.ended
ended
""",
]


def test_class_of_a_cell_trains_on_ray(terminal: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is ended while the last run is live, which leaves nothing behind."""
    for name, value in terminal.environ.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in CELLS])
    client = nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(terminal.folder)}}, timeout=300)
    client.execute()
    shown = [output.get("text") or output.data["text/plain"] for cell in notebook.cells for output in cell.outputs]
    assert shown == ["(True, True)", "('exhausted', 'object:Mine', 5.0)", "True", "('exhausted', 7.0)", "False"], shown
    terminal.check_nothing_left()
    assert terminal.handle("live").status().env_steps >= 0
