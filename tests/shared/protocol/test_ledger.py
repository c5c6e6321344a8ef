"""The ledger: counting, its JSON, and accounting that balances only when it is right."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.shared.base.errors import DropReason, Fenced
from stagecoach.shared.experience.log_entry import STRANGERS
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import (
    Count,
    Ledger,
    LedgerLine,
    WorkerAccount,
    fast_forward,
    read_accounting,
    read_ledger,
)
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.trainer_node.state.log_consumer import Committed
from tests.conftest import MakeRole
from tests.support.runs.small_run import SIZE, SmallTrainer, SmallWorker, begin, in_redis, ledger_lines, small_config

counts = st.builds(Count, st.integers(0, 10**12), st.integers(0, 10**12))
accounts = st.builds(
    WorkerAccount,
    consumed=counts,
    dropped=st.dictionaries(st.sampled_from(DropReason), counts),
    high_water=st.dictionaries(st.integers(0, 1000), st.integers(0, 10**9), max_size=4),
)
ledgers = st.builds(Ledger, st.dictionaries(st.text(min_size=1, max_size=12), accounts, max_size=4))


@pytest.fixture
def role(make_role: MakeRole) -> RunContext:
    """With credit for four fragments."""
    return make_role(small_config(fragments_per_update=4))


@given(ledgers)
def test_json_and_back_as_equal_text_whatever_came_first(ledger: Ledger) -> None:
    text = ledger.as_json()
    found = Ledger.from_json(text)
    assert found == ledger and "\n" not in text
    assert Ledger(dict(reversed(found.accounts.items()))).as_json() == text
    assert Ledger.from_json("") == Ledger()


@pytest.mark.parametrize(
    ("produced", "balances"),
    [(Count(6, 24), True), (Count(7, 28), False), (Count(5, 20), False), (Count(6, 25), False)],
)
def test_line_and_sum_balance_in_fragments_and_transitions(produced: Count, balances: bool) -> None:
    dropped = {DropReason.STALE: Count(1, 4), DropReason.LOST: Count(2, 8)}
    line = LedgerLine(produced, consumed=Count(2, 8), dropped=dropped, in_flight=Count(1, 4))
    assert line.balances is balances
    assert line.as_dict()["balances"] is balances
    other = LedgerLine(Count(2, 8), Count(), {DropReason.STALE: Count(1, 4), DropReason.FOREIGN: Count(1, 4)}, Count())
    summed = sum([line, other], LedgerLine())
    assert summed.balances is balances and summed.produced.fragments == produced.fragments + 2
    assert (summed.consumed, summed.in_flight) == (Count(2, 8), Count(1, 4))
    assert summed.dropped == {"stale": Count(2, 8), "lost": Count(2, 8), "foreign": Count(1, 4)}
    assert dropped == {"stale": Count(1, 4), "lost": Count(2, 8)}


def test_accounting_has_a_line_per_worker_at_every_moment(role: RunContext) -> None:
    trainer, one, other = begin(role), SmallWorker(role), SmallWorker(role, "host:1")
    assert ledger_lines(role) == {"total": LedgerLine()}
    one.work()
    other.work(blob=b"bad")
    assert ledger_lines(role)["total"].in_flight == Count(2, 2 * SIZE)
    assert trainer.take() is not None and trainer.take() is None
    lines = ledger_lines(role)
    assert lines["host:1"].dropped == {"undecodable": Count(1, SIZE)} and lines["host:1"].in_flight == Count()
    for _ in range(3):
        one.work()
        assert trainer.take() is not None
    trainer.publish()
    lines = ledger_lines(role)
    assert lines["worker-0"] == LedgerLine(Count(4, 4 * SIZE), Count(4, 4 * SIZE), {}, Count())
    assert list(lines) == ["host:1", "worker-0", "total"]


def test_vanished_entry_unbalances_and_foreign_one_is_strangers(role: RunContext) -> None:
    worker, keys = SmallWorker(role), RunKeys(role.run_id)
    worker.work()
    worker.work()
    client: Any = role.redis
    first, _ = client.xrange(keys.log)
    client.xdel(keys.log, first[0])
    line = read_accounting(role.redis, role.run_id)["worker-0"]
    assert not line.balances and (line.produced.fragments, line.in_flight.fragments) == (2, 1)
    client.xadd(keys.log, first[1])
    lines = read_accounting(role.redis, role.run_id)
    assert lines["worker-0"] == line and lines[STRANGERS].balances and not lines["total"].balances


def test_accounting_reads_no_fragment_of_a_sound_log(role: RunContext) -> None:
    """A script that reads hundreds of megabytes keeps Redis from answering for seconds."""
    worker, keys = SmallWorker(role), RunKeys(role.run_id)
    for _ in range(3):
        worker.work()
    client: Any = role.redis
    with client.monitor() as monitor:
        assert read_accounting(role.redis, role.run_id)["worker-0"].in_flight == Count(3, 3 * SIZE)
        role.redis.ping()
        seen: list[str] = []
        while not seen or "PING" not in seen[-1]:
            seen.append(monitor.next_command()["command"])
    assert any(f"XRANGE {keys.pushes}" in command for command in seen)
    assert not [command for command in seen if f"XRANGE {keys.log}" in command]


def test_fast_forward_restores_lost_past_but_fences_old_trainer(role: RunContext) -> None:
    """The checkpoint knows of three fragments of worker-0, Redis of none."""
    old, ledger = begin(role), Ledger()
    ledger.consume("worker-0", SIZE)
    ledger.drop("worker-0", DropReason.LOST, 2 * SIZE, fragments=2)
    trainer, before = begin(role), in_redis(role)
    with pytest.raises(Fenced):
        fast_forward(role.redis, role.run_id, old.epoch, "0-0", ledger)
    assert in_redis(role) == before
    fast_forward(role.redis, role.run_id, trainer.epoch, "0-0", ledger)
    assert ledger_lines(role)["worker-0"].produced == Count(3, 3 * SIZE)
    assert role.flow.read().in_flight == 0
    SmallWorker(role).work()
    assert ledger_lines(role)["worker-0"].produced == Count(4, 4 * SIZE)


def test_uncovered_claims_and_entries_stay_in_flight(role: RunContext) -> None:
    """Two entries are behind the checkpoint's position, one after it, one claim is held, one fragment was refused."""
    trainer, worker, other, slow = begin(role), *(SmallWorker(role, f"worker-{index}") for index in range(3))
    for _ in range(3):
        worker.work()
    assert slow.claim().granted
    role.flow.release("worker-2")
    assert other.claim().granted
    assert slow.push() == "stale"
    position = worker.log.read("0-0", 3, 0)[1].id
    ledger = Ledger()
    ledger.consume("worker-0", SIZE)
    ledger.consume("worker-0", SIZE)
    ledger.of("worker-0").saw(0, 1)
    for _ in range(2):
        fast_forward(role.redis, role.run_id, trainer.epoch, position, ledger)
        assert role.flow.read().in_flight == 2
    trainer.consumer.restore(Committed(position, ledger.as_json(), {}))
    trainer.publish()
    lines = ledger_lines(role)
    assert lines["worker-0"] == LedgerLine(Count(3, 3 * SIZE), Count(2, 2 * SIZE), {}, Count(1, SIZE))
    assert lines["worker-2"].dropped == {"stale": Count(1, SIZE)}


