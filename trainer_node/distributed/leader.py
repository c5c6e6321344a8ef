"""Rendezvous and exchange of the ranks of a data-parallel trainer: `Leader` is rank 0, `follow` the side of the others.

They meet by a short stream in Redis (`Rendezvous`), written by the trainer of the newest epoch alone: an entry with an
invitation opens a group, one without says that the group of that epoch is about to exchange something. In the group
`begin` hands over rank 0's learner, as a checkpoint's objects, and `held` the fragments that its replay buffers hold, a
few at a time; each `turn` the fragments of one update and its phase; `over` ends it in order. What each rank does with
them: docs/concepts/determinism.md.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import redis
import xxhash
from pydantic import TypeAdapter

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import Fenced, StagecoachError
from stagecoach.shared.base.printable import foreign
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import TrainerConfig
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import START, id_order, whole_number
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.registry import torch_device
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.shared.protocol.heartbeat import Wait, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.redis_client import own_address
from stagecoach.shared.protocol.scripts import Script
from stagecoach.shared.storage.checkpoint_store import Checkpoint, Manifest
from stagecoach.trainer_node.distributed import process_group
from stagecoach.trainer_node.learning.learner import Learner, make_learner
from stagecoach.trainer_node.state.snapshot import Snapshot, restore

_CHECK_SECONDS = 1.0
_POLL_SECONDS = 0.05
_HELD = 16
"""Fragments of a replay buffer in one message."""


class RanksDiffer(StagecoachError):
    """Ranks that learned from the same fragments have different weights."""


class Call(NamedTuple):
    """One entry: the group of `epoch` is open (`invitation`), or has something to exchange."""

    epoch: int
    invitation: process_group.Invitation | None


class Rendezvous:
    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis, self._keys = client, RunKeys(run_id)
        self._call = Script(client, self._keys, "call_ranks")
        self._after = START

    def call(self, epoch: int, invitation: process_group.Invitation | None = None) -> None:
        """Calls the other ranks; raises `Fenced` where another trainer has taken over."""
        if not self._call(epoch=epoch, invitation=json.dumps(asdict(invitation)) if invitation else ""):
            raise Fenced(f"epoch {epoch} may not call the ranks; a newer trainer has taken over")

    def next(self, seconds: float) -> Call | None:
        """The next entry; waits for it, at most `seconds`."""
        found: Any = self._redis.xread({self._keys.ranks: self._after}, count=1, block=max(1, int(seconds * 1000)))
        if not found:
            last: Any = self._redis.xrevrange(self._keys.ranks, count=1)
            if last and id_order(last[0][0].decode()) < id_order(self._after):
                self._after = START  # another Redis, whose clock is behind
            return None
        id_, fields = found[0][1][0]
        self._after = id_.decode()
        text, epoch = fields.get(b"invitation", b""), whole_number(fields.get(b"epoch", b""))
        what = f"the call {self._after} to the ranks of run {self._keys.run_id}"
        invitation = foreign(TypeAdapter(process_group.Invitation), text, what) if text else None
        return Call(epoch, invitation) if epoch and (invitation or not text) else None


def rank_id(rank: int) -> str:
    """The name of a rank's heartbeat, log file and place in the fleet."""
    return f"rank-{rank}"


def meet_followers(
    client: redis.Redis, run_id: str, epoch: int, learner: Learner, trainer: TrainerConfig, wait: Wait,
    needless: Callable[[], bool],
) -> Leader | None:  # fmt: skip
    """Opens the group of this epoch and waits for all other ranks; None once it is needless. Raises `Fenced`,
    `GroupBroken`, and `WaitTimeout`, which names who is missing."""
    rendezvous, host = Rendezvous(client, run_id), own_address(client)
    if not host:
        raise process_group.GroupBroken("this machine has no address on the way to Redis")
    opening = process_group.Opening(host, trainer.ranks, trainer.rank_timeout_seconds)
    rendezvous.call(epoch, opening.invitation)
    checked = world.monotonic()
    while missing := opening.missing():
        if world.monotonic() - checked > _CHECK_SECONDS:
            checked = world.monotonic()
            if needless():
                return None
            wait.last_error = _whereabouts(client, run_id, missing)
            wait.check()
        world.sleep(_POLL_SECONDS)
    wait.last_error = None
    return Leader(opening.close(torch_device(trainer.device)), learner, lambda: rendezvous.call(epoch))


