"""What people do with a run's checkpoints: verify, prune, promote, export. All work from the store alone.

`Run` has a method for each; only `prune` needs a run that is not live.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.checkpoint import (
    CHECKPOINTS,
    CONFIG,
    ENVIRONMENT,
    MANIFEST,
    MARKS,
    POINTER,
    PROMOTED,
    STATUS,
    CheckpointStore,
    Manifest,
    Pointer,
    Promotion,
    checkpoint_version,
)
from shared.config import CheckpointConfig, Config
from shared.config_sources import dump_config
from shared.errors import CheckpointDamaged, CheckpointNotFound, UserError
from shared.exports import RECORD, files_of, read_export, read_file, write_export
from shared.object_store import FileStore
from shared.policies.codec import decode_policy, finite, state_arrays
from trainer_node.retention import going, prune, status_entries, take_stock

OK, DAMAGED, CUT_OFF, BEING_WRITTEN = "ok", "damaged", "cut off", "being written"
_POLICY = "policy.safetensors"
_LOOKS = 20
_LOOK_SECONDS = 0.3


@dataclass(frozen=True)
class Verdict:
    """What `verify` found of one checkpoint or sync file."""

    name: str
    state: str
    """`ok`, `damaged`, `cut off` (an upload that was never completed) or `being written`."""
    problems: tuple[str, ...] = ()
    objects: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Removed:
    """One checkpoint that `prune` removed (or would remove)."""

    name: str
    bytes: int | None
    """None for what had no manifest that says so: cut off or damaged."""


# Listing


def list_checkpoints(checkpoints: CheckpointStore) -> list[dict[str, Any]]:
    """The kept ones, oldest first: name, steps, mean return, evaluation, size, and their marks."""
    status = checkpoints.marker(STATUS) or {"checkpoints": []}
    marked = {mark: status.get(mark) for mark in MARKS}
    promotion = _promotion_or_none(checkpoints)  # where it is damaged `verify` tells; the list is right without it
    marked["promoted"] = promotion.checkpoint if promotion else None
    return [
        {**entry, "marks": [mark for mark, name in marked.items() if name == entry["name"]]}
        for entry in status["checkpoints"]
    ]


# Verifying


def verify(checkpoints: CheckpointStore, name: str | None = None, *, live: bool = False) -> list[Verdict]:
    """Reads every object of every checkpoint (or of one) and compares it with what should be there.

    What a live run prunes while it is looked at is left out. Sync files and exports appear only if they are damaged.
    """
    if name is not None:
        return [_examine_one(checkpoints, name, live)]
    files = list(_damaged_sync_files(checkpoints))
    hashes = _expected_hashes(checkpoints)
    looked = (_examine(checkpoints, name, hashes, live) for name in checkpoints.names())
    verdicts = [verdict for verdict in looked if verdict is not None]
    whole = [verdict.name for verdict in verdicts if verdict.state == OK]
    return [*verdicts, *_damaged_exports(checkpoints, whole), *files]


def _damaged_exports(checkpoints: CheckpointStore, names: Sequence[str]) -> Iterator[Verdict]:
    """Of whole checkpoints; nothing that goes on learning reads an export."""
    for name in names:
        try:
            export = read_export(checkpoints, name)
            if export is not None:
                for policy_id in files_of(export):
                    read_file(checkpoints, export, policy_id)
        except CheckpointNotFound:
            continue  # pruned meanwhile
        except CheckpointDamaged as error:
            if name in checkpoints.names():
                yield Verdict(f"{name}/{RECORD}", DAMAGED, (str(error),))


def _examine_one(checkpoints: CheckpointStore, name: str, live: bool) -> Verdict:
    """A mark that moves on while its checkpoint is read is followed."""
    for _ in range(_LOOKS):
        resolved = checkpoints.resolve(name)
        found = _examine(checkpoints, resolved, _expected_hashes(checkpoints), live)
        if found is not None:
            return found
    raise CheckpointNotFound(f"{resolved} was pruned while it was read")


def _examine(checkpoints: CheckpointStore, name: str, hashes: dict[str, dict[str, str]], live: bool) -> Verdict | None:
    """None for what has been pruned in the meantime."""
    try:
        data, manifest = checkpoints.read_manifest(name)
    except CheckpointNotFound:
        return _without_manifest(checkpoints, name, live)
    except CheckpointDamaged as error:
        return Verdict(name, DAMAGED, (str(error).removeprefix(f"{name} "),))
    digest = hashlib.sha256(data).hexdigest()
    problems = [
        f"its manifest is not the one that {file} names"
        for file, expected in hashes.get(name, {}).items()
        if expected != digest
    ]
    problems += _problems(checkpoints, manifest)
    if problems and live:
        try:
            checkpoints.read_manifest(name)
        except CheckpointNotFound:
            return _without_manifest(checkpoints, name, live)  # it was pruned meanwhile, manifest first
    state = DAMAGED if problems else OK
    return Verdict(name, state, tuple(problems), len(manifest.objects), manifest.total_bytes)


def _problems(checkpoints: CheckpointStore, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the objects; one at a time, since a checkpoint may be large."""
    for key in manifest.objects:
        try:
            data = checkpoints.read_object(manifest, key)
            if key.endswith(_POLICY) and not finite(state_arrays(decode_policy(data)[0])):
                yield f"{key} has weights that are not finite"
        except CheckpointDamaged as error:
            text = str(error).removeprefix(f"{manifest.name}/").removeprefix(f"{manifest.name} ")
            yield text if key in text else f"{key}: {text}"


