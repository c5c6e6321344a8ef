"""Intake on a real log: what is consumed, what is dropped with which reason, and a ledger that balances."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from stagecoach.shared.base.errors import DropReason, Fenced
from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.log_entry import STRANGERS, LogEntry
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Count, Ledger, LedgerLine, fast_forward, read_accounting, read_ledger
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.state.log_consumer import Committed
from tests.conftest import MakeRole
from tests.support.runs.small_run import (
    BAD,
    ENVS,
    SIZE,
    STEPS,
    SmallTrainer,
    SmallWorker,
    begin,
    damaged,
    in_redis,
    ledger_lines,
    small_config,
)

Begun = Callable[..., tuple[SmallTrainer, SmallWorker, RunContext]]


@pytest.fixture
def begun(make_role: MakeRole) -> Begun:
    """`begun(**sections of small_config)` → a run's trainer, which has published version 0, its worker and its role."""

    def make(**settings: Any) -> tuple[SmallTrainer, SmallWorker, RunContext]:
        role = make_role(small_config(**settings))
        return begin(role), SmallWorker(role), role

    return make


def test_takes_fragments_in_the_order_of_the_log(begun: Begun) -> None:
    trainer, first, role = begun()
    second = SmallWorker(role, "worker-1")
    second.work()
    first.work()
    found = [trainer.take(), trainer.take()]
    assert [item.header.worker_id for item in found if item] == ["worker-1", "worker-0"]
    assert trainer.take() is None
    trainer.publish()
    total = ledger_lines(role)["total"]
    assert total.consumed == total.produced == Count(2, 2 * SIZE)
    assert trainer.consumer.lags == {0: 2}


@pytest.mark.parametrize("reason", BAD)
def test_log_consumer_drops_and_counts_bad_fragment(begun: Begun, reason: str) -> None:
    trainer, worker, role = begun(fragments_per_update=1)
    worker.work(blob=damaged(worker, reason))
    assert worker.claim().reply == "wait_credit"
    assert trainer.take() is None
    line = ledger_lines(role)["worker-0"]
    assert line.dropped == {reason: Count(1, SIZE)} and line.consumed == Count()
    assert role.flow.read().in_flight == 0
    worker.work()
    taken = trainer.take()
    assert taken is not None and taken.header.seq == 1
    trainer.publish()
    line = ledger_lines(role)["worker-0"]
    assert line.consumed == Count(1, SIZE) and line.dropped == {reason: Count(1, SIZE)}


@pytest.mark.parametrize(("algorithm", "phase", "dropped"), [
    ("ppo", Phase.TRAIN, True), ("ppo", Phase.HEATUP, False), ("dqn", Phase.TRAIN, False),
])  # fmt: skip
def test_unknown_log_prob_is_dropped_when_learned_from(
    begun: Begun, algorithm: str, phase: Phase, dropped: bool
) -> None:
    trainer, worker, _ = begun(algorithm=algorithm)
    made = worker.act(phase=phase)
    made.columns["default"]["log_prob"][0, 0] = np.nan
    worker.work(blob=fragment.encode(made))
    assert (trainer.consumer.take(0, phase, 0.0) is None) == dropped
    assert trainer.consumer.ledger.of("worker-0").dropped == ({"not_finite": Count(1, SIZE)} if dropped else {})


@pytest.mark.parametrize(("reason", "change"), [
    ("schema", {"worker_id": "worker-9"}), ("schema", {"seq": 7}), ("schema", {"incarnation": 3}),
    ("schema", {"steps": STEPS + 1}), ("schema", {"num_envs": ENVS + 1}), ("schema", {"policy_versions": {"other": 0}}),
    ("stale", {"policy_versions": {"default": 1}}), ("stale", {"history": "of other experience"}),
])  # fmt: skip
def test_log_consumer_drops_fragment_with_wrong_header(begun: Begun, reason: str, change: dict[str, Any]) -> None:
    """If Redis lost the version and the trainer died, neither environment nor worker is at fault."""
    trainer, worker, role = begun()
    worker.work(blob=fragment.encode(worker.act(**change)))
    assert trainer.take() is None
    assert ledger_lines(role)["worker-0"].dropped == {reason: Count(1, SIZE)}
    assert trainer.consumer._in_a_row == (reason == "schema")


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_consumes_up_to_the_lag_bound_and_drops_what_is_older(begun: Begun, max_lag: int) -> None:
    trainer, worker, role = begun(fragments_per_update=1, max_policy_lag=max_lag)
    for _ in range(max_lag + 1):
        worker.work(trainer.version)
        assert trainer.take() is not None
        trainer.publish()
    worker.work(version=0)
    assert trainer.take() is None
    worker.work(version=1)
    assert trainer.take() is not None
    assert trainer.consumer.lags == {0: max_lag + 1, max_lag: 1} if max_lag else {0: 2}
    assert ledger_lines(role)["total"].dropped == {"stale": Count(1, SIZE)}