def _whereabouts(client: redis.Redis, run_id: str, missing: Sequence[int]) -> str:
    beats = {beat.id: beat for beat in read_heartbeats(client, run_id) if beat.role == "rank"}
    said = []
    for rank in missing:
        beat = beats.get(rank_id(rank))
        state = "has not started" if beat is None else beat.ended
        if beat is not None and not beat.ended:
            state = f"on {beat.host}, {'on its way' if beat.alive else f'silent for {beat.age_seconds:.0f} s'}"
        said.append(f"{rank_id(rank)} ({state})")
    return ", ".join(said)


class SingleProcess:
    """Rank 0 of a trainer with one rank."""

    def turn(self, fragments: Sequence[Fragment], phase: Phase) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self, taken: Snapshot, description: EnvironmentDescription, held: Iterable[Fragment] = ()) -> None: ...

    def close(self) -> None: ...

    def leave(self) -> None: ...


class Leader:
    """Rank 0 of a group: hands its learner over, then says before each update what is learned from."""

    def __init__(self, group: process_group.Group, learner: Learner, call: Callable[[], None] = lambda: None) -> None:
        """`call` wakes the followers, before each message."""
        self._group, self._learner, self._call = group, learner, call
        self.size, self.backend = group.size, group.backend

    def begin(self, taken: Snapshot, description: EnvironmentDescription, held: Iterable[Fragment] = ()) -> None:
        """Sends `taken`, a snapshot of this rank's learner as it is now, and what its replay buffers hold, as it was
        logged. May be called again where reading that has failed."""
        manifest = taken.checkpoint.manifest.model_dump(mode="json")
        self._tell("begin", taken.checkpoint.objects, manifest=manifest, description=description.as_dict())
        fragments, first = iter(held), 0
        while some := list(itertools.islice(fragments, _HELD)):
            self._tell("held", _blobs(some), first=first)
            first += len(some)
        share_minibatches(self._group, self._learner)

    @contextlib.contextmanager
    def turn(self, fragments: Sequence[Fragment], phase: Phase) -> Iterator[None]:
        """One update: within, this rank emulates acting and learns, as all the followers do."""
        self._tell("turn", _blobs(fragments), phase=phase.value)
        with process_group.group_errors():
            yield
        compare_weights(self._group, self._learner)

    def close(self) -> None:
        """Ends the group between two updates; the followers wait for the next one."""
        with contextlib.suppress(process_group.GroupBroken):
            self._tell("over", {})
        self.leave()

    def leave(self) -> None:
        self._group.leave()

    def _tell(self, what: str, blobs: dict[str, bytes], **header: Any) -> None:
        self._call()
        arrays = {name: np.frombuffer(blob, np.uint8) for name, blob in blobs.items()}
        self._group.broadcast(tensor_blob.encode(arrays, {"what": what, **header}))


def _blobs(fragments: Sequence[Fragment]) -> dict[str, bytes]:
    return {str(number): fragment.encode(item) for number, item in enumerate(fragments)}


def share_minibatches(group: process_group.Group, learner: Learner) -> None:
    for algorithm in learner.algorithms.values():
        algorithm.shard = process_group.RankShard(group)


def compare_weights(group: process_group.Group, learner: Learner) -> None:
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


def follow(
    group: process_group.Group, config: Config, called: Callable[[Learner | None], None] = lambda learner: None
) -> None:
    """Learns in a group what rank 0 learns, until that says it is over; raises `GroupBroken`."""
    learner: Learner | None = None
    turns = 0
    while True:
        called(learner if turns else None)
        arrays, header = tensor_blob.decode(group.broadcast())
        blobs = {name: array.tobytes() for name, array in arrays.items()}
        if header["what"] == "over":
            return
        if header["what"] == "begin":
            description = EnvironmentDescription.from_dict(header["description"])
            learner = make_learner(config, description, read_dataset=read_dataset)
            learner.read_demonstrations()
            restore(learner, Checkpoint(Manifest.model_validate(header["manifest"]), blobs))
            share_minibatches(group, learner)
            continue
        assert learner is not None, "rank 0 begins with `begin`"
        fragments = [fragment.decode(blobs[str(number)]) for number in range(len(blobs))]
        if header["what"] == "held":
            learner.recall(fragments, header["first"])
            continue
        turns += 1
        with process_group.group_errors():
            learner.emulate_acting(fragments, Phase(header["phase"]))
            learner.learn(fragments, Phase(header["phase"]))
        compare_weights(group, learner)
