"""The bound on restarts: how often in a row something may end without having made progress, whatever the clock says.

Used for roles, embedded services, embedded Ray, the group of the ranks and environments. A slow machine starts things
slowly, so a number of restarts within some seconds says nothing on it; one that ends again and again and has done
nothing in between will do no more the next time.
"""

from __future__ import annotations

from typing import Any, cast

import redis

from shared.events import read_evaluations
from shared.experience_log import id_order
from shared.flow import Flow
from shared.redis_keys import RunKeys

Progress = tuple[int, ...]
"""How far something has come; compared with what it had come to before."""


class RestartBound:
    """Counts the ends in a row of something that is started again; `saw` tells it how far that has come by now."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._furthest: Progress | None = None
        self.progressed = False
        """Since the last end."""
        self.ends = 0
        """In a row, without progress before them."""

    def saw(self, progress: Progress) -> None:
        """How far it has come; the first call says where it starts from. More than ever before is progress."""
        self.progressed |= self._furthest is not None and progress > self._furthest
        self._furthest = progress if self._furthest is None else max(progress, self._furthest)

    def ended(self) -> bool:
        """Counts an end, unless there was progress since the last one; whether it is one too many."""
        self.ends = 0 if self.progressed else self.ends + 1
        self.progressed = False
        return self.ends > self._allowed


def learning_progress(client: redis.Redis, run_id: str) -> Progress:
    """Of trainer, ranks and whatever the whole run stands on: the log position that has been accounted for.

    A trainer that only learns again what a former one has learnt, or publishes a fork, does not move it.
    """
    return id_order(Flow(client, run_id).read().settled_id)


def acting_progress(client: redis.Redis, run_id: str, worker: str) -> Progress:
    """Of a worker: the fragments that it has pushed."""
    return (int(cast(Any, client.hget(RunKeys(run_id).produced, f"{worker}:fragments")) or 0),)


def evaluation_progress(client: redis.Redis, run_id: str) -> Progress:
    """Of the evaluator: the newest version that has a score."""
    return (max((int(scores["version"]) for scores in read_evaluations(client, run_id).values()), default=-1),)
