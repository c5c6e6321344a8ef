"""Every order of the protocol's steps up to a bounded depth, breadth first, over the real scripts on a real Redis.

A world is what Redis holds (as `DUMP` gives it) and what workers and trainers know. A step loads a world into Redis,
lets one party act through the product's own clients, and reads back what became of it. Worlds that differ in clocks and
stream ids only are the same: ids are compared by their order, leases by whether they are over. A step that needs a
fault (an answer that is lost, a command that arrives late, a lease that runs out, a process replaced while the old one
lives on, a Redis rolled back) costs one of a few faults.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from stagecoach.shared.base.errors import Fenced, RedisRolledBack, VersionsDiverged, WorkerSuperseded
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.log_entry import START, STRANGERS, BodyPlace, LogEntry, id_order
from stagecoach.shared.policies.serialization import VersionHeader
from stagecoach.shared.protocol.flow_control import Claim
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import (
    Forward,
    Ledger,
    Taken,
    digest_of,
    fast_forward,
    read_accounting,
    read_ledger,
)
from stagecoach.shared.protocol.payload_shards import named_bodies
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.protocol.shared_memory import SharedMemory
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.state.log_consumer import Committed, LogConsumer, RedisAccounting, _name
from tests.support.experience.fragments import zero_fragment
from tests.support.runs.small_run import ENVS, STEPS

PAST_MS = 1
_LEASE_SECONDS = 1e9
_ANOTHER_PROCESS = "the process before"
_POSITION = re.compile("⟨(.*?)⟩")
_WORKER = re.compile(r"worker-\d+")


class Position(str):
    """A stream id: only its place among the others tells worlds apart."""

    def __repr__(self) -> str:
        return f"⟨{self}⟩"


_START = Position(START)


class History(str):
    """Of a policy version: the experience that it comes from tells worlds apart, not how that is named."""

    comes_from: ClassVar[dict[str, str]] = {"": "nothing"}


_NO_HISTORY = History()
Weights = tuple[tuple[int, History, str], ...]
"""Newest versions: number, history, and the acts that they were learned from."""


@dataclass(frozen=True)
class Image:
    """A Redis at one moment, without times, and what has happened to fragments in its past."""

    dumps: tuple[bytes, ...] = field(default=(), repr=False)
    """The same, to load."""
    flow: tuple[tuple[str, str], ...] = ()
    log: tuple[Any, ...] = ()
    last: Position = _START
    claims: tuple[tuple[str, bool], ...] = ()
    """Claim, and whether its lease is over."""
    workers: tuple[Any, ...] = ()
    """Pushed and produced fragments, and the incarnations."""
    appended: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    weights: str = ""
    """Weights on the board."""


@dataclass(frozen=True)
class Acted:
    """A fragment in a worker's hand, with the claim behind it."""

    act: str
    """Which worker's how many-th process acted it, and its how many-th it is: what `life` says in its header."""
    version: int
    epoch: int
    history: History


@dataclass(slots=True)
class WorkerState:
    """Knowledge of a worker's newest process."""

    name: str
    incarnation: int
    epoch: int
    process: int = 0
    seq: int = 0
    refusals: int = 0
    acts: int = 0
    version: int = 0
    history: History = _NO_HISTORY
    weights: str = "()"
    hand: Acted | None = None
    alive: bool = True


@dataclass(frozen=True)
class Accounting:
    """Position of a trainer in the log."""

    position: Position
    ledger: str
    history: History = _NO_HISTORY
    held: tuple[tuple[Position, str], ...] = ()
    """The entries taken since the log was trimmed."""


@dataclass(slots=True)
class TrainerState:
    """Knowledge of a trainer."""

    epoch: int
    version: int
    now: Accounting
    committed: Accounting
    process: bool = True
    """True if its accounting was matched with this Redis process."""
    untold: tuple[str, ...] | None = None
    """Workers whose accounts Redis does not have yet; None for all."""
    taken: tuple[tuple[Position, str], ...] = ()
    learned: tuple[tuple[Position, str], ...] = ()
    weights: Weights = ((0, _NO_HISTORY, "()"),)
    held_after: Position = _START
    exact: bool = True
    """True if it has learned all that its ledger counts as consumed, which it cannot behind a trimmed log."""
    alive: bool = True


@dataclass(frozen=True)
class Saved:
    """A durable checkpoint."""

    version: int
    accounting: Accounting
    learned: tuple[tuple[Position, str], ...]
    exact: bool
    weights: Weights = ((0, _NO_HISTORY, "()"),)


