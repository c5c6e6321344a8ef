"""Verifies a run's checkpoints byte by byte, and marks verified checkpoints for deployment."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from stagecoach.shared.base import errors, world
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.policies.serialization import decode_policy, finite_arrays, finite_weights
from stagecoach.shared.storage import checkpoint_store as stored
from stagecoach.shared.storage.checkpoint_store import (
    MANIFEST,
    MARKS,
    POINTER,
    PROMOTED,
    STATUS,
    CheckpointStore,
    Promotion,
)
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS, read_shared_object
from stagecoach.trainer_node.checkpointing.retention import status_entries, unless_damaged

_POLICY = "/policy.safetensors"
_POLLS = 20
_POLL_SECONDS = 0.3


class State(StrEnum):
    OK = "ok"
    DAMAGED = "damaged"
    CUT_OFF = "cut off"
    BEING_WRITTEN = "being written"


@dataclass(frozen=True)
class Verdict:
    name: str
    state: State
    problems: tuple[str, ...] = ()
    objects: int = 0
    bytes: int = 0


def verify(checkpoints: CheckpointStore, name: str | None = None, *, live: bool = False) -> list[Verdict]:
    """Compares each object of all checkpoints (or one) with the manifest, but for what a live run prunes meanwhile."""
    if name is not None:
        return [_examine_one(checkpoints, name, live)]
    files = list(_damaged_sync_files(checkpoints))
    hashes = _expected_hashes(checkpoints)
    examined = (_examine(checkpoints, name, hashes, live) for name in checkpoints.names())
    verdicts = [verdict for verdict in examined if verdict is not None]
    complete = [verdict.name for verdict in verdicts if verdict.state is State.OK]
    return [*verdicts, *_damaged_shared(checkpoints, complete, live), *files]


def _damaged_shared(checkpoints: CheckpointStore, names: Sequence[str], live: bool) -> Iterator[Verdict]:
    listed: dict[str, str] = {}
    for name in names:
        with suppress(errors.CheckpointNotFound):  # pruned meanwhile
            listed |= dict.fromkeys(checkpoints.manifest(name).provenance.get("shared_objects", ()), name)
    for sha256, name in sorted(listed.items()):
        try:
            read_shared_object(checkpoints.store, sha256)
        except errors.SharedObjectUnusable as error:
            if not _goes(checkpoints, name, live):
                yield Verdict(SHARED_OBJECTS + sha256, State.DAMAGED, (str(error),))


def _examine_one(checkpoints: CheckpointStore, name: str, live: bool) -> Verdict:
    """Examines one checkpoint; follows a mark that moves meanwhile."""
    for _ in range(_POLLS):
        resolved = checkpoints.resolve(name)
        if found := _examine(checkpoints, resolved, _expected_hashes(checkpoints), live):
            return found
    raise errors.CheckpointNotFound(f"{resolved} was pruned while it was read")


def _examine(checkpoints: CheckpointStore, name: str, hashes: dict[str, dict[str, str]], live: bool) -> Verdict | None:
    """Returns None if the checkpoint was pruned meanwhile."""
    try:
        data, manifest = checkpoints.read_manifest(name)
    except errors.CheckpointNotFound:
        return _without_manifest(checkpoints, name, live)
    except errors.CheckpointDamaged as error:
        return Verdict(name, State.DAMAGED, (str(error).removeprefix(f"{name} "),))
    digest = hashlib.sha256(data).hexdigest()
    others = [file for file, expected in hashes.get(name, {}).items() if expected != digest]
    problems = [f"its manifest is not the one that {file} names" for file in others]
    problems += _problems(checkpoints, manifest)
    if problems and live:
        try:
            checkpoints.read_manifest(name)
        except errors.CheckpointNotFound:
            return _without_manifest(checkpoints, name, live)  # it was pruned meanwhile, manifest first
    state = State.DAMAGED if problems else State.OK
    return Verdict(name, state, tuple(problems), len(manifest.objects), manifest.total_bytes)


def _problems(checkpoints: CheckpointStore, manifest: stored.Manifest) -> Iterator[str]:
    """Yields problems of the objects, read one at a time, since a checkpoint may be large."""
    for key in manifest.objects:
        try:
            data = checkpoints.read_object(manifest, key)
            if key.endswith(_POLICY) and not _finite(data):
                yield f"{key} has weights that are not finite"
        except errors.CheckpointDamaged as error:
            text = str(error).removeprefix(f"{manifest.name}/").removeprefix(f"{manifest.name} ")
            yield text if key in text else f"{key}: {text}"


def _finite(policy: bytes) -> bool:
    try:
        return finite_weights(decode_policy(policy)[0])
    except errors.PolicyKindUnknown:  # a custom class, which verification must not import
        return finite_arrays(tensor_blob.decode(policy)[0])


def _without_manifest(checkpoints: CheckpointStore, name: str, live: bool) -> Verdict | None:
    known, pointer = status_entries(checkpoints), unless_damaged(checkpoints.pointer)
    if name not in checkpoints.names():
        return None
    latest = pointer.latest if pointer else None
    if name in known or name == latest:
        return Verdict(name, State.DAMAGED, (f"{MANIFEST} is missing",))
    if live and (checkpoint_version(name) or 0) > (checkpoint_version(latest or "") or -1):
        return Verdict(name, State.BEING_WRITTEN)
    return None if _goes(checkpoints, name, live) else Verdict(name, State.CUT_OFF)


def _goes(checkpoints: CheckpointStore, name: str, live: bool) -> bool:
    """Returns whether a checkpoint is gone, now or once its pruning has completed."""
    for _ in range(_POLLS if live else 0):
        if name not in checkpoints.names():
            return True
        world.sleep(_POLL_SECONDS)
    return name not in checkpoints.names()


def _expected_hashes(checkpoints: CheckpointStore) -> dict[str, dict[str, str]]:
    """Checkpoint → sync file → SHA-256 of the manifest recorded there."""
    hashes = {name: {STATUS: entry["manifest_sha256"]} for name, entry in status_entries(checkpoints).items()}
    if pointer := unless_damaged(checkpoints.pointer):
        hashes.setdefault(pointer.latest, {})[POINTER] = pointer.manifest_sha256
    if promotion := unless_damaged(checkpoints.promotion):
        hashes.setdefault(promotion.checkpoint, {})[PROMOTED] = promotion.manifest_sha256
    return hashes


def _damaged_sync_files(checkpoints: CheckpointStore) -> Iterator[Verdict]:
    """Yields sync files that are unreadable or name a missing checkpoint."""
    try:
        checkpoints.marker(STATUS)
    except errors.CheckpointDamaged as error:
        yield Verdict(STATUS, State.DAMAGED, (str(error),))
    for file, marks in ((POINTER, MARKS[:3]), (PROMOTED, MARKS[3:])):
        try:
            problems = tuple(f"names {name} as {mark}, which is gone" for mark, name in _gone(checkpoints, marks))
        except errors.CheckpointDamaged as error:
            problems = (str(error),)
        if problems:
            yield Verdict(file, State.DAMAGED, problems)


def _gone(checkpoints: CheckpointStore, marks: tuple[str, ...]) -> list[tuple[str, str]]:
    """Marks whose checkpoint is missing in two successive reads; a live run's marks may move in between."""
    earlier: list[tuple[str, str]] = []
    for _ in range(_POLLS):
        named = [(mark, checkpoints.marked(mark)) for mark in marks]
        names = checkpoints.names()
        gone = [(mark, name) for mark, name in named if name and name not in names]
        if gone == earlier:
            return gone
        earlier = gone
    return []