def _without_manifest(checkpoints: CheckpointStore, name: str, live: bool) -> Verdict | None:
    known, pointer = status_entries(checkpoints), _pointer_or_none(checkpoints)
    if name not in checkpoints.names():
        return None
    latest = pointer.latest if pointer else None
    if name in known or name == latest:
        return Verdict(name, DAMAGED, (f"{MANIFEST} is missing",))
    newer = (checkpoint_version(name) or 0) > (checkpoint_version(latest or "") or -1)
    if live and not newer and _goes(checkpoints, name):
        return None
    return Verdict(name, BEING_WRITTEN if live and newer else CUT_OFF)


def _goes(checkpoints: CheckpointStore, name: str) -> bool:
    """Whether it is being pruned just now: the manifest goes first, and the rest in a moment."""
    for _ in range(_LOOKS):
        time.sleep(_LOOK_SECONDS)
        if name not in checkpoints.names():
            return True
    return False


def _expected_hashes(checkpoints: CheckpointStore) -> dict[str, dict[str, str]]:
    """Checkpoint → sync file → SHA-256 of the manifest according to it."""
    hashes = {name: {STATUS: entry["manifest_sha256"]} for name, entry in status_entries(checkpoints).items()}
    pointer = _pointer_or_none(checkpoints)
    if pointer is not None:
        hashes.setdefault(pointer.latest, {})[POINTER] = pointer.manifest_sha256
    promotion = _promotion_or_none(checkpoints)
    if promotion is not None:
        hashes.setdefault(promotion.checkpoint, {})[PROMOTED] = promotion.manifest_sha256
    return hashes


def _pointer_or_none(checkpoints: CheckpointStore) -> Pointer | None:
    try:
        return checkpoints.pointer()
    except CheckpointDamaged:
        return None


def _promotion_or_none(checkpoints: CheckpointStore) -> Promotion | None:
    try:
        return checkpoints.promotion()
    except CheckpointDamaged:
        return None


def _damaged_sync_files(checkpoints: CheckpointStore) -> Iterator[Verdict]:
    """Those that cannot be read, or that name a checkpoint which is not there."""
    try:
        checkpoints.marker(STATUS)
    except CheckpointDamaged as error:
        yield Verdict(STATUS, DAMAGED, (str(error),))
    for file, marks in ((POINTER, MARKS[:3]), (PROMOTED, MARKS[3:])):
        try:
            gone = _gone(checkpoints, marks)
        except CheckpointDamaged as error:
            yield Verdict(file, DAMAGED, (str(error),))
            continue
        if gone:
            yield Verdict(file, DAMAGED, tuple(f"names {name} as {mark}, which is gone" for mark, name in gone.items()))


def _gone(checkpoints: CheckpointStore, marks: tuple[str, ...]) -> dict[str, str]:
    """Marks whose checkpoint isn't there; what differs at the second look was only moving, as a live run's do."""
    before: dict[str, str] | None = None
    for _ in range(_LOOKS):
        named = {mark: checkpoints.marked(mark) for mark in marks}
        names = checkpoints.names()
        gone = {mark: name for mark, name in named.items() if name and name not in names}
        if not gone or gone == before:
            return gone
        before = gone
    return {}


# Pruning