@dataclass(frozen=True)
class Segment:
    """Segment of the archive."""

    after: Position
    through: Position
    acts: tuple[str, ...]


@dataclass(frozen=True)
class Late:
    """A command that was sent, and is still on its way."""

    kind: str
    arguments: tuple[Any, ...]


@dataclass(slots=True)
class World:
    """All there is. A step changes a copy."""

    redis: Image
    workers: list[WorkerState]
    trainers: list[TrainerState]
    store: list[Saved]
    faults: int
    late: list[Late] = field(default_factory=list)
    past: Image | None = None
    archive: list[Segment] = field(default_factory=list)
    rolled_back: bool = False
    """Whether Redis ever was: then what it refused or lost before is not in its accounting."""

    def copy(self) -> World:
        """Another one that is the same."""
        workers, trainers = [replace(worker) for worker in self.workers], [replace(each) for each in self.trainers]
        return replace(
            self, workers=workers, trainers=trainers, store=[*self.store], late=[*self.late], archive=[*self.archive]
        )

    def key(self) -> bytes:
        """The same for worlds that differ in times only, in which worker has which name, or in the faults left."""
        orders = list(itertools.permutations(self.workers))
        nameless = [repr([replace(worker, name="", hand=None) for worker in order]) for order in orders]
        first = min(nameless)
        return min(self._key_as(order) for order, known in zip(orders, nameless, strict=True) if known == first)

    def _key_as(self, workers: Sequence[WorkerState]) -> bytes:
        """Returns the world with the workers renamed `worker-0`, `worker-1` and so on."""
        names = {worker.name: f"worker-{index}" for index, worker in enumerate(workers)}

        def named(item: Any) -> Any:
            if isinstance(item, bytes):
                return named(item.decode())
            if isinstance(item, History):
                return named(History.comes_from[item])
            if isinstance(item, str) and not isinstance(item, Position):
                text = _WORKER.sub(lambda found: names[found[0]], item)
                return sorted(json.loads(text).items()) if text.startswith("{") else text
            if isinstance(item, Image):
                unordered = (item.claims, *item.workers, item.appended, item.refused)
                return named((item.flow, item.log, item.last)), [sorted(named(each)) for each in unordered]
            if isinstance(item, tuple | list):
                return tuple(named(part) for part in item)
            return named([getattr(item, each.name) for each in fields(item)]) if is_dataclass(item) else item

        rest = named((self.redis, workers, self.trainers, self.store, self.past, self.archive, self.rolled_back))
        text = repr((rest, sorted(map(repr, named(self.late)))))
        positions = sorted({*_POSITION.findall(text)}, key=id_order)
        ranks = {position: str(rank) for rank, position in enumerate(positions)}
        ranked = _POSITION.sub(lambda found: f"⟨{ranks[found[1]]}⟩", text)
        return hashlib.blake2b(ranked.encode(), digest_size=16).digest()


Step = Callable[[World], None]
Next = tuple[str, Step, int]
"""A step: what it is called, what it does to a world, and how many faults it takes."""


class Violation(AssertionError):
    """Violation of an invariant, with the steps that lead to it."""


@dataclass
class Found:
    """Statistics of a search."""

    worlds: int = 0
    steps: int = 0
    by_depth: list[int] = field(default_factory=list)