def test_fast_forward_that_arrives_late_changes_nothing(role: RunContext) -> None:
    """A trainer repeats its command over a new connection, and publishes; the first one arrives after that."""
    trainer, worker = begin(role), SmallWorker(role)
    for _ in range(2):
        worker.work()
    forward = partial(fast_forward, role.redis, role.run_id, trainer.epoch, "0-0", Ledger(), number=1)
    assert forward()
    assert trainer.take() is not None and trainer.take() is not None
    assert trainer.publish(1).reply == "published"
    before = in_redis(role)
    assert forward()
    assert in_redis(role) == before


def test_resumed_accounting_frees_credit_without_version(role: RunContext) -> None:
    """A drop commits the good fragments before it, too; a trainer that goes on from there will not take them again."""
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    worker.work(blob=b"bad")
    worker.work()
    assert trainer.take() is not None and trainer.take() is not None
    second = SmallTrainer(role)
    committed, ledger = role.flow.read().committed_id, read_ledger(role.redis, role.run_id)
    second.consumer.restore(Committed(committed, ledger.as_json(), {}))
    assert role.flow.read().in_flight == 2
    fast_forward(role.redis, role.run_id, second.epoch, committed, ledger)
    assert role.flow.read().in_flight == 1
    assert second.take() is not None and second.take() is None
    assert second.publish(1).reply == "published"
    assert role.flow.read().in_flight == 0
    assert ledger_lines(role)["total"].produced == Count(3, 3 * SIZE)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["consume", "drop", "saw", "heard", "lost"]))))
def test_ledger_news_add_up_to_the_ledger(steps: list[tuple[str, str]]) -> None:
    """In whatever order: news that Redis got and whose answer was lost (`lost`) are told again."""
    ledger, redis = Ledger(), dict[str, str]()
    for number, (worker, step) in enumerate(steps):
        if step == "consume":
            ledger.consume(worker, SIZE)
        elif step == "drop":
            ledger.drop(worker, DropReason.STALE, SIZE)
        elif step == "saw":
            ledger.of(worker).saw(0, number)
        else:
            whole, *news = ledger.news()
            redis = ({} if whole else redis) | dict(zip(news[::2], news[1::2], strict=True))
            assert ledger.as_json() == "{" + ",".join(f'"{name}":{redis[name]}' for name in sorted(redis)) + "}"
            if step == "heard":
                ledger.told()
                assert ledger.news() == [""]


def test_only_what_has_changed_travels(role: RunContext) -> None:
    """A mark that stands in Redis for another worker's account stays, until all is written anew."""
    trainer, workers = begin(role), [SmallWorker(role, f"worker-{index}") for index in range(3)]
    marked = RunKeys(role.run_id).ledger

    def turn(worker: SmallWorker, bad: bool = False) -> bytes | None:
        worker.work(trainer.version, b"bad" if bad else None)
        assert (trainer.take() is None) == bad
        return cast(bytes | None, role.redis.hget(marked, "worker-1"))

    turn(workers[1])
    turn(workers[2])
    trainer.publish()
    role.redis.hset(marked, "worker-1", b"a mark")
    assert turn(workers[0], bad=True) == b"a mark"
    turn(workers[0])
    turn(workers[2])
    trainer.publish()
    assert turn(workers[1], bad=True) != b"a mark"
    role.redis.set(marked, "what an earlier version wrote")
    read_accounting(role.redis, role.run_id)
    trainer.consumer.restore(trainer.consumer.committed)
    workers[0].work(trainer.version)
    assert trainer.take() is not None
    trainer.publish()
    assert read_ledger(role.redis, role.run_id) == trainer.consumer.ledger
    role.redis.hset(marked, mapping={"worker-1": b"a mark", "worker-9": b"gone"})
    fast_forward(role.redis, role.run_id, trainer.epoch, trainer.consumer.position, trainer.consumer.ledger)
    assert read_ledger(role.redis, role.run_id) == trainer.consumer.ledger
