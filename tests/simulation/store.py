"""A store in memory: what it holds, and how it fails. Each process has its own way to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from stagecoach.shared.base.errors import DeletionRefused, ObjectMissing, StoreError, StoreUnavailable
from tests.simulation.scheduler import Scheduler

T = TypeVar("T")


@dataclass
class Bucket:
    """What the store holds, and what is wrong with it."""

    scheduler: Scheduler
    objects: dict[str, bytes] = field(default_factory=dict)
    up: bool = True
    full: bool = False
    deletes: bool = True
    fails: float = 0.0
    """How often a request fails: before it is carried out, after it, or it is carried out late, in half at first, or
    twice."""
    slow: float = 0.02
    """How often a request takes seconds."""
    changed: Callable[[str], None] = lambda key: None
    """Called after each change of an object."""

    def write(self, key: str, data: bytes | None) -> None:
        before = self.objects.pop(key, None)
        if data is not None:
            self.objects[key] = data
        if data != before:
            self.changed(key)


class Store:
    """The store as one process has it (shared/storage/object_store.py)."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._scheduler = bucket, bucket.scheduler

    def check(self) -> None:
        self._request(lambda: None)

    def get(self, key: str) -> bytes:
        return self._request(lambda: self._found(key))

    def put(self, key: str, data: bytes) -> None:
        if self._bucket.full:
            self._travel()
            raise StoreError(f"writing {key}: the store is out of room")
        self._request(partial(self._bucket.write, key, data), partial(self._bucket.write, key, data[: len(data) // 2]))

    def delete(self, key: str) -> None:
        if not self._bucket.deletes:
            self._travel()
            raise DeletionRefused(f"deleting {key} is refused")
        self._request(partial(self._bucket.write, key, None))

    def folders(self, prefix: str) -> list[str]:
        def listed() -> list[str]:
            below = (key.removeprefix(prefix) for key in self._bucket.objects if key.startswith(prefix))
            return sorted({rest.split("/")[0] for rest in below if "/" in rest})

        return self._request(listed)

    def keys(self, prefix: str) -> list[str]:
        return self._request(lambda: sorted(key for key in self._bucket.objects if key.startswith(prefix)))

    def _found(self, key: str) -> bytes:
        if key not in self._bucket.objects:
            raise ObjectMissing(key)
        return self._bucket.objects[key]

    def _request(self, carry_out: Callable[[], T], by_half: Callable[[], None] | None = None) -> T:
        draw, bucket = self._scheduler.random, self._bucket
        self._travel()
        if not bucket.up:
            raise StoreUnavailable("the store does not answer")
        failure = draw.choice(("before", "after", "late", "half")) if draw.random() < bucket.fails else ""
        if failure == "before":
            raise StoreError("the store has failed")
        if failure == "late":
            self._scheduler.after(draw.uniform(0.0, 5.0), partial(_quietly, carry_out))
            raise StoreError("the store's answer was lost, and it is slow")
        if failure == "half" and by_half is not None:  # some stores show an object before it is complete
            by_half()
            self._travel()
        result = carry_out()
        self._travel()
        if failure == "after":
            raise StoreError("the store's answer was lost")
        return result

    def _travel(self) -> None:
        draw = self._scheduler.random
        if self._scheduler.current is not None:
            slow = draw.random() < self._bucket.slow
            self._scheduler.block(draw.uniform(0.5, 8.0) if slow else draw.uniform(0.0, 0.01))


def _quietly(call: Callable[[], Any]) -> None:
    try:
        call()
    except ObjectMissing:
        pass
