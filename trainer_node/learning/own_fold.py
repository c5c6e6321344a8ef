"""A user's own fold behind checks: an error or an unusable return value names the fold and its method."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from stagecoach.shared.base.user_code import calling, unusable
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
        with calling(self._method("observe_fragment")):
            self._fold.observe_fragment(header, counters)

    def observe_update(self, fragments: Sequence[Fragment], advantages: Array | None) -> None:
        with calling(self._method("observe_update")):
            self._fold.observe_update(fragments, advantages)

    def after_update(self, policies: Mapping[str, Policy], updates: int) -> Collection[str]:
        with calling(self._method("after_update")):
            reset = self._fold.after_update(policies, updates)
        if not (isinstance(reset, Collection) and {*reset} <= {*self.resettable}):
            raise unusable(
                self._method("after_update"), reset, f"policies of its resettable: {sorted(self.resettable)}"
            )
        return reset

    def table(self, counters: Counters) -> ParameterTable:
        with calling(self._method("parameters")):
            found = self._fold.parameters()
        if not isinstance(found, Mapping):
            raise unusable(self._method("parameters"), found, "a mapping from names to values or samplers")
        samplers = {}
        for name, value in found.items():
            try:
                samplers[str(name)] = sampler_of(value.item() if isinstance(value, np.generic) else value)
            except ValueError:
                expected = (
                    f"a finite number, text, true, false or a sampler (as in environment.parameters) for {name!r}"
                )
                raise unusable(self._method("parameters"), found, expected) from None
        return ParameterTable(samplers)

    def state(self) -> Mapping[str, Any]:
        """Returns the state, which has to be equal after a way through JSON; else a resumed run would differ."""
        with calling(self._method("state")):
            state = self._fold.state()
        expected = "a dict with text as keys; lists, not tuples; finite numbers of Python, not of NumPy"
        try:
            stable = isinstance(state, dict) and json.loads(json.dumps(state, allow_nan=False)) == state
        except (TypeError, ValueError, RecursionError):
            stable = False
        if not stable:
            raise unusable(self._method("state"), state, expected)
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        with calling(self._method("load_state")):
            self._fold.load_state(state)
        self._stored |= {*self._named()}

    def new_objects(self) -> Mapping[str, bytes]:
        with calling(self._method("new_objects")):
            new = self._fold.new_objects()
        if not isinstance(new, Mapping) or any(not _hashes_to(name, data) for name, data in new.items()):
            raise unusable(
                self._method("new_objects"), new, "a mapping from SHA-256 (64 hexadecimal digits) to these bytes"
            )
        self._stored |= new.keys()
        return new

    def objects(self) -> Collection[str]:
        named = self._named()
        if unknown := {*named} - self._stored:
            raise unusable(
                self._method("objects"), named, f"objects that new_objects() returned before, unlike {unknown}"
            )
        return named

    def metrics(self) -> Mapping[str, float]:
        with calling(self._method("metrics")):
            found = self._fold.metrics()
        if not isinstance(found, Mapping) or any(
            not (isinstance(value, Real) and math.isfinite(value)) for value in found.values()
        ):
            raise unusable(self._method("metrics"), found, "a mapping from names to finite numbers")
        return found

    def drain_events(self) -> list[str]:
        with calling(self._method("drain_events")):
            events = self._fold.drain_events()
        if not (isinstance(events, list) and all(isinstance(text, str) for text in events)):
            raise unusable(self._method("drain_events"), events, "a list of texts")
        return events

    def _named(self) -> Collection[str]:
        with calling(self._method("objects")):
            named = self._fold.objects()
        if not (isinstance(named, Collection) and all(isinstance(name, str) for name in named)):
            raise unusable(self._method("objects"), named, "a collection of SHA-256 strings")
        return named

    def _method(self, name: str) -> str:
        return f"folds.{self.name}: {name}()"


def _hashes_to(name: object, data: object) -> bool:
    return isinstance(data, bytes) and hashlib.sha256(data).hexdigest() == name
