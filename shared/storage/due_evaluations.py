"""Policies that are due to be evaluated, whether a checkpoint of them is kept or not.

One object each, `evaluations/<name>/policies.safetensors`, with the name that a checkpoint of that version has. The
trainer writes it before the checkpoint that covers it, and deletes it once its score is recorded.
"""

from collections.abc import Mapping

import numpy as np

from shared.errors import CheckpointDamaged, FragmentError
from shared.experience import tensor_blob
from shared.storage.checkpoint_store import checkpoint_version
from shared.storage.object_store import ObjectStore

_FOLDER = "evaluations/"


def _key(name: str) -> str:
    return f"{_FOLDER}{name}/policies.safetensors"


def due_evaluations(store: ObjectStore) -> list[str]:
    """Their names, oldest version first."""
    found = [name for name in store.folders(_FOLDER) if checkpoint_version(name) is not None]
    return sorted(found, key=lambda name: checkpoint_version(name) or 0)


def write_due_evaluation(store: ObjectStore, name: str, policies: Mapping[str, bytes]) -> None:
    """`policies`: policy id → the bytes of its `policy.safetensors`."""
    arrays = {policy_id: np.frombuffer(data, np.uint8) for policy_id, data in policies.items()}
    store.put(_key(name), tensor_blob.encode(arrays, {"name": name}))


def read_due_evaluation(store: ObjectStore, name: str) -> dict[str, bytes]:
    """Raises `ObjectMissing`, and `CheckpointDamaged` for other bytes than were written."""
    try:
        arrays, _ = tensor_blob.decode(store.get(_key(name)))
    except FragmentError as error:
        raise CheckpointDamaged(f"the policy {name} that is due to be evaluated cannot be read: {error}") from None
    return {policy_id: array.tobytes() for policy_id, array in arrays.items()}


def delete_due_evaluation(store: ObjectStore, name: str) -> None:
    store.delete(_key(name))
