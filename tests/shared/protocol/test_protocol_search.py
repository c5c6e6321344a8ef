"""The protocol in every order of its steps, up to a depth: nothing is learned twice, and the ledger balances."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from stagecoach.coordinator.services.memory_folder import MemoryFolder
from stagecoach.shared.protocol import payload_shards, scripts
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole
from tests.support.protocol.search import EveryWorldsMemory, Search, Violation
from tests.support.runs.builders import in_memory
from tests.support.runs.small_run import small_config

TOO_LATE = [
    "worker-0 claims",
    "the lease of worker-0:0:0 runs out",
    "worker-1 claims",
    "worker-0 pushes, unheard",
    "worker-1 pushes",
]
"""There is no place for the fragment of worker-0, which has not heard of it."""


@pytest.fixture(params=["in the log", "in shared memory"])
def role(
    request: pytest.FixtureRequest, make_role: MakeRole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RunContext]:
    """With the fragments' bodies there."""
    made = make_role(small_config(1, 0))
    if request.param == "in the log":
        yield made
        return
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    with closing(MemoryFolder(tmp_path)) as folder:
        memory = EveryWorldsMemory(str(folder.path))
        memory.role = made
        yield in_memory(made, memory)


def test_no_short_order_of_steps_breaks_the_protocol(role: RunContext) -> None:
    search = Search(role)
    found = search.run(5, search.beginning(faults=2))
    assert found.worlds > 600 and found.by_depth[-1] > 300
    assert bool(role.bodies.memory.names()) == bool(role.bodies)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("fragments_per_update", "max_policy_lag", "depth", "faults"),
    [(1, 0, 8, 2), (1, 0, 7, 3), (1, 1, 7, 2), (2, 0, 7, 2)],
)
def test_no_order_of_steps_breaks_the_protocol(
    make_role: MakeRole, fragments_per_update: int, max_policy_lag: int, depth: int, faults: int
) -> None:
    search = Search(make_role(small_config(fragments_per_update, max_policy_lag)))
    found = search.run(depth, search.beginning(faults))
    print(f"{found.worlds} worlds by {found.steps} steps; new at each depth: {found.by_depth}")
    assert found.by_depth[-1] > 0


def test_search_never_takes_a_refused_fragment(make_role: MakeRole) -> None:
    """However it goes on from there: the trainer makes room, answers are lost, claims are held again."""
    search = Search(make_role(small_config(1, 0)))
    search.run(3, search.follow(3, TOO_LATE))


FAULTS = {
    "what was refused is taken": ("push", ":refused')) or 0) > heard", ":refused')) or 0) > heard + 1", TOO_LATE),
    "what was pushed is taken again": ("push", "if seq <= last then", "if seq < last then", []),
    "a version is counted again": ("publish", "if wanted > version then", "if wanted >= version then", [
        "worker-0 claims", "worker-0 pushes", "trainer 1 reads"]),
    "a claim that was given back still counts": ("register", "'claimed', -1)", "'claimed', 0)", []),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_search_detects_fault_in_script(make_role: MakeRole, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """So the search can fail. The first is how a push was once taken."""
    name, right, wrong, way = FAULTS[fault]
    source = scripts.source
    assert source(name).text.count(right) == 1
    spoilt = replace(source(name), text=source(name).text.replace(right, wrong))
    monkeypatch.setattr(scripts, "source", lambda wanted: spoilt if wanted == name else source(wanted))
    search = Search(make_role(small_config(1, 0)))
    with pytest.raises(Violation, match=", after: "):
        search.run(4, search.follow(3, way))
