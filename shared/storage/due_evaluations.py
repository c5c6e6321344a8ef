"""Policies that are due to be evaluated, and their ratings in a league, whether a checkpoint of them is kept or not.

One object each, `evaluations/<name>/policies.safetensors`, with the name that a checkpoint of that version has. The
trainer writes it before the checkpoint that covers it, and deletes it once its score is recorded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared.errors import CheckpointDamaged, FragmentError
from shared.experience import tensor_blob
from shared.storage.checkpoint_store import checkpoint_version
from shared.storage.object_store import ObjectStore

_FOLDER = "evaluations/"


@dataclass(frozen=True)
class DueEvaluation:
    policies: Mapping[str, bytes]
    """Policy id → the bytes of its `policy.safetensors`."""
    ratings: Mapping[str, Any] = field(default_factory=dict)
    """Of a league's learners, as a checkpoint's provenance has them."""


def _key(name: str) -> str:
    return f"{_FOLDER}{name}/policies.safetensors"


def due_evaluations(store: ObjectStore) -> list[str]:
    """Their names, oldest version first."""
    found = [name for name in store.folders(_FOLDER) if checkpoint_version(name) is not None]
    return sorted(found, key=lambda name: checkpoint_version(name) or 0)


def write_due_evaluation(store: ObjectStore, name: str, due: DueEvaluation) -> None:
    arrays = {policy_id: np.frombuffer(data, np.uint8) for policy_id, data in due.policies.items()}
    store.put(_key(name), tensor_blob.encode(arrays, {"name": name, "ratings": due.ratings}))


def read_due_evaluation(store: ObjectStore, name: str) -> DueEvaluation:
    """Raises `ObjectMissing`, and `CheckpointDamaged` for other bytes than were written."""
    try:
        arrays, header = tensor_blob.decode(store.get(_key(name)))
    except FragmentError as error:
        raise CheckpointDamaged(f"the policy {name} that is due to be evaluated cannot be read: {error}") from None
    policies = {policy_id: array.tobytes() for policy_id, array in arrays.items()}
    return DueEvaluation(policies, header.get("ratings", {}))


def delete_due_evaluation(store: ObjectStore, name: str) -> None:
    store.delete(_key(name))
