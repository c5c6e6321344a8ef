"""Checkpoints of the policies that are due to be evaluated, whether a checkpoint of that version is kept or not.

One object each, `evaluations/<name>/checkpoint.safetensors`, with the name that a checkpoint of that version has. The
trainer writes it before the checkpoint that covers it. Once its score is recorded, the trainer keeps it as a checkpoint
if it is one of the best, and deletes this object.
"""

import numpy as np

from stagecoach.shared.base.errors import CheckpointDamaged, FragmentError
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.storage.checkpoint_store import Checkpoint, Manifest, checkpoint_folders, describe_objects
from stagecoach.shared.storage.object_store import ObjectStore

_FOLDER = "evaluations/"


def _key(name: str) -> str:
    return f"{_FOLDER}{name}/checkpoint.safetensors"


def due_evaluations(store: ObjectStore) -> list[str]:
    """Names of due evaluations, oldest version first."""
    return checkpoint_folders(store, _FOLDER)


def write_due_evaluation(store: ObjectStore, due: Checkpoint) -> None:
    arrays = {key: np.frombuffer(data, np.uint8) for key, data in due.objects.items()}
    header = {"manifest": due.manifest.model_dump(mode="json")}
    store.put(_key(due.manifest.name), tensor_blob.encode(arrays, header))


def read_due_evaluation(store: ObjectStore, name: str) -> Checkpoint:
    """Raises `ObjectMissing`, and `CheckpointDamaged` for other bytes than were written."""
    try:
        arrays, header = tensor_blob.decode(store.get(_key(name)))
        manifest = Manifest.model_validate(header.get("manifest"))
        objects = {key: array.tobytes() for key, array in arrays.items()}
        if manifest.name != name or manifest.objects != describe_objects(objects):
            raise ValueError("its objects are not those of its manifest")
    except (FragmentError, ValueError) as error:
        raise CheckpointDamaged(f"{name}, which is due to be evaluated, cannot be read: {error}") from None
    return Checkpoint(manifest, objects)


def delete_due_evaluation(store: ObjectStore, name: str) -> None:
    store.delete(_key(name))
