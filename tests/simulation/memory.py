"""The memory that the processes of a host share, as a dictionary: it may be full, or lose all that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property

import pytest

from stagecoach.shared.protocol import payload_shards, policy_board
from stagecoach.shared.protocol.shared_memory import SharedMemory


class Memory(SharedMemory):
    """Memory of one run (shared/protocol/shared_memory.py)."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = {}
        self.full = False

    def __bool__(self) -> bool:
        return True

    @cached_property
    def token(self) -> str:
        return "simulated"

    def put(self, name: str, body: bytes) -> bool:
        if self.full and len(self.files.get(name, b"")) < len(body):  # else it has its room already
            self.files.pop(name, None)
            return False
        self.files[name] = body
        return True

    def rename(self, name: str, to: str) -> None:
        if name in self.files:
            self.files[to] = self.files.pop(name)

    def get(self, name: str, size: int) -> bytes | None:
        body = self.files.get(name)
        return body if body is not None and len(body) == size else None

    def holds(self, name: str) -> bool:
        return name in self.files

    def names(self) -> list[str]:
        return sorted(self.files)

    def remove(self, names: Iterable[str]) -> int:
        return sum(self.files.pop(name, None) is not None for name in names)


@contextmanager
def for_all_bodies() -> Iterator[None]:
    """Takes small bodies and policy versions into shared memory, too, while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (payload_shards, policy_board):
            patch.setattr(module, "AT_LEAST", 1)
        yield
