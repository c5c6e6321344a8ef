"""The fast version of the gates: one seed, all roles in one process, ended as soon as the gate is reached.

The tasks are those of the learning table with `fast: true`; `make learning` runs all of them, over five seeds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.runner import Job, run
from benchmarks.learning.tasks import Task, load_tasks

TASKS = load_tasks()
FAST = [task for task in TASKS.values() if task.fast]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", FAST, ids=lambda task: task.name)
def test_task_reaches_its_gate(task: Task, tmp_path: Path) -> None:
    found = run(Job(task, "inline", 1), tmp_path, until_reached=True)
    assert found.reason == "solved", found.evaluations
    assert found.env_steps <= task.within


@pytest.mark.timeout(300)
def test_zero_learning_rate_learns_nothing(tmp_path: Path) -> None:
    """All checkpoints have the weights of the first: the same starts give the same scores. The last has more starts."""
    task = TASKS["control-no-learning-rate"]
    changes = {"stop_at": {"env_steps": 10_000}, "evaluation": {"seed": 1}}
    short = task.model_copy(update={"config": {**task.config, **changes}})
    found = run(Job(short, "inline", 1), tmp_path)
    assert found.reason == "exhausted"
    assert len(found.evaluations) > 1
    *equal, (_, longer) = found.evaluations
    assert {score for _, score in equal} == {found.evaluations[0][1]} and longer < task.reach
    assert found.evaluations[0][1] < task.reach
