"""Demonstrations let the example's car reach the top, which PPO alone never does; and imitation alone suffices."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.results import Result
from benchmarks.learning.runner import Job, run
from benchmarks.learning.tasks import Task
from stagecoach.shared.config.loading import parse_yaml
from tests.support.experience.cartpole_data import played, write_played

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(300)


def trained(folder: Path, example: str, reach: float, within: int, **changes: Any) -> Result:
    """One seed of an example, ended as soon as it reaches that."""
    config: dict[str, Any] = parse_yaml((EXAMPLES / f"{example}.yaml").read_text(), example) | changes
    config["stop_at"] = {"env_steps": within}
    task = Task(
        name=example, algorithm="ppo", environment=config["environment"]["id"], reach=reach, within=within,
        reference="-", source="-", minutes=1, config=config,
    )  # fmt: skip
    return run(Job(task, "inline", 1), folder, until_reached=True)


def test_mountain_car_is_solved_only_with_demonstrations(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("shown", EXAMPLES / "mountain_car_demonstrations.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.write(tmp_path / "mountain_car.csv")
    example, shown = "mountain_car_demonstrations", {"path": str(tmp_path / "mountain_car.csv")}
    found = trained(tmp_path / "shown", example, -130, 15_360, demonstrations=shown)
    assert max(score for _, score in found.evaluations) >= -130, found.evaluations
    algorithm = parse_yaml((EXAMPLES / f"{example}.yaml").read_text(), example)["algorithm"] | {
        "behavioral_cloning": None
    }
    alone = trained(tmp_path / "alone", example, -130, 15_360, demonstrations=None, algorithm=algorithm)
    assert {score for _, score in alone.evaluations} == {-200.0}


def test_gail_alone_learns_to_balance(tmp_path: Path) -> None:
    write_played(tmp_path / "balanced.csv", played(10))
    shown = {"path": str(tmp_path / "balanced.csv"), "min_return": 450}
    found = trained(tmp_path, "cartpole_gail", 400, 102_400, demonstrations=shown)
    assert max(score for _, score in found.evaluations) >= 400, found.evaluations
