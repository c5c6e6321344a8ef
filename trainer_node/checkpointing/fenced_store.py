"""The store as a trainer of one epoch has it: older trainers write nothing, and deleting comes after durability."""

from stagecoach.shared.base.errors import Fenced
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.storage.object_store import ObjectStore


class FencedStore:
    """`put` and `delete` raise `Fenced` once a newer trainer has taken over."""

    def __init__(self, store: ObjectStore, flow: Flow, epoch: int) -> None:
        self._store, self._flow, self.epoch = store, flow, epoch
        self.get, self.keys, self.folders, self.check = store.get, store.keys, store.folders, store.check

    def put(self, key: str, data: bytes) -> None:
        self.ask()
        self._store.put(key, data)

    def delete(self, key: str) -> None:
        self.ask()
        self._store.delete(key)

    def ask(self) -> None:
        if not self._flow.holds(self.epoch):
            raise Fenced(f"epoch {self.epoch} may not write checkpoints; a newer trainer has taken over")


class LateDeletions:
    """A store whose `delete` only notes the key; `sweep` deletes. So a store that cannot delete holds up nothing that
    has to be durable. What a crash leaves undeleted, each owner of a key finds again."""

    def __init__(self, store: FencedStore) -> None:
        self.fenced = store
        self.get, self.keys, self.folders, self.check = store.get, store.keys, store.folders, store.check
        self.doomed: dict[str, None] = {}
        """Keys that are to go, in their order."""

    def put(self, key: str, data: bytes) -> None:
        self.doomed.pop(key, None)
        self.fenced.put(key, data)

    def delete(self, key: str) -> None:
        self.doomed[key] = None

    def sweep(self) -> None:
        """Deletes what is noted; raises as the store does, and the rest stays noted."""
        for key in list(self.doomed):
            self.fenced.delete(key)
            self.doomed.pop(key, None)
