"""The product's own path: claim and push on one side, read, publish and trim on the other.

Both sides are what rollout worker and trainer do for each fragment and each version, without acting and learning.
"""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.transport.made_fragments import Shape, made_columns, made_fragment
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.log_entry import START, LogEntry
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import VersionHeader, encode_board, state_arrays
from stagecoach.shared.protocol.flow_control import Claim
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.state.log_consumer import LogConsumer, RedisAccounting

TRIM_EACH = 10
"""Versions between two trims, as between two checkpoints of the default config."""


class PushingWorker:
    """One rollout worker's part."""

    def __init__(self, index: int) -> None:
        self._worker = f"worker-{index}"
        self._index = index

    def join(self, launch: RoleLaunch, shape: Shape) -> int:
        """Registers in a run, and makes what it will push; answers the bytes of a fragment."""
        self._role, self._shape = launch.open(self._worker), shape
        self._columns = made_columns(self._role.description(), shape, self._index)
        self._log = self._role.log()
        self._incarnation, _ = self._role.flow.register(self._worker)
        self._blob = fragment.encode(self._fragment(0, 0))
        return len(self._blob)

    def push(self, count: int, encode: bool) -> float:
        """So many fragments, each claimed before; encoded anew each time, or once for all. Answers when it began."""
        began = time.monotonic()
        ahead: Claim | None = None
        for seq in range(count):
            claim = self._granted(seq, ahead)
            blob = fragment.encode(self._fragment(seq, claim.version)) if encode else self._blob
            then = self._role.flow.claiming(self._worker, self._incarnation, seq + 1)
            word = self._log.push(
                self._worker, self._incarnation, seq, claim.epoch, self._shape.transitions, blob, then=then,
                memory=claim.memory,
            )  # fmt: skip
            if word != "pushed":
                raise RuntimeError(f"a push was answered with {word!r}")
            ahead = then.reply
        return began

    def leave(self) -> None:
        """Of this run."""
        self._role.redis.close()

    def _granted(self, seq: int, ahead: Claim | None) -> Claim:
        """`ahead`: what was answered to the claim that went with the last push."""
        claim = ahead or self._role.flow.claim(self._worker, self._incarnation, seq)
        while not claim.granted:
            if not claim.waiting:
                raise RuntimeError(f"a claim was answered with {claim.reply!r}")
            self._role.flow.wait_for_wakeup(claim, 1.0)
            claim = self._role.flow.claim(self._worker, self._incarnation, seq)
        return claim

    def _fragment(self, seq: int, version: int) -> fragment.Fragment:
        return made_fragment(
            self._role.run_id, self._worker, seq, version, self._shape, self._columns, self._incarnation
        )


class TakingTrainer:
    """The trainer's part."""

    def join(self, launch: RoleLaunch) -> None:
        """Takes over the run and publishes version 0."""
        self._role = launch.open("trainer")
        self._log = self._role.log()
        self._epoch = self._role.flow.take_over(memory=self._role.bodies.memory.token)
        self._publishing = _Publishing(self._role, self._epoch)
        self._publishing.publish(0, START, Ledger())

    def take(self, count: int, decode: bool) -> float:
        """So many fragments; answers when the last was here.

        Without `decode` they stay bytes; with it, they go through the trainer's log consumer: decoded, checked, booked.
        """
        return self._decoded(count) if decode else self._as_bytes(count)

    def leave(self) -> None:
        """Of this run."""
        self._role.redis.close()

    def _as_bytes(self, count: int) -> float:
        each, position, got = self._role.config.rollout.fragments_per_update, START, 0
        page: list[LogEntry] = []
        while got < count:
            found = self._log.read(position, each - len(page), 1.0)
            page += found
            got += len(found)
            position = page[-1].id if page else position
            if len(page) == each or got == count:
                self._publishing.publish(len(page), position, Ledger())
                page = []
        return time.monotonic()

    def _decoded(self, count: int) -> float:
        config, each = self._role.config, self._role.config.rollout.fragments_per_update
        accounting = RedisAccounting(self._role.redis, self._role.run_id, self._epoch)
        consumer = LogConsumer(self._role.run_id, config, self._role.description(), self._log.read, accounting)
        taken = 0
        for got in range(1, count + 1):
            while consumer.take(self._publishing.version, Phase.TRAIN, 1.0) is None:
                self._refuse_drops(consumer)
            taken += 1
            if taken == each or got == count:
                consumer.commit()
                self._publishing.publish(taken, consumer.committed.position, consumer.ledger)
                taken = 0
        ended = time.monotonic()
        self._refuse_drops(consumer)
        return ended

    @staticmethod
    def _refuse_drops(consumer: LogConsumer) -> None:
        """A worker that the kernel held back for longer than the policy lag allows; the sample would be of less."""
        dropped = {worker: account.dropped for worker, account in consumer.ledger.accounts.items() if account.dropped}
        if dropped:
            raise RuntimeError(f"the consumer dropped fragments: {dropped}")


class _Publishing:
    """Versions of a small policy, and the trims that a checkpoint allows."""

    def __init__(self, role: RunContext, epoch: int) -> None:
        description = role.description()
        policies = build_policies(description.policies, role.config.policies, role.config.algorithm.resolved(), seed=0)
        states = {policy_id: state_arrays(policy) for policy_id, policy in policies.items()}
        self._header = VersionHeader(0, Phase.TRAIN, PhaseCounters())
        self._blob = encode_board(states, self._header)
        self._board = PolicyBoard(role.redis, role.run_id)
        self._log = role.log()
        self._epoch = epoch
        self.version = -1

    def publish(self, consumed: int, position: str, ledger: Ledger) -> None:
        """The next version, behind so many fragments."""
        self.version += 1
        self._board.publish(
            epoch=self._epoch, version=self.version, consumed=consumed, committed_id=position, ledger=ledger,
            header=replace(self._header, version=self.version), blob=self._blob,
        )  # fmt: skip
        if self.version and self.version % TRIM_EACH == 0:
            self._log.trim(self._epoch, position)
