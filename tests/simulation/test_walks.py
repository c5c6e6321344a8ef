"""Walks over whole simulated runs: nothing breaks, a walk can be repeated, and a planted fault is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stagecoach.shared.protocol import scripts
from tests.simulation.faults import Fault
from tests.simulation.mutants import hunt
from tests.simulation.run import Setting
from tests.simulation.walk import Plan, shrink, walk
from tests.support.suite.groups import some_quick

WALKS = 3
"""Of each test here; `make simulate` takes more of them."""
_HUNT = 8
"""Walks that may be needed to find one of these planted faults."""
SOON = [
    "push: forgets the number",
    "push: finishes no claim",
    "claim: knows no window",
    "push: counts two",
    "claim: counts none",
    "claim: grants one too many",
    "publish: counts a version again",
    "publish: gives no credit back",
    "publish: writes no ledger",
    "fast-forward: gives no credit",
    "fenced: by an equal epoch",
    "store: manifest without objects",
]


@pytest.mark.parametrize("first", range(1, 10, WALKS))
def test_walks_break_nothing(first: int) -> None:
    for seed in range(first, first + WALKS):
        found = walk(Plan.drawn(seed))
        assert not found.violation, found
        assert found.versions > 0


def test_walk_is_decided_by_its_plan() -> None:
    plan = Plan.drawn(3)
    assert walk(plan) == walk(Plan.parsed(str(plan)))


def test_violation_is_shrunk_to_the_faults_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fragments that are counted twice need none."""
    source, right = scripts.source, "produced('', 1 + lost)"
    assert source("push").text.count(right) == 1
    spoilt = replace(source("push"), text=source("push").text.replace(right, "produced('', 2 + lost)"))
    monkeypatch.setattr(scripts, "source", lambda name: spoilt if name == "push" else source(name))
    faults = [Fault(2.0 + number, kind, number) for number, kind in enumerate(["order", "kill", "promote", "kill"])]
    found = walk(Plan(1, Setting(workers=1, fragments_per_update=1, max_policy_lag=0), tuple(faults)))
    assert found.violation
    smaller = shrink(found)
    assert smaller.violation
    assert smaller.plan.faults == ()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", some_quick(SOON, *SOON[:3]))
def test_planted_fault_is_found(name: str) -> None:
    """Those that few walks find; `python -m tests.simulation.mutants` plants the whole table."""
    found, said = hunt(name, walks=_HUNT)
    assert found, said
