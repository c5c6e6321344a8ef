"""Every order of the protocol's steps up to a bounded depth, breadth first, over the real scripts on a real Redis.

A world is what Redis holds (as `DUMP` gives it) and what workers and trainers know. A step loads a world into Redis,
lets one party act through the product's own clients, and reads back what became of it. Worlds that differ in clocks and
stream ids only are the same: ids are compared by their order, leases by whether they are over. A step that needs a
fault (an answer that is lost, a command that arrives late, a lease that runs out, a process replaced while the old one
lives on, a Redis rolled back) costs one of a few faults.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from shared.errors import Fenced, RedisRolledBack, WorkerSuperseded
from shared.experience import fragment
from shared.experience.counters import Phase, PhaseCounters
from shared.experience.log_entry import LogEntry, id_order
from shared.policies.serialization import VersionHeader
from shared.protocol.experience_log import ExperienceLog
from shared.protocol.flow_control import Claim
from shared.protocol.keys import RunKeys
from shared.protocol.ledger import Ledger, fast_forward, read_accounting, read_ledger
from shared.protocol.policy_board import PolicyBoard
from shared.runtime.run_context import RunContext
from tests.support.fragments import zero_fragment
from tests.support.small_run import ENVS, STEPS
from trainer_node.log_consumer import Committed, LogConsumer, RedisAccounting

PAST_MS = 1
_LEASE_SECONDS = 1e9
_ANOTHER_PROCESS = "the process before"

_SAVE = """
-- KEYS flow, log, claims, pushed, produced, incarnations, ledger, board, pushes. What they hold, to load and to
-- compare.
local dumps = {}
for index, key in ipairs(KEYS) do dumps[index] = redis.call('DUMP', key) end
local last = redis.call('EXISTS', KEYS[2]) == 1 and redis.call('XINFO', 'STREAM', KEYS[2])
local last_id = '0-0'
for index = 1, last and #last or 0, 2 do
  if last[index] == 'last-generated-id' then last_id = last[index + 1] end
