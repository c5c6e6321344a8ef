"""Log entries over which a trainer's process really dies, or after which no weights are left: a user's own algorithm
that cannot bear one reward, and a run that comes past it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.processes.command_line import SOURCE, CommandLine, check_ledger, check_refused

RUN = "poisoned"
CODE = """
import os
import signal

from gymnasium.envs.classic_control import CartPoleEnv

from own_algorithm import Reinforce, ReinforceConfig
from stagecoach.trainer_node.learning.building_blocks.interface import side_by_side


class Once(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        observation, reward, *rest = super().step(action)
        return observation, 666.0 if self.steps == 300 else reward, *rest


class FragileConfig(ReinforceConfig):
    fate: str


class Fragile(Reinforce):
    Config = FragileConfig

    def update(self, experience, counters):
        if (side_by_side(experience)["reward"] == 666).any():
            if self._config.fate == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            for parameter in self.policy.parameters():
                parameter.data.fill_(float("nan"))
            return {}
        return super().update(experience, counters)
"""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def fragile(terminal: CommandLine, fate: str) -> Path:
    """The config of a run whose 300th step is poison; no environment of a successor comes so far."""
    shutil.copy(SOURCE / "examples" / "own_algorithm.py", terminal.folder)
    (terminal.folder / "fragile.py").write_text(CODE)
    return terminal.write_config(
        environment={"id": "fragile:Once", "num_envs": 1},
        rollout={"workers": 1, "fragment_steps": 16, "fragments_per_update": 2},
        algorithm={"name": "fragile:Fragile", "fate": fate},
        checkpoint={"every": "2 updates"}, archive="all", stop_at={"updates": 12},
    )  # fmt: skip


def check_dropped(terminal: CommandLine) -> None:
    """The two entries of one update are dropped as poison, the ledger balances, and a replay comes to the same."""
    finished = terminal.marker(RUN, ".finished")
    check_ledger(finished)
    dropped = finished["ledger"]["total"]["dropped"]
    assert dropped["poison"]["fragments"] == 2 and set(dropped) <= {"poison", "stale"}
    assert finished["version"] == 12
    assert terminal.json("replay", RUN)["equal"]
    terminal.check_nothing_left()


@pytest.mark.ray
def test_poison_entries_are_dropped_after_three_deaths(terminal: CommandLine) -> None:
    told = terminal.run("train", fragile(terminal, "dies"), "--run-id", RUN).ok()
    assert told.count("the trainer before died") == 3 and "it is number 3 in a row" in told
    assert told.count("entries are in quarantine, and dropped as poison") == 1
    check_dropped(terminal)


def test_run_that_failed_over_entries_resumes_without_them(terminal: CommandLine) -> None:
    failed = terminal.run("train", fragile(terminal, "NaN"), "--run-id", RUN, "--inline")
    again = terminal.run("resume", RUN, "--inline")
    for done in (failed, again):
        assert done.code == 1, done
    way = re.search(rf"`stagecoach resume {RUN} --drop (\d+-\d+\.\.\d+-\d+)`", again.err)
    assert way is not None and way[0] in failed.err, (failed, again)
    for wrong, why in (("seven", "expected a position of the log"), ("1-0", "has learned from it, or dropped it")):
        check_refused(terminal.run("resume", RUN, "--inline", "--drop", wrong), why)
    terminal.run("resume", RUN, "--inline", "--drop", way[1]).ok()
    check_dropped(terminal)
