"""One incarnation of the trainer: who it is to the rest of the run, and each way in which it ends."""

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

import redis

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import Fenced, ShardUnavailable, StoreError, StoreUnavailable
from stagecoach.shared.base.failure import Failure, RoleEnd, RunEnd, reason_in_words
from stagecoach.shared.experience.counters import PhaseCounters
from stagecoach.shared.experience.log_entry import LogEntry
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat, retry_until_deadline
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.quarantine import WorkRecord
from stagecoach.shared.protocol.redis_client import retries
from stagecoach.shared.runtime.profile import Profile
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import FINISHED
from stagecoach.trainer_node.distributed.leader import Leader, SingleProcess

T = TypeVar("T")
_LOGGER = logging.getLogger("stagecoach.trainer")


class Incarnation:
    """Heartbeat, epoch and group of ranks of one trainer, and what has to be closed at its end."""

    def __init__(self, role: RunContext, run_folder: str | None = None) -> None:
        self.role, self.run_folder, self.log = role, run_folder, role.log()
        self.heartbeat = Heartbeat(role.redis, role.run_id, "trainer", "trainer")
        self.profile = Profile(role.checkpoints.store, "trainer", role.config.metrics.profile)
        self.stages = self.profile.add("training", self.heartbeat.stages)
        self.outage_seconds = role.config.store.retry_seconds
        self.epoch = 0
        """0 until it has fenced the trainers before it."""
        self.ranks: SingleProcess | Leader = SingleProcess()
        self.closing = contextlib.ExitStack()
        self.version, self.counters = -1, PhaseCounters().as_dict()
        """Version and counters of the last update that it reported: a failed update was never trained on."""
        self.learns = False
        """True once recovery has ended, so that a checkpoint can be saved on request."""
        self.shutdown_requested = False

    def emit_event(self, text: str, kind: str = "trainer") -> None:
        self.role.emit_event(kind, text)

    def with_store(self, call: Callable[[], T]) -> T:
        """Returns the result of `call`; retries, as a named wait, while the store (or a Redis shard) is away."""
        passing = StoreError, StoreUnavailable, ShardUnavailable
        with self.heartbeat.waiting("the store", self.outage_seconds, outage=True) as wait:
            return retry_until_deadline(wait, call, passing)

    def read_log(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """Reads as `ExperienceLog.read` does; retries, as a named wait, while a shard is away, until the run ends."""
        with contextlib.suppress(ShardUnavailable):
            return self.log.read(after, count, block_seconds)

        def again() -> list[LogEntry]:
            over = self.shutdown_requested or self.role.flow.read().state is not RunState.RUNNING
            return [] if over else self.log.read(after, count, 0.0)

        with self.heartbeat.waiting("a Redis shard", self.role.config.redis.retry_seconds, outage=True) as wait:
            return retry_until_deadline(wait, again, (ShardUnavailable,), longest_pause_seconds=1.0)

    def request_shutdown(self) -> None:
        """Leaves after the present update, from a signal handler; at once if nothing has been learned yet."""
        self.shutdown_requested = True
        retries(self.role.redis).hurry()
        if self.heartbeat.waits and not self.learns:
            raise KeyboardInterrupt

    def finished(self, reason: str) -> str:
        """The run is over, and all of it is durable."""
        self.closing.close()
        self.heartbeat.stop(reason)
        self.profile.write()
        return reason

    def preempted(self, how: str) -> str:
        """Leaves the run to the next trainer; what is still being written is harmless, or refused by the next epoch."""
        with contextlib.suppress(redis.RedisError):
            if self.epoch:
                WorkRecord(self.role.redis, self.role.run_id, self.epoch).leave()
            self.emit_event(f"the trainer leaves {how}; the next one continues")
        self.ranks.leave()
        self.heartbeat.stop("left: another trainer may take over")
        self.profile.write()
        return RoleEnd.PREEMPTED

    def fenced(self, error: Fenced) -> None:
        """A newer trainer has taken over, and beats under this name."""
        self.ranks.leave()
        self.heartbeat.stop(f"fenced: {error}", last_beat=False)

    def fail(self, error: Exception) -> None:
        """Ends the run with `.finished: failed` and the diagnosis; checkpoints stay as they are. A trainer that never
        took over, or that was fenced since, has no right to."""
        _LOGGER.exception("the trainer failed")
        self.ranks.leave()
        failure = Failure.of(error)
        end = RunEnd.failed(failure)
        try:
            if self.epoch > 0 and self.role.flow.holds(self.epoch):
                self.role.flow.set_state(RunState.FINISHED, end.reason, epoch=self.epoch, failure=end.failure)
                self.write_finished(end.reason, None)
        except Exception:
            _LOGGER.exception("the failure could not be recorded in Redis or the store")
        self.closing.close()
        self.heartbeat.stop(failure.detail, failure=failure.kind)

    def abandoned(self) -> None:
        """Ends the threads of a trainer in this process, and leaves the run as a killed one would."""
        self.closing.close()
        self.heartbeat.stop("abandoned", last_beat=False)

    def write_finished(self, reason: str, final: str | None) -> None:
        """`.finished`: why, the final checkpoint if there is one, the counters and the accounting."""
        role = self.role
        ledger = {name: line.as_dict() for name, line in read_accounting(role.redis, role.run_id).items()}
        content = {
            "run_id": role.run_id, "reason": reason, "failure": role.flow.read().failure, "final": final,
            "version": self.version, "counters": self.counters if self.version >= 0 else None, "ledger": ledger,
            "time": round(world.unix_time(), 3),
        }  # fmt: skip
        role.checkpoints.write_marker(FINISHED, content)
        self.emit_event(f"run finished: {reason_in_words(reason)}", "state")
