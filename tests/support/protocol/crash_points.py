"""A small run whose processes die between any two writes, chosen by number: so every point can be tried in turn.

All that a process writes (a command or script of Redis, an object of the store) goes through its `Life`, which counts
it and, after so many writes, lets the process do nothing any more. To crash before a write and after the one before it
is the same for everybody else, so the numbers 0 … all writes are every point there is. The publisher is a thread of the
trainer's: it is waited for after each step, or held at a write of its own, and it dies with the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import redis

from stagecoach.coordinator.services.memory_folder import MemoryFolder
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, Fenced, WaitTimeout
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.events import read_evaluations, record_evaluation
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.heartbeat import forget_heartbeat
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.payload_shards import Bodies
from stagecoach.shared.protocol.redis_client import shard_clients
from stagecoach.shared.protocol.scripts import NAMES, source
from stagecoach.shared.protocol.shared_memory import SharedMemory
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED, READY, CheckpointStore
from stagecoach.shared.storage.due_evaluations import due_evaluations
from stagecoach.shared.storage.metric_log import ENV_STEPS, EPISODES, EVALUATIONS, TRAIN, VERSION
from stagecoach.shared.storage.object_store import ObjectStore
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer
from tests.support.runs.builders import RedisServer, folder_address, make_run
from tests.support.runs.checkpoints import key_of
from tests.support.runs.metric_rows import recorded
from tests.support.suite.speed import stretched

_SCRIPTS = {source(name).sha: name for name in NAMES}
_READS = {
    "check_epoch", "accounting", "PING", "INFO", "TIME", "HGET", "HMGET", "HGETALL", "GET", "MGET", "HKEYS",
    "SMISMEMBER",
    "EXISTS", "LRANGE", "XREAD", "XRANGE", "XREVRANGE", "XLEN", "SMEMBERS", "SISMEMBER", "ZRANGE", "ZCARD",
}  # fmt: skip
"""Commands that only read; all others count as writes."""
_PATIENCE_SECONDS = stretched(30.0)
_EVALUATED = ("eval/ep_rew_mean", "eval/ep_len_mean", "eval/episodes", VERSION, ENV_STEPS)
SPOILT_AT = 2
"""The policy version at which one fragment is lost and the one after it is no fragment at all."""


class Crash(BaseException):
    """This process is gone. Nothing in the product may catch it and go on."""


class Life:
    """One process (all of its threads) until it has written `most` times."""

    def __init__(
        self,
        most: int | None = None,
        hold: int | None = None,
        pause: int | None = None,
        glance: Callable[[], None] = lambda: None,
    ) -> None:
        self.most, self.hold, self.pause, self.glance = most, hold, pause, glance
        self.done: list[str] = []
        """Writes so far, in order."""
        self.start: list[str] = []
        """Number of writes before its first step."""
        self.held = threading.Event()
        """Set when a background thread stands before its write number `hold`, or any before the life's `pause`."""
        self.go_on = threading.Event()
        self.dead = False
        self._one_at_a_time = threading.Lock()
        self.behind = 0
        """What its background threads have written, or are about to."""
        self.behind_at: dict[str, int] = {}
        """How much that was when the trainer had started, and before it finished."""

    def write(self, what: str, act: Callable[[], Any], torn: Callable[[], None] = lambda: None) -> Any:
        """Does it, unless the process is gone by now; `torn` is what may be seen of a write that was cut off."""

        def stand_still() -> None:
            self.held.set()
            assert self.go_on.wait(_PATIENCE_SECONDS)

        if threading.current_thread() is not threading.main_thread() and not self.go_on.is_set():
            if self.behind == self.hold:
                stand_still()
            self.behind += 1
        with self._one_at_a_time:
            if len(self.done) == self.pause:
                stand_still()
            if not self.dead and len(self.done) == self.most:
                self.dead = True
                torn()
            self.read()
            answer = act()
            self.done.append(what)
            self.glance()
        return answer

    def read(self) -> None:
        if self.dead:
            raise Crash

    @property
    def left_behind(self) -> bool:
        """True if the publisher stands still while the trainer continues."""
        return self.hold is not None and self.held.is_set()

    def over(self, role: RunContext) -> RunContext:
        self._over_redis(role.redis)
        shards = shard_clients(role.address, role.config)
        for shard in shards.values():
            self._over_redis(shard)
        checkpoints = CheckpointStore(_Store(role.checkpoints.store, self), role.run_id)
        memory = _Memory.of(role.address)
        memory.life = self
        bodies, flow = Bodies(shards, role.run_id, memory), Flow(role.redis, role.run_id)
        return dataclasses.replace(role, checkpoints=checkpoints, flow=flow, bodies=bodies)

    def _over_redis(self, client: redis.Redis) -> None:
        real: Any = client.execute_command

        def execute(*arguments: Any, **options: Any) -> Any:
            name = _name(*arguments[:2])
            for_people = name == "heartbeat" or threading.current_thread().name.startswith("metrics")
            if for_people:  # on their own time
                if self.dead:
                    raise redis.ConnectionError("this process is gone")
            elif name not in _READS:
                return self.write(name, lambda: real(*arguments, **options))
            else:
                self.read()
            return real(*arguments, **options)

        setattr(client, "execute_command", execute)  # noqa: B010 - the client's own methods go through it


