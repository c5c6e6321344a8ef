"""Operations on a run's checkpoints in the store: verify, prune, promote, export (also as ONNX).

`Run` has a method for each; only `prune` needs a run that is not live.
"""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from stagecoach.shared.base.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ExportFailed,
    PolicyKindUnknown,
    SharedObjectUnusable,
    UserError,
)
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import CheckpointConfig
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
from stagecoach.shared.storage.object_store import FileStore
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS, read_shared_object, write_shared_object
from stagecoach.trainer_node.checkpointing.retention import (
    announce,
    remove,
    status_entries,
    take_inventory,
    to_prune,
    unless_damaged,
)
from stagecoach.trainer_node.export.checkpoint_export import RECORD, Export, export_policies

_POLICY = "/policy.safetensors"
_POLLS = 20
_POLL_SECONDS = 0.3
_LOGGER = logging.getLogger("stagecoach.coordinator")


class State(StrEnum):
    """Verdict of `verify` on a checkpoint or sync file."""

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


@dataclass(frozen=True)
class Removed:
    name: str
    bytes: int | None
    """None without a readable manifest (cut off or damaged)."""


def list_checkpoints(checkpoints: CheckpointStore) -> list[dict[str, Any]]:
    """Lists the kept checkpoints, oldest first: name, steps, scores, size, marks and the metrics of folds."""
    status = checkpoints.marker(STATUS) or {"checkpoints": []}
    promotion = unless_damaged(checkpoints.promotion)  # `verify` reports damage
    marked = {mark: status.get(mark) for mark in MARKS} | {"promoted": promotion.checkpoint if promotion else None}
    return [
        {key: value for key, value in entry.items() if key != "shared_objects"}
        | {"marks": [mark for mark, name in marked.items() if name == entry["name"]]}
        for entry in status["checkpoints"]
    ]


def verify(checkpoints: CheckpointStore, name: str | None = None, *, live: bool = False) -> list[Verdict]:
    """Reads every object of every checkpoint (or of one) and compares it with its manifest.

    Leaves out what a live run prunes meanwhile. Sync files appear only if they are damaged.
    """
    if name is not None:
        return [_examine_one(checkpoints, name, live)]
    files = list(_damaged_sync_files(checkpoints))
    hashes = _expected_hashes(checkpoints)
    examined = (_examine(checkpoints, name, hashes, live) for name in checkpoints.names())
    verdicts = [verdict for verdict in examined if verdict is not None]
    complete = [verdict.name for verdict in verdicts if verdict.state is State.OK]
    return [*verdicts, *_damaged_shared(checkpoints, complete, live), *files]


def _damaged_shared(checkpoints: CheckpointStore, names: Sequence[str], live: bool) -> Iterator[Verdict]:
    """Yields the damaged shared objects of whole checkpoints, each once."""
    listed: dict[str, str] = {}
    for name in names:
        with suppress(CheckpointNotFound):  # pruned meanwhile
            listed |= dict.fromkeys(checkpoints.manifest(name).provenance.get("shared_objects", ()), name)
    for sha256, name in sorted(listed.items()):
        try:
            read_shared_object(checkpoints.store, sha256)
        except SharedObjectUnusable as error:
            if not _goes(checkpoints, name, live):
                yield Verdict(SHARED_OBJECTS + sha256, State.DAMAGED, (str(error),))


def _examine_one(checkpoints: CheckpointStore, name: str, live: bool) -> Verdict:
    """Examines one checkpoint; follows a mark that moves meanwhile."""
    for _ in range(_POLLS):
        resolved = checkpoints.resolve(name)
        if found := _examine(checkpoints, resolved, _expected_hashes(checkpoints), live):
            return found
    raise CheckpointNotFound(f"{resolved} was pruned while it was read")


def _examine(checkpoints: CheckpointStore, name: str, hashes: dict[str, dict[str, str]], live: bool) -> Verdict | None:
    """Returns None if the checkpoint was pruned meanwhile."""
    try:
        data, manifest = checkpoints.read_manifest(name)
    except CheckpointNotFound:
        return _without_manifest(checkpoints, name, live)
    except CheckpointDamaged as error:
        return Verdict(name, State.DAMAGED, (str(error).removeprefix(f"{name} "),))
    digest = hashlib.sha256(data).hexdigest()
    others = [file for file, expected in hashes.get(name, {}).items() if expected != digest]
    problems = [f"its manifest is not the one that {file} names" for file in others]
    problems += _problems(checkpoints, manifest)
    if problems and live:
        try:
            checkpoints.read_manifest(name)
        except CheckpointNotFound:
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
        except CheckpointDamaged as error:
            text = str(error).removeprefix(f"{manifest.name}/").removeprefix(f"{manifest.name} ")
            yield text if key in text else f"{key}: {text}"


def _finite(policy: bytes) -> bool:
    try:
        return finite_weights(decode_policy(policy)[0])
    except PolicyKindUnknown:  # a custom class, which verification must not import
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
        time.sleep(_POLL_SECONDS)
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
    except CheckpointDamaged as error:
        yield Verdict(STATUS, State.DAMAGED, (str(error),))
    for file, marks in ((POINTER, MARKS[:3]), (PROMOTED, MARKS[3:])):
        try:
            problems = tuple(f"names {name} as {mark}, which is gone" for mark, name in _gone(checkpoints, marks))
        except CheckpointDamaged as error:
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


