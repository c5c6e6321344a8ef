"""What a run tells of a Redis that is away: a file in its folder meanwhile (Redis cannot be asked), then an event."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from coordinator.preparation import connect_once
from shared.connection import retries
from shared.errors import StagecoachError
from shared.events import emit
from shared.full_disk import lacks_room
from shared.role import Role

_LOGGER = logging.getLogger("stagecoach.coordinator")
_FILE = "outage.json"
_SETTLE_SECONDS = 3.0
_TELLING: dict[Path, threading.Lock] = {}
"""Held by whoever tells of an outage of a run; all clients of a process meet the same one."""


def tell_of_outages(role: Role, folder: Path, *clients: redis.Redis) -> None:
    """From now on, of those that one of these clients meets."""
    path = folder / _FILE
    path.unlink(missing_ok=True)
    told = _TELLING.setdefault(path, threading.Lock())

    @contextmanager
    def away(trouble: str) -> Iterator[None]:
        """The first thread that meets an outage tells of it, and of its end."""
        if not told.acquire(blocking=False):
            yield
            return
        _LOGGER.warning("the run waits for Redis: %s", trouble)
        since = time.time()
        with suppress(OSError):
            path.write_text(json.dumps({"since": since, "trouble": trouble}))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            threading.Thread(target=back, args=(time.time() - since,), name="redis-is-back", daemon=True).start()

    def back(seconds: float) -> None:  # not in the midst of the call that has just come through
        text = f"Redis was away for {max(0.0, seconds):.0f} s; the run waited for it and continues"
        _LOGGER.warning("%s", text)
        with suppress(StagecoachError, redis.RedisError), connect_once(role, "coordinator") as client:
            emit(client, role.run_id, "outage", text)
        time.sleep(_SETTLE_SECONDS)  # others find it back somewhat later, and name the same outage until then
        told.release()

    for client in clients:
        if (found := retries(client)) is not None:
            found.named.append(away)


def outage_of_redis(folder: Path) -> str | None:
    """`Redis, since 10:20:30 (45 s): …`, while the coordinator of this folder's run waits for it; None else."""
    path = folder / _FILE
    try:
        since, text = path.stat().st_mtime, path.read_text()
    except OSError:
        return None
    trouble = "its log in logs/ says why"
    with suppress(ValueError, KeyError, TypeError):  # on a full disk there is the file, and nothing in it
        trouble = lacks_room(folder, 0) or trouble
        told = json.loads(text)
        since, trouble = float(told["since"]), str(told["trouble"])
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return f"Redis, since {clock} ({max(0.0, time.time() - since):.0f} s): {trouble}"
