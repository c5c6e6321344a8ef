"""Trial of a store: list, put, get and delete."""

from contextlib import suppress

from stagecoach.shared.base.errors import DeletionRefused, ObjectMissing, StagecoachError
from stagecoach.shared.storage.object_store import ObjectStore

PROBE = "probe"
_CONTENT = b"stagecoach"


def try_store(store: ObjectStore) -> str | None:
    """Raises what the store refuses, by the name of the right. A refused deletion ends no run: it is returned."""
    store.check()
    store.put(PROBE, _CONTENT)
    with suppress(ObjectMissing):  # another trial deleted it meanwhile
        if store.get(PROBE) != _CONTENT:
            raise StagecoachError("the store gave back other bytes than it was given; do not use it")
    try:
        store.delete(PROBE)
    except DeletionRefused as error:
        return f"{error}. A run keeps all its checkpoints, its log's archive and its metrics' segments there"
    return None
