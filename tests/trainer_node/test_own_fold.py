"""A fold of a user's own, as examples/own_fold.py: exact over deaths and in a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.lifecycle.validation import check_description
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import ConfigError
from stagecoach.trainer_node.learning.learner import make_learner
from tests.conftest import minimal_config
from tests.support.environments.lessons import MODULE
from tests.support.runs.game import KEEP, NewGame, goes_on_exactly

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ADAPTIVE: dict[str, Any] = {"parameter": "length", "low": 1, "high": 3, "aim": 0.3, "window": 4}


def config_of(kwargs: dict[str, Any], **sections: Any) -> Any:
    environment = {"id": f"{MODULE}:Corridor", "num_envs": 2, "parameters": {"length": 2}}
    folds = {"difficulty": {"path": "own_fold:AdaptiveDifficulty", "kwargs": kwargs}}
    return minimal_config(environment=environment, folds=folds, **sections)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def test_own_fold_resumes_and_replays_exactly(new_game: NewGame) -> None:
    algorithm = {"name": "ppo", "minibatch_size": 16, "epochs": 2}
    config = config_of(ADAPTIVE, algorithm=algorithm, checkpoint=KEEP, archive="all", stop_at={"updates": 7})
    game = goes_on_exactly(new_game, config)
    latest = game.role.checkpoints.load_latest()
    assert latest is not None and "trainer/difficulty.json" in latest.objects
    assert latest.manifest.provenance["fold_metrics"]["difficulty/length"] > 1, "the fold has moved"
    assert "length is 2 from" in game.events("difficulty")


def test_own_fold_is_refused_when_it_does_not_fit() -> None:
    config = config_of({"parameter": "length"})
    with pytest.raises(ConfigError, match=r"cannot be created with {.*}: it raised TypeError: .*'low'"):
        check_description(config, describe_environment(config))
    with pytest.raises(ConfigError, match="choose another name"):
        minimal_config(folds={"league": "own_fold:AdaptiveDifficulty"})
    config = minimal_config(folds={"difficulty": "collections:Counter"})
    with pytest.raises(ConfigError, match=r"expected a subclass of stagecoach\.Fold"):
        check_description(config, describe_environment(config))


def test_error_in_own_fold_names_class_and_kwargs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_fold.py").write_text(
        "import stagecoach\nclass Broken(stagecoach.Fold):\n    def __init__(self, low): raise ValueError('too low')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = minimal_config(folds={"difficulty": {"path": "broken_fold:Broken", "kwargs": {"low": 1}}})
    expected = (
        r"folds.difficulty.path=broken_fold:Broken cannot be created with {'low': 1}: it raised ValueError: too low.*:3"
    )
    for use in (check_description, make_learner):  # `stagecoach doctor` and `validate`; the trainer
        with pytest.raises(ConfigError, match=expected) as refused:
            use(config, describe_environment(config))
        assert "\n" not in str(refused.value)
