"""The scale rehearsal, small: workers join, leave and die, a process of them is killed, and every transition is found
again; and where the accounting was wrong in whatever way, it would say so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.rehearsal.rehearsal import Measured, Rehearsal, arguments, rehearsal, verdict
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting

pytestmark = pytest.mark.timeout(240)
SMALL = (
    "--workers 20 --processes 2 --seconds 8 --per-update 4 --steps 16 --envs 2 --think-ms 10 --lease-seconds 1 "
    "--leaves-per-minute 300 --deaths-per-minute 300 --crash"
)


@pytest.fixture(scope="module")
def ended() -> Iterator[tuple[Rehearsal, Measured]]:
    """One that has come to its end, with its Redis still there."""
    given = arguments(SMALL.split())
    with rehearsal(given) as work:
        work.start()
        measured = work.measure(given.seconds)
        work.end()
        yield work, measured


def test_rehearsal_balances_while_workers_come_and_go(ended: tuple[Rehearsal, Measured]) -> None:
    work, measured = ended
    assert work.problems() == []
    assert verdict(work) == 0
    assert measured.consumed > 0 and work.accounting["total"].produced.fragments > measured.consumed
    assert all(measured.counts[move] > 0 for move in ("joined", "left", "died", "crashed")), measured.counts


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"fragments": 1, "transitions": 32}, "does not balance"),
        ({"transitions": 1}, "does not balance"),
        ({"fragments": 1, "fragments:stale": 1, "transitions": 32, "transitions:stale": 32}, "the ledger says"),
    ],
    ids=["a fragment too many", "a transition too many", "balanced, but no worker has pushed it"],
)
def test_wrong_accounting_is_found(ended: tuple[Rehearsal, Measured], fields: dict[str, int], says: str) -> None:
    work, _ = ended
    key, worker = RunKeys(work.role.run_id).produced, work.certain_worker()
    before = work.accounting
    for name, count in fields.items():
        work.role.redis.hincrby(key, f"{worker}:{name}", count)
    try:
        work.accounting = read_accounting(work.role.redis, work.role.run_id)
        said: list[str] = []
        assert verdict(work, said.append) == 1
        assert any(worker in line and says in line for line in said), said
    finally:
        for name, count in fields.items():
            work.role.redis.hincrby(key, f"{worker}:{name}", -count)
        work.accounting = before
