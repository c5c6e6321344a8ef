"""The whole protocol against a real Redis, in random order, with a simple model beside it.

Workers join, claim, act, push, push twice, die, leave, come late and are drained; leases run out; the trainer takes,
drops, publishes, trims, crashes and reads again, and is taken over. The model keeps no counters of its own: what is in
flight are the claims that are held and the entries that no published version and no drop has committed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import redis
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

from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.coordinator.services.embedded import new_secret
from stagecoach.coordinator.services.memory_folder import MemoryFolder
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import Fenced, WorkerSuperseded
from stagecoach.shared.experience import fragment
from stagecoach.shared.protocol import payload_shards
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.payload_shards import Bodies, named_bodies
from stagecoach.shared.protocol.scripts import Script
from stagecoach.shared.protocol.shared_memory import PLACE, SharedMemory
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import ENVIRONMENT, CheckpointStore
from stagecoach.shared.storage.object_store import open_store
from stagecoach.trainer_node.state.log_consumer import Committed
from tests.conftest import RedisServer
from tests.support.runs.small_run import SIZE, SmallTrainer, SmallWorker, in_redis, small_config

PAST_MS = 1


@dataclass
class Acted:
    """A fragment that a worker has claimed and may push, now or late."""

    worker: SmallWorker
    seq: int
    version: int
    refused: bool = False
    """Whether Redis has refused it as stale; it stays so."""

    @property
    def claim(self) -> str:
        return f"{self.worker.name}:{self.worker.incarnation}:{self.seq}"


@dataclass
class Entry:
    """What the model knows of an entry in the log."""

    worker: str
    incarnation: int
    seq: int
    version: int
    good: bool
    size: int
    fate: str = "flying"
    """Or `dropped`, or `consumed` once a published version stands on it."""


@dataclass
class Snapshot:
    """What a checkpoint keeps of the log's consumer."""

    version: int
    read: int
    committed: Committed


