"""Objects of a run's store that checkpoints share, named by their SHA-256: what folds name, such as players.

They never change, so writing one again is harmless, and a reader may keep what it has read. A checkpoint's manifest
lists all of them that it needs (`shared_objects`); what no checkpoint lists is deleted.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from stagecoach.shared.base.errors import ObjectMissing, SharedObjectUnusable

if TYPE_CHECKING:
    from stagecoach.shared.storage.object_store import ObjectStore  # its S3 client is not needed to act with a policy

SHARED_OBJECTS = "shared_objects/"


def write_shared_object(store: ObjectStore, data: bytes) -> str:
    """Stores an object and returns its SHA-256; raises as the store does."""
    sha256 = hashlib.sha256(data).hexdigest()
    store.put(SHARED_OBJECTS + sha256, data)
    return sha256


def read_shared_object(store: ObjectStore, sha256: str) -> bytes:
    """Returns the verified bytes; raises `SharedObjectUnusable`, or as the store does."""
    way_out = "bring the object back, or resume from a checkpoint without it, if there is one"
    try:
        data = store.get(SHARED_OBJECTS + sha256)
    except ObjectMissing:
        raise SharedObjectUnusable(f"the store does not have {SHARED_OBJECTS}{sha256}; {way_out}") from None
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise SharedObjectUnusable(
            f"{SHARED_OBJECTS}{sha256} was altered: its SHA-256 is {found} ({len(data)} bytes); {way_out}"
        )
    return data
