"""What rank 0 tells the other ranks, and what they do with it: both ends of the same messages.

`begin` hands over rank 0's learner, as a checkpoint's objects; each `turn` the fragments of one update and its phase;
`over` ends the group in order. Every rank emulates acting on all of it and so has the same counters, normalisers and
batch; the minibatches are what is shared out (`trainer_node/algorithms/share.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import xxhash

from shared import fragment, tensor_blob
from shared.checkpoint import Checkpoint, Manifest
from shared.config import Config
from shared.fragment import Fragment
from shared.policies.codec import state_arrays
from shared.spaces import EnvironmentDescription
from shared.steps import Phase
from trainer_node import snapshot
from trainer_node.group import Group, GroupBroken, RanksDiffer, RankShare, group_errors
from trainer_node.learner import Learner, make_learner
from trainer_node.snapshot import Snapshot


class Alone:
    """Rank 0 where there is no other."""

    def turn(self, fragments: Sequence[Fragment], phase: Phase) -> AbstractContextManager[None]:
        """Nobody else is told."""
        return nullcontext()

    def close(self) -> None:
        """Nothing to do."""

    def leave(self) -> None:
        """Nothing to do."""


class Lead:
    """Rank 0 of a group: hands its learner over, then says before each update what is learnt from."""

    def __init__(self, group: Group, learner: Learner, call: Callable[[], None] = lambda: None) -> None:
        self._group = group
        self._learner = learner
        self._call = call
        """Wakes the others up, before each message."""

    def begin(self, taken: Snapshot, description: EnvironmentDescription) -> None:
        """`taken` is of our learner, as it is now."""
        manifest = taken.manifest.model_dump(mode="json")
        self._tell("begin", taken.objects, manifest=manifest, description=description.as_dict())
        _share_out(self._group, self._learner)

    @contextlib.contextmanager
    def turn(self, fragments: Sequence[Fragment], phase: Phase) -> Iterator[None]:
        """One update: within, we emulate acting and learn, as all the others do."""
        blobs = {str(number): fragment.encode(item) for number, item in enumerate(fragments)}
        self._tell("turn", blobs, phase=phase.value)
        with group_errors():
            yield
        _compare(self._group, self._learner)

    def close(self) -> None:
        """Between two updates: the others are told, and wait for the next group."""
        with contextlib.suppress(GroupBroken):
            self._tell("over", {})
        self.leave()

    def leave(self) -> None:
        """At once; the others see the group break."""
        self._group.leave()

    def _tell(self, what: str, blobs: dict[str, bytes], **header: Any) -> None:
        self._call()
        arrays = {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}
        self._group.broadcast(tensor_blob.encode(arrays, {"what": what, **header}))


def follow(group: Group, config: Config, called: Callable[[Learner | None], None] = lambda learner: None) -> None:
    """The life of another rank in a group: learns what rank 0 learns, until that says it is over.

    `called` returns when rank 0 has something to tell. Raises `GroupBroken`.
    """
    learner: Learner | None = None
    while True:
        called(learner)
        arrays, header = tensor_blob.decode(group.broadcast())
        blobs = {name: array.tobytes() for name, array in arrays.items()}
        if header["what"] == "over":
            return
        if header["what"] == "begin":
            learner = _taken_over(group, config, blobs, header)
            continue
        assert learner is not None, "rank 0 begins with `begin`"
        fragments = [fragment.decode(blobs[str(number)]) for number in range(len(blobs))]
        with group_errors():
            learner.emulate_acting(fragments, Phase(header["phase"]))
            learner.learn(fragments, Phase(header["phase"]))
        _compare(group, learner)


def _taken_over(group: Group, config: Config, blobs: dict[str, bytes], header: dict[str, Any]) -> Learner:
    learner = make_learner(config, EnvironmentDescription.from_dict(header["description"]))
    learner.read_demonstrations()
    snapshot.restore(learner, Checkpoint(Manifest.model_validate(header["manifest"]), blobs))
    _share_out(group, learner)
    return learner


def _share_out(group: Group, learner: Learner) -> None:
    for policy_id in sorted(learner.algorithms):
        learner.algorithms[policy_id].share = RankShare(group, learner.policies[policy_id])


def _compare(group: Group, learner: Learner) -> None:
    """Raises `RanksDiffer` unless every rank has come to the same weights."""
    digest = xxhash.xxh3_64()
    for policy_id in sorted(learner.policies):
        for _, array in sorted(state_arrays(learner.policies[policy_id]).items()):
            digest.update(np.ascontiguousarray(array).data)
    found = group.compare(digest.intdigest() >> 1)
    others = [rank for rank, number in enumerate(found) if number != found[0]]
    if others:
        raise RanksDiffer(
            f"after update {learner.counters.train.updates} rank {', '.join(map(str, others))} of {group.size} has "
            f"other weights than rank 0; ranks need the same PyTorch and the same kind of processor or graphics card"
        )
