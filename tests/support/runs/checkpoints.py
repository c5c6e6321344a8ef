"""Manifests of checkpoints, and where objects lie: in the folder of an upload, below that of a checkpoint's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stagecoach.shared.experience.checkpoint_name import checkpoint_name
from stagecoach.shared.storage.checkpoint_store import MANIFEST, CheckpointStore, Manifest, describe_objects


def manifest_of(version: int, objects: dict[str, bytes], **fields: Any) -> Manifest:
    """A manifest as the trainer makes it, of 64 environment steps for each version; `fields` replace its own."""
    values: dict[str, Any] = {
        "run_id": "the-run", "name": checkpoint_name(version, version * 64), "version": version, "epoch": 1,
        "created": 1.0, "log_position": f"{version}-0", "parent": None, "objects": describe_objects(objects),
        "provenance": {"a": [1]},
    }  # fmt: skip
    return Manifest(**(values | fields))


def key_of(checkpoints: CheckpointStore, name: str, key: str) -> str:
    """The key in the store of an object (or manifest) of a checkpoint that is whole."""
    return checkpoints.manifest(name).folder + key


def upload_in(checkpoint: Path) -> Path:
    """The folder with objects and manifest, in a store of files; there is exactly one."""
    (manifest,) = checkpoint.glob(f"*/{MANIFEST}")
    return manifest.parent
