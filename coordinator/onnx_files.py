"""`stagecoach checkpoints export --onnx`: a checkpoint's policies as ONNX files in a folder, to be deployed."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.archive import Archive
from shared.checkpoint import CheckpointStore, Manifest
from shared.errors import ArchiveIncomplete, CheckpointDamaged, ExportFailed, UserError
from shared.experience_log import LogEntry, before
from shared.exports import RECORD, Export, read_export, read_file
from trainer_node.export_child import Answer, Request, answer
from trainer_node.onnx_export import require_onnx

_LOGGER = logging.getLogger("stagecoach.coordinator")
_POLICY = "/policy.safetensors"


def export_onnx(
    checkpoints: CheckpointStore, config: Mapping[str, Any], name: str | None, directory: Path
) -> tuple[Export, dict[str, Path]]:
    """Writes `directory/<policy id>.onnx` for each policy, and the record; answers it, and the files by policy id.

    What the trainer has exported already is copied. Else it is made here, and compared with torch on random and on
    archived observations. Raises `ExportFailed`, or `UserError` where a file is there; then nothing is written.
    """
    name = checkpoints.resolve(name) if name else checkpoints.preferred()
    record = directory / RECORD
    export, files = _stored(checkpoints, name) or _made(checkpoints, config, name)
    if export.failures:
        raise ExportFailed(f"{name} cannot be exported as ONNX: {export}")
    paths = {policy_id: directory / f"{policy_id}.onnx" for policy_id in files}
    if there := [str(path) for path in (*paths.values(), record) if path.exists()]:
        raise UserError(f"{', '.join(there)} exists, and nothing is overwritten; choose another folder")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for policy_id, path in paths.items():
            path.write_bytes(files[policy_id])
        record.write_text(export.model_dump_json(indent=1))
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error}") from None
    return export, paths


def _stored(checkpoints: CheckpointStore, name: str) -> tuple[Export, dict[str, bytes]] | None:
    """What lies beside the checkpoint, if it is whole; a failure is tried again."""
    try:
        export = read_export(checkpoints, name)
        if export is None or export.failures:
            return None
        return export, {policy_id: read_file(checkpoints, export, policy_id) for policy_id in export.policies}
    except CheckpointDamaged as error:
        _LOGGER.warning("%s; it is exported anew", error)
        return None


def _made(checkpoints: CheckpointStore, config: Mapping[str, Any], name: str) -> tuple[Export, dict[str, bytes]]:
    require_onnx()
    loaded = checkpoints.load(name, only=_POLICY)
    data, manifest = checkpoints.read_manifest(name)
    policies = {key.removesuffix(_POLICY): blob for key, blob in loaded.objects.items()}
    made: Answer = answer(Request(dict(config), manifest, policies, _archived(checkpoints, manifest)))
    export = Export(
        checkpoint=name, manifest_sha256=hashlib.sha256(data).hexdigest(), created=round(time.time(), 3),
        made_with=made.made_with, policies=dict(made.policies),
    )  # fmt: skip
    return export, dict(made.files)


def _archived(checkpoints: CheckpointStore, manifest: Manifest) -> bytes | None:
    """The last fragment that the checkpoint was learnt from, where the run's archive has it."""
    position = manifest.log_position
    archive = Archive(checkpoints.store, checkpoints.run_id)
    try:
        entry: LogEntry | None = next(archive.entries(before(position), position), None)
    except (ArchiveIncomplete, ValueError):
        return None
    return entry.fragment if entry else None