@dataclass
class Model:
    """The run as it must be."""

    window: int
    version: int = 0
    claims: dict[str, bool] = field(default_factory=dict)
    """Claim → whether its lease has run out."""
    entries: list[Entry] = field(default_factory=list)
    """All that was ever pushed, in order."""
    read: int = 0
    """Entries that the present trainer has read."""
    taken: list[Entry] = field(default_factory=list)
    trimmed: int = 0
    refused: int = 0
    draining: set[str] = field(default_factory=set)
    pushed: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Held claims, and entries that are neither dropped nor consumed."""
        return len(self.claims) + sum(entry.fate == "flying" for entry in self.entries)


class Protocol(RuleBasedStateMachine):
    """One run with L, K and up to seven workers."""

    server: redis.Redis
    folder: Path
    max_lag: int
    updates_of: int
    description: bytes
    shards: ClassVar[dict[str, redis.Redis]] = {}
    """Where the bodies are; none for the log itself."""
    memory: SharedMemory | None = None

    @initialize(fleet=st.sampled_from([1, 2, 7]))
    def start(self, fleet: int) -> None:
        """A new run, its trainer, and the names that workers may have."""
        config = small_config(self.updates_of, self.max_lag)
        address = Address(f"t-{new_secret()[:12]}", "redis://here", f"file://{self.folder}")
        store = open_store(address, config)
        store.put(ENVIRONMENT, self.description)
        checkpoints = CheckpointStore(store, address.run_id)
        self.bodies = Bodies(self.shards, address.run_id, self.memory)
        flow = Flow(self.server, address.run_id)
        self.role = RunContext(config, address, self.server, checkpoints, flow, self.bodies)
        assert create_flow(self.role)
        self.keys = RunKeys(address.run_id)
        self.names = ["worker-" + "1" * (index + 1) for index in range(fleet)]  # each the beginning of the next
        self.live: dict[str, SmallWorker] = {}
        self.acting: list[Acted] = []
        self.old_workers: list[SmallWorker] = []
        self.old_trainers: list[SmallTrainer] = []
        self.model = Model((self.max_lag + 1) * self.updates_of)
        self.trainer = SmallTrainer(self.role)
        self.trainer.publish(0)
        self.committed = self.trainer.consumer.committed
        self.snapshots = [self.snapshot()]
        for name in self.names:
            self.join(name)

    def snapshot(self) -> Snapshot:
        return Snapshot(self.trainer.version, self.model.read, self.trainer.consumer.committed)

    # Workers

    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        self.join(data.draw(st.sampled_from(self.names)))

    def join(self, name: str) -> None:
        if name in self.live:
            self.old_workers.append(self.live[name])
        worker = SmallWorker(self.role, name)
        assert worker.incarnation == 1 + max((w.incarnation for w in self.old_workers if w.name == name), default=-1)
        assert worker.epoch == self.trainer.epoch
        self.live[name] = worker
        self.role.flow.undrain(name)
        self.model.draining.discard(name)
        self.forget_claims(name)

    def forget_claims(self, name: str) -> int:
        """The model of giving back; answers how many."""
        gone = [claim for claim in self.model.claims if claim.startswith(f"{name}:")]
        for claim in gone:
            del self.model.claims[claim]
        return len(gone)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        """A worker asks (again, if it holds one already) and gets exactly what the rule says."""
        worker = self.live[data.draw(st.sampled_from(sorted(self.live)))]
        self.expect_claim(worker)

    @precondition(lambda self: self.live)
    @rule()
    def all_claim(self) -> None:
        for worker in self.live.values():
            self.expect_claim(worker)

    @precondition(lambda self: len(self.live) > 1 and self.model.claims)
    @rule(data=st.data())
    def others_fill_the_place(self, data: st.DataObject) -> None:
        """One worker is slower than its lease; the others act on until there is no credit."""
        slow = data.draw(st.sampled_from(sorted(self.model.claims)))
        self.server.zadd(self.keys.claims, {slow: PAST_MS})
        self.model.claims[slow] = True
        for worker in self.live.values():
            while not slow.startswith(f"{worker.name}:") and self.expect_claim(worker) == "granted":
                self.expect_push(self.acting[-1], "good")

    @precondition(lambda self: self.acting)
    @rule()
    def all_push(self) -> None:
        for acted in list(self.acting):
            self.expect_push(acted, "good")

    def expect_claim(self, worker: SmallWorker) -> str:
        """Claims, compares with the model, and answers the word."""
        answer = worker.claim()
        model, claim = self.model, f"{worker.name}:{worker.incarnation}:{worker.seq}"
        if worker.name in model.draining:
            assert answer.reply == "drain"
            return answer.reply
        model.claims = {name: over for name, over in model.claims.items() if not over}
        expected = "granted" if claim in model.claims or model.in_flight < model.window else "wait_credit"
        assert (answer.reply, answer.version) == (expected, model.version)
        if answer.granted:
            assert answer.epoch == self.trainer.epoch
            model.claims[claim] = False
            refused = any(item.refused for item in self.acting if item.claim == claim)  # it has not heard of that
            acted = Acted(worker, worker.seq, answer.version, refused)
            self.acting = [item for item in self.acting if item.claim != claim] + [acted]
        return answer.reply

    @precondition(lambda self: self.acting)
    @rule(data=st.data(), kind=st.sampled_from(["good", "good", "good", "newest", "bad"]), again=st.booleans())
    def push(self, data: st.DataObject, kind: str, again: bool) -> None:
        """A worker pushes what it acted: in time, late, or from a grave; the first answer may get lost on its way."""
        acted = data.draw(st.sampled_from(self.acting))
        self.expect_push(acted, kind, heard=not again)
        if again and self.model.pushed.get((acted.worker.name, acted.worker.incarnation), -1) >= acted.seq:
            acted.worker.seq = acted.seq
            assert acted.worker.push(b"a resend") == "duplicate"
            acted.worker.seq = acted.seq + 1

    def expect_push(self, acted: Acted, kind: str, heard: bool = True) -> None:
        """Pushes and compares with the model; what was refused stays with the worker until it has `heard` of it."""
        model, worker = self.model, acted.worker
        version = model.version if kind == "newest" else acted.version
        blob = b"not a fragment" if kind == "bad" else fragment.encode(worker.act(version, seq=acted.seq))
        if worker.incarnation < max(one.incarnation for one in self.everybody(worker.name)):
            assert worker.push(blob) == "superseded", "its successor acts the same again"
            self.acting.remove(acted)
            return
        held = acted.claim in model.claims
        room = not acted.refused and (held or model.in_flight < model.window)
        word = worker.send(blob)
        assert word == ("pushed" if room else "stale")
        if not room:
            model.refused += not acted.refused  # else the same is sent again
            acted.refused = True
            if heard:
                worker.refusals += 1
                self.acting.remove(acted)
            return
        worker.seq += 1
        model.claims.pop(acted.claim, None)
        source = (worker.name, worker.incarnation)
        model.pushed[source] = acted.seq
        model.entries.append(Entry(*source, acted.seq, version, kind != "bad", len(blob)))
        self.acting.remove(acted)

    def everybody(self, name: str) -> list[SmallWorker]:
        return [worker for worker in (*self.live.values(), *self.old_workers) if worker.name == name]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reported=st.booleans())
    def die(self, data: st.DataObject, reported: bool) -> None:
        """A worker ends, with or without somebody who gives back its claims."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.old_workers.append(self.live.pop(name))
        if reported:
            assert self.role.flow.release(name) == self.forget_claims(name)

    @precondition(lambda self: self.old_workers)
    @rule(data=st.data())
    def a_superseded_worker_is_told(self, data: st.DataObject) -> None:
        """An incarnation that has been replaced gets no claim."""
        old = data.draw(st.sampled_from(self.old_workers))
        if old.name in self.live:
            with pytest.raises(WorkerSuperseded, match="newer incarnation"):
                old.claim()

    @precondition(lambda self: len(self.live) > 1)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.role.flow.drain(name)
        self.model.draining.add(name)

    @precondition(lambda self: self.model.claims)
    @rule(data=st.data())
    def lease_runs_out(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(sorted(self.model.claims)))
        self.server.zadd(self.keys.claims, {claim: PAST_MS})
        self.model.claims[claim] = True

    # Trainer

    @precondition(lambda self: self.trainer.taken < self.updates_of)
    @rule()
    def take(self) -> None:
        """The trainer takes the next fragment that is good and recent enough; what is not gives its credit back."""
        model, expected = self.model, None
        while expected is None and model.read < len(model.entries):
            entry = model.entries[model.read]
            model.read += 1
            if entry.good and model.version - entry.version <= self.max_lag:
                expected = (entry.worker, entry.incarnation, entry.seq)
                model.taken.append(entry)
            else:
                entry.fate = "dropped"
        found = self.trainer.take()
        assert (found and (found.header.worker_id, found.header.incarnation, found.header.seq)) == expected
        if found:
            assert 0 <= model.version - found.header.version <= self.max_lag

    @precondition(lambda self: self.trainer.taken == self.updates_of)
    @rule(keep=st.booleans())
    def publish(self, keep: bool) -> None:
        """K fragments have become a version; a checkpoint may keep it."""
        assert self.trainer.publish().reply == "published"
        self.model.version += 1
        for entry in self.model.taken:
            entry.fate = "consumed"
        self.model.taken = []
        self.committed = self.trainer.consumer.committed
        if keep:
            self.snapshots.append(self.snapshot())

    @rule(keep=st.booleans())
    def take_all(self, keep: bool) -> None:
        while True:
            if self.trainer.taken == self.updates_of:
                self.publish(keep)
            read = self.model.read
            self.take()
            if self.model.read == read:
                return

    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        """A checkpoint is durable: the log before it goes, and older checkpoints with it."""
        kept = data.draw(st.integers(0, len(self.snapshots) - 1))
        self.snapshots = self.snapshots[kept:]
        through = self.snapshots[0]
        log = self.trainer.log
        assert log.trim(self.trainer.epoch, through.committed.position) == through.read - self.model.trimmed
        self.model.trimmed = through.read
        assert self.held() == self.named_bodies(), "all is swept"

    def held(self) -> frozenset[tuple[str, str, str]]:
        """Place, worker and field of every body outside the log."""
        names = [name.partition(":") for name in (self.memory.names() if self.memory is not None else [])]
        return held(self.shards, self.keys, self.names) | {(PLACE, worker, body) for worker, _, body in names}

    def named_bodies(self) -> frozenset[tuple[str, str, str]]:
        """Shard, worker and field of every body that the log names."""
        named = named_bodies(self.server, self.role.run_id)
        return frozenset((place.shard, worker, place.field) for worker, place in named)

    @rule(data=st.data())
    def crash_and_read_again(self, data: st.DataObject) -> None:
        """Another trainer takes over from a checkpoint, reads the log again, and changes nothing until it is level."""
        snapshot = data.draw(st.sampled_from(self.snapshots))
        self.old_trainers.append(self.trainer)
        self.trainer = trainer = SmallTrainer(self.role)
        assert trainer.epoch == self.old_trainers[-1].epoch + 1
        trainer.version = snapshot.version
        trainer.consumer.restore(snapshot.committed)
        before = in_redis(self.role)
        while trainer.version < self.model.version:
            while trainer.taken < self.updates_of:
                assert trainer.take() is not None
            assert trainer.publish().reply == "known"
        assert in_redis(self.role) == before
        assert trainer.consumer.committed == self.committed
        behind = [index for index, entry in enumerate(self.model.entries) if entry.fate == "consumed"]
        self.model.read, self.model.taken = (behind[-1] + 1 if behind else 0), []

    @precondition(lambda self: self.old_trainers)
    @rule(data=st.data())
    def an_old_trainer_is_refused(self, data: st.DataObject) -> None:
        """Whoever was taken over can neither publish, drop nor trim."""
        old, before = data.draw(st.sampled_from(self.old_trainers)), in_redis(self.role)
        assert not self.role.flow.holds(old.epoch) and self.role.flow.holds(self.trainer.epoch)
        with pytest.raises(Fenced, match=f"epoch {old.epoch} may not publish version"):
            old.publish(self.model.version + 1)
        with pytest.raises(Fenced):
            old.log.trim(old.epoch, "9999999999999-0")
        drop, late = Script(self.server, self.keys, "drop"), "9999999999999-0"
        assert drop(epoch=old.epoch, committed_id=late, claims=1, process="", decided="", accounts=[""]) == b"fenced"
        assert in_redis(self.role) == before

    # What always holds

    @invariant()
    def the_bound_holds(self) -> None:
        """Never more than (L + 1) · K in flight, never less than none, and exactly what the model says."""
        state = self.role.flow.read()
        assert state.version == self.model.version and state.consumed == self.updates_of * state.version
        assert state.in_flight == self.model.in_flight
        assert 0 <= state.in_flight <= state.window == self.model.window

    @invariant()
    def the_ledger_balances(self) -> None:
        """For every worker and in total; and the log holds the bytes that the flow says."""
        model, lines = self.model, read_accounting(self.server, self.role.run_id)
        assert all(line.balances for line in lines.values())
        total, pushed = lines["total"], len(model.entries) + model.refused
        assert (total.produced.fragments, total.produced.transitions) == (pushed, pushed * SIZE)
        assert len(self.trainer.log) == len(model.entries) - model.trimmed
        in_log = sum(entry.size for entry in model.entries[model.trimmed :])
        assert self.role.flow.read().log_bytes == in_log

    @invariant()
    def the_shards_hold_every_body_that_the_log_names(self) -> None:
        """Pushes that were refused have taken theirs back."""
        if self.bodies:
            named = self.named_bodies()
            assert named <= self.held()
            assert len(named) == len(self.model.entries) - self.model.trimmed

    def teardown(self) -> None:
        """From wherever it has come to: once leases have run out, one worker alone brings the run on."""
        if not hasattr(self, "trainer"):
            return
        for claim in self.model.claims:
            self.server.zadd(self.keys.claims, {claim: PAST_MS})
            self.model.claims[claim] = True
        worker = SmallWorker(self.role, self.names[0])
        self.role.flow.undrain(worker.name)
        self.model.draining.discard(worker.name)
        self.forget_claims(worker.name)
        goal = self.model.version + 2
        for _ in range(4 * self.model.window + 4):
            if self.model.version >= goal:
                break
            if self.expect_claim(worker) == "granted":
                self.expect_push(self.acting[-1], "newest")
            self.take_all(keep=False)
        assert self.model.version >= goal, "the run is stuck"
        if self.memory is not None:
            self.memory.remove(self.memory.names())
        keys: Any = self.server.scan_iter(match=self.keys.prefix + "*")
        self.server.delete(*keys)