def prune_checkpoints(checkpoints: CheckpointStore, rule: CheckpointConfig, *, dry_run: bool) -> list[Removed]:
    """Applies the retention rule; the run must not be live. Marked checkpoints stay, whatever the rule says.

    Raises `CheckpointDamaged` where the newest one is damaged: the older ones are then what a resume goes back to.
    """
    pointer = checkpoints.pointer()
    if pointer is None:
        raise CheckpointNotFound(f"run {checkpoints.run_id} has no checkpoint yet")
    promotion = checkpoints.promotion()
    (latest,) = verify(checkpoints, "latest")
    if latest.state != OK:
        raise CheckpointDamaged(
            f"nothing is pruned, since the newest checkpoint is damaged ({'; '.join(latest.problems)}) and a resume "
            f"goes back to an older one"
        )
    stock = take_stock(checkpoints, {})
    protected = {promotion.checkpoint} if promotion else set[str]()
    doomed = going(stock, pointer, rule, protected) if dry_run else prune(checkpoints, stock, pointer, rule, protected)
    return [Removed(name, stock.entries[name]["bytes"] if name in stock.entries else None) for name in doomed]


# Promoting


def promote(checkpoints: CheckpointStore, name: str, *, live: bool) -> Promotion:
    """Marks a checkpoint for deployment, once it is found whole and its weights finite.

    The mark is set before it is known that the trainer does not prune the checkpoint at this moment (see `prune`, which
    announces in the status file what goes); where it does, the mark is put back as it was.
    """
    (found,) = verify(checkpoints, name, live=live)
    if found.state == DAMAGED:
        raise CheckpointDamaged(f"{found.name} is not promoted: {'; '.join(found.problems)}")
    if found.state != OK:
        raise CheckpointNotFound(f"{found.name} is not promoted: it is not complete ({found.state})")
    before = _promotion_or_none(checkpoints)
    digest = hashlib.sha256(checkpoints.read_manifest(found.name)[0]).hexdigest()
    promotion = Promotion(checkpoint=found.name, manifest_sha256=digest, time=round(time.time(), 3))
    checkpoints.write_promotion(promotion)
    if live and found.name not in status_entries(checkpoints):
        checkpoints.write_promotion(before)
        raise CheckpointNotFound(f"{found.name} is not promoted: the trainer is pruning it; promote a newer one")
    return promotion


def withdraw(checkpoints: CheckpointStore) -> str | None:
    """Takes the mark away; answers what was promoted."""
    before = _promotion_or_none(checkpoints)
    checkpoints.write_promotion(None)
    return before.checkpoint if before else None


# Exporting


def export(checkpoints: CheckpointStore, config: Config, name: str | None, directory: Path) -> Path:
    """Copies a checkpoint into `directory/<run id>/`, with all that is needed to play, deploy or begin from it.

    Answers the checkpoint's folder. It appears whole or not at all; raises `UserError` where something is there.
    """
    name = checkpoints.resolve(name) if name else checkpoints.preferred()
    target = directory / checkpoints.run_id
    if target.exists():
        raise UserError(f"{target} exists, and nothing is overwritten; choose another folder")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=directory))
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error}") from None
    try:
        copy = CheckpointStore(FileStore(partial, checkpoints.run_id), checkpoints.run_id)
        _copy(checkpoints, copy, config, name)
        os.rename(partial / checkpoints.run_id, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target / CHECKPOINTS / name


def _copy(checkpoints: CheckpointStore, copy: CheckpointStore, config: Config, name: str) -> None:
    """Objects first, each verified on its way and the whole once more as a reader of the copy sees it."""
    data, manifest = checkpoints.read_manifest(name)
    for key in manifest.objects:
        copy.store.put(manifest.folder + key, checkpoints.read_object(manifest, key))
    copy.store.put(manifest.folder + MANIFEST, data)
    if (beside := read_export(checkpoints, name)) is not None:
        files = {policy_id: read_file(checkpoints, beside, policy_id) for policy_id in files_of(beside)}
        write_export(copy, beside, files)
    copy.store.put(ENVIRONMENT, checkpoints.store.get(ENVIRONMENT))
    copy.store.put(CONFIG, dump_config(config).encode())
    digest = hashlib.sha256(data).hexdigest()
    copy.write_pointer(Pointer(latest=name, epoch=manifest.epoch, manifest_sha256=digest))
    problems = [problem for verdict in verify(copy) for problem in verdict.problems]
    if problems:
        raise CheckpointDamaged(f"{name} is not exported: {'; '.join(problems)}")
