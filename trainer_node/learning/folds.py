"""The folds of a run, in the order in which they observe an episode. A new built-in fold is registered here.

A user's own fold is behind checks: an error or an unusable return value names the fold and its method.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from stagecoach.shared.base.user_code import calling, make_own, unusable
from stagecoach.shared.config.environments.parameters import sampler_of
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.experience.parameters import ParameterTable
from stagecoach.shared.experience.spaces import Array, EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.curriculum import Curriculum
from stagecoach.trainer_node.learning.fold import Fold
from stagecoach.trainer_node.learning.league import League

T = TypeVar("T")


def make_folds(config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy]) -> list[Fold]:
    """Returns new folds: the league, the curriculum, and those of the user; raises `ConfigError`."""
    folds: list[Fold] = []
    rating = None
    if config.league is not None:
        league = League(config, description, policies)
        rating, folds = league.rating, [league]
    if config.environment.parameters:
        folds.append(Curriculum(config, description, rating))
    return [*folds, *own_folds(config)]


def own_folds(config: Config) -> list[Fold]:
    folds: list[Fold] = []
    for name, section in config.folds.items():
        fold = make_own(section.path, f"folds.{name}.path", Fold, **section.kwargs)
        fold.name = name
        folds.append(OwnFold(fold))
    return folds


class OwnFold(Fold):
    """Calls a user's fold. All methods raise `UserCodeError` for its errors and for what it must not return."""

    def __init__(self, fold: Fold) -> None:
        self._fold, self.name = fold, fold.name
        self.resettable = fold.resettable
        self._stored = set[str]()

    def _called(
        self, name: str, method: Callable[..., T], *arguments: Any, expected: str = "",
        fits: Callable[[Any], bool] = lambda found: True,
    ) -> T:  # fmt: skip
        where = f"folds.{self.name}: {name}()"
        with calling(where):
            found = method(*arguments)
        if not fits(found):
            raise unusable(where, found, expected)
        return found

    def observe_fragment(self, header: FragmentHeader, counters: Counters) -> None:
        self._called("observe_fragment", self._fold.observe_fragment, header, counters)

    def observe_update(self, fragments: Sequence[Fragment], advantages: Array | None) -> None:
        self._called("observe_update", self._fold.observe_update, fragments, advantages)

    def after_update(self, policies: Mapping[str, Policy], updates: int) -> Collection[str]:
        return self._called(
            "after_update", self._fold.after_update, policies, updates,
            expected=f"policies of its resettable: {sorted(self.resettable)}",
            fits=lambda reset: isinstance(reset, Collection) and {*reset} <= {*self.resettable},
        )  # fmt: skip

    def table(self, counters: Counters) -> ParameterTable:
        expected = "a mapping from names to values or samplers"
        found = self._called(
            "parameters", self._fold.parameters, expected=expected, fits=lambda its: isinstance(its, Mapping)
        )
        samplers = {}
        for name, value in found.items():
            try:
                samplers[str(name)] = sampler_of(value.item() if isinstance(value, np.generic) else value)
            except ValueError:
                expected = "a finite number, text, true, false or a sampler (as in environment.parameters)"
                raise unusable(f"folds.{self.name}: parameters()", found, f"{expected} for {name!r}") from None
        return ParameterTable(samplers)

    def state(self) -> Mapping[str, Any]:
        """Returns the state, which has to be equal after a way through JSON; else a resumed run would differ."""
        expected = "a dict with text as keys; lists, not tuples; finite numbers of Python, not of NumPy"
        return self._called("state", self._fold.state, expected=expected, fits=_survives_json)

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._called("load_state", self._fold.load_state, state)
        self._stored |= {*self._named()}

    def new_objects(self) -> Mapping[str, bytes]:
        expected = "a mapping from SHA-256 (64 hexadecimal digits) to these bytes"
        new = self._called("new_objects", self._fold.new_objects, expected=expected, fits=_are_hashed)
        self._stored |= new.keys()
        return new

    def objects(self) -> Collection[str]:
        named = self._named()
        if unknown := {*named} - self._stored:
            expected = f"objects that new_objects() returned before, unlike {unknown}"
            raise unusable(f"folds.{self.name}: objects()", named, expected)
        return named

    def metrics(self) -> Mapping[str, float]:
        expected = "a mapping from names to finite numbers"
        return self._called("metrics", self._fold.metrics, expected=expected, fits=_are_finite)

    def drain_events(self) -> list[str]:
        fits = lambda events: isinstance(events, list) and all(isinstance(text, str) for text in events)  # noqa: E731
        return self._called("drain_events", self._fold.drain_events, expected="a list of texts", fits=fits)

    def _named(self) -> Collection[str]:
        return self._called(
            "objects", self._fold.objects, expected="a collection of SHA-256 strings",
            fits=lambda named: isinstance(named, Collection) and all(isinstance(name, str) for name in named),
        )  # fmt: skip


def _survives_json(state: object) -> bool:
    try:
        return isinstance(state, dict) and bool(json.loads(json.dumps(state, allow_nan=False)) == state)
    except (TypeError, ValueError, RecursionError):
        return False


def _are_hashed(new: object) -> bool:
    return isinstance(new, Mapping) and all(
        isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == name for name, data in new.items()
    )


def _are_finite(found: object) -> bool:
    return isinstance(found, Mapping) and all(
        isinstance(value, Real) and math.isfinite(value) for value in found.values()
    )