class EveryWorldsMemory(SharedMemory):
    """Shared memory that keeps the bodies of all worlds; none may be removed that the present world's log names."""

    role: RunContext

    def remove(self, names: Iterable[str]) -> int:
        """Checks that the log names none of them."""
        gone = {*names}
        named = {f"{worker}:{place.field}" for worker, place in named_bodies(self.role.redis, self.role.run_id)}
        assert not gone & named, f"bodies that the log names were removed: {gone & named}"
        return len(gone)


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
        self._process = self._flow.process()
        self._encode = lru_cache(None)(self._encoded)
        self._acts: dict[bytes, str] = {}
        """Encoded bytes → the act that they encode."""
        self._acted_with: dict[tuple[str, str], str] = {}
        """Act and history → the weights."""
        self._flow.set_bounds(_LEASE_SECONDS, 2**40)
        self._workers = workers

    # Worlds

    def beginning(self, faults: int) -> World:
        """Version 0 is published and durable; the workers have registered."""
        accounting = Accounting(_START, Ledger().as_json())
        trainer = TrainerState(self._flow.take_over(), 0, accounting, accounting)
        self._publish(trainer, 0)
        names = [f"worker-{index}" for index in range(self._workers)]
        workers = [WorkerState(name, *self._flow.register(name)) for name in names]
        return World(self._image(Image()), workers, [trainer], [Saved(0, accounting, (), True)], faults)

    def _act_in(self, entry: Mapping[bytes, bytes]) -> str:
        """The act whose fragment an entry of the log has, or says where it is."""
        place = BodyPlace.decode(entry.get(b"body", b""))
        there = self.role.bodies.fetch([(entry[b"worker"].decode(), place)]) if place else [entry[b"fragment"]]
        return self._acts.get(there[0] or b"", "garbage")

    def _image(self, before: Image) -> Image:
        keys = self._keys
        with self.role.redis.pipeline(transaction=False) as reads:
            for name in self._names:
                reads.dump(name)
            reads.hgetall(keys.flow)
            reads.xrange(keys.log)
            reads.xinfo_stream(keys.log)
            reads.zrange(keys.claims, 0, -1, withscores=True)
            reads.hget(keys.board, "blob")
            for name in (keys.pushed, keys.produced, keys.incarnations):
                reads.hgetall(name)
            found = reads.execute(raise_on_error=False)  # there may be no log
        dumps, (flow, log, info, claims, blob, *workers) = found[: len(self._names)], found[len(self._names) :]
        pairs = {name.decode(): value.decode() for name, value in flow.items()}
        places = {name: Position(pairs[name]) for name in ("committed_id", "published_id", "trimmed_id")}
        places["history"] = History.comes_from[pairs.get("history", "")]  # type: ignore[assignment]
        return replace(
            before,
            dumps=tuple(dump or b"" for dump in dumps),
            flow=_pairs(pairs | places),
            log=tuple(
                (Position(id_.decode()), _pairs({**entry, b"body": b"", b"fragment": self._act_in(entry)}))
                for id_, entry in log
            ),
            last=Position(info["last-generated-id"].decode()) if isinstance(info, dict) else _START,
            claims=tuple(sorted((name.decode(), end == PAST_MS) for name, end in claims)),
            workers=tuple(map(_pairs, workers)),
            weights=blob.decode(),
        )

    def _enter(self, image: Image) -> None:
        with self.role.redis.pipeline(transaction=False) as writes:
            writes.delete(*self._names, self._keys.wakeups)
            for name, dump in zip(self._names, image.dumps, strict=True):
                if dump:
                    writes.restore(name, 0, dump)
            writes.execute()

    def _after(self, world: World, step: Step, cost: int) -> World:
        """Returns the world after a step; Redis is in it."""
        self._enter(world.redis)
        new = world.copy()
        new.faults -= cost
        step(new)
        new.redis = self._image(new.redis)
        new.past = new.past if new.faults else None  # nothing is rolled back any more
        return new

    # Workers

    def _encoded(self, name: str, incarnation: int, seq: int, version: int, act: str, history: str) -> bytes:
        made = zero_fragment(
            self._description, run_id=self.role.run_id, worker_id=name, incarnation=incarnation, seq=seq,
            policy_versions=dict.fromkeys(self._description.policies, version), steps=STEPS, num_envs=ENVS, life=act,
            history=str(history),
        )  # fmt: skip
        blob = fragment.encode(made)
        self._acts[blob] = f"{act} by {name}:{incarnation}:{seq} of {version}"
        return blob

    @staticmethod
    def _pushing(worker: WorkerState) -> tuple[Any, ...]:
        hand = worker.hand
        assert hand is not None
        place = worker.name, worker.incarnation, worker.seq
        return *place, hand.epoch, hand.version, hand.act, hand.history, worker.refusals

    def _push(self, world: World, command: tuple[Any, ...]) -> tuple[str, Claim | None]:
        """As a worker does it, its next claim with it; what Redis answers, and what became of it."""
        name, incarnation, seq, epoch, version, act, history, refusals = command
        blob = self._encode(name, incarnation, seq, version, act, history)
        claiming = self._flow.claiming(name, incarnation, seq + 1)
        word = self._log.push(
            name, incarnation, seq, epoch, STEPS * ENVS, blob, then=claiming, refusals=refusals,
            memory=self.role.bodies.memory.token,
        )  # fmt: skip
        image = world.redis
        if word == "pushed":
            if act in image.appended or act in image.refused:
                raise Violation(
                    f"{act} is taken into the log, though it was {'taken' if act in image.appended else 'refused'}"
                )
            world.redis = replace(image, appended=(*sorted({*image.appended, act}),))
        if word == "stale":
            world.redis = replace(image, refused=(*sorted({*image.refused, act}),))
        if word == "duplicate" and not world.rolled_back and act not in image.appended:
            raise Violation(f"{act} is taken for a duplicate, though it is not in the log")
        return word, claiming.reply

    def _is_granted(self, worker: WorkerState, claim: Claim) -> None:
        later = worker.version > claim.version
        same = later or (worker.version, worker.history) == (claim.version, claim.history)
        if not same or worker.epoch != claim.epoch:
            board: Any = self.role.redis.hget(self._keys.board, "blob")
            flow = self._flow.read()
            worker.version, worker.history, worker.weights = flow.version, History(flow.history), board.decode()
        act = f"{worker.name}/{worker.process}/{worker.acts}"
        self._acted_with[act, worker.history] = worker.weights
        worker.hand = Acted(act, worker.version, claim.epoch, worker.history)
        worker.acts, worker.epoch = worker.acts + 1, claim.epoch

    def _registers_again(self, worker: WorkerState) -> None:
        worker.incarnation, worker.epoch = self._flow.register(worker.name, worker.incarnation + 1)
        worker.seq = worker.refusals = 0

    def _claims(self, world: World, index: int) -> None:
        worker = world.workers[index]
        try:
            claim = self._flow.claim(worker.name, worker.incarnation, worker.seq)
        except WorkerSuperseded:
            worker.alive = False
            return
        if claim.reply == "taken":
            self._registers_again(worker)
        elif claim.granted:
            self._is_granted(worker, claim)

    def _pushes(self, world: World, index: int) -> None:
        worker = world.workers[index]
        word, claim = self._push(world, self._pushing(worker))
        worker.hand = None
        if word == "superseded":
            worker.alive = False
        elif word == "epoch":
            self._registers_again(worker)
        elif word == "stale":
            self._flow.release(f"{worker.name}:{worker.incarnation}")
            worker.refusals += 1
        else:
            worker.seq += 1
            if claim is not None and claim.granted:
                self._is_granted(worker, claim)

    def _is_replaced(self, world: World, index: int) -> None:
        """A new process; what the old one has in its hand may still come."""
        worker = world.workers[index]
        if worker.hand:
            world.late.append(Late("push", self._pushing(worker)))
        registered = self._flow.register(worker.name)
        world.workers[index] = WorkerState(worker.name, *registered, process=worker.process + 1)

    # Trainers

    def _accounting(self, trainer: TrainerState) -> RedisAccounting:
        accounting = RedisAccounting(self.role.redis, self.role.run_id, trainer.epoch)
        accounting.redis_process = self._process if trainer.process else _ANOTHER_PROCESS
        accounting.emit_event = lambda text: None  # type: ignore[method-assign]
        return accounting

    def _attempts(self, world: World, trainer: TrainerState, act: Callable[[], None]) -> None:
        """Handles a fenced trainer or a rolled-back Redis."""
        try:
            act()
        except Fenced:
            trainer.alive = False
        except RedisRolledBack:
            self._attempts(world, trainer, partial(self._comes_back, world, trainer))
        except VersionsDiverged:
            self._continues_without(world, trainer)

    def _takes(self, world: World, index: int) -> None:
        """The next entry, if there is one."""
        trainer = world.trainers[index]
        self._attempts(world, trainer, partial(self._take, world, trainer))

    def _take(self, world: World, trainer: TrainerState) -> None:
        entry = self._log.read(trainer.now.position, 1, 0)
        accounting = self._accounting(trainer)
        consumer = LogConsumer(self.role.run_id, self.role.config, self._description, _once(entry), accounting)
        known = {version: str(history) for version, history, _ in trainer.weights}
        consumer.restore(Committed(trainer.now.position, trainer.now.ledger, {}, known))
        consumer.ledger = _ledger_of(trainer)
        consumer._history = str(trainer.now.history)
        found = consumer.take(trainer.version, Phase.TRAIN, 0.0)
        whole, *news = consumer.ledger.news()
        names = [(Position(its.id), _name(its).partition(" ")[2]) for its in entry if its.id == consumer.position]
        history = History(consumer._history)
        acts = (*trainer.learned, *trainer.taken)
        if found is not None:
            History.comes_from[history] = repr((*[act for _, act in acts], found.header.life))
        ledger, position = consumer.ledger.as_json(), Position(consumer.position)
        trainer.now = Accounting(position, ledger, history, (*trainer.now.held, *names))
        trainer.untold = None if whole else tuple(news[::2])
        if found is None:
            return
        lag, act = trainer.version - found.header.version, found.header.life
        if not 0 <= lag <= self._max_lag:
            raise Violation(f"{act} is learned from with lag {lag}")
        if act in [its for _, its in acts]:
            raise Violation(f"{act} is learned from twice")
        if act in world.redis.refused and not world.rolled_back:
            raise Violation(f"{act} was refused and is learned from all the same")
        own = {version: weights for version, _, weights in trainer.weights}[found.header.version]
        if (acted := self._acted_with[act, found.header.history]) != own:
            raise Violation(f"{act} was acted by {acted}, and version {found.header.version} is {own}")
        trainer.taken = (*trainer.taken, (Position(found.position), act))

    def _publish(self, trainer: TrainerState, consumed: int) -> None:
        assert trainer.now == trainer.committed
        version, history, weights = trainer.weights[-1]
        assert version == trainer.version
        header = VersionHeader(trainer.version, Phase.TRAIN, PhaseCounters(), history=str(history))
        published = self._board.publish(
            epoch=trainer.epoch, version=trainer.version, consumed=consumed, committed_id=trainer.now.position,
            ledger=_ledger_of(trainer), header=header, blob=weights.encode(),
            process=self._process if trainer.process else _ANOTHER_PROCESS,
        )  # fmt: skip
        if published.reply == "published":
            trainer.untold = ()

    def _weights(self, trainer: TrainerState, version: int) -> Weights:
        its = version, trainer.now.history, repr(tuple(act for _, act in trainer.learned))
        return *(old for old in trainer.weights if old[0] >= version - self._max_lag), its

    def _learned(self, trainer: TrainerState) -> TrainerState:
        learned, version = (*trainer.learned, *trainer.taken), trainer.version + 1
        new = replace(trainer, version=version, committed=trainer.now, learned=learned, taken=())
        new.weights = self._weights(new, version)
        return new

    def _publishes(self, world: World, index: int) -> None:
        trainer = world.trainers[index] = self._learned(world.trainers[index])
        self._attempts(world, trainer, partial(self._publish, trainer, self._needed))

    def _looks(self, world: World, index: int, dies: bool = False) -> None:
        trainer, state = world.trainers[index], self._flow.read()
        if state.epoch > trainer.epoch:
            trainer.alive = False
        elif state.epoch < trainer.epoch or state.version < trainer.version or not trainer.process:
            self._attempts(world, trainer, partial(self._comes_back, world, trainer, dies))
        elif state.version > trainer.version and self._log.ends_at(trainer.now.position):
            self._continues_without(world, trainer)

    def _comes_back(self, world: World, trainer: TrainerState, dies: bool = False) -> None:
        """`Recovery.redis_came_back`; it may die when the checkpoint that it writes there is durable."""
        if not self._flow.holds(trainer.epoch):
            trainer.alive = False
            return
        trainer.taken, trainer.now, trainer.untold = (), trainer.committed, None
        if self._flow.read().version > trainer.version:
            same, trainer.process = self._forward(trainer, Forward.COMPARE), True
            if not same:
                self._continues_without(world, trainer)
        elif not self._forward(trainer, Forward.IF_SAME):
            self._is_durable(world, trainer)
            if dies:
                trainer.alive = False
                return
            self._forward(trainer, Forward.ANYWAY)
        trainer.process = True
        self._publish(trainer, 0)

    def _forward(self, trainer: TrainerState, mode: Forward) -> bool:
        known = trainer.committed
        names = tuple(f"{position} {name}".strip() for position, name in known.held)
        same = fast_forward(
            self.role.redis, self.role.run_id, trainer.epoch, known.position, Ledger.from_json(known.ledger),
            Taken(trainer.held_after, "", digest_of("", *names)), mode,
        )  # fmt: skip
        if not same and mode is Forward.ANYWAY:
            self._trimmed(trainer, known.position)
        return same

    @staticmethod
    def _trimmed(trainer: TrainerState, through: Position) -> None:
        """What it compares with the log begins behind that."""

        def left(known: Accounting) -> Accounting:
            return replace(known, held=tuple(each for each in known.held if id_order(each[0]) > id_order(through)))

        same = trainer.now == trainer.committed
        trainer.committed = left(trainer.committed)
        trainer.now = trainer.committed if same else left(trainer.now)
        trainer.held_after = max(trainer.held_after, through, key=id_order)

    def _is_durable(self, world: World, trainer: TrainerState) -> None:
        committed = replace(trainer.committed, held=())
        saved = Saved(trainer.version, committed, trainer.learned, trainer.exact, trainer.weights)
        if saved not in world.store:
            world.store.append(saved)

    def _rolled_back(self, world: World, learned: Saved, epoch: int) -> Saved:
        """`rolled_back`: these weights as a version behind all others, at what Redis accounts for."""
        newest, state = max(world.store, key=lambda saved: saved.version), self._flow.read()
        ledger, position = read_ledger(self.role.redis, self.role.run_id).as_json(), Position(state.committed_id)
        if newest.version > state.version:
            ledger, position = newest.accounting.ledger, newest.accounting.position
        version = max(newest.version, state.version) + 1 + self._max_lag
        weights = repr(tuple(act for _, act in learned.learned))
        history = History(f"{learned.weights[-1][1]}/{version}/{epoch}")
        History.comes_from[history] = f"{weights} again as {version} of {epoch}"
        accounting = Accounting(position, ledger, history)
        saved = Saved(version, accounting, learned.learned, False, ((version, history, weights),))
        world.store.append(saved)
        return saved

    def _continues_without(self, world: World, trainer: TrainerState) -> None:
        """`Recovery.continue_without`."""
        reached = Saved(trainer.version, trainer.committed, trainer.learned, trainer.exact, trainer.weights)
        self._restores(world, trainer, self._rolled_back(world, reached, trainer.epoch))

    def _restores(self, world: World, trainer: TrainerState, saved: Saved) -> None:
        """`Recovery._restore`."""
        trainer.version, trainer.learned, trainer.exact = saved.version, saved.learned, saved.exact
        trainer.now = trainer.committed = saved.accounting
        trainer.held_after, trainer.weights, trainer.taken, trainer.untold = (
            saved.accounting.position,
            saved.weights,
            (),
            None,
        )
        if self._flow.read().version < trainer.version:
            self._forward(trainer, Forward.ANYWAY)
        if self._flow.read().version <= trainer.version:
            self._attempts(world, trainer, partial(self._publish, trainer, 0))

    def _starts(self, world: World) -> None:
        """Another trainer, from the newest checkpoint, as `Recovery.run` does it; the old ones live on."""
        epoch = self._flow.take_over(max(trainer.epoch for trainer in world.trainers))
        newest, state = max(world.store, key=lambda saved: saved.version), self._flow.read()
        if id_order(state.trimmed_id) > id_order(newest.accounting.position) and state.version >= newest.version:
            newest = self._rolled_back(world, newest, epoch)
        trainer = TrainerState(epoch, newest.version, newest.accounting, newest.accounting)
        world.trainers.append(trainer)
        self._restores(world, trainer, newest)

    def _saves(self, world: World, index: int, trim: bool) -> None:
        """Makes its version durable and trims what it covers, at once or later."""
        trainer = world.trainers[index]
        if not self._flow.holds(trainer.epoch):
            trainer.alive = False
            return
        self._is_durable(world, trainer)
        if not trainer.process:
            return
        through = trainer.committed.position
        if trim:
            self._archives(world, through)
            self._arrives(world, Late("trim", (trainer.epoch, through, self._process)))
            self._trimmed(trainer, through)
        else:
            world.late.append(Late("trim", (trainer.epoch, through, self._process)))

    def _archives(self, world: World, through: Position) -> None:
        """`Archiver.store`."""
        after = max([self._flow.read().trimmed_id, *(each.through for each in world.archive)], key=id_order)
        if id_order(through) > id_order(after):
            raw: Any = self.role.redis.xrange(self._keys.log, f"({after}", through)
            acts = tuple(self._act_in(entry).split(" ")[0] for _, entry in raw)
            world.archive.append(Segment(Position(after), through, acts))

    def _arrives(self, world: World, command: Late) -> None:
        if command.kind == "push":
            self._push(world, command.arguments)
            return
        with suppress(Fenced, RedisRolledBack, VersionsDiverged):  # its sender is told by its next one
            if command.kind == "trim":
                epoch, through, process = command.arguments
                if process == self._process:
                    self._archives(world, through)
                self._log.trim(epoch, through, process)
            else:
                self._publish(replace(command.arguments[0]), self._needed)

    # Steps

    def steps(self, world: World) -> Iterator[Next]:
        """Steps that can happen next."""
        for index, worker in enumerate(world.workers):
            if worker.alive:
                yield from self._worker_steps(index, worker)
            yield f"{worker.name} is replaced", partial(self._is_replaced, index=index), 1
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
            yield "Redis writes its file", _writes_its_file, 0
        if world.past is not None:
            yield "Redis is rolled back", self._is_rolled_back, 1

    def _worker_steps(self, index: int, worker: WorkerState) -> Iterator[Next]:
        if worker.hand is None:
            claims = partial(self._claims, index=index)
            yield f"{worker.name} claims", claims, 0
            yield f"{worker.name} claims, unheard", partial(_unheard, step=claims), 1
            return
        command = Late("push", self._pushing(worker))
        yield f"{worker.name} pushes", partial(self._pushes, index=index), 0
        yield f"{worker.name} pushes, unheard", partial(self._arrives, command=command), 1
        yield f"a push of {worker.name} is slow", partial(_is_slow, command=command), 1

    def _trainer_steps(self, world: World, index: int, trainer: TrainerState) -> Iterator[Next]:
        name = f"trainer {trainer.epoch}"
        if len(trainer.taken) == self._needed:
            command = Late("publish", (self._learned(trainer),))
            yield f"{name} publishes", partial(self._publishes, index=index), 0
            yield f"{name} publishes, unheard", partial(self._arrives, command=command), 1
            yield f"a version of {name} is slow", partial(_is_slow, command=command), 1
        else:
            reads = partial(self._takes, index=index)
            yield f"{name} reads", reads, 0
            yield f"{name} reads, unheard", partial(_unheard, step=reads), 1
        if not any(saved.version == trainer.version for saved in world.store):
            yield f"{name} writes a checkpoint", partial(self._saves, index=index, trim=True), 0
            yield f"{name} writes a checkpoint and trims late", partial(self._saves, index=index, trim=False), 1
        if len(world.trainers) > 1 or not trainer.process:
            yield f"{name} looks", partial(self._looks, index=index), 0
        if not trainer.process:
            yield f"{name} looks, and dies", partial(self._looks, index=index, dies=True), 1

    def _lapses(self, world: World, claim: str) -> None:
        self.role.redis.zadd(self._keys.claims, {claim: PAST_MS})

    def _is_late(self, world: World, command: Late) -> None:
        world.late.remove(command)
        self._arrives(world, command)

    def _is_rolled_back(self, world: World) -> None:
        """Another process, with what was written then; what is sent again is sent to that one."""
        assert world.past is not None
        self._enter(world.past)
        for index, command in enumerate(world.late):
            if command.kind == "publish":
                world.late[index] = Late("publish", (replace(command.arguments[0], process=False),))
            if command.kind == "trim":
                world.late[index] = Late("trim", (*command.arguments[:2], _ANOTHER_PROCESS))
        for trainer in world.trainers:
            trainer.process = False
        world.redis, world.rolled_back = world.past, True

    # What always holds

    def check(self, world: World) -> None:
        """Checks the world that Redis is in."""
        lines = read_accounting(self.role.redis, self.role.run_id)
        odd = {name: line.as_dict() for name, line in lines.items() if not line.balances}
        if odd:
            raise Violation(f"the accounting does not balance: {odd}")
        flow = dict(world.redis.flow)
        in_flight, window = int(flow["claimed"]) - int(flow["consumed"]), (self._max_lag + 1) * self._needed
        if world.rolled_back:  # what was dropped behind the last version counts again until it is dropped again
            committed = id_order(flow["committed_id"])
            window += sum(id_order(position) > committed for position, _ in world.redis.log)
        if not 0 <= in_flight <= window:
            raise Violation(f"{in_flight} are in flight of at most {window}")
        produced = sum(line.produced.fragments for name, line in lines.items() if name not in ("total", STRANGERS))
        known = len(world.redis.appended) + len(world.redis.refused)
        if not world.rolled_back and produced != known:
            raise Violation(f"{produced} are counted as produced, which are {known}")
        for trainer in world.trainers:
            consumed = Ledger.from_json(trainer.committed.ledger).consumed().fragments
            if trainer.exact and consumed != len(trainer.learned):
                raise Violation(
                    f"trainer {trainer.epoch} counts {consumed} as consumed and has learned {trainer.learned}"
                )
            if trainer.alive and trainer.process and trainer.exact and trainer.epoch == int(flow["epoch"]):
                self._all_is_covered(world, trainer)

    def _all_is_covered(self, world: World, trainer: TrainerState) -> None:
        """Log, archive and the holes that have a name are all that it has learned."""
        there = {(position, dict(entry)[b"fragment"].split(" ")[0]) for position, entry in world.redis.log}
        trimmed = id_order(dict(world.redis.flow)["trimmed_id"])
        for position, act in trainer.learned:
            place = id_order(position)
            archived = [each for each in world.archive if id_order(each.after) < place <= id_order(each.through)]
            if archived and not any(act in each.acts for each in archived):
                raise Violation(f"the archive lacks {act}, which was learned, and names no hole there")
            if not archived and (position, act) not in there and place > trimmed:
                raise Violation(f"{act} was learned and is in no log any more, and nothing says so")

    def goes_on(self, world: World) -> None:
        """From here a worker and a trainer, both new, come to a next version once all leases are over."""
        world = world.copy()
        for claim, _ in world.redis.claims:
            self._lapses(world, claim)
        self._is_replaced(world, 0)
        self._starts(world)
        index, goal = len(world.trainers) - 1, max(self._flow.read().version, world.trainers[-1].version) + 1
        for _ in range(4 * (self._max_lag + 1) * self._needed + 8):
            (self._pushes if world.workers[0].hand else self._claims)(world, 0)
            for _ in range(3):
                self._looks(world, index)
                ready = len(world.trainers[index].taken) == self._needed
                (self._publishes if ready else self._takes)(world, index)
            if self._flow.read().version >= goal:
                return
        raise Violation("the run is stuck")

    # The search

    def follow(self, faults: int, names: Sequence[str]) -> World:
        """The world that these steps lead to from the beginning; raises `Violation` as `run` does."""
        world = self.beginning(faults)
        for name in names:
            step, cost = next((step, cost) for known, step, cost in self.steps(world) if known == name)
            world = self._after(world, step, cost)
            self.check(world)
        self.goes_on(world)
        return world

    def run(self, depth: int, begin: World, every: int = 50) -> Found:
        """All worlds up to `depth` steps from `begin`; raises `Violation` with the steps that lead to it.

        What a world can come to, the same one with more faults left can as well. From each `every`-th world it is
        tried whether the run can go on.
        """
        found = Found()
        seen = {begin.key(): begin.faults}
        frontier: list[tuple[World, tuple[str, ...]]] = [(begin, ())]
        for _ in range(depth):
            following = []
            for world, way in frontier:
                for name, step, cost in self.steps(world):
                    if cost > world.faults:
                        continue
                    found.steps += 1
                    try:
                        new = self._after(world, step, cost)
                        if seen.get(key := new.key(), -1) >= new.faults:
                            continue
                        seen[key] = new.faults
                        self.check(new)
                        if len(seen) % every == 0:
                            self.goes_on(new)
                    except AssertionError as error:
                        raise Violation(f"{error}, after: {'; '.join([*way, name])}") from error
                    following.append((new, (*way, name)))
            frontier = following
            found.by_depth.append(len(frontier))
        found.worlds = len(seen)
        return found


def _pairs(mapping: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(sorted(mapping.items()))


def _once(entries: list[LogEntry]) -> Callable[..., list[LogEntry]]:
    """A log that has these, and then no more."""
    left = [entries]
    return lambda *_: left.pop() if left else []


def _ledger_of(trainer: TrainerState) -> Ledger:
    """As it has it in memory, with what it has not told yet."""
    ledger = Ledger.from_json(trainer.now.ledger)
    if trainer.untold is not None:
        ledger.told()
        for worker in trainer.untold:
            ledger.of(worker)
    return ledger


def _unheard(world: World, step: Step) -> None:
    """Redis has changed, and the one who asked does not know."""
    after = world.copy()
    step(after)
    world.redis = after.redis


def _is_slow(world: World, command: Late) -> None:
    world.late.append(command)


def _writes_its_file(world: World) -> None:
    world.past = world.redis
