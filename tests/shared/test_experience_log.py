"""The experience log: each fragment once, late ones only where there is room, trimmed only up to what is durable."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from shared.damaged_keys import KeyDamaged
from shared.errors import Fenced
from shared.experience_log import START, STRANGERS, ExperienceLog
from shared.ledger import Count, read_books
from shared.redis_keys import RunKeys
from shared.role import Role
from tests.conftest import MakeRole
from tests.trainer_node.test_intake import SIZE, SmallTrainer, SmallWorker, begin, books, in_redis, small_config

EXPIRED_MS = 1


@pytest.fixture
def role(make_role: MakeRole) -> Role:
    """K = 1, L = 0: one claim at a time."""
    return make_role(small_config(fragments_per_update=1))


def lease_runs_out(worker: SmallWorker) -> None:
    """Time passes for the claim that `worker` holds."""
    claim = f"{worker.name}:{worker.incarnation}:{worker.seq}"
    worker.role.redis.zadd(RunKeys(worker.role.run_id).claims, {claim: EXPIRED_MS})


def test_a_push_appends_the_fragment_counts_it_and_honours_its_claim(role: Role) -> None:
    worker = SmallWorker(role)
    assert worker.claim().granted
    assert worker.push(b"abc") == "pushed"
    (entry,) = worker.log.read(START, 10, 0)
    assert (entry.worker, entry.incarnation, entry.seq, entry.transitions) == ("worker-0", 0, 0, SIZE)
    assert (entry.fragment, entry.claimed) == (b"abc", True)
    state = role.flow.read()
    assert (state.claimed, state.log_bytes) == (1, 3)
    assert role.redis.zcard(RunKeys(role.run_id).claims) == 0
    assert books(role)["worker-0"].produced == books(role)["worker-0"].in_flight == Count(1, SIZE)


def test_a_repeated_push_changes_nothing(role: Role) -> None:
    worker = SmallWorker(role)
    worker.work()
    before = in_redis(role)
    for seq in (0, 0):
        worker.seq = seq
        assert worker.push() == "duplicate"
    assert in_redis(role) == before and len(worker.log) == 1


@pytest.mark.parametrize("known", [True, False], ids=["the server knows the scripts", "it has forgotten them"])
def test_a_claim_can_go_with_a_push(make_role: MakeRole, known: bool) -> None:
    role = make_role(small_config(fragments_per_update=2))
    worker = SmallWorker(role)
    assert worker.claim().granted
    if not known:
        role.redis.script_flush()
    claiming = role.flow.claiming("worker-0", 0, 1)
    assert worker.log.push("worker-0", 0, 0, worker.epoch, SIZE, b"abc", then=claiming) == "pushed"
    assert claiming.answer is not None and claiming.answer.granted
    assert role.redis.zrange(RunKeys(role.run_id).claims, 0, -1) == [b"worker-0:0:1"]
    again = role.flow.claiming("worker-0", 0, 1)
    assert worker.log.push("worker-0", 0, 0, worker.epoch, SIZE, b"abc", then=again) == "duplicate"
    assert again.answer == claiming.answer, "as where the answer to the first was lost"
    assert role.flow.read().claimed == 2


def test_a_repeat_is_recognised_after_the_run_has_finished(role: Role) -> None:
    worker = SmallWorker(role)
    worker.work()
    role.flow.set_state("finished", "solved")
    worker.seq = 0
    assert worker.push() == "duplicate"
    worker.seq = 1
    assert worker.push() == "finished"
    assert len(worker.log) == 1 and books(role)["total"].produced.fragments == 1


def test_a_fragment_that_is_under_way_while_the_run_stops_still_lands(role: Role) -> None:
    worker = SmallWorker(role)
    assert worker.claim().granted
    role.flow.set_state("stopping", "stopped")
    assert worker.push() == "pushed"


def test_two_incarnations_count_from_zero_each(role: Role) -> None:
    trainer, old = begin(role), SmallWorker(role)
    old.work()
    assert trainer.take() is not None
    trainer.publish()
    new = SmallWorker(role)
    new.work(version=1)
    assert [(entry.incarnation, entry.seq) for entry in new.log.read(START, 10, 0)] == [(0, 0), (1, 0)]
    assert trainer.take() is not None


def test_a_late_fragment_is_taken_where_there_is_room(role: Role) -> None:
    worker = SmallWorker(role)
    assert worker.claim().granted
    lease_runs_out(worker)
    assert worker.push() == "pushed"
    assert role.flow.read().in_flight == 1


def test_a_late_fragment_whose_claim_was_given_back_claims_again(role: Role) -> None:
    trainer, worker = begin(role), SmallWorker(role)
    assert worker.claim().granted
    role.flow.release("worker-0")
    assert role.flow.read().in_flight == 0
    assert worker.push() == "pushed"
    assert role.flow.read().in_flight == 1
    assert trainer.take() is not None
    trainer.publish()
    assert role.flow.read().in_flight == 0


def test_a_late_fragment_whose_place_is_taken_is_stale_and_counted(role: Role) -> None:
    slow, other = SmallWorker(role), SmallWorker(role, "worker-1")
    assert slow.claim().granted
    lease_runs_out(slow)
    assert other.claim().granted
    assert slow.push() == "stale"
    assert len(slow.log) == 0 and role.flow.read().in_flight == 1
    line = books(role)["worker-0"]
    assert line.produced == Count(1, SIZE) and line.dropped == {"stale": Count(1, SIZE)}
    assert books(role)["total"].dropped == {"stale": Count(1, SIZE)}
    assert other.push() == "pushed"


def test_a_stale_fragment_that_is_sent_again_is_counted_once_and_another_one_too(role: Role) -> None:
    """The first answer got lost on its way; what is acted later under the same number is another fragment."""
    slow, other = SmallWorker(role), SmallWorker(role, "worker-1")
    assert slow.claim().granted
    lease_runs_out(slow)
    other.work()
    assert [slow.send(b"one"), slow.push(b"one")] == ["stale", "stale"]
    assert books(role)["worker-0"].dropped == {"stale": Count(1, SIZE)}
    assert slow.push(b"another") == "stale"
    assert books(role)["worker-0"].dropped == {"stale": Count(2, 2 * SIZE)}
    assert books(role)["worker-0"].produced == Count(2, 2 * SIZE)


@pytest.mark.parametrize("claimed_again", [False, True])
def test_a_fragment_that_was_refused_is_not_learnt_when_it_is_sent_again(role: Role, claimed_again: bool) -> None:
    """The answer was lost, and there is room by then; or a copy of the command comes while the next claim is held."""
    trainer, slow, other = begin(role), SmallWorker(role), SmallWorker(role, "worker-1")
    assert slow.claim().granted
    lease_runs_out(slow)
    other.work()
    assert slow.send(b"late") == "stale"
    assert trainer.take() is not None
    trainer.publish()
    if claimed_again:
        assert slow.claim().granted
    assert slow.send(b"late") == "stale"
    assert len(slow.log) == 1 and role.flow.read().in_flight == claimed_again
    line = books(role)["worker-0"]
    assert line.produced == Count(1, SIZE) and line.dropped == {"stale": Count(1, SIZE)}
    slow.refusals += 1
    slow.work(version=1)
    assert books(role)["worker-0"].produced == Count(2, 2 * SIZE)


def test_a_worker_whose_number_redis_has_given_before_is_not_taken_for_the_one_that_was_refused(role: Role) -> None:
    """Redis was set back to before a worker registered, and refused it then; its successor gets the same number."""
    trainer, slow, other = begin(role), SmallWorker(role), SmallWorker(role, "worker-1")
    assert slow.claim().granted
    lease_runs_out(slow)
    other.work()
    role.redis.hdel(RunKeys(role.run_id).incarnations, "worker-0")
    assert slow.push() == "stale"
    assert trainer.take() is not None
    trainer.publish()
    successor = SmallWorker(role)
    assert successor.incarnation == slow.incarnation
    successor.work(version=1)


def test_a_worker_goes_on_after_a_stale_fragment(role: Role) -> None:
    trainer, slow, other = begin(role), SmallWorker(role), SmallWorker(role, "worker-1")
    assert slow.claim().granted
    lease_runs_out(slow)
    other.work()
    assert slow.push() == "stale"
    assert trainer.take() is not None
    trainer.publish()
    slow.work(version=1)
    assert trainer.take() is not None
    line = books(role)["worker-0"]
    assert line.produced.fragments == 2 and line.dropped == {"stale": Count(1, SIZE)}


def test_a_push_that_has_seen_a_newer_trainer_than_redis_has_is_told(role: Role) -> None:
    """Redis was set back to before that trainer came: what it knows of this worker may be wrong."""
    worker = SmallWorker(role)
    assert worker.claim().granted
    before = in_redis(role)
    assert worker.log.push("worker-0", 0, 0, worker.epoch + 1, SIZE, b"abc") == "epoch"
    assert in_redis(role) == before


def test_a_push_from_before_a_new_trainer_came_is_welcome(role: Role) -> None:
    worker = SmallWorker(role)
    assert worker.claim().granted
    SmallTrainer(role)
    assert worker.push() == "pushed"


def test_a_push_to_an_unknown_run_writes_nothing(redis_client: redis.Redis, unique_run_id: str) -> None:
    log = ExperienceLog(redis_client, unique_run_id)
    with pytest.raises(redis.ResponseError, match="NORUN"):
        log.push("worker-0", 0, 0, 0, SIZE, b"abc")
    assert list(redis_client.scan_iter(match=RunKeys(unique_run_id).prefix + "*")) == []


def test_reads_in_pages_after_a_position(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=5))
    worker = SmallWorker(role)
    for _ in range(5):
        worker.work(blob=b"x")
    first = worker.log.read(START, 2, 0)
    rest = worker.log.read(first[-1].id, 10, 0)
    assert [entry.seq for entry in [*first, *rest]] == [0, 1, 2, 3, 4]
    assert worker.log.read(rest[-1].id, 10, 0) == [] == worker.log.read(rest[-1].id, 10, 0.01)


def filled(role: Role, fragments: int) -> tuple[SmallTrainer, list[str]]:
    """A log with so many fragments of 10 bytes, and their ids."""
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(fragments):
        worker.work(blob=b"0123456789")
    return trainer, [entry.id for entry in worker.log.read(START, fragments, 0)]


def settled(role: Role, position: str) -> None:
    """The ledger accounts for everything through this position."""
    role.redis.hset(RunKeys(role.run_id).flow, "settled_id", position)


def test_trim_frees_what_it_covers_and_no_more(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=5))
    trainer, ids = filled(role, 5)
    settled(role, ids[-1])
    log = ExperienceLog(role.redis, role.run_id)
    assert log.trim(trainer.epoch, START) == 0
    assert log.trim(trainer.epoch, ids[1]) == 2
    state = role.flow.read()
    assert [entry.id for entry in log.read(START, 10, 0)] == ids[2:]
    assert (state.log_bytes, state.trimmed_id) == (30, ids[1])
    assert log.trim(trainer.epoch, ids[1]) == 0 == log.trim(trainer.epoch, ids[0])
    state = role.flow.read()
    assert (state.log_bytes, state.trimmed_id) == (30, ids[1])
    assert log.trim(trainer.epoch, ids[4]) == 3 and role.flow.read().log_bytes == 0


def test_trim_frees_the_bytes_before_an_entry_that_a_stranger_added(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=5))
    trainer, _ = filled(role, 2)
    client: Any = role.redis
    strange = client.xadd(RunKeys(role.run_id).log, {b"hello": b"world"}).decode()
    settled(role, strange)
    log = ExperienceLog(role.redis, role.run_id)
    assert log.trim(trainer.epoch, strange) == 3
    assert role.flow.read().log_bytes == 0


def test_trim_leaves_what_the_ledger_does_not_account_for_yet(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=5))
    trainer, ids = filled(role, 3)
    settled(role, ids[0])
    log = ExperienceLog(role.redis, role.run_id)
    assert log.trim(trainer.epoch, ids[2]) == 1
    assert [entry.id for entry in log.read(START, 10, 0)] == ids[1:]
    assert (role.flow.read().log_bytes, role.flow.read().trimmed_id) == (20, ids[0])


def test_an_older_trainer_may_not_trim(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=5))
    old, ids = filled(role, 3)
    role.flow.take_over()
    before = in_redis(role)
    with pytest.raises(Fenced, match=f"epoch {old.epoch} may not trim"):
        ExperienceLog(role.redis, role.run_id).trim(old.epoch, ids[-1])
    assert in_redis(role) == before


def test_stream_ids_are_compared_as_numbers(make_role: MakeRole) -> None:
    """As text, 5-9 would come after 5-10 and 999-0 after 1000-0."""
    role = make_role(small_config(fragments_per_update=2))
    trainer, keys = begin(role), RunKeys(role.run_id)
    client: Any = role.redis
    for id_ in ("5-9", "5-10", "999-0", "1000-0"):
        client.xadd(keys.log, {b"hello": b"world"}, id=id_)
    log = ExperienceLog(role.redis, role.run_id)
    assert trainer.take() is None
    assert role.flow.read().settled_id == "1000-0"
    assert trainer.intake.ledger.of(STRANGERS).dropped == {"foreign": Count(4, 0)}
    assert log.trim(trainer.epoch, "5-9") == 1 and log.trim(trainer.epoch, "999-0") == 2
    assert [entry.id for entry in log.read(START, 10, 0)] == ["1000-0"]


@pytest.mark.parametrize("first", ["99999999999999999-7", "18446744073709551615-0"])
def test_a_position_beyond_the_numbers_of_lua_is_one_like_any_other(make_role: MakeRole, first: str) -> None:
    """As numbers of Lua's, both would be greater than all that follows, and a trim would remove unread entries."""
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker = begin(role), SmallWorker(role)
    untyped: Any = role.redis
    untyped.xadd(RunKeys(role.run_id).log, {"x": "y"}, id=first)
    for _ in range(2):
        worker.work()
        assert trainer.take() is not None
    trainer.publish()
    taken = trainer.intake.position
    worker.work()
    assert worker.log.trim(trainer.epoch, first) == 1 and len(worker.log) == 3
    assert worker.log.trim(trainer.epoch, taken) == 2
    assert [entry.worker for entry in worker.log.read(START, 10, 0)] == ["worker-0"]
    assert all(line.balances for line in read_books(role.redis, role.run_id).values())


