"""The policies of one checkpoint as ONNX files, and the record of how these compare with torch."""

from collections.abc import Mapping
from contextlib import suppress

from pydantic import BaseModel

from stagecoach.shared.base.errors import ArchiveIncomplete, FragmentError
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import before
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.export.onnx_translation import (
    ExportedPolicy,
    exported,
    made_with,
    recorded_observations,
    require_onnx,
)

RECORD = "export.json"
_POLICY = "/policy.safetensors"


class Export(BaseModel, frozen=True, extra="forbid"):
    """Contents of `export.json`."""

    checkpoint: str
    made_with: dict[str, str]
    """Versions of the packages that wrote and compared the files."""
    policies: dict[str, ExportedPolicy]

    @property
    def failures(self) -> str:
        """Reasons why policies have no file; empty if all have one."""
        failed = {policy_id: policy.failure for policy_id, policy in self.policies.items() if policy.failure}
        return "; ".join(f"{policy_id}: {failure}" for policy_id, failure in failed.items())


def export_policies(checkpoints: CheckpointStore, name: str) -> tuple[Export, Mapping[str, bytes]]:
    """Translates all policies of a checkpoint; returns the record, and the files by policy id.

    They are compared on the last fragment that the checkpoint was learned from as well, if the archive has it. Raises
    `UserError` without the extra `onnx`, `CheckpointDamaged`, or as the store does.
    """
    require_onnx()
    manifest = checkpoints.manifest(name)
    recorded = _last_fragment(checkpoints, manifest.log_position)
    files, policies = {}, {}
    for key in manifest.objects:
        if key.endswith(_POLICY):
            policy_id, blob = key.removesuffix(_POLICY), checkpoints.read_object(manifest, key)
            spec = decode_policy(blob)[0].spaces.observation
            seen = recorded_observations(recorded, policy_id, spec) if recorded else []
            data, policies[policy_id] = exported(blob, manifest, seen)
            if data:
                files[policy_id] = data
    return Export(checkpoint=name, made_with=made_with(), policies=policies), files


def _last_fragment(checkpoints: CheckpointStore, position: str) -> Fragment | None:
    with suppress(ArchiveIncomplete, ValueError, StopIteration, FragmentError):  # a dropped one may be unreadable
        entry = next(Archive(checkpoints.store, checkpoints.run_id).entries(before(position), position))
        return fragment.decode(entry.fragment) if entry.fragment else None
    return None