def prune_checkpoints(checkpoints: CheckpointStore, rule: CheckpointConfig, *, dry_run: bool) -> list[Removed]:
    """Applies the retention rule; the run must not be live. Marked checkpoints stay, whatever the rule says.

    Raises `CheckpointDamaged` if the newest one is damaged, since a resume then needs an older one.
    """
    pointer = checkpoints.pointer()
    if pointer is None:
        raise CheckpointNotFound(f"run {checkpoints.run_id} has no checkpoint yet")
    promoted = {promotion.checkpoint} if (promotion := checkpoints.promotion()) else set[str]()
    (latest,) = verify(checkpoints, "latest")
    if latest.state is not State.OK:
        raise CheckpointDamaged(
            f"nothing is pruned: the newest checkpoint is damaged ({'; '.join(latest.problems)}), and a resume needs "
            f"an older one"
        )
    inventory = take_inventory(checkpoints, {})
    if dry_run:
        removed = to_prune(inventory, pointer, rule, promoted)
    else:
        announced, _ = announce(checkpoints, inventory, pointer, rule, promoted)
        removed = [*remove(checkpoints, inventory, pointer, announced)]
    return [Removed(name, inventory.entries.get(name, {}).get("bytes")) for name in removed]


def promote(checkpoints: CheckpointStore, name: str, *, live: bool) -> Promotion:
    """Marks a verified checkpoint with finite weights for deployment.

    If the trainer turns out to be pruning the checkpoint (see `remove`), the former mark is restored.
    """
    (found,) = verify(checkpoints, name, live=live)
    if found.state is State.DAMAGED:
        raise CheckpointDamaged(f"{found.name} is not promoted: {'; '.join(found.problems)}")
    if found.state is not State.OK:
        raise CheckpointNotFound(f"{found.name} is not promoted: it is not complete ({found.state})")
    former = unless_damaged(checkpoints.promotion)
    digest = hashlib.sha256(checkpoints.read_manifest(found.name)[0]).hexdigest()
    promotion = Promotion(checkpoint=found.name, manifest_sha256=digest, time=round(time.time(), 3))
    checkpoints.write_promotion(promotion)
    if live and found.name not in status_entries(checkpoints):
        checkpoints.write_promotion(former)
        raise CheckpointNotFound(f"{found.name} is not promoted: the trainer is pruning it; promote a newer one")
    return promotion


def withdraw(checkpoints: CheckpointStore) -> str | None:
    former = unless_damaged(checkpoints.promotion)
    checkpoints.write_promotion(None)
    return former.checkpoint if former else None


def export(checkpoints: CheckpointStore, config: Config, name: str | None, directory: Path) -> Path:
    """Copies a checkpoint to `directory/<run id>/`, with everything to play, deploy or begin from it.

    Returns its folder, which appears complete or not at all; raises `UserError` if the target exists.
    """
    name = checkpoints.preferred(name)
    target = directory / checkpoints.run_id
    with (
        _writing_anew(directory, target),
        tempfile.TemporaryDirectory(prefix=".partial-", dir=directory, ignore_cleanup_errors=True) as partial,
    ):
        copy = CheckpointStore(FileStore(Path(partial), checkpoints.run_id), checkpoints.run_id)
        _copy(checkpoints, copy, config, name)
        os.rename(Path(partial, checkpoints.run_id), target)
    return target / stored.CHECKPOINTS / name


@contextmanager
def _writing_anew(directory: Path, *paths: Path) -> Iterator[None]:
    """Creates the directory; raises `UserError` if one of `paths` exists or cannot be written."""
    if there := [str(path) for path in paths if path.exists()]:
        raise UserError(f"{', '.join(there)} exists; choose another folder")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error}") from None


def _copy(checkpoints: CheckpointStore, copy: CheckpointStore, config: Config, name: str) -> None:
    """Copies the objects, verifying each, then verifies the whole copy."""
    data, manifest = checkpoints.read_manifest(name)
    for key in manifest.objects:
        copy.store.put(manifest.folder + key, checkpoints.read_object(manifest, key))
    for sha256 in manifest.provenance.get("shared_objects", ()):
        write_shared_object(copy.store, read_shared_object(checkpoints.store, sha256))
    copy.store.put(manifest.folder + MANIFEST, data)
    copy.store.put(stored.ENVIRONMENT, checkpoints.store.get(stored.ENVIRONMENT))
    copy.store.put(stored.CONFIG, dump_config(config).encode())
    digest = hashlib.sha256(data).hexdigest()
    copy.write_pointer(stored.Pointer(latest=name, epoch=manifest.epoch, manifest_sha256=digest))
    problems = [problem for verdict in verify(copy) for problem in verdict.problems]
    if problems:
        raise CheckpointDamaged(f"{name} is not exported: {'; '.join(problems)}")


def export_onnx(
    checkpoints: CheckpointStore, config: Config, name: str | None, directory: Path
) -> tuple[Export, dict[str, Path]]:
    """Writes `directory/<policy id>.onnx` for each policy, and the record; returns it, and the files by policy id.

    Compares each with torch on random and archived observations. Raises `ExportFailed`, or `UserError` if a file
    exists; nothing is written then.
    """
    name = checkpoints.preferred(name)
    record = directory / RECORD
    export, files = export_policies(checkpoints, name)
    if export.failures:
        raise ExportFailed(f"{name} cannot be exported as ONNX: {export.failures}")
    paths = {policy_id: directory / f"{policy_id}.onnx" for policy_id in files}
    with _writing_anew(directory, *paths.values(), record):
        for policy_id, path in paths.items():
            path.write_bytes(files[policy_id])
        record.write_text(export.model_dump_json(indent=1))
    return export, paths