def promote(checkpoints: CheckpointStore, name: str, *, live: bool) -> Promotion:
    """Marks a verified checkpoint with finite weights for deployment, unless it is being pruned (see `remove`)."""
    (found,) = verify(checkpoints, name, live=live)
    if found.state is State.DAMAGED:
        raise errors.CheckpointDamaged(f"{found.name} is not promoted: {'; '.join(found.problems)}")
    if found.state is not State.OK:
        raise errors.CheckpointNotFound(f"{found.name} is not promoted: it is not complete ({found.state})")
    former = unless_damaged(checkpoints.promotion)
    digest = hashlib.sha256(checkpoints.read_manifest(found.name)[0]).hexdigest()
    promotion = Promotion(checkpoint=found.name, manifest_sha256=digest, time=round(world.unix_time(), 3))
    checkpoints.write_promotion(promotion)
    if live and found.name not in status_entries(checkpoints):
        checkpoints.write_promotion(former)
        raise errors.CheckpointNotFound(f"{found.name} is not promoted: the trainer is pruning it; promote a newer one")
    return promotion


def withdraw(checkpoints: CheckpointStore) -> str | None:
    """Clears the mark; returns the checkpoint that had it."""
    former = unless_damaged(checkpoints.promotion)
    checkpoints.write_promotion(None)
    return former.checkpoint if former else None