def test_replay_buffer_accepts_warm_up_fragments_later(begun: Begun) -> None:
    trainer, worker, role = begun(algorithm="dqn")
    worker.work(blob=damaged(worker, "stale"))
    assert trainer.take(Phase.TRAIN) is not None and not ledger_lines(role)["total"].dropped


def test_repeated_log_entry_is_duplicate_with_own_credit(begun: Begun) -> None:
    """A Redis that has forgotten what a worker pushed lets it push the same again."""
    trainer, worker, role = begun(max_policy_lag=1)
    worker.work()
    role.redis.delete(RunKeys(role.run_id).pushed)
    worker.seq = 0
    worker.work()
    assert trainer.take() is not None and trainer.take() is None
    assert role.flow.read().in_flight == 1
    line = ledger_lines(role)["worker-0"]
    assert line.dropped == {"duplicate": Count(1, SIZE)} and line.consumed == Count(1, SIZE)


def test_entries_that_vanished_from_the_log_are_counted_as_lost(begun: Begun) -> None:
    trainer, worker, role = begun(fragments_per_update=4)
    for _ in range(4):
        worker.work()
    entries = worker.log.read("0-0", 10, 0)
    role.redis.xdel(RunKeys(role.run_id).log, entries[1].id, entries[2].id)
    assert not read_accounting(role.redis, role.run_id)["worker-0"].balances
    taken = [trainer.take(), trainer.take()]
    assert [item.header.seq for item in taken if item] == [0, 3]
    state = role.flow.read()
    assert state.claimed == 2
    worker.work()
    worker.work()
    assert trainer.take() is not None and trainer.take() is not None
    trainer.publish()
    line = ledger_lines(role)["worker-0"]
    assert line.dropped == {"lost": Count(2, 2 * SIZE)} and line.consumed == Count(4, 4 * SIZE)
    assert role.flow.read().in_flight == 0


def test_gap_before_bad_fragment_counts_both(begun: Begun) -> None:
    trainer, worker, role = begun()
    worker.work()
    worker.work(blob=b"bad")
    role.redis.xdel(RunKeys(role.run_id).log, worker.log.read("0-0", 1, 0)[0].id)
    assert trainer.take() is None
    assert role.flow.read().in_flight == 0
    assert ledger_lines(role)["worker-0"].dropped == {"lost": Count(1, SIZE), "undecodable": Count(1, SIZE)}


def test_gap_is_counted_once_after_restart(begun: Begun) -> None:
    trainer, worker, role = begun()
    worker.work()
    worker.work()
    role.redis.xdel(RunKeys(role.run_id).log, worker.log.read("0-0", 1, 0)[0].id)
    assert trainer.take() is not None
    second = SmallTrainer(role)
    committed = read_ledger(role.redis, role.run_id).as_json()
    second.consumer.restore(Committed(role.flow.read().committed_id, committed, {}))
    assert second.take() is not None
    assert second.consumer.ledger.of("worker-0").dropped == {"lost": Count(1, SIZE)}
    assert role.flow.read().claimed == 1


GARBAGE: list[dict[bytes, bytes]] = [
    {b"hello": b"world"},
    {b"worker": b"\xff\xfe", b"incarnation": b"-1", b"seq": b"1.5", b"transitions": b"many", b"fragment": b"\x00"},
    {b"worker": b"worker-0", b"incarnation": b"9" * 5000, b"seq": b"9" * 5000, b"transitions": b"9" * 5000},
    {b"worker": b"worker-0", b"incarnation": "²".encode(), b"transitions": "٣".encode(), b"fragment": b""},
    {},
    {b"end": b"9" * 12},
    {b"seq": b"7", b"end": b"9" * 12, b"lost": b"5"},
    {b"worker": b"worker-7", b"incarnation": b"3"},
]
"""The last four are put upon a copy of what a worker pushed."""


