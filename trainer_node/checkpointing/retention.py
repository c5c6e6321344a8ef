"""Retention of checkpoints: the last k, the best b by evaluation, every m-th, those that have a mark, and the first of
a run that began with what another one has learned, since a replay needs it.

It follows from what the store lists and the status file says, not from one process's memory.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stagecoach.shared.base import errors
from stagecoach.shared.config.sections import CheckpointConfig
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.events import confirmed_return
from stagecoach.shared.storage.checkpoint_store import STATUS, CheckpointStore, Pointer
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS

T = TypeVar("T")


@dataclass(frozen=True)
class Inventory:
    names: list[str]
    entries: dict[str, dict[str, Any]]
    """Entries of the status file, for those that can be read."""
    cut_off: list[str]
    """Uploads without a manifest."""

    @property
    def scores(self) -> dict[str, float]:
        return confirmed_returns({name: its["evaluation"] for name, its in self.entries.items() if its["evaluation"]})

    @property
    def readable(self) -> list[str]:
        """Names of those with a valid manifest, oldest first."""
        return [name for name in self.names if name in self.entries]


def replay_from(entries: Mapping[str, Mapping[str, Any]], keep_last: int) -> str | None:
    """Returns the oldest log position in the replay buffers of the newest checkpoints; None if they have none. Older
    checkpoints, kept for their scores, are played, not trained on."""
    newest = sorted(entries, key=lambda name: checkpoint_version(name) or 0)[-keep_last:]
    positions = [entries[name].get("replay_from") for name in newest]
    return min((position for position in positions if position), key=id_order, default=None)


def confirmed_returns(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Checkpoint name → the mean return that ranks it, of those whose score a second evaluation has confirmed."""
    found = {name: confirmed_return(evaluation) for name, evaluation in evaluations.items()}
    return {name: value for name, value in found.items() if value is not None}


def best_checkpoints(scores: Mapping[str, float], names: Collection[str]) -> list[str]:
    """Returns the scored checkpoints among `names`, best confirmed mean return first, then newest first."""
    evaluated = [name for name in names if math.isfinite(scores.get(name, math.nan))]
    return sorted(evaluated, key=lambda name: (-scores[name], -(checkpoint_version(name) or 0)))


def select_for_pruning(
    names: Sequence[str], scores: Mapping[str, float], config: CheckpointConfig, protected: Collection[str]
) -> list[str]:
    """Returns those of `names` (all in the store, oldest first) that may be deleted, oldest first."""
    keep = {*names[-config.keep_last :], *best_checkpoints(scores, names)[: config.keep_best], *protected}
    if config.keep_every is not None:
        keep |= {name for name in names if (checkpoint_version(name) or 0) % config.keep_every == 0}
    return [name for name in names if name not in keep]


def take_inventory(
    checkpoints: CheckpointStore, evaluations: Mapping[str, dict[str, Any]], changed: str | None = None
) -> Inventory:
    """Looks through the store; manifests are read for `changed` and for what the status file does not know."""
    names, known = checkpoints.names(), status_entries(checkpoints)
    entries, cut_off = {}, []
    for name in names:
        entry = known.get(name)
        if entry is None or name == changed:
            try:
                entry = _entry(checkpoints, name) | {"evaluation": entry["evaluation"] if entry else None}
            except errors.CheckpointNotFound:
                cut_off.append(name)
                continue
            except errors.CheckpointDamaged:
                continue  # neither pointed to nor in the status file
        entries[name] = entry | {"evaluation": evaluations.get(name, entry["evaluation"])}
    return Inventory(names, entries, cut_off)


def unless_damaged(read: Callable[[], T | None]) -> T | None:
    """Reads a sync file that the next checkpoint replaces; returns None if it is lost or damaged."""
    try:
        return read()
    except errors.CheckpointDamaged:
        return None


def status_file(checkpoints: CheckpointStore) -> dict[str, Any]:
    return unless_damaged(lambda: checkpoints.marker(STATUS)) or {}


def status_entries(checkpoints: CheckpointStore) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in status_file(checkpoints).get("checkpoints", [])}