def held(shards: dict[str, redis.Redis], keys: RunKeys, workers: list[str]) -> frozenset[tuple[str, str, str]]:
    """Shard, worker and field of every body that is there."""
    found = set()
    for shard, client in shards.items():
        for worker in workers:
            fields: Any = client.hkeys(keys.bodies(worker))
            found |= {(shard, worker, field.decode()) for field in fields}
    return frozenset(found)


@pytest.fixture(scope="module")
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    with redis_server.client() as found:
        yield found


@pytest.mark.parametrize("fragments_per_update", [1, 2, 4])
@pytest.mark.parametrize("max_policy_lag", [0, 1, 3])
def test_protocol_keeps_bounds_and_accounting_in_random_order(
    client: redis.Redis, tmp_path: Path, max_policy_lag: int, fragments_per_update: int
) -> None:
    play(server=client, folder=tmp_path, max_lag=max_policy_lag, updates_of=fragments_per_update)


def test_so_it_does_with_the_bodies_on_shards(
    client: redis.Redis, shards: dict[str, redis.Redis], tmp_path: Path
) -> None:
    play(server=client, folder=tmp_path, max_lag=1, updates_of=2, shards=shards)


def test_so_it_does_with_the_bodies_in_shared_memory(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    with closing(MemoryFolder(tmp_path)) as folder:
        memory = SharedMemory(str(folder.path))
        play(server=client, folder=tmp_path, max_lag=1, updates_of=2, memory=memory)


def play(**attributes: Any) -> None:
    """Runs the machine with these attributes."""
    attributes["description"] = json.dumps(describe_environment(small_config()).as_dict()).encode()
    run_state_machine_as_test(
        type("Configured", (Protocol,), attributes),
        settings=settings(
            max_examples=15, stateful_step_count=50, derandomize=True, database=None,
            phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