end
local log = {}
for _, entry in ipairs(redis.call('XRANGE', KEYS[2], '-', '+')) do
  log[#log + 1] = entry[1]
  for index = 1, #entry[2], 2 do
    log[#log + 1] = entry[2][index] .. '=' .. entry[2][index + 1]
  end
end
return {dumps, redis.call('HGETALL', KEYS[1]), log, last_id, redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES'),
  redis.call('HGETALL', KEYS[4]), redis.call('HGETALL', KEYS[5]), redis.call('HGETALL', KEYS[6]),
  redis.call('HGETALL', KEYS[7])}
"""

_LOAD = """
-- KEYS as above, then others that only go. ARGV: a dump for each of the first, or ''.
redis.call('DEL', unpack(KEYS))
for index, dump in ipairs(ARGV) do
  if dump ~= '' then redis.call('RESTORE', KEYS[index], 0, dump) end
end
return 1
"""


class Position(str):
    """A stream id: only its place among the others tells worlds apart."""


@dataclass(frozen=True)
class Image:
    """A Redis at one moment, and what has happened to fragments in its past."""

    dumps: tuple[bytes, ...]
    seen: tuple[Any, ...]
    """The same, comparable: without times."""
    claims: tuple[tuple[str, bool], ...]
    """Claim, and whether its lease is over."""
    appended: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Acted:
    """A fragment in a worker's hand, with the claim behind it."""

    act: str
    """Which worker's how many-th process acted it, and its how many-th it is: what `life` says in its header."""
    version: int
    epoch: int


@dataclass(frozen=True)
class WorkerState:
    """What a worker's newest process knows."""

    name: str
    incarnation: int
    epoch: int
    process: int = 0
    seq: int = 0
    refusals: int = 0
    acts: int = 0
    version: int = 0
    hand: Acted | None = None
    alive: bool = True


@dataclass(frozen=True)
class Accounting:
    """Where a trainer stands in the log."""

    position: Position
    ledger: str


@dataclass(frozen=True)
class TrainerState:
    """What a trainer knows."""

    epoch: int
    version: int
    now: Accounting
    committed: Accounting
    process: bool = True
    """Whether the Redis process is the one that its accounting was matched with."""
    untold: tuple[str, ...] | None = None
    """Whose accounts Redis does not know yet; None for all."""
    taken: tuple[str, ...] = ()
    learned: tuple[str, ...] = ()
    exact: bool = True
    """Whether it has learned all that its ledger says was consumed: not behind a log that was trimmed."""
    alive: bool = True


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint."""

    version: int
    accounting: Accounting
    learned: tuple[str, ...]
    exact: bool


@dataclass(frozen=True)
class Late:
    """A command that was sent, and is still on its way."""

    kind: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class World:
    """All there is."""

    redis: Image
    workers: tuple[WorkerState, ...]
    trainers: tuple[TrainerState, ...]
    store: tuple[Saved, ...]
    faults: int
    late: tuple[Late, ...] = ()
    past: Image | None = None
    rolled_back: bool = False
    """Whether Redis ever was: then what it refused or lost before is not in its accounting."""


Next = tuple[str, Callable[[World], World], int]
"""A step: what it is called, what becomes of a world, and how many faults it takes."""


class Violation(AssertionError):
    """What must always hold does not, and the steps that lead there."""


@dataclass
class Found:
    """What a search has seen."""

    worlds: int = 0
    steps: int = 0
    by_depth: list[int] = field(default_factory=list)


class Search:
    """Workers and trainers of one run; K and L are its config's."""

    def __init__(self, role: RunContext, workers: int = 2) -> None:
        self.role, self._keys = role, RunKeys(role.run_id)
        rollout = role.config.rollout
        self._needed, self._max_lag = rollout.fragments_per_update, rollout.max_policy_lag
        self._flow, self._log, self._board = role.flow, role.log(), PolicyBoard(role.redis, role.run_id)
        self._description = role.description()
        keys = self._keys
        self._names = [
            keys.flow, keys.log, keys.claims, keys.pushed, keys.produced, keys.incarnations, keys.ledger, keys.board,
            keys.pushes,
        ]  # fmt: skip
        self._save, self._load = role.redis.register_script(_SAVE), role.redis.register_script(_LOAD)
        self._process = self._flow.process()
        self._encode = lru_cache(None)(self._encoded)
        self._acts: dict[bytes, str] = {}
        """What was encoded, as a field of the log → its act."""
        self._flow.set_bounds(_LEASE_SECONDS, 2**40)
        self._workers = workers

    # Worlds

    def beginning(self, faults: int) -> World:
        """Version 0 is published and durable; the workers have registered."""
        epoch = self._flow.take_over()
        accounting = Accounting(Position("0-0"), Ledger().as_json())
        trainer = TrainerState(epoch, 0, accounting, accounting)
        empty = Image((), (), ())
        world = World(empty, (), (trainer,), (Saved(0, accounting, (), True),), faults)
        world = _with_trainer(world, 0, self._publish(trainer, 0))
        workers = [f"worker-{index}" for index in range(self._workers)]
        registered = tuple(WorkerState(name, *self._flow.register(name)) for name in workers)
        return replace(world, redis=self._image(empty), workers=registered)

    def _image(self, before: Image) -> Image:
        dumps, flow, log, last, claims, *others = self._save(self._names, [])
        pairs = {name.decode(): value.decode() for name, value in zip(flow[::2], flow[1::2], strict=True)}
        for name in ("committed_id", "published_id", "trimmed_id"):
            pairs[name] = Position(pairs[name])
        entries = tuple(
            self._acts[item] if item in self._acts else item.decode() if b"=" in item else Position(item.decode())
            for item in log
        )
        held = tuple(
            (name.decode(), float(end) == PAST_MS) for name, end in zip(claims[::2], claims[1::2], strict=True)
        )
        hashes = tuple(
            frozenset((name.decode(), value.decode()) for name, value in zip(one[::2], one[1::2], strict=True))
            for one in others
        )
        seen = (frozenset(pairs.items()), entries, Position(last.decode()), frozenset(held), *hashes)
        return Image(tuple(dump or b"" for dump in dumps), seen, held, before.appended, before.refused)

    def _enter(self, image: Image) -> None:
        self._load([*self._names, self._keys.wakeups], list(image.dumps))

    # Workers

    def _encoded(self, name: str, incarnation: int, seq: int, version: int, act: str) -> bytes:
        made = zero_fragment(
            self._description, run_id=self.role.run_id, worker_id=name, incarnation=incarnation, seq=seq,
            policy_versions=dict.fromkeys(self._description.policies, version), steps=STEPS, num_envs=ENVS, life=act,
        )  # fmt: skip
        blob = fragment.encode(made)
        self._acts[b"fragment=" + blob] = f"{act} by {name}:{incarnation}:{seq} of {version}"
        return blob

    def _pushing(self, worker: WorkerState) -> tuple[Any, ...]:
        assert worker.hand is not None
        hand = worker.hand
        return worker.name, worker.incarnation, worker.seq, hand.epoch, hand.version, hand.act, worker.refusals

    def _push(self, world: World, command: tuple[Any, ...]) -> tuple[World, str, Claim | None]:
        """As a worker does it, its next claim with it; what Redis answers, and what became of it."""
        name, incarnation, seq, epoch, version, act, refusals = command
        blob = self._encode(name, incarnation, seq, version, act)
        claiming = self._flow.claiming(name, incarnation, seq + 1)
        word = self._log.push(
            name, incarnation, seq, epoch, STEPS * ENVS, blob, then=claiming, refusals=refusals
        )  # fmt: skip
        image = world.redis
        if word == "pushed":
            if act in image.appended or act in image.refused:
                raise Violation(
                    f"{act} is taken into the log, though it was {'taken' if act in image.appended else 'refused'}"
                )
            image = replace(image, appended=image.appended | {act})
        if word == "stale":
            image = replace(image, refused=image.refused | {act})
        if word == "duplicate" and not world.rolled_back and act not in image.appended:
            raise Violation(f"{act} is taken for a duplicate, though it is not in the log")
        return replace(world, redis=image), word, claiming.reply

    def _granted(self, worker: WorkerState, claim: Claim) -> WorkerState:
        version = worker.version
        if version < claim.version or worker.epoch != claim.epoch:
            version = claim.version
        hand = Acted(f"{worker.name}/{worker.process}/{worker.acts}", version, claim.epoch)
        return replace(worker, hand=hand, acts=worker.acts + 1, version=version, epoch=claim.epoch)

    def _registered_again(self, worker: WorkerState) -> WorkerState:
        incarnation, epoch = self._flow.register(worker.name, worker.incarnation + 1)
        return replace(worker, incarnation=incarnation, epoch=epoch, seq=0, refusals=0, hand=None)

    def _claims(self, world: World, index: int) -> World:
        worker = world.workers[index]
        try:
            claim = self._flow.claim(worker.name, worker.incarnation, worker.seq)
        except WorkerSuperseded:
            return _with_worker(world, index, replace(worker, alive=False))
        if claim.reply == "taken":
            return _with_worker(world, index, self._registered_again(worker))
        return _with_worker(world, index, self._granted(worker, claim) if claim.granted else worker)

    def _pushes(self, world: World, index: int) -> World:
        worker = world.workers[index]
        world, word, claim = self._push(world, self._pushing(worker))
        if word == "superseded":
            return _with_worker(world, index, replace(worker, alive=False, hand=None))
        if word == "epoch":
            return _with_worker(world, index, self._registered_again(worker))
        worker = replace(worker, hand=None)
        if word == "stale":
            self._flow.release(f"{worker.name}:{worker.incarnation}")
            return _with_worker(world, index, replace(worker, refusals=worker.refusals + 1))
        worker = replace(worker, seq=worker.seq + 1)
        return _with_worker(world, index, self._granted(worker, claim) if claim and claim.granted else worker)

    def _replaced(self, world: World, index: int) -> World:
        """A new process; what the old one has in its hand may still come."""
        worker = world.workers[index]
        late = (*world.late, Late("push", self._pushing(worker))) if worker.hand else world.late
        fresh = WorkerState(worker.name, *self._flow.register(worker.name), process=worker.process + 1)
        return replace(_with_worker(world, index, fresh), late=late)

    # Trainers

    def _accounting(self, trainer: TrainerState) -> RedisAccounting:
        accounting = RedisAccounting(self.role, trainer.epoch)
        accounting.redis_process = self._process if trainer.process else _ANOTHER_PROCESS
        accounting.tell = lambda text: None  # type: ignore[method-assign]
        return accounting

    def _takes(self, world: World, index: int) -> World:
        """The next entry, if there is one."""
        trainer = world.trainers[index]
        reader = _OneEntry(self._log)
        consumer = LogConsumer(
            self.role.run_id, self.role.config, self._description, reader.read, self._accounting(trainer)
        )
        consumer.restore(Committed(trainer.now.position, trainer.now.ledger, {}))
        consumer.ledger = _ledger_of(trainer)
        try:
            found = consumer.take(trainer.version, Phase.TRAIN, 0.0)
        except Fenced:
            return _with_trainer(world, index, replace(trainer, alive=False))
        except RedisRolledBack:
            return self._comes_back(world, index)
        whole, *news = consumer.ledger.news()
        now = Accounting(Position(consumer.position), consumer.ledger.as_json())
        trainer = replace(trainer, now=now, untold=None if whole else tuple(news[::2]))
        if found is None:
            return _with_trainer(world, index, trainer)
        lag, act = trainer.version - found.header.version, found.header.life
        if not 0 <= lag <= self._max_lag:
            raise Violation(f"{act} is learned from with lag {lag}")
        if act in trainer.learned or act in trainer.taken:
            raise Violation(f"{act} is learned from twice")
        if act in world.redis.refused and not world.rolled_back:
            raise Violation(f"{act} was refused and is learned from all the same")
        return _with_trainer(world, index, replace(trainer, taken=(*trainer.taken, act)))

    def _publish(self, trainer: TrainerState, consumed: int) -> TrainerState:
        assert trainer.now == trainer.committed
        header = VersionHeader(trainer.version, Phase.TRAIN, PhaseCounters())
        published = self._board.publish(
            epoch=trainer.epoch, version=trainer.version, consumed=consumed, committed_id=trainer.now.position,
            ledger=_ledger_of(trainer), header=header, blob=b"weights",
            process=self._process if trainer.process else _ANOTHER_PROCESS,
        )  # fmt: skip
        return replace(trainer, untold=()) if published.reply == "published" else trainer

    @staticmethod
    def _learned(trainer: TrainerState) -> TrainerState:
        learned = (*trainer.learned, *trainer.taken)
        return replace(trainer, version=trainer.version + 1, committed=trainer.now, learned=learned, taken=())

    def _publishes(self, world: World, index: int) -> World:
        trainer = self._learned(world.trainers[index])
        world = _with_trainer(world, index, trainer)
        try:
            return _with_trainer(world, index, self._publish(trainer, self._needed))
        except Fenced:
            return _with_trainer(world, index, replace(trainer, alive=False))
        except RedisRolledBack:
            return self._comes_back(world, index)

    def _looks(self, world: World, index: int) -> World:
        trainer, state = world.trainers[index], self._flow.read()
        if state.epoch > trainer.epoch:
            return _with_trainer(world, index, replace(trainer, alive=False))
        if state.epoch < trainer.epoch or state.version < trainer.version or not trainer.process:
            return self._comes_back(world, index)
        return world

    def _comes_back(self, world: World, index: int) -> World:
        """`Trainer._redis_came_back`; the checkpoint that it submits there is not durable yet."""
        trainer = world.trainers[index]
        if not self._flow.holds(trainer.epoch):
            return _with_trainer(world, index, replace(trainer, alive=False))
        trainer = replace(trainer, process=True, taken=(), now=trainer.committed, untold=None)
        knows_more = self._flow.read().version > trainer.version
        trainer = self._publish(trainer, 0) if knows_more else self._fast_forward(trainer)
        return _with_trainer(world, index, trainer)

    def _fast_forward(self, trainer: TrainerState) -> TrainerState:
        known = trainer.committed
        fast_forward(self.role.redis, self.role.run_id, trainer.epoch, known.position, Ledger.from_json(known.ledger))
        return self._publish(trainer, 0)

    def _starts(self, world: World) -> World:
        """Another trainer, from the newest checkpoint, as `Trainer._recover` does it; the old ones live on."""
        epoch = self._flow.take_over(max(trainer.epoch for trainer in world.trainers))
        newest, state = max(world.store, key=lambda saved: saved.version), self._flow.read()
        if id_order(state.trimmed_id) > id_order(newest.accounting.position) and state.version >= newest.version:
            text = self._ledger()
            accounting = Accounting(Position(state.committed_id), text)
            newest = Saved(state.version + 1 + self._max_lag, accounting, newest.learned, False)
            world = replace(world, store=(*world.store, newest))
        trainer = TrainerState(
            epoch, newest.version, newest.accounting, newest.accounting, learned=newest.learned, exact=newest.exact
        )
        if state.version < trainer.version:
            trainer = self._fast_forward(trainer)
        return replace(world, trainers=(*world.trainers, trainer))

    def _ledger(self) -> str:
        return read_ledger(self.role.redis, self.role.run_id).as_json()

    def _saves(self, world: World, index: int, trim: bool) -> World:
        """Its version becomes durable, and what it covers is trimmed; or the trim comes later."""
        trainer = world.trainers[index]
        if not self._flow.holds(trainer.epoch):
            return _with_trainer(world, index, replace(trainer, alive=False))
        saved = Saved(trainer.version, trainer.committed, trainer.learned, trainer.exact)
        if saved not in world.store:
            world = replace(world, store=(*world.store, saved))
        command = Late("trim", (trainer.epoch, trainer.committed.position))
        return self._arrives(world, command) if trim else replace(world, late=(*world.late, command))

    def _arrives(self, world: World, command: Late) -> World:
        if command.kind == "push":
            return self._push(world, command.arguments)[0]
        try:
            if command.kind == "trim":
                self._log.trim(*command.arguments)
            else:
                trainer: TrainerState = command.arguments[0]
                self._publish(trainer, self._needed)
        except (Fenced, RedisRolledBack):
            pass  # whoever sent it is told by its next one
        return world

    # Steps

    def steps(self, world: World) -> Iterator[Next]:
        """What can happen next."""
        for index, worker in enumerate(world.workers):
            if worker.alive:
                yield from self._worker_steps(index, worker)
            yield f"{worker.name} is replaced", partial(self._replaced, index=index), 1
        for index, trainer in enumerate(world.trainers):
            if trainer.alive:
                yield from self._trainer_steps(world, index, trainer)
        for claim, over in world.redis.claims:
            if not over:
                yield f"the lease of {claim} runs out", partial(self._lapses, claim=claim), 1
        for command in world.late:
            yield f"a late {command.kind} arrives", partial(self._is_late, command=command), 0
        if len(world.trainers) < 2:
            yield "another trainer starts", self._starts, 1
        if world.past is None and world.faults:
            yield "Redis writes its file", lambda world: replace(world, past=world.redis), 0
        if world.past is not None:
            yield "Redis is rolled back", self._is_rolled_back, 1

    def _worker_steps(self, index: int, worker: WorkerState) -> Iterator[Next]:
        if worker.hand is None:
            yield f"{worker.name} claims", lambda world: self._claims(world, index), 0
            yield f"{worker.name} claims, unheard", lambda world: _redis_of(world, self._claims(world, index)), 1
            return
        command = self._pushing(worker)
        yield f"{worker.name} pushes", lambda world: self._pushes(world, index), 0
        yield f"{worker.name} pushes, unheard", lambda world: self._push(world, command)[0], 1
        yield (
            f"a push of {worker.name} is slow",
            lambda world: replace(world, late=(*world.late, Late("push", command))),
            1,
        )

    def _trainer_steps(self, world: World, index: int, trainer: TrainerState) -> Iterator[Next]:
        name = f"trainer {trainer.epoch}"
        if len(trainer.taken) == self._needed:
            command = Late("publish", (self._learned(trainer),))
            yield f"{name} publishes", lambda world: self._publishes(world, index), 0
            yield f"{name} publishes, unheard", lambda world: self._arrives(world, command), 1
            yield f"a version of {name} is slow", lambda world: replace(world, late=(*world.late, command)), 1
        else:
            yield f"{name} reads", lambda world: self._takes(world, index), 0
            yield f"{name} reads, unheard", lambda world: _redis_of(world, self._takes(world, index)), 1
        if not any(saved.version == trainer.version for saved in world.store):
            yield f"{name} writes a checkpoint", lambda world: self._saves(world, index, trim=True), 0
            yield f"{name} writes a checkpoint and trims late", lambda world: self._saves(world, index, trim=False), 1
        if len(world.trainers) > 1 or not trainer.process:
            yield f"{name} looks", lambda world: self._looks(world, index), 0

    def _lapses(self, world: World, claim: str) -> World:
        self.role.redis.zadd(self._keys.claims, {claim: PAST_MS})
        return world

    def _is_late(self, world: World, command: Late) -> World:
        left = list(world.late)
        left.remove(command)
        return self._arrives(replace(world, late=tuple(left)), command)

    def _is_rolled_back(self, world: World) -> World:
        """Another process, with what was written then; whoever sends again, sends to that one."""
        assert world.past is not None
        self._enter(world.past)
        late = tuple(
            Late(command.kind, (replace(command.arguments[0], process=False),))
            if command.kind == "publish"
            else command
            for command in world.late
        )
        trainers = tuple(replace(trainer, process=False) for trainer in world.trainers)
        return replace(world, redis=world.past, trainers=trainers, late=late, rolled_back=True)

    # What always holds

    def check(self, world: World) -> None:
        """Of a world that Redis is in."""
        lines = read_accounting(self.role.redis, self.role.run_id)
        odd = {name: line.as_dict() for name, line in lines.items() if not line.balances}
        if odd:
            raise Violation(f"the accounting does not balance: {odd}")
        flow = dict(world.redis.seen[0])
        in_flight, window = int(flow["claimed"]) - int(flow["consumed"]), (self._max_lag + 1) * self._needed
        if not 0 <= in_flight <= window:
            raise Violation(f"{in_flight} are in flight of at most {window}")
        produced = lines["total"].produced.fragments
        known = len(world.redis.appended) + len(world.redis.refused)
        if not world.rolled_back and produced != known:
            raise Violation(f"{produced} are counted as produced, which are {known}")
        for trainer in world.trainers:
            consumed = Ledger.from_json(trainer.committed.ledger).consumed().fragments
            if trainer.exact and consumed != len(trainer.learned):
                raise Violation(
                    f"trainer {trainer.epoch} counts {consumed} as consumed and has learned {trainer.learned}"
                )

    def goes_on(self, world: World) -> None:
        """From here a worker and a trainer, both new, come to a next version once all leases are over."""
        for claim, _ in world.redis.claims:
            self._lapses(world, claim)
        world = self._starts(self._replaced(world, 0))
        index, goal = len(world.trainers) - 1, max(self._flow.read().version, world.trainers[-1].version) + 1
        for _ in range(4 * (self._max_lag + 1) * self._needed + 8):
            worker = world.workers[0]
            world = self._pushes(world, 0) if worker.hand else self._claims(world, 0)
            for _ in range(3):
                ready = len(world.trainers[index].taken) == self._needed
                world = self._publishes(world, index) if ready else self._takes(world, index)
            if self._flow.read().version >= goal:
                return
        raise Violation("the run is stuck")

    # The search

    def follow(self, faults: int, names: Sequence[str]) -> World:
        """The world that these steps lead to from the beginning; raises `Violation` as `run` does."""
        world = self.beginning(faults)
        for name in names:
            step, cost = next((step, cost) for known, step, cost in self.steps(world) if known == name)
            self._enter(world.redis)
            world = step(replace(world, faults=world.faults - cost))
            world = replace(world, redis=self._image(world.redis))
            self.check(world)
        self.goes_on(world)
        return world

    def run(self, depth: int, begin: World, every: int = 50) -> Found:
        """All worlds up to `depth` steps from `begin`; raises `Violation` with the steps that lead to it.

        What a world can come to, the same one with more faults left can as well, and without any left nothing is
        rolled back. From each `every`-th world it is tried whether the run can go on.
        """
        found = Found(worlds=1)
        ways: dict[bytes, tuple[bytes, str]] = {}
        seen = {_key(begin): begin.faults}
        frontier = [(_key(begin), begin)]
        for _ in range(depth):
            following: list[tuple[bytes, World]] = []
            for here, world in frontier:
                for name, step, cost in self.steps(world):
                    if cost > world.faults:
                        continue
                    found.steps += 1
                    try:
                        self._enter(world.redis)
                        new = step(replace(world, faults=world.faults - cost))
                        new = replace(new, redis=self._image(new.redis), past=new.past if new.faults else None)
                        key = _key(new)
                        if seen.get(key, -1) >= new.faults:
                            continue
                        if key not in seen:
                            ways[key] = here, name
                        seen[key] = new.faults
                        self.check(new)
                        if len(seen) % every == 0:
                            self.goes_on(new)
                    except AssertionError as error:
                        raise Violation(f"{error}, after: {'; '.join([*_way(ways, here), name])}") from error
                    following.append((key, new))
            frontier = following
            found.by_depth.append(len(frontier))
        found.worlds = len(seen)
        return found


class _OneEntry:
    """A log of one entry more."""

    def __init__(self, log: ExperienceLog) -> None:
        self._log, self._given = log, False

    def read(self, after: str, count: int, block_seconds: float) -> list[LogEntry]:
        """The next one, once."""
        given, self._given = self._given, True
        return [] if given else self._log.read(after, 1, 0)


def _ledger_of(trainer: TrainerState) -> Ledger:
    """As it has it in memory, with what it has not told yet."""
    ledger = Ledger.from_json(trainer.now.ledger)
    if trainer.untold is not None:
        ledger.told()
        for worker in trainer.untold:
            ledger.of(worker)
    return ledger


def _with_worker(world: World, index: int, worker: WorkerState) -> World:
    return replace(world, workers=(*world.workers[:index], worker, *world.workers[index + 1 :]))


def _with_trainer(world: World, index: int, trainer: TrainerState) -> World:
    return replace(world, trainers=(*world.trainers[:index], trainer, *world.trainers[index + 1 :]))


def _redis_of(world: World, after: World) -> World:
    """What an unheard command does: Redis has changed, and nobody knows."""
    return replace(world, redis=after.redis)


def _way(ways: dict[bytes, tuple[bytes, str]], key: bytes) -> list[str]:
    names: list[str] = []
    while key in ways:
        key, name = ways[key]
        names.insert(0, name)
    return names


def _key(world: World) -> bytes:
    """The same for worlds that differ in times only, or in which of two workers has which name."""
    renamed = [world.workers] if len(world.workers) < 2 else [world.workers, world.workers[::-1]]
    nameless = [[replace(worker, name="", hand=None) for worker in workers] for workers in renamed]
    first = min(nameless, key=repr)
    return min(_key_as(world, workers) for workers, known in zip(renamed, nameless, strict=True) if known == first)


def _key_as(world: World, workers: Sequence[WorkerState]) -> bytes:
    """Where these workers have the names `worker-0`, `worker-1` and so on."""
    positions: set[Position] = set()
    names = {worker.name: f"worker-{index}" for index, worker in enumerate(workers)}

    def plain(item: Any) -> Any:
        if isinstance(item, Position):
            positions.add(item)
            return item
        if isinstance(item, str):
            item = re.sub(r"worker-\d", lambda found: names[found[0]], item)
            return str(sorted(json.loads(item).items())) if item.startswith("{") else item
        if isinstance(item, Image):
            return plain((item.seen, item.appended, item.refused))
        if isinstance(item, frozenset):
            return tuple(sorted((plain(part) for part in item), key=repr))
        if isinstance(item, tuple):
            return tuple(plain(part) for part in item)
        if hasattr(item, "__dataclass_fields__"):
            return tuple(plain(part) for part in vars(item).values())
        return item

    rest = replace(world, workers=(), late=(), faults=0)
    found = (plain(rest), plain(tuple(workers)), *sorted(plain(world.late), key=repr))
    order = {position: index for index, position in enumerate(sorted(positions, key=id_order))}

    def ranked(item: Any) -> Any:
        if isinstance(item, Position):
            return ("id", order[item])
        return tuple(ranked(part) for part in item) if isinstance(item, tuple) else item

    return hashlib.blake2b(repr(ranked(found)).encode(), digest_size=16).digest()