def to_prune(inventory: Inventory, pointer: Pointer, config: CheckpointConfig, protected: Collection[str]) -> list[str]:
    """Returns what the rule does not keep, oldest first, including damaged and incomplete checkpoints."""
    named = {name for name in (pointer.latest, pointer.best, pointer.final, *protected) if name}
    named |= {name for name, entry in inventory.entries.items() if entry.get("initialized_from")}
    readable = inventory.readable
    doomed = {*select_for_pruning(readable, inventory.scores, config, named)}
    outlived = inventory.names.index(readable[-config.keep_last :][0]) if readable else 0
    newest = inventory.names.index(pointer.latest) if pointer.latest in inventory.names else 0
    for index, name in enumerate(inventory.names):
        if name not in inventory.entries and name not in named:
            doomed |= {name} if index < (newest if name in inventory.cut_off else outlived) else set()
    return [name for name in inventory.names if name in doomed]


def announce(
    checkpoints: CheckpointStore, inventory: Inventory, pointer: Pointer, config: CheckpointConfig,
    protected: Collection[str], most: int | None = None,
) -> tuple[list[str], int]:  # fmt: skip
    """Writes the status file without what the rule lets go, or without the oldest `most` of it. Returns the names that
    it leaves out, for `remove`, and how many the rule lets go."""
    try:
        promotion = checkpoints.promotion()
        doomed = to_prune(inventory, pointer, config, {*protected, promotion.checkpoint if promotion else ""})
    except errors.CheckpointDamaged:
        doomed = []  # what the mark named is unknown: all stays until it can be read
    _write_status(checkpoints, inventory, pointer, doomed[:most])
    return doomed[:most], len(doomed)


def remove(
    checkpoints: CheckpointStore, inventory: Inventory, pointer: Pointer, announced: Sequence[str],
    kept: Collection[str] = (),
) -> Iterator[str]:  # fmt: skip
    """Removes the shared objects that only announced checkpoints list, but for those that are `kept`; then these
    checkpoints, manifest first. Yields the names that went. Raises as the store does; what stays whole is in the status
    file again, and still names its objects. `promote` looks into the status file after it has set its mark, and the
    mark is looked for here after the announcement: one of the two sees the other, so what is promoted is never
    removed."""
    if not announced:
        return
    promotion = checkpoints.promotion()
    doomed = [name for name in announced if promotion is None or name != promotion.checkpoint]
    gone, lost = list[str](), set[str]()
    try:
        left = _shared_objects_of(inventory, doomed) - _shared_objects_of(inventory, {*inventory.readable} - {*doomed})
        for sha256 in sorted(left - {*kept}):
            checkpoints.store.delete(SHARED_OBJECTS + sha256)
            lost.add(sha256)
        for name in doomed:
            checkpoints.delete(name)
            gone.append(name)
            yield name
    except (errors.StoreError, errors.StoreUnavailable):
        stopped_at = doomed[len(gone) :][:1]
        gone += [name for name in doomed if lost & _shared_objects_of(inventory, [name])]
        _write_status(checkpoints, inventory, pointer, [*gone, *_without_manifest(checkpoints, stopped_at)])
        raise


def _without_manifest(checkpoints: CheckpointStore, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        try:
            checkpoints.read_manifest(name)
        except errors.CheckpointError:
            yield name


def _write_status(checkpoints: CheckpointStore, inventory: Inventory, pointer: Pointer, without: Sequence[str]) -> None:
    entries = [inventory.entries[name] for name in inventory.readable if name not in without]
    names = {"latest": pointer.latest, "best": pointer.best, "final": pointer.final}
    checkpoints.write_marker(STATUS, {"run_id": checkpoints.run_id, **names, "checkpoints": entries})


def _shared_objects_of(inventory: Inventory, names: Collection[str]) -> set[str]:
    entries = (inventory.entries[name] for name in names if name in inventory.entries)
    return {sha256 for entry in entries for sha256 in entry.get("shared_objects", ())}


def _entry(checkpoints: CheckpointStore, name: str) -> dict[str, Any]:
    data, manifest = checkpoints.read_manifest(name)
    provenance = manifest.provenance
    try:
        oldest = provenance.get("replay_from")
        if oldest is not None:
            id_order(oldest)
        told = {**provenance["counters"]["train"], "mean_return": provenance["mean_return"], "replay_from": oldest}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise errors.CheckpointDamaged(
            f"the provenance of {name} makes no sense ({type(error).__name__}: {error})"
        ) from None
    kept = "shared_objects", "fold_metrics", "initialized_from"
    told |= {key: provenance[key] for key in kept if provenance.get(key)}
    own = {"name": name, "version": manifest.version, "created": manifest.created, "bytes": manifest.total_bytes}
    return told | own | {"manifest_sha256": hashlib.sha256(data).hexdigest()}
