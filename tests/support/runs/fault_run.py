"""A Redis of a test's own, with a proxy before it, shards or shared memory where they are wanted, and the games played
on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.services.memory_folder import MemoryFolder, clear_abandoned_memory
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.failure import RoleEnd
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.run_context import open_run_context
from stagecoach.trainer_node.learning.learner import Learner
from tests.support.processes.waiting import eventually, meanwhile
from tests.support.runs.builders import shard_fields
from tests.support.runs.game import Game, balanced, make_game, small
from tests.support.services.fault_proxy import FaultProxy
from tests.support.services.own_redis import OwnRedis

UPDATES = 6
"""Updates of a run, two fragments each."""


class FaultRun:
    def __init__(self, folder: Path, shards: int = 0, memory: bool = False, settings: Any = None) -> None:
        self.folder = folder
        self.redis = OwnRedis(folder / "redis", settings=settings)
        self.proxy = FaultProxy(self.redis.port)
        self.shards = [OwnRedis(folder / f"shard-{number}", self.redis.password) for number in range(shards)]
        self.memory = MemoryFolder(folder / "redis") if memory else None
        self._games: list[Game] = []

    def config(self, deadline: float = 60.0, shards: Iterable[str] | None = None, **sections: Any) -> Config:
        """A small run that gives up a silent connection soon, and Redis and shards late; bodies are on the shards."""
        urls = [shard.url for shard in self.shards] if shards is None else list(shards)
        rollout = {"fragment_steps": 8, "fragments_per_update": 2, "wait_deadline_seconds": deadline}
        redis: dict[str, Any] = {"timeout_seconds": 2, "retry_seconds": deadline}
        if urls:  # they belong to a Redis that is named
            redis |= {"url": self.redis.url, "shards": urls}
        return small(**({"redis": redis, "rollout": rollout} | sections))

    def game(self, config: Config | None = None) -> Game:
        server, fields = self.redis.through(self.proxy.port), dict[str, str]()
        if self.memory is not None:
            fields = {"memory_folder": str(self.memory.path), "redis_folder": str(self.redis.folder)}
        self._games.append(make_game(server, self.folder, config or self.config(), **fields))
        return self._games[-1]

    def kill_shards(self) -> None:
        """Kills the shards; `start_shards` restores their data."""
        for shard in self.shards:
            shard.kill()

    def start_shards(self) -> None:
        for shard in self.shards:
            shard.start()

    def bodies(self, game: Game) -> set[str]:
        """Names of the bodies outside the log."""
        return shard_fields(game.role) | {name.split(":", 1)[1] for name in game.role.bodies.memory.names()}

    def lose_all(self) -> None:
        """All bodies outside the log are gone."""
        for shard in self.shards:
            shard.command("FLUSHALL")
        if self.memory is not None:
            for path in self.memory.path.glob("worker-*"):
                path.unlink()

    def lose(self, game: Game, *seqs: int) -> Callable[[], None]:
        """The bodies of these fragments are gone; returns how they come back."""
        key, lost = RunKeys(game.role.run_id).bodies("worker-0"), list[Callable[[], object]]()
        for shard in self.shards:
            for field in shard.command("HKEYS", key):
                if int(field.split(b":")[1]) in seqs:
                    lost.append(partial(shard.command, "HSET", key, field, shard.command("HGET", key, field)))
                    shard.command("HDEL", key, field)
        for path in self.memory.path.glob("worker-0:*") if self.memory is not None else ():
            if int(path.name.split(":")[2]) in seqs:
                lost.append(partial(path.with_name("away").joinpath(path.name).rename, path))
                path.with_name("away").mkdir(exist_ok=True)
                path.rename(path.with_name("away") / path.name)
        assert len(lost) == len(seqs)

        def come_back() -> None:
            for restore in lost:
                restore()

        return come_back

    def forsake_memory(self) -> None:
        """The process that held the shared memory is killed; its lock is gone, its folder stays."""
        assert self.memory is not None
        self.memory._owner.close()

    def renew_memory(self, game: Game) -> None:
        """The run starts again: what it opens from here on sees a new folder."""
        clear_abandoned_memory()
        self.memory = MemoryFolder(self.redis.folder)
        config, address = game.role.config, replace(game.role.address, memory_folder=str(self.memory.path))
        game.open = lambda: open_run_context(config, address)
        game.role = game.open()

    def close(self) -> None:
        """Ends all of it; whoever says good-bye does not wait for a server that a test has killed."""
        self.proxy.heal()
        for server in (self.redis, *self.shards):
            if not server.runs:
                server.start()
        self.proxy.retarget(self.redis.port)
        for game in self._games:
            game.end()
        self.proxy.close()
        if self.memory is not None:
            self.memory.close()
        for server in (self.redis, *self.shards):
            server.kill()


@contextmanager
def replica_of(place: FaultRun, port: int) -> Iterator[OwnRedis]:
    """A replica that has all of the primary that is behind `port`."""
    replica = OwnRedis(place.folder / "replica", place.redis.password, {"replicaof": f"127.0.0.1 {port}"})
    try:
        eventually(lambda: replica.command("INFO", "replication")["master_link_status"] == "up")
        wait_until_replicated(replica, place)
        yield replica
    finally:
        place.proxy.cut()
        replica.kill()


def wait_until_replicated(replica: OwnRedis, place: FaultRun) -> None:
    offsets = ((replica, "slave_repl_offset"), (place.redis, "master_repl_offset"))
    eventually(lambda: len({server.command("INFO", "replication")[name] for server, name in offsets}) == 1)


class Witness:
    """Checks that no log entry is learned twice, and that workers act with one policy under each version."""

    def __init__(self, game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
        self.game = game
        self.learned: set[str] = set()
        """Positions of all entries behind the present weights."""
        learn = Learner.learn

        def seen(learner: Learner, fragments: Any, phase: Any) -> Any:
            if learner is game.trainer.learner:  # not a replay's
                self._check(fragments)
            return learn(learner, fragments, phase)

        monkeypatch.setattr(Learner, "learn", seen)

    def _check(self, fragments: Any) -> None:
        positions = {item.position for item in fragments}
        assert len(positions) == len(fragments) and not positions & self.learned, "learned twice"
        self.learned |= positions
        versions = {item.header.version: item.header.history for item in fragments}
        histories = {known: self.game.trainer.consumer.history(known) for known in versions}
        assert versions == histories, "acted by another policy of that number"

    def restarted(self) -> None:
        """Forgets what the present trainer's checkpoint does not cover; call after each restart."""
        restored = id_order(self.game.trainer.consumer.committed.position)
        self.learned = {position for position in self.learned if id_order(position) <= restored}


def as_if_nothing_had_been(game: Game, undisturbed: str, incarnation: int = 0) -> None:
    """The goal is reached, the accounting balances, nothing was lost or learned twice, and the weights are the same."""
    game.finish()
    total = balanced(game)["total"]
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    assert total["consumed"]["fragments"] == 2 * UPDATES
    assert "lost" not in total["dropped"] and "duplicate" not in total["dropped"]
    assert game.worker.incarnation == incarnation
    assert game.policy_hash() == undisturbed
    state = game.role.flow.read()
    assert 0 <= state.in_flight <= state.window


def run_beside(game: Game, faults: Callable[[], object] = lambda: None) -> None:
    """Trainer and worker each in a thread until the run has ended, while `faults` happen."""

    def act() -> None:
        while not isinstance(game.worker.step(0.2), RoleEnd):
            pass

    with meanwhile(faults), meanwhile(act):
        while game.trainer.step(0.2) != "ended":
            pass
        game.trainer.finish("exhausted")


def new_worker(game: Game) -> None:
    game.worker.stop("replaced")
    game.worker = Worker(game.open(), 0)
    game.worker.start()