@pytest.mark.parametrize(
    "fields", GARBAGE, ids=["no field", "no number", "huge number", "odd digits", "copy", "far", "gap", "another"]
)
def test_foreign_log_entries_change_no_credit_or_account(begun: Begun, fields: dict[bytes, bytes]) -> None:
    """Nor the bytes that the log is counted to hold, nor the accounting that a Redis is set forward to."""
    trainer, worker, role = begun()
    keys = RunKeys(role.run_id)
    worker.work()
    client: Any = role.redis
    ((_, pushed),) = client.xrange(keys.log)
    for _ in range(3):
        client.xadd(keys.log, pushed | fields if GARBAGE.index(fields) >= 4 else fields)
    assert read_accounting(role.redis, role.run_id)[STRANGERS].in_flight.fragments == 3
    worker.work()
    fast_forward(role.redis, role.run_id, trainer.epoch, "0-0", Ledger())
    assert role.flow.read().in_flight == 2
    assert trainer.take() is not None and trainer.take() is not None
    assert role.flow.read().in_flight == 2
    trainer.publish()
    assert (role.flow.read().in_flight, trainer.consumer.ledger.consumed()) == (0, Count(2, 2 * SIZE))
    lines = read_accounting(role.redis, role.run_id)
    assert all(line.balances for line in lines.values())
    assert lines["worker-0"] == LedgerLine(Count(2, 2 * SIZE), Count(2, 2 * SIZE), {}, Count())
    assert {reason: count.fragments for reason, count in lines[STRANGERS].dropped.items()} == {"foreign": 3}
    client.xadd(keys.log, pushed | fields)
    assert trainer.take() is None
    worker.log.trim(trainer.epoch, trainer.consumer.position)
    assert (len(worker.log), client.xlen(keys.pushes), role.flow.read().log_bytes) == (0, 0, 0)


def test_many_foreign_entries_do_not_end_the_run(begun: Begun) -> None:
    trainer, worker, role = begun()
    for _ in range(250):
        role.redis.xadd(RunKeys(role.run_id).log, {"worker": "worker-0"})
    worker.work()
    assert trainer.take() is not None


def test_restore_continues_from_committed_accounting(begun: Begun) -> None:
    trainer, worker, _ = begun(fragments_per_update=4)
    for _ in range(4):
        worker.work()
    assert trainer.take() is not None
    assert trainer.consumer.committed.position == "0-0" and trainer.consumer.committed.lags == {}
    trainer.consumer.commit()
    committed = trainer.consumer.committed
    assert committed.position == trainer.consumer.position == worker.log.read("0-0", 10, 0)[0].id
    assert Ledger.from_json(committed.ledger) == trainer.consumer.ledger and committed.lags == {0: 1}
    assert trainer.take() is not None
    trainer.consumer.restore(committed)
    again = trainer.take()
    assert again is not None and again.header.seq == 1, "what was read ahead is forgotten"
    assert trainer.consumer.ledger.consumed() == Count(2, 2 * SIZE) and trainer.consumer.lags == {0: 2}


def test_rereading_the_log_gives_equal_accounting(begun: Begun) -> None:
    first, worker, role = begun(max_policy_lag=1)
    other = SmallWorker(role, "worker-1")
    worker.work()
    worker.work(blob=b"bad")
    other.work(blob=damaged(other, "not_finite"))
    other.work()
    assert first.take() is not None and first.take() is not None
    first.publish()
    worker.work(version=1)
    other.work(version=1, blob=b"bad")
    worker.work(version=1)
    role.redis.xdel(RunKeys(role.run_id).log, worker.log.read("0-0", 10, 0)[4].id)
    assert first.take() is not None and first.take() is None
    expected, lags, position = first.consumer.ledger, first.consumer.lags, first.consumer.position

    second = SmallTrainer(role)
    before = in_redis(role)
    assert second.take() is not None and second.take() is not None
    assert second.publish().reply == "known"
    assert second.take() is not None and second.take() is None
    assert (second.consumer.ledger, second.consumer.lags, second.consumer.position) == (expected, lags, position)
    assert second.consumer.ledger.of("worker-0").dropped[DropReason.LOST] == Count(1, SIZE)
    assert in_redis(role) == before


