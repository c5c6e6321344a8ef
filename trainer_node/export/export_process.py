"""The process that exports the policies of one checkpoint: `python -m stagecoach.trainer_node.export.export_process`.

It reads a `Request` from its standard input and writes an `Exported` to its standard output. It knows neither Redis nor
the store, and shares nothing with the trainer that started it: not Python's lock, not memory, not a crash.
"""

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.errors import FragmentError
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Manifest
from stagecoach.shared.storage.export_record import Export
from stagecoach.trainer_node.export.onnx_translation import exported, made_with, recorded_observations

_POLICY = "/policy.safetensors"
_MESSAGE = ConfigDict(frozen=True, ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")


class Request(BaseModel):
    model_config = _MESSAGE

    config: dict[str, Any]
    """The run's: it names the user's own modules, which know their kinds of policy."""
    manifest: Manifest
    export: Export
    """The record, without policies yet."""
    policies: dict[str, bytes]
    """Policy id → its file."""
    recorded: bytes | None
    """The body of a fragment, if there is one."""


class Exported(BaseModel):
    model_config = _MESSAGE

    export: Export
    files: dict[str, bytes]
    """Policy id → ONNX."""


def requested(checkpoints: CheckpointStore, name: str, config: Mapping[str, Any], recorded: bytes | None) -> Request:
    """For all policies of the checkpoint `name`; raises as the store does, and `CheckpointDamaged`."""
    data, manifest = checkpoints.read_manifest(name)
    keys = [key for key in manifest.objects if key.endswith(_POLICY)]
    policies = {key.removesuffix(_POLICY): checkpoints.read_object(manifest, key) for key in keys}
    sha256, now = hashlib.sha256(data).hexdigest(), round(time.time(), 3)
    export = Export(checkpoint=name, manifest_sha256=sha256, created=now, made_with={}, policies={})
    return Request(config=dict(config), manifest=manifest, export=export, policies=policies, recorded=recorded)


def carry_out(request: Request) -> Exported:
    files, policies = {}, {}
    for policy_id, blob in request.policies.items():
        data, policies[policy_id] = exported(blob, request.manifest, _recorded(request, policy_id, blob))
        if data:
            files[policy_id] = data
    made = {"policies": policies, "made_with": made_with()}
    return Exported(export=request.export.model_copy(update=made), files=files)


def _recorded(request: Request, policy_id: str, blob: bytes) -> list[Columns]:
    if request.recorded is None:
        return []
    try:
        found = fragment.decode(request.recorded)
    except FragmentError:
        return []  # the trainer has dropped it, and counted it
    return recorded_observations(found, policy_id, decode_policy(blob)[0].spaces.observation)


def main() -> int:
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what torch's exporter prints is no result
    request = Request.model_validate_json(sys.stdin.buffer.read())
    parse_config(request.config).algorithms()  # a user's own brings its kind of policy with it
    torch.set_num_threads(1)
    with os.fdopen(out, "wb") as stream:
        stream.write(carry_out(request).model_dump_json().encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
