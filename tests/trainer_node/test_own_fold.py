"""A fold of a user's own, as examples/own_fold.py: exact over deaths and in a replay."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagecoach.coordinator.lifecycle.validation import check_description
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import ConfigError, UserCodeError
from stagecoach.shared.experience.counters import Counters
from stagecoach.trainer_node.learning.fold import Fold, encode
from stagecoach.trainer_node.learning.folds import OwnFold
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
    latest = game.latest()
    assert "trainer/difficulty.json" in latest.objects
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


CALLS: dict[str, Any] = {
    "after_update": lambda fold: fold.after_update({}, 1),
    "parameters": lambda fold: fold.table(Counters()),
    "state": encode,
    "load_state": lambda fold: fold.load_state({}),
    "new_objects": lambda fold: fold.new_objects(),
    "objects": lambda fold: fold.objects(),
    "metrics": lambda fold: fold.metrics(),
    "drain_events": lambda fold: fold.drain_events(),
}
"""Method of a user's fold → the trainer's call."""


def fold_with(method: str, function: Any) -> Fold:
    """Returns a user's fold whose `method` calls `function`."""
    fold = type("Broken", (Fold,), {method: lambda _, *arguments: function()})()
    fold.name = "broken"
    return OwnFold(fold)


@pytest.mark.parametrize("method", CALLS)
def test_error_in_own_fold_names_fold_and_method(method: str) -> None:
    def fail() -> None:
        raise SystemExit("bye")

    with pytest.raises(
        UserCodeError, match=rf"^folds\.broken: {method}\(\) raised SystemExit: bye \(at .*test_own_fold"
    ):
        CALLS[method](fold_with(method, fail))


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("after_update", ("nobody",), r"policies of its resettable: \[\]"),
        ("after_update", 7, "policies of its resettable"),
        ("parameters", None, "a mapping from names"),
        ("parameters", {"length": float("nan")}, "a finite number, .* for 'length'"),
        ("parameters", {"length": object()}, "a finite number, .* for 'length'"),
        ("state", None, "a dict with text as keys"),
        ("state", {"last": (2, 0)}, "lists, not tuples"),
        ("state", {"counts": {1: 2}}, "text as keys"),
        ("state", {"mean": float("nan")}, "finite numbers"),
        ("state", {"array": np.zeros(2)}, "not of NumPy"),
        ("new_objects", {"ab" * 32: b"x"}, "a mapping from SHA-256"),
        ("new_objects", {"ab" * 32: "x"}, "a mapping from SHA-256"),
        ("objects", ["ab" * 32], r"objects that new_objects\(\) returned before"),
        ("objects", None, "a collection of SHA-256"),
        ("metrics", None, "finite numbers"),
        ("metrics", {"a": "b"}, "finite numbers"),
        ("drain_events", None, "a list of texts"),
    ],
)
def test_own_fold_rejects_unusable_return_value(method: str, value: Any, expected: str) -> None:
    with pytest.raises(UserCodeError, match=rf"^folds\.broken: {method}\(\) returned .*; expected .*{expected}"):
        CALLS[method](fold_with(method, lambda: value))


def test_own_fold_accepts_numpy_scalars_and_its_own_objects() -> None:
    sampler = fold_with("parameters", lambda: {"length": np.int64(4)}).table(Counters()).as_dict()
    assert sampler == fold_with("parameters", lambda: {"length": 4}).table(Counters()).as_dict()
    objects = {hashlib.sha256(b"x").hexdigest(): b"x"}
    kind = type("Storing", (Fold,), {"new_objects": lambda _: objects, "objects": lambda _: [*objects]})
    fold = OwnFold(kind())
    assert (fold.new_objects(), fold.objects()) == (objects, [*objects])
