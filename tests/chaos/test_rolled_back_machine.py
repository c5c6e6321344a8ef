"""The real trainer and real workers in random order, while Redis is rolled back, fills up, and everybody dies.

A Redis that is rolled back is one whose keys are restored to an earlier moment, and which another process seems
to serve.
The model is what the trainer has really learned, fragment by fragment: a restart takes it back to its checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import WorkerSuperseded
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Ledger, read_accounting
from tests.support.runs.game import Game, make_game, small
from tests.support.services.own_redis import OwnRedis

Learned = tuple[str, int, int, str]
"""Worker, incarnation, sequence number, and a digest of what it saw: two fragments may have had the same number."""


class SetBack(RuleBasedStateMachine):
    server: OwnRedis
    folder: Path
    max_lag: int

    @initialize()
    def start(self) -> None:
        """A new run; version 0 is published and durable."""
        rollout = {"fragment_steps": 4, "fragments_per_update": 2, "max_policy_lag": self.max_lag}
        environment = {"id": "CartPole-v1", "num_envs": 2}
        config = small(
            environment=environment, rollout=rollout, algorithm={"minibatch_size": 16, "epochs": 1},
            checkpoint={"every": "3 updates", "keep_last": 2}, stop_at={"updates": 10_000},
        )  # fmt: skip
        self.game: Game = make_game(self.server.through(self.server.port), self.folder, config)
        self.workers = [self.game.worker, self.game.another_worker(1)]
        self.game.worker, self.game.others = self.workers[0], []
        self.learned_at: dict[int, tuple[Learned, ...]] = {0: ()}
        self.weights_at: dict[int, str] = {}
        self.floor = 0
        self.alive = True
        self.full = False
        self.pasts: list[dict[bytes, Any]] = []
        self.watch()
        self.remember()

    def watch(self) -> None:
        seen_by = self.game.trainer.learner
        self.learned = list(self.learned_at[self.game.trainer.version])
        emulate = seen_by.emulate_acting

        def seen(fragments: Sequence[Fragment], phase: Any) -> None:
            for found in fragments:
                header, observations = found.header, found.columns["default"]["obs"]
                digest = hashlib.sha256(observations.tobytes()).hexdigest()
                self.learned.append((header.worker_id, header.incarnation, header.seq, digest))
            emulate(fragments, phase)

        seen_by.emulate_acting = seen  # type: ignore[method-assign]

    def keys(self) -> list[bytes]:
        prefix = RunKeys(self.game.role.run_id).prefix
        found: list[bytes] = list(self.game.role.redis.scan_iter(f"{prefix}*"))
        return [key for key in found if b":heartbeats:" not in key]

    # Workers

    @rule(updates=st.integers(1, 3), remembered=st.booleans())
    def play(self, updates: int, remembered: bool) -> None:
        for _ in range(updates):
            self.act(0, 1)
            if remembered:
                self.remember()
            self.act(1, 1)
            if self.alive:
                self.train(1)

    @rule(index=st.integers(0, 1), times=st.integers(1, 3))
    def act(self, index: int, times: int) -> None:
        for _ in range(times):
            try:
                assert self.workers[index].step(0) in ("pushed", "waited")
            except WorkerSuperseded:
                self.replace(index)

    @rule(index=st.integers(0, 1))
    def replace(self, index: int) -> None:
        self.workers[index].stop("replaced")
        self.workers[index] = Worker(self.game.open(), index)
        self.workers[index].start()

    @rule(index=st.integers(0, 1))
    def claim_and_lose_the_lease(self, index: int) -> None:
        """Claims, and acts for longer than the lease."""
        worker, client = self.workers[index], self.game.role.redis
        try:
            claim = self.game.role.flow.claim(worker.id, worker.incarnation, worker.claims.seq)
        except WorkerSuperseded:
            self.replace(index)
            return
        if claim.granted:
            name = f"{worker.id}:{worker.incarnation}:{worker.claims.seq}"
            client.zadd(RunKeys(self.game.role.run_id).claims, {name: 1})

    # The trainer

    @precondition(lambda self: self.alive)
    @rule(times=st.integers(1, 3))
    def train(self, times: int) -> None:
        """The trainer takes turns; what it comes to twice without a loss between is the same."""
        trainer = self.game.trainer
        for _ in range(times):
            word = trainer.step(0)
            assert word in ("updated", "waited")
            self.game.durable()
            if word == "updated":
                self.learned_at[trainer.version] = tuple(self.learned)
                weights = self.digest()
                assert self.weights_at.setdefault(trainer.version, weights) == weights
            self.floor = max(self.floor, trainer.version)
            self.published()

    def digest(self) -> str:
        state = self.game.trainer.learner.policies["default"].state_dict()
        return hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()

    def published(self) -> None:
        """Checks that the board has the newest version after a trainer's check."""
        state = self.game.role.flow.read()
        assert state.version == self.game.board_version() >= self.floor
        assert state.epoch == self.game.trainer.incarnation.epoch

    @precondition(lambda self: self.alive)
    @rule()
    def trainer_dies(self) -> None:
        """Kills the trainer between two turns, as `kill -9` does."""
        self.game.durable()
        self.game.crash()
        self.alive = False
        self.forget()

    def forget(self) -> None:
        """Forgets versions that neither Redis, the store nor a living trainer has."""
        newest = self.game.role.checkpoints.load_latest()
        assert newest is not None
        known = [self.game.role.flow.read().version, newest.manifest.version]
        self.floor = max([*known, self.game.trainer.version] if self.alive else known)
        self.weights_at = {version: found for version, found in self.weights_at.items() if version <= self.floor}

    @precondition(lambda self: not self.alive)
    @rule()
    def trainer_starts(self) -> None:
        self.game.restart()
        self.game.durable()
        self.alive = True
        self.watch()
        self.published()

    # Redis

    @rule()
    def remember(self) -> None:
        client = self.game.role.redis
        self.pasts = [*self.pasts[-2:], {key: client.dump(key) for key in self.keys()}]

    @rule(far=st.integers(1, 3), who_dies=st.sampled_from(["nobody", "trainer", "a worker"]), work=st.booleans())
    def rolled_back(self, far: int, who_dies: str, work: bool) -> None:
        """Redis comes back as it was; the trainer, if it lives, finds another process there.

        Workers may come first; and what the trainer has taken from the log may be there no more when it publishes.
        """
        chosen = max(0, len(self.pasts) - far)
        self.pasts = self.pasts[: chosen + 1]
        client = self.game.role.redis
        if self.alive and who_dies == "trainer":
            self.trainer_dies()
        self.server.command("CONFIG", "SET", "maxmemory", 0)
        with client.pipeline(transaction=True) as pipe:
            for key in self.keys():
                pipe.delete(key)
            for key, value in self.pasts[chosen].items():
                pipe.restore(key, 0, value)
            pipe.execute()
        self.server.command("CONFIG", "SET", "maxmemory", int(self.full))
        if self.alive:
            recovery = self.game.trainer.recovery
            recovery.accounting.redis_process, recovery.redis_checked = "the process before", -1e9
        self.forget()
        if who_dies == "a worker":
            self.replace(0)
        if work:
            self.act(0, 2)
            self.act(1, 1)

    @rule(full=st.sampled_from([False, False, False, True]))
    def memory(self, full: bool) -> None:
        """Fills the memory: no new claim is granted, and everything else continues."""
        self.full = full
        self.server.command("CONFIG", "SET", "maxmemory", int(full))

    # What always holds

    @invariant()
    def the_ledger_balances_and_the_bound_holds(self) -> None:
        """Also before the trainer has seen that Redis was rolled back: a past is right in itself."""
        if not hasattr(self, "game"):
            return
        lines = read_accounting(self.game.role.redis, self.game.role.run_id)
        assert all(line.balances for line in lines.values()), {name: line.as_dict() for name, line in lines.items()}
        state = self.game.role.flow.read()
        assert 0 <= state.in_flight <= state.window

    @invariant()
    def every_fragment_is_learned_once(self) -> None:
        """Checks that consumed fragments equal learned ones, without a duplicate."""
        if not hasattr(self, "game") or not self.alive:
            return
        assert len(set(self.learned)) == len(self.learned)
        committed = Ledger.from_json(self.game.trainer.consumer.committed.ledger)
        assert committed.consumed().fragments == len(self.learned)

    def teardown(self) -> None:
        """Checks that the run continues by itself from its present state."""
        if not hasattr(self, "game"):
            return
        try:
            self.server.command("CONFIG", "SET", "maxmemory", 0)
            if not self.alive:
                self.trainer_starts()
            claims = RunKeys(self.game.role.run_id).claims
            for claim in self.server.command("ZRANGE", claims, 0, -1):
                self.server.command("ZADD", claims, 1, claim)
            goal = self.game.role.flow.read().version + 2
            for _ in range(60):
                self.act(0, 1)
                self.act(1, 1)
                self.train(1)
                if self.game.trainer.version >= goal:
                    break
            assert self.game.trainer.version >= goal, "the run is stuck"
        finally:
            self.game.crash()
            for worker in self.workers:
                worker.stop("end of test")
            self.server.command("FLUSHALL")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[OwnRedis]:
    found = OwnRedis(tmp_path / "redis", settings={"appendonly": "no"})
    yield found
    found.kill()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_policy_lag", [0, 2])
def test_nothing_is_learned_twice_and_the_ledger_balances(
    server: OwnRedis, tmp_path: Path, max_policy_lag: int
) -> None:
    class Configured(SetBack):
        folder, max_lag = tmp_path, max_policy_lag

    Configured.server = server
    run_state_machine_as_test(
        Configured,
        settings=settings(
            max_examples=25, stateful_step_count=50, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
