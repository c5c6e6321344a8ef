"""Exports: a checkpoint's policies as ONNX files, and the result of comparing them with torch.

They lie beside its objects with a record of their own, `export.json`, written last, which names the manifest and the
files by their hashes. No trainer reads them, no replay compares them, and they are deleted with the checkpoint.
"""

import hashlib
from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from stagecoach.shared.errors import CheckpointDamaged, ObjectMissing
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, StoredObject, stored

RECORD, FILE = "export.json", "policy.onnx"
FORMAT = 1


class Comparison(BaseModel, frozen=True, extra="forbid"):
    """What ONNX Runtime and torch compute from the same observations."""

    rows: int
    max_difference: float
    """The largest absolute difference of any action parameter, continuous action or hidden state."""
    other_choices: int
    """Rows in which another discrete action was chosen: of two that are equally good within that difference."""


class ExportedPolicy(BaseModel, frozen=True, extra="forbid"):
    file: StoredObject | None = None
    failure: str | None = None
    compared: dict[str, Comparison] = {}
    """On `random` observations of the space, and on `recorded` ones of the run (where there were any)."""


class Export(BaseModel, frozen=True, extra="forbid"):
    format: int = FORMAT
    checkpoint: str
    manifest_sha256: str
    created: float
    made_with: dict[str, str]
    """Versions of what made and compared the files."""
    policies: dict[str, ExportedPolicy]

    @property
    def failures(self) -> dict[str, str]:
        """By policy id, why it has no file."""
        return {policy_id: policy.failure for policy_id, policy in self.policies.items() if policy.failure}

    @property
    def max_difference(self) -> float:
        """From torch, of all policies that have a file."""
        compared = (one for policy in self.policies.values() for one in policy.compared.values())
        return max((one.max_difference for one in compared), default=0.0)

    @property
    def other_choices(self) -> int:
        return sum(one.other_choices for policy in self.policies.values() for one in policy.compared.values())

    def __str__(self) -> str:
        if self.failures:
            return "; ".join(f"{policy_id}: {failure}" for policy_id, failure in self.failures.items())
        others = f", {self.other_choices} choices differ" if self.other_choices else ""
        return f"differs from torch by at most {self.max_difference:.1e}{others}"


def files_of(export: Export) -> dict[str, str]:
    """Policy id → the name of its file within the checkpoint."""
    return {policy_id: f"{policy_id}/{FILE}" for policy_id, policy in export.policies.items() if policy.file}


def write_export(checkpoints: CheckpointStore, export: Export, files: Mapping[str, bytes]) -> None:
    """Stores the files by policy id, each read back, then the record; raises `CheckpointDamaged`, or as the store."""
    folder = checkpoints.read_manifest(export.checkpoint, export.manifest_sha256)[1].folder
    for policy_id, name in files_of(export).items():
        checkpoints.store.put(folder + name, files[policy_id])
        read_file(checkpoints, export, policy_id)
    checkpoints.store.put(folder + RECORD, export.model_dump_json(indent=1).encode())


def read_export(checkpoints: CheckpointStore, name: str) -> Export | None:
    """The export of a checkpoint; None where it has none. Raises `CheckpointDamaged`, and `CheckpointNotFound`."""
    try:
        data, manifest = checkpoints.read_manifest(name)
    except CheckpointDamaged:
        return None
    try:
        export = checkpoints.read_whole(manifest.folder + RECORD, Export.model_validate_json)
    except ObjectMissing:
        return None
    except ValidationError:
        raise CheckpointDamaged(f"{name}/{RECORD} cannot be read") from None
    sha256 = hashlib.sha256(data).hexdigest()
    if (export.format, export.checkpoint, export.manifest_sha256) != (FORMAT, name, sha256):
        raise CheckpointDamaged(f"{name}/{RECORD} is not of this checkpoint's manifest")
    return export


def read_file(checkpoints: CheckpointStore, export: Export, policy_id: str) -> bytes:
    name = f"{policy_id}/{FILE}"
    folder = checkpoints.read_manifest(export.checkpoint, export.manifest_sha256)[1].folder
    try:
        data = checkpoints.store.get(folder + name)
    except ObjectMissing:
        raise CheckpointDamaged(f"{export.checkpoint} lacks its export {name}") from None
    if stored(data) != export.policies[policy_id].file:
        raise CheckpointDamaged(f"{export.checkpoint}/{name} was altered: its SHA-256 is not the one in {RECORD}")
    return data
