"""A study's file: what it may say, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stagecoach.coordinator.studies.study_config import DimensionConfig, StudyConfig, check_study, read_study
from stagecoach.shared.base.errors import ConfigError
from tests.support.processes.command_line import Stagecoach, check_refused

ROOT = Path(__file__).parents[3]
STUDY: dict[str, Any] = {
    "config": "cartpole", "set": {"stop_at.env_steps": 2000}, "evaluations": 4, "trials": 4, "generation": 2,
    "space": {"algorithm.gamma": {"uniform": [0.9, 0.99]}},
}  # fmt: skip


def study(**changes: Any) -> StudyConfig:
    return StudyConfig.model_validate(STUDY | changes)


def test_example_study_is_valid() -> None:
    found = read_study(ROOT / "examples" / "tune.yaml")
    base = found.base(ROOT / "examples")
    check_study(found, base)
    assert (found.trials, base.stop_at.env_steps) == (16, 20_000)


def test_dimension_has_labels_for_lists_and_mixed_choices() -> None:
    dimension = DimensionConfig(choice=([64, 64], None, 1, True, "relu"))
    assert dimension.labels == ["[64, 64]", "null", "1", "true", "relu"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"algorithm.nothing": {"choice": [1, 2]}}}, "unknown key algorithm.nothing"),
        ({"space": {"algorithm.gamma": {"uniform": [0.9, 1.5]}}}, "space.algorithm.gamma: at 1.5: .* 1 or less"),
        ({"space": {"algorithm.gamma": {"choice": [0.9, "x"]}}}, "space.algorithm.gamma: at 'x': .* a number"),
        ({"space": {"algorithm.gamma": {"uniform": [0.99, 0.9]}}}, "space.algorithm.gamma: .*low below high"),
        ({"space": {"algorithm.gamma": {"log_uniform": [0, 0.9]}}}, "bounds above 0"),
        ({"space": {"algorithm.gamma": {"uniform": [0.8, 0.9], "choice": [1, 2]}}}, "uniform and choice"),
        ({"space": {"algorithm.gamma": {}}}, "found nothing, expected one of uniform"),
        ({"space": {"algorithm.gamma": {"choice": [0.9, 0.9]}}}, "two or more different"),
        ({"space": {"algorithm.epochs": {"integers": [1, 9], "step": 0.5}}}, "step=0.5: expected a whole number"),
        ({"space": {"algorithm.epochs": {"log_integers": [1, 9], "step": 2}}}, "step=2 with log_integers"),
        ({"space": {"redis.url": {"choice": ["a", "b"]}}}, "space.redis.url: no study varies"),
        ({"space": {"seed": {"integers": [1, 9]}}}, "space.seed: no study varies"),
        ({"space": {"trainer.num_cpus": {"choice": [1, 2]}}}, "space.trainer.num_cpus: it does not affect learning"),
        ({"set": {"algorithm.gamma": 0.9, "stop_at.env_steps": 2000}}, "algorithm.gamma is under both"),
        ({"set": {"stop_at.env_steps": None}}, "stop_at.env_steps"),
        ({"set": {"evaluation.episodes": 0, "stop_at.env_steps": 2000}}, "evaluation.episodes=0"),
        ({"trials": 5}, "trials=5: expected a multiple of generation=2"),
        ({"trails": 5}, "unknown key trails; did you mean trials"),
        ({"objective": {"measure": "seconds", "score": 475}}, "set exact: false"),
        ({"objective": "seconds"}, "needs a score to reach"),
        ({"objective": "speed"}, "objective: expected 'mean_return', 'auc' or 'seconds'"),
        ({"pruning": {"at": [100]}}, "pruning.at=100: expected 500"),
        ({"pruning": {"at": [1000, 500]}}, "later and later"),
        ({"config": "cartpole_dqn", "space": {"algorithm.gamma": {"choice": [0.9, 0.99]}}}, "max_policy_lag=2"),
        ({"population": {}, "generation": 4}, "two or more trials in each of two or more generations"),
        ({"population": {}, "seeds": 2}, "population: leave out pruning, and use seeds=1"),
        ({"population": {}, "evaluations": 3}, "evaluations=3 with population: expected a multiple of the 2"),
        ({"population": {}, "config": "cartpole_dqn"}, "fork_from with dqn: the replay buffer is in the other run"),
        ({"population": {"replaced": 0.9}}, "population.replaced"),
        ({"population": {}, "space": {"algorithm.name": {"choice": ["ppo", "a2c"]}}}, "keeps its network and algo"),
        (
            {"population": {}, "set": {"stop_at.env_steps": 2000, "initialize_from": "x"}},
            "initialize_from policies alone; give one",
        ),
        ({"config": "carpole"}, "did you mean cartpole"),
        ({"config": "none.yaml"}, "no config file .*none.yaml"),
    ],
)
def test_mistake_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(STUDY | changes))
    with pytest.raises(ConfigError, match=said):
        check_study(read := read_study(path), read.base(tmp_path))


def test_not_exact_study_may_depend_on_the_clock() -> None:
    found = study(exact=False, objective={"measure": "seconds", "score": 475}, config="cartpole_dqn")
    check_study(found, found.base(ROOT))


def test_command_refuses_a_missing_file_and_a_name_of_a_run(stagecoach: Stagecoach, tmp_path: Path) -> None:
    check_refused(stagecoach("tune", "nothing.yaml"), "nothing.yaml", "No such file")
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(STUDY))
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    (tmp_path / "runs" / "taken" / "config.yaml").touch()
    check_refused(stagecoach("tune", "study.yaml", "--name", "taken"), "is a run", "--name")
    assert not (tmp_path / "runs" / "study").exists()
