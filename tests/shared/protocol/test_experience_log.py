"""The experience log: each fragment once, late ones only where there is room, trimmed only up to what is durable."""

from __future__ import annotations

from typing import Any

import pytest

from stagecoach.shared.experience.log_entry import START, STRANGERS
from stagecoach.shared.protocol.experience_log import ExperienceLog, Settled
from stagecoach.shared.protocol.flow_control import KeyDamaged, RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Count, read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole
from tests.support.runs.small_run import SIZE, SmallTrainer, SmallWorker, begin, in_redis, ledger_lines, small_config

EXPIRED_MS = 1


@pytest.fixture
def role(make_role: MakeRole) -> RunContext:
    """K = 1, L = 0: one claim at a time."""
    return make_role(small_config(fragments_per_update=1))


def too_slow(role: RunContext) -> SmallWorker:
    """A worker whose lease has run out; another one's fragment has taken its place."""
    slow = SmallWorker(role)
    assert slow.claim().granted
    role.redis.zadd(RunKeys(role.run_id).claims, {f"{slow.name}:{slow.incarnation}:{slow.seq}": EXPIRED_MS})
    SmallWorker(role, "worker-1").work()
    return slow


@pytest.mark.parametrize("known", [True, False], ids=["the server knows the scripts", "it has forgotten them"])
def test_claim_shares_round_trip_with_push(make_role: MakeRole, known: bool) -> None:
    role = make_role(small_config(fragments_per_update=2))
    worker = SmallWorker(role)
    assert worker.claim().granted
    if not known:
        role.redis.script_flush()
    claiming = role.flow.claiming("worker-0", 0, 1)
    assert worker.log.push("worker-0", 0, 0, worker.epoch, SIZE, b"abc", then=claiming) == "pushed"
    assert claiming.reply is not None and claiming.reply.granted
    assert role.redis.zrange(RunKeys(role.run_id).claims, 0, -1) == [b"worker-0:0:1"]
    again = role.flow.claiming("worker-0", 0, 1)
    assert worker.log.push("worker-0", 0, 0, worker.epoch, SIZE, b"abc", then=again) == "duplicate"
    assert again.reply == claiming.reply, "as where the answer to the first was lost"
    assert role.flow.read().claimed == 2


def test_late_turns_without_fragment_are_settled_once(role: RunContext) -> None:
    worker = SmallWorker(role)
    for sessions in ({"robot/0": 3}, {"robot/0": 3}, {"robot/0": 2, "robot/1": 0}):
        worker.log.settle(worker.name, worker.incarnation, Settled(sessions, 2))
    total = read_accounting(role.redis, role.run_id)["total"]
    assert total.produced == Count(0, 2) and total.dropped == {"stale": Count(0, 2)}
    assert worker.log.open_session("robot/0", 0) == (3, 0)
    successors = SmallWorker(role), SmallWorker(role)
    worker.log.settle(worker.name, worker.incarnation, Settled({"robot/0": 5}, 2))
    assert worker.log.open_session("robot/0", 0) == (3, 0), f"{successors[-1].incarnation} acts in its place"


def test_repeat_is_recognized_after_the_run_finished(role: RunContext) -> None:
    worker = SmallWorker(role)
    assert worker.claim().granted
    role.flow.set_state(RunState.STOPPING, "stopped")
    assert worker.push() == "pushed", "it was under way while the run stopped"
    role.flow.set_state(RunState.FINISHED, "solved")
    before, worker.seq = in_redis(role), 0
    assert worker.push() == worker.push() == "duplicate"
    worker.seq = 1
    assert worker.push() == "finished"
    assert in_redis(role) == before


def test_stale_fragment_sent_twice_is_counted_once(role: RunContext) -> None:
    """The first answer got lost on its way; what is acted later under the same number is another fragment."""
    slow = too_slow(role)
    assert [slow.send(b"one"), slow.push(b"one")] == ["stale", "stale"]
    assert len(slow.log) == 1 == role.flow.read().in_flight, "only the other's"
    line = ledger_lines(role)["worker-0"]
    assert line.produced == Count(1, SIZE) and line.dropped == {"stale": Count(1, SIZE)}
    assert ledger_lines(role)["total"].dropped == {"stale": Count(1, SIZE)}
    assert slow.push(b"another") == "stale"
    assert ledger_lines(role)["worker-0"].dropped == {"stale": Count(2, 2 * SIZE)}
    assert ledger_lines(role)["worker-0"].produced == Count(2, 2 * SIZE)


@pytest.mark.parametrize("claimed_again", [False, True])
def test_refused_fragment_is_not_learned_when_sent_again(role: RunContext, claimed_again: bool) -> None:
    """The answer was lost, and there is room by then; or a copy of the command comes while the next claim is held."""
    trainer, slow = begin(role), too_slow(role)
    assert slow.send(b"late") == "stale"
    assert trainer.take() is not None
    trainer.publish()
    if claimed_again:
        assert slow.claim().granted
    assert slow.send(b"late") == "stale"
    assert len(slow.log) == 1 and role.flow.read().in_flight == claimed_again
    line = ledger_lines(role)["worker-0"]
    assert line.produced == Count(1, SIZE) and line.dropped == {"stale": Count(1, SIZE)}
    slow.refusals += 1
    slow.work(version=1)
    assert ledger_lines(role)["worker-0"].produced == Count(2, 2 * SIZE)


def test_repeated_incarnation_is_not_taken_for_the_refused_one(role: RunContext) -> None:
    """Redis was rolled back to before a worker registered, and refused it then; its successor gets the same number."""
    trainer, slow = begin(role), too_slow(role)
    role.redis.hdel(RunKeys(role.run_id).incarnations, "worker-0")
    assert slow.push() == "stale"
    assert trainer.take() is not None
    trainer.publish()
    successor = SmallWorker(role)
    assert successor.incarnation == slow.incarnation
    successor.work(version=1)