class _Store:
    """A store as the process of a `Life` has it. A put that is cut off leaves what a folder store's leaves."""

    def __init__(self, store: ObjectStore, life: Life) -> None:
        self._store, self._life = store, life

    def __getattr__(self, name: str) -> Any:
        self._life.read()
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        folder, _, name = key.rpartition("/")
        partial = f"{folder}/.partial-{name}" if folder else f".partial-{name}"

        def torn() -> None:
            self._store.put(partial, data[: len(data) // 2])

        self._life.write(f"put {key}", lambda: self._store.put(key, data), torn)

    def delete(self, key: str) -> None:
        self._life.write(f"delete {key}", lambda: self._store.delete(key))


class _Memory(SharedMemory):
    """Shared memory as the process of a `Life` has it. A body that is cut off stays half written."""

    life: Life

    def put(self, name: str, body: bytes) -> bool:
        """A write of one body."""
        put = super().put

        def torn() -> None:
            put(name, body[: len(body) // 2])

        return bool(self.life.write("body", lambda: put(name, body), torn))

    def remove(self, names: Iterable[str]) -> int:
        """A write for each body."""
        remove = super().remove
        return sum(int(self.life.write("free", partial(remove, [name]))) for name in names)


class Run:
    """One run on real Redis and a folder store; its trainers and workers are put on stage one after the other."""

    def __init__(self, server: RedisServer, folder: Path, config: Config, memory: bool = False) -> None:
        self.config, self.address = config, folder_address(server, folder)
        self._memory = contextlib.ExitStack()
        if memory:
            held = self._memory.enter_context(contextlib.closing(MemoryFolder(folder)))
            self.address = dataclasses.replace(self.address, memory_folder=str(held.path))
        self.role = make_run(config, self.address)
        self.keys = RunKeys(self.role.run_id)
        self.worker: Worker | None = None
        self.worker_life, self.evaluator_life = Life(), Life()
        self.damaged: set[str] = set()
        """Checkpoints whose objects were altered from outside."""
        self._spoilt, self._pushed, self._version = False, set[bytes](), -1

    def _open(self) -> RunContext:
        return open_run_context(self.config, self.address)

    # The trainer

    def train(self, life: Life, updates_while_held: int = 0) -> bool:
        """One trainer, from its start until the run has finished (true) or its life is over (false).

        Where the life holds the publisher, the trainer goes on for so many updates, and then both are gone.
        """
        incarnation = Incarnation(life.over(self._open()))
        try:
            trainer = Trainer.start(incarnation)
            self._settle(trainer, life)
            life.start, life.behind_at["start"], until = list(life.done), life.behind, None
            self.score()
            while trainer.step(0) != "ended":
                self._settle(trainer, life)
                if life.left_behind:
                    until = until or trainer.version + updates_while_held
                    life.dead = life.dead or trainer.version >= until
                else:
                    self.score()
                    trainer.state.writer.notice_evaluations()
                self.act()
            life.behind_at["end"] = life.behind
            if life.left_behind:
                return False
            if life.hold is not None:  # it has made fewer writes than the run before, and makes its last ones freely
                life.go_on.set()
            reason = self.role.flow.read().reason or "exhausted"
            if self.config.evaluation.every is not None:
                trainer.save_last(reason)
                self.evaluate_all()
            trainer.finish(reason)
            return True
        except Crash:
            return False
        finally:
            self._bury(incarnation, life)

    def partitioned(self, life: Life) -> threading.Thread:
        """A trainer in a thread of its own, from its start until it stands before its write number `life.pause`."""

        def train_until_fenced() -> None:
            with contextlib.suppress(Fenced):
                self.train(life)

        thread = threading.Thread(target=train_until_fenced)
        thread.start()
        assert life.held.wait(_PATIENCE_SECONDS)
        return thread

    # The others: they are not the trainer's process, and act on while there is none

    def act(self) -> None:
        try:
            if self.worker is None and self.role.checkpoints.marker(READY) is not None:
                self.worker = Worker(self.worker_life.over(self._open()), 0)
                self.worker.start()
            if not self._spoilt and self.role.flow.read().version == SPOILT_AT:
                self._spoil()
            if self.worker is not None:
                self.worker.step(0)
        except Crash:
            assert self.worker is not None
            self.worker.heartbeat.stop("", last_beat=False)
            self.worker.context.redis.close()
            self.worker, self.worker_life = None, Life()
        self.note()

    def evaluate(self) -> None:
        """One turn of an evaluator that plays; one that dies is followed by another."""
        role = self.evaluator_life.over(self._open())
        evaluator = Evaluator(role)
        try:
            evaluator.start()
            evaluator.step(0)
        except Crash:
            self.evaluator_life = Life()
        finally:
            evaluator.heartbeat.stop("", last_beat=False)
            forget_heartbeat(self.role.redis, self.role.run_id, "evaluator", "evaluator")
            role.redis.close()

    def evaluate_all(self) -> None:
        """Waits until no evaluation is due."""
        while {*due_evaluations(self.role.checkpoints.store)} - read_evaluations(
            self.role.redis, self.role.run_id
        ).keys():
            self.evaluate()

    def damage_newest(self) -> None:
        name = self.role.checkpoints.names()[-1]
        self.role.checkpoints.store.put(key_of(self.role.checkpoints, name, "default/policy.safetensors"), b"altered")
        self.damaged.add(name)

    def note(self) -> None:
        last: Any = self.role.redis.xrevrange(self.keys.log, count=4)
        self._pushed |= {id_ for id_, _ in last}

    def score(self) -> None:
        """Score of the newest checkpoint by the evaluator; without one that plays, as the best is to come and go."""
        if self.config.stop_at.mean_return is not None or self.config.evaluation.every is not None:
            self.evaluate()
            return
        pointer = self.role.checkpoints.pointer()
        if pointer is not None and pointer.latest not in read_evaluations(self.role.redis, self.role.run_id):
            version = int(pointer.latest.partition("_")[0])
            mean_return = version * 7 % 11
            scores = {"version": version, "mean_return": mean_return, "confirmation": {"mean_return": mean_return}}
            record_evaluation(self.role.redis, self.role.run_id, pointer.latest, scores)

    def _spoil(self) -> None:
        flow, name = self.role.flow, "worker-9"
        flow.register(name)
        assert flow.claim(name, 0, 1).granted
        ExperienceLog(self.role.redis, self.role.run_id).push(name, 0, 1, 0, 32, b"rubbish")
        self._spoilt = True

    def _settle(self, trainer: Trainer, life: Life) -> None:
        """Waits until the publisher has nothing to do, or stands still."""
        while not life.left_behind:
            try:
                trainer.state.writer.wait_idle(0.002)
            except WaitTimeout:
                continue
            except BaseException:  # it is dead, and so is the trainer when it writes next
                return
            return

    def _bury(self, incarnation: Incarnation, life: Life) -> None:
        """Ends the remaining threads of the process, so that none writes any more."""
        life.dead = True
        life.go_on.set()
        incarnation.closing.close()
        incarnation.heartbeat.stop("", last_beat=False)
        incarnation.role.redis.close()

    # What must hold at every moment

    def glance(self) -> None:
        """Versions never go back, and the board has the one that Redis counts."""
        version = self.role.flow.read().version
        assert version >= self._version, f"version {version} after {self._version}"
        self._version = version
        board: Any = self.role.redis.hget(self.keys.board, "version")
        assert version == (-1 if board is None else int(board))

    def look(self) -> None:
        """The ledger balances; every checkpoint is whole; what the log has lost is in one of them."""
        self.glance()
        accounting = read_accounting(self.role.redis, self.role.run_id)
        assert all(line.balances for line in accounting.values()), accounting
        checkpoints, positions = self.role.checkpoints, [(0, 0)]
        for name in checkpoints.names():
            try:
                positions.append(id_order(checkpoints.load(name).manifest.log_position))
            except CheckpointNotFound:
                continue  # without a manifest it is none
            except CheckpointDamaged:
                assert name in self.damaged
                positions.append(id_order(checkpoints.manifest(name).log_position))  # it was durable
        pointer = checkpoints.pointer()
        assert pointer is not None or checkpoints.marker(READY) is None
        assert pointer is None or pointer.latest in self.damaged or checkpoints.load_latest() is not None
        entries: Any = self.role.redis.xrange(self.keys.log)
        gone = self._pushed - {id_ for id_, _ in entries}
        assert all(id_order(id_.decode()) <= max(positions) for id_ in gone), (gone, positions)
        finished = checkpoints.marker(FINISHED)
        if finished is not None:
            assert pointer is not None and pointer.final == pointer.latest == finished["final"]
            assert self.role.flow.read().state == "finished"

    def outcome(self) -> dict[str, Any]:
        """All that this run has come to, without times, log positions and epochs: equal to the undisturbed run's."""
        finished, latest = self.role.checkpoints.marker(FINISHED), self.role.checkpoints.load_latest()
        pointer = self.role.checkpoints.pointer()
        assert finished is not None and latest is not None and pointer is not None
        state = json.loads(latest.objects.pop("trainer/state.json"))
        del state["log_position"], state["histories"]  # these name positions
        store = self.role.checkpoints.store
        evaluations = recorded(store, EVALUATIONS)
        assert len({label for label, _ in evaluations}) == len(evaluations), "none is twice in the records"
        rows = {"train": recorded(store, TRAIN), "episodes": recorded(store, EPISODES)}
        if self.config.evaluation.every is not None:
            assert due_evaluations(store) == [], "each is played by now"
            # whether one is confirmed depends on what else is kept as it is played
            told = {label: {name: row[name] for name in _EVALUATED} for label, row in evaluations if row[ENV_STEPS] > 0}
            rows["evaluations"] = sorted(told.items())
        return {
            **rows,
            "hashes": {name: hashlib.sha256(data).hexdigest() for name, data in sorted(latest.objects.items())},
            "state": state,
            "reason": finished["reason"],
            "kept": self.role.checkpoints.names(),
            "best": pointer.best,
        }

    def contents(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """State of the run in Redis, and all objects in the store."""
        keys, client, store = self.keys, self.role.redis, self.role.checkpoints.store
        flow: Any = client.hgetall(keys.flow)
        decides = {key: client.dump(key) for key in (keys.board, keys.ledger, keys.log, keys.produced, keys.claims)}
        return {"flow": flow, **decides}, {key: store.get(key) for key in store.keys("")}

    def end(self) -> None:
        if self.worker is not None:
            self.worker.stop("end of test")
            self.worker.context.redis.close()
        found = list(self.role.redis.scan_iter(f"{self.keys.prefix}*"))
        self.role.redis.delete(*found)
        self.role.redis.close()
        self._memory.close()


def _name(command: str, first: Any = "", *_: Any) -> str:
    sha = hashlib.sha1(str(first).encode()).hexdigest() if command == "EVAL" else str(first)
    return _SCRIPTS.get(sha, "?") if command.startswith("EVAL") else command
