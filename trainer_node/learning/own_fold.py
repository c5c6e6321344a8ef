"""A user's own fold behind checks: an error or an unusable return value names the fold and its method."""

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import numpy as np

from stagecoach.shared.base.errors import UserCodeError
from stagecoach.shared.base.user_code import raised
from stagecoach.shared.config.environments.parameters import sampler_of
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.experience.parameters import ParameterTable
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.fold import Fold


class OwnFold(Fold):
    """Calls a user's fold. All methods raise `UserCodeError` for its errors and for what it must not return."""

    def __init__(self, fold: Fold) -> None:
        self._fold, self.name = fold, fold.name
        self.resettable = fold.resettable
        self._stored = set[str]()

    def observe_fragment(self, header: FragmentHeader, counters: Counters) -> None:
        with self._calling("observe_fragment"):
            self._fold.observe_fragment(header, counters)

    def observe_update(self, fragments: Sequence[Fragment], advantages: Array | None) -> None:
        with self._calling("observe_update"):
            self._fold.observe_update(fragments, advantages)

    def after_update(self, policies: Mapping[str, Policy], updates: int) -> Collection[str]:
        with self._calling("after_update"):
            reset = self._fold.after_update(policies, updates)
        if not (isinstance(reset, Collection) and {*reset} <= {*self.resettable}):
            raise self._unusable("after_update", reset, f"policies of its resettable: {sorted(self.resettable)}")
        return reset

    def table(self, counters: Counters) -> ParameterTable:
        with self._calling("parameters"):
            found = self._fold.parameters()
        if not isinstance(found, Mapping):
            raise self._unusable("parameters", found, "a mapping from names to values or samplers")
        samplers = {}
        for name, value in found.items():
            try:
                samplers[str(name)] = sampler_of(value.item() if isinstance(value, np.generic) else value)
            except ValueError:
                expected = (
                    f"a finite number, text, true, false or a sampler (as in environment.parameters) for {name!r}"
                )
                raise self._unusable("parameters", found, expected) from None
        return ParameterTable(samplers)

    def state(self) -> Mapping[str, Any]:
        """Returns the state, which has to be equal after a way through JSON; else a resumed run would differ."""
        with self._calling("state"):
            state = self._fold.state()
        expected = "a dict with text as keys; lists, not tuples; finite numbers of Python, not of NumPy"
        try:
            stable = isinstance(state, dict) and json.loads(json.dumps(state, allow_nan=False)) == state
        except (TypeError, ValueError, RecursionError):
            stable = False
        if not stable:
            raise self._unusable("state", state, expected)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self._calling("load_state"):
            self._fold.load_state(state)
        self._stored |= {*self._named()}

    def new_objects(self) -> Mapping[str, bytes]:
        with self._calling("new_objects"):
            new = self._fold.new_objects()
        if not isinstance(new, Mapping) or any(not _hashes_to(name, data) for name, data in new.items()):
            raise self._unusable("new_objects", new, "a mapping from SHA-256 (64 hexadecimal digits) to these bytes")
        self._stored |= new.keys()
        return new

    def objects(self) -> Collection[str]:
        named = self._named()
        if unknown := {*named} - self._stored:
            raise self._unusable("objects", named, f"objects that new_objects() returned before, unlike {unknown}")
        return named

    def metrics(self) -> Mapping[str, float]:
        with self._calling("metrics"):
            found = self._fold.metrics()
        if not isinstance(found, Mapping) or any(
            not (isinstance(value, Real) and math.isfinite(value)) for value in found.values()
        ):
            raise self._unusable("metrics", found, "a mapping from names to finite numbers")
        return found

    def drain_events(self) -> list[str]:
        with self._calling("drain_events"):
            events = self._fold.drain_events()
        if not (isinstance(events, list) and all(isinstance(text, str) for text in events)):
            raise self._unusable("drain_events", events, "a list of texts")
        return events

    def _named(self) -> Collection[str]:
        with self._calling("objects"):
            named = self._fold.objects()
        if not (isinstance(named, Collection) and all(isinstance(name, str) for name in named)):
            raise self._unusable("objects", named, "a collection of SHA-256 strings")
        return named

    @contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as failed:
            raise UserCodeError(f"folds.{self.name}: {method}() {raised(failed)}") from failed

    def _unusable(self, method: str, value: object, expected: str) -> UserCodeError:
        found = repr(value)
        shown = found if len(found) <= _LONGEST else found[:_LONGEST] + "…"
        return UserCodeError(f"folds.{self.name}: {method}() returned {shown}; expected {expected}")


_LONGEST = 200
"""Characters of a return value in a message."""


def _hashes_to(name: object, data: object) -> bool:
    return isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == name
