"""A fold of a user's own, as examples/own_fold.py: exact over deaths and in a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
    with pytest.raises(ConfigError, match=r"does not take .* missing a required argument: 'low'"):
        make_learner(config, describe_environment(config))
    with pytest.raises(ConfigError, match="choose another name"):
        minimal_config(folds={"league": "own_fold:AdaptiveDifficulty"})
    config = minimal_config(folds={"difficulty": "collections:Counter"})
    with pytest.raises(ConfigError, match=r"expected a subclass of stagecoach\.Fold"):
        make_learner(config, describe_environment(config))
