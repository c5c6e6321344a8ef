"""A store in memory that fails before or after a write, and can be changed while it is read."""

from __future__ import annotations

from collections.abc import Callable

from stagecoach.shared.base.errors import ObjectMissing, StoreError


class MemoryStore:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fails_in: int | None = None
        """Number of writes that succeed before one fails."""
        self.fails_late = False
        """The write that fails takes place, and its answer is lost."""
        self.before_get: Callable[[], object] = lambda: None

    def check(self) -> None: ...

    def get(self, key: str) -> bytes:
        self.before_get()
        if key not in self.objects:
            raise ObjectMissing(key)
        return self.objects[key]

    def put(self, key: str, data: bytes) -> None:
        self._write(lambda: self.objects.__setitem__(key, data))

    def delete(self, key: str) -> None:
        self._write(lambda: self.objects.pop(key, None))

    def folders(self, prefix: str) -> list[str]:
        return sorted({key.removeprefix(prefix).split("/")[0] for key in self.objects if key.startswith(prefix)})

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def _write(self, write: Callable[[], object]) -> None:
        failing = self.fails_in == 0
        self.fails_in = None if failing or self.fails_in is None else self.fails_in - 1
        if not failing or self.fails_late:
            write()
        if failing:
            raise StoreError("the store is away")
