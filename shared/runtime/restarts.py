"""The bound on consecutive restarts without progress."""

from typing import Any, cast

import redis

from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.events import read_evaluations
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.keys import RunKeys

Progress = tuple[int, ...]


class RestartBound:
    """Counts consecutive restarts without progress; call `record_progress` when there is some."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._furthest: Progress | None = None
        self.progressed = False
        self.ends = 0
        """Consecutive ends without progress before them."""

    def record_progress(self, progress: Progress) -> None:
        """Compares with the furthest before; the first call sets where it starts from."""
        self.progressed |= self._furthest is not None and progress > self._furthest
        self._furthest = progress if self._furthest is None else max(progress, self._furthest)

    def ended(self) -> bool:
        """Counts an end, unless there was progress since the last one; returns whether it is one too many."""
        self.ends = 0 if self.progressed else self.ends + 1
        self.progressed = False
        return self.ends > self._allowed


def learning_progress(client: redis.Redis, run_id: str) -> Progress:
    """Returns the progress of trainer, ranks and services: the log position that is accounted for. A trainer that only
    replays what a former one has learned, or publishes a rollback, does not move it."""
    return id_order(Flow(client, run_id).read().committed_id)


def acting_progress(client: redis.Redis, run_id: str, worker: str) -> Progress:
    return (int(cast(Any, client.hget(RunKeys(run_id).produced, f"{worker}:fragments")) or 0),)


def evaluation_progress(client: redis.Redis, run_id: str) -> Progress:
    return (max((int(scores["version"]) for scores in read_evaluations(client, run_id).values()), default=-1),)