def test_push_with_newer_epoch_than_redis_is_rejected(role: RunContext) -> None:
    """Redis was rolled back to before that trainer came: what it knows of this worker may be wrong."""
    worker = SmallWorker(role)
    assert worker.claim().granted
    before = in_redis(role)
    assert worker.log.push("worker-0", 0, 0, worker.epoch + 1, SIZE, b"abc") == "epoch"
    assert in_redis(role) == before


def test_log_is_read_in_pages_after_a_position(make_role: MakeRole) -> None:
    """The fields of an entry are as `redis-cli XRANGE` shows them."""
    role = make_role(small_config(fragments_per_update=5))
    worker = SmallWorker(role)
    for _ in range(5):
        worker.work(blob=b"abc")
    first = worker.log.read(START, 2, 0)
    rest = worker.log.read(first[-1].id, 10, 0)
    assert [entry.seq for entry in [*first, *rest]] == [0, 1, 2, 3, 4]
    assert worker.log.read(rest[-1].id, 10, 0) == [] == worker.log.read(rest[-1].id, 10, 0.01)
    client: Any = role.redis
    (_, fields), *_ = client.execute_command("XRANGE", f"stagecoach:{{{role.run_id}}}:log", "-", "+")
    flat = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    assert flat == {
        b"worker": b"worker-0", b"incarnation": b"0", b"seq": b"0", b"lost": b"0",
        b"transitions": str(SIZE).encode(), b"end": b"3", b"version": b"-1", b"fragment": b"abc",
    }  # fmt: skip


def filled(role: RunContext, fragments: int) -> tuple[SmallTrainer, list[str]]:
    """A log with so many fragments of 10 bytes, and their ids."""
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(fragments):
        worker.work(blob=b"0123456789")
    return trainer, [entry.id for entry in worker.log.read(START, fragments, 0)]


def committed(role: RunContext, position: str) -> None:
    """The ledger accounts for everything through this position."""
    role.redis.hset(RunKeys(role.run_id).flow, "committed_id", position)


def test_trim_frees_only_covered_and_accounted_entries(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=5))
    trainer, ids = filled(role, 5)
    log = ExperienceLog(role.redis, role.run_id)
    committed(role, ids[3])
    for through, freed, left in ((START, 0, 5), (ids[1], 2, 3), (ids[1], 0, 3), (ids[0], 0, 3), (ids[4], 2, 1)):
        assert log.trim(trainer.epoch, through) == freed
        assert [entry.id for entry in log.read(START, 10, 0)] == ids[5 - left :]
        state = role.flow.read()
        assert state.log_bytes == 10 * left and state.trimmed_id == (ids[4 - left] if left < 5 else START)
    client: Any = role.redis
    strange = client.xadd(RunKeys(role.run_id).log, {b"hello": b"world"}).decode()
    committed(role, strange)
    assert log.trim(trainer.epoch, strange) == 2
    assert role.flow.read().log_bytes == 0, "the bytes before an entry that a stranger added"


def test_stream_ids_are_compared_as_numbers(make_role: MakeRole) -> None:
    """As text, 5-9 would come after 5-10 and 999-0 after 1000-0."""
    role = make_role(small_config(fragments_per_update=2))
    trainer, keys = begin(role), RunKeys(role.run_id)
    client: Any = role.redis
    for id_ in ("5-9", "5-10", "999-0", "1000-0"):
        client.xadd(keys.log, {b"hello": b"world"}, id=id_)
    log = ExperienceLog(role.redis, role.run_id)
    assert trainer.take() is None
    assert role.flow.read().committed_id == "1000-0"
    assert trainer.consumer.ledger.of(STRANGERS).dropped == {"foreign": Count(4, 0)}
    assert log.trim(trainer.epoch, "5-9") == 1 and log.trim(trainer.epoch, "999-0") == 2
    assert [entry.id for entry in log.read(START, 10, 0)] == ["1000-0"]


@pytest.mark.parametrize("first", ["99999999999999999-7", "18446744073709551615-0"])
def test_positions_beyond_lua_numbers_work(make_role: MakeRole, first: str) -> None:
    """As numbers of Lua's, both would be greater than all that follows, and a trim would remove unread entries."""
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker = begin(role), SmallWorker(role)
    untyped: Any = role.redis
    untyped.xadd(RunKeys(role.run_id).log, {"x": "y"}, id=first)
    for _ in range(2):
        worker.work()
        assert trainer.take() is not None
    trainer.publish()
    taken = trainer.consumer.position
    worker.work()
    assert worker.log.trim(trainer.epoch, first) == 1 and len(worker.log) == 3
    assert worker.log.trim(trainer.epoch, taken) == 2
    assert [entry.worker for entry in worker.log.read(START, 10, 0)] == ["worker-0"]
    assert all(line.balances for line in read_accounting(role.redis, role.run_id).values())


def test_greatest_position_is_reported_as_damage(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker = begin(role), SmallWorker(role)
    untyped: Any = role.redis
    untyped.xadd(RunKeys(role.run_id).log, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
    for act in (worker.work, trainer.take):
        with pytest.raises(KeyDamaged, match=r":log .*is damaged: .*delete all its keys"):
            act()


def test_accounting_pages_through_a_long_log(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=250))
    filled(role, 250)
    assert read_accounting(role.redis, role.run_id)["worker-0"].in_flight == Count(250, 250 * SIZE)