def test_the_last_position_that_there_is_is_told_as_damage_with_the_way_out(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=2))
    trainer, worker = begin(role), SmallWorker(role)
    untyped: Any = role.redis
    untyped.xadd(RunKeys(role.run_id).log, {"x": "y"}, id=f"{2**64 - 1}-{2**64 - 1}")
    for act in (worker.work, trainer.take):
        with pytest.raises(KeyDamaged, match=r":log .*is damaged: .*delete all its keys"):
            act()


def test_the_books_page_through_a_long_log(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=250))
    filled(role, 250)
    assert read_books(role.redis, role.run_id)["worker-0"].in_flight == Count(250, 250 * SIZE)


def test_an_outside_client_sees_the_stream(role: Role) -> None:
    """The fields of an entry, as `redis-cli XRANGE` shows them."""
    worker = SmallWorker(role)
    worker.work(blob=b"abc")
    client: Any = role.redis
    ((_, fields),) = client.execute_command("XRANGE", f"stagecoach:{{{role.run_id}}}:log", "-", "+")
    flat = fields if isinstance(fields, dict) else dict(zip(fields[::2], fields[1::2], strict=True))
    assert flat == {
        b"worker": b"worker-0", b"incarnation": b"0", b"seq": b"0", b"lost": b"0",
        b"transitions": str(SIZE).encode(), b"end": b"3", b"fragment": b"abc",
    }  # fmt: skip
