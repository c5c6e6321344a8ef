"""The store as a trainer of one epoch has it: before each write it asks Redis whether that epoch still holds.

So a trainer that was cut off from the world while another took over finishes at most the one request that it was in
the middle of when it comes back, and is refused the next.
"""

from __future__ import annotations

from shared.errors import Fenced
from shared.flow import Flow
from shared.object_store import ObjectStore


class FencedStore:
    """Reads as the store does; writes only while the trainer may."""

    def __init__(self, store: ObjectStore, flow: Flow, epoch: int) -> None:
        self._store, self._flow, self._epoch = store, flow, epoch

    def check(self) -> None:
        """As the store does."""
        self._store.check()

    def get(self, key: str) -> bytes:
        """As the store does."""
        return self._store.get(key)

    def put(self, key: str, data: bytes) -> None:
        """As the store does; raises `Fenced` for an older trainer."""
        self.ask()
        self._store.put(key, data)

    def delete(self, key: str) -> None:
        """As the store does; raises `Fenced` for an older trainer."""
        self.ask()
        self._store.delete(key)

    def folders(self, prefix: str) -> list[str]:
        """As the store does."""
        return self._store.folders(prefix)

    def keys(self, prefix: str) -> list[str]:
        """As the store does."""
        return self._store.keys(prefix)

    def ask(self) -> None:
        """Raises `Fenced` for an older trainer."""
        if not self._flow.holds(self._epoch):
            raise Fenced(f"epoch {self._epoch} may not write checkpoints; a newer trainer has taken over")
