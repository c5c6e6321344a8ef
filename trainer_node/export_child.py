"""The process that makes the exports of one checkpoint: `python -m trainer_node.export_child`.

It reads a request from its standard input and answers on its standard output, both one blob (shared/tensor_blob.py):
policy files and observations in, ONNX files and what came of comparing them out. It knows neither Redis nor the store,
and shares nothing with the trainer that started it: not Python's lock, not the memory, not an exporter's crash.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shared import fragment, tensor_blob
from shared.checkpoint import Manifest
from shared.config_sources import parse_config
from shared.errors import FragmentError
from shared.exports import ExportedPolicy
from shared.policies.codec import decode_policy
from trainer_node.onnx_export import exported, made_with, recorded_observations


@dataclass(frozen=True)
class Request:
    """What is to be exported."""

    config: dict[str, Any]
    """Plain data: it names the user's own modules, which know their kinds of policy."""
    manifest: Manifest
    policies: Mapping[str, bytes]
    """Policy id → its file."""
    recorded: bytes | None
    """The body of a fragment, if there is one."""

    def encode(self) -> bytes:
        """The inverse of `decode`."""
        blobs = {f"policy/{policy_id}": data for policy_id, data in self.policies.items()}
        if self.recorded is not None:
            blobs["recorded"] = self.recorded
        header = {"config": self.config, "manifest": self.manifest.model_dump(mode="json")}
        return tensor_blob.encode({name: np.frombuffer(data, np.uint8) for name, data in blobs.items()}, header)

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Raises `tensor_blob.BlobError`."""
        arrays, header = tensor_blob.decode(data)
        blobs = {name: array.tobytes() for name, array in arrays.items()}
        recorded = blobs.pop("recorded", None)
        policies = {name.removeprefix("policy/"): blob for name, blob in blobs.items()}
        return cls(header["config"], Manifest.model_validate(header["manifest"]), policies, recorded)


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    files: Mapping[str, bytes]
    """Policy id → ONNX."""
    policies: Mapping[str, ExportedPolicy]
    made_with: dict[str, str]

    def encode(self) -> bytes:
        """The inverse of `decode`."""
        told = {policy_id: policy.model_dump(mode="json") for policy_id, policy in self.policies.items()}
        arrays = {policy_id: np.frombuffer(data, np.uint8) for policy_id, data in self.files.items()}
        return tensor_blob.encode(arrays, {"policies": told, "made_with": self.made_with})

    @classmethod
    def decode(cls, data: bytes) -> Answer:
        """Raises `tensor_blob.BlobError` for anything but a whole answer."""
        arrays, header = tensor_blob.decode(data)
        policies = {name: ExportedPolicy.model_validate(told) for name, told in header["policies"].items()}
        return cls({name: array.tobytes() for name, array in arrays.items()}, policies, header["made_with"])


def answer(request: Request) -> Answer:
    """Exports and compares all policies of the request."""
    files, policies = {}, {}
    for policy_id, blob in request.policies.items():
        data, policies[policy_id] = exported(blob, request.manifest, _recorded(request, policy_id, blob))
        if data:
            files[policy_id] = data
    return Answer(files, policies, made_with())


def _recorded(request: Request, policy_id: str, blob: bytes) -> list[dict[str, Any]]:
    if request.recorded is None:
        return []
    try:
        found = fragment.decode(request.recorded)
    except FragmentError:
        return []  # the trainer has dropped it, and counted it
    return recorded_observations(found, policy_id, decode_policy(blob)[0].spaces.observation)


def main() -> int:
    """One request."""
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an exporter prints is no answer
    request = Request.decode(sys.stdin.buffer.read())
    parse_config(request.config).algorithm.resolved()  # a user's own brings its kind of policy with it
    torch.set_num_threads(1)
    with os.fdopen(out, "wb") as stream:
        stream.write(answer(request).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