def test_fenced_trainer_may_not_drop(begun: Begun) -> None:
    old, worker, role = begun()
    worker.work(blob=b"bad")
    new = SmallTrainer(role)
    before = in_redis(role)
    with pytest.raises(Fenced, match="newer trainer"):
        old.take()
    assert in_redis(role) == before
    assert new.take() is None
    assert ledger_lines(role)["worker-0"].dropped == {"undecodable": Count(1, SIZE)}


def test_altered_header_metadata_is_corrupt(begun: Begun) -> None:
    trainer, worker, role = begun()
    blob = fragment.encode(worker.act())
    changed = blob.replace(b'\\"seq\\":0', b'\\"seq\\":1')
    assert changed != blob and len(tensor_blob.decode(blob)[0]) > 0
    worker.work(blob=changed)
    assert trainer.take() is None
    assert ledger_lines(role)["worker-0"].dropped == {"corrupt": Count(1, SIZE)}


def test_log_consumer_drops_header_that_cannot_be_encoded(begun: Begun) -> None:
    trainer, worker, role = begun()
    arrays, header = tensor_blob.decode(fragment.encode(worker.act()))
    worker.work(blob=tensor_blob.encode(arrays, header | {os.fsdecode(b"caf\xe9\x1b]52;c;"): 1}))
    worker.work()
    assert trainer.take() is not None
    (event,) = read_events(role.redis, role.run_id)
    assert event.kind == "dropped" and "is schema" in event.text and "caf\\udce9\\x1b]52" in event.text
    assert ledger_lines(role)["total"].balances


@pytest.mark.parametrize("reason", ["corrupt", "undecodable"])
def test_body_damaged_on_its_way_is_read_again(begun: Begun, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """A drop is for good, and a replay of the archive would find the fragment whole."""
    trainer, worker, role = begun(fragments_per_update=1)
    read, bad = trainer.log.read, [damaged(worker, reason)]

    def damaging(*arguments: Any) -> list[LogEntry]:
        return [replace(entry, fragment=bad.pop() if bad else entry.fragment) for entry in read(*arguments)]

    monkeypatch.setattr(trainer.consumer, "_read", damaging)
    worker.work()
    assert trainer.take() is not None and not bad
    assert ledger_lines(role)["worker-0"].dropped == {}


@pytest.mark.parametrize("bomb", ["codec", "stack", "endless", "sparse"])
def test_no_fragment_unpacks_to_more_than_the_run_expects(begun: Begun, bomb: str) -> None:
    """Some kilobytes may not become gigabytes, or hours, before their shape is compared."""
    trainer, worker, _ = begun(fragments_per_update=1)
    packed, header = tensor_blob.decode(fragment.encode(worker.act()))
    zeros = np.zeros(64 << 20, np.uint8)
    name = "default/obs"
    if bomb == "codec":
        packed[name] = np.frombuffer(zstandard.ZstdCompressor().compress(zeros.tobytes()), np.uint8)
        header["layout"] = {name: {"codec": "zstd", "shape": [len(zeros)]}}
    elif bomb == "sparse":
        packed[name] = np.zeros((0, 16 << 20), np.float32)
        packed["default/mask"] = np.zeros((STEPS, ENVS), np.bool_)
        header["sparse"] = {"default": ["obs"]}
    else:
        slots, count = (0, 1 << 36) if bomb == "endless" else (1 << 20, 4)
        packed[name + "#first"] = np.zeros((slots, 16, 1), np.uint8)
        packed[name + "#frames"] = np.zeros((count, slots, 1), np.uint8)
        packed[name + "#whole"], packed[name + "#where"] = np.zeros((0, 16, 1), np.uint8), np.zeros((0, 2), np.int32)
        header["layout"] = {name: {"stack": 16}}
    worker.work(blob=tensor_blob.encode(packed, header))
    tracemalloc.start()
    try:
        assert trainer.take() is None
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()
    assert ledger_lines(worker.role)["worker-0"].dropped == {DropReason.SCHEMA: Count(1, SIZE)}


def test_every_drop_reason_is_tested() -> None:
    """Those of the consumer; `left_out` is a what-if's."""
    assert {*BAD, "duplicate", "lost", "lost_body", "poison", "foreign", "left_out"} == set(DropReason)
