"""Operations on a run's checkpoints in the store: list, prune, export (also as ONNX).

`Run` has a method for each; only `prune` needs a run that is not live.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, ExportFailed, UserError
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import CheckpointConfig
from stagecoach.shared.storage import checkpoint_store as stored
from stagecoach.shared.storage.checkpoint_store import MANIFEST, MARKS, STATUS, CheckpointStore
from stagecoach.shared.storage.object_store import FileStore
from stagecoach.shared.storage.shared_objects import read_shared_object, write_shared_object
from stagecoach.trainer_node.checkpointing.retention import announce, remove, take_inventory, to_prune, unless_damaged
from stagecoach.trainer_node.checkpointing.verification import State, verify
from stagecoach.trainer_node.export import RECORD, Export, export_policies

_POLICY = "/policy.safetensors"
_LOGGER = logging.getLogger("stagecoach.coordinator")


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
