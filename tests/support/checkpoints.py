"""Where the objects of a checkpoint lie: in the folder of an upload, below that of its name."""

from __future__ import annotations

from pathlib import Path

from shared.storage.checkpoint_store import MANIFEST, CheckpointStore


def key_of(checkpoints: CheckpointStore, name: str, key: str) -> str:
    """The key in the store of an object (or manifest) of a checkpoint that is whole."""
    return checkpoints.manifest(name).folder + key


def upload_in(checkpoint: Path) -> Path:
    """The folder with objects and manifest, in a store of files; there is exactly one."""
    (manifest,) = checkpoint.glob(f"*/{MANIFEST}")
    return manifest.parent
