"""The parts that the tests are run in: what `make test` takes, and what the rest does about a day that is too short.

A test that has none of the marks in `GROUPS` is quick: it is pure, or needs no more than the Redis and S3 servers of
its process. `--part quick` takes those, and what is marked `essential`. `--part rest` takes all others, and has a
deadline (`--until`): what has not begun by then is skipped and named. Without `--part` everything runs.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Item = TypeVar("Item")

GROUPS = {
    "ray": "starts Ray, in this process or by the command line",
    "chaos": "real faults: kills, partitions, crash points, stores and Redis servers that go away",
    "processes": "starts several processes of a run without Ray: ranks, roles that are signaled",
    "exhaustive": "the other cases of a table or a search of which the quick part takes some",
    "cluster": "a whole cluster by `ray up` on hosts that are namespaces of this machine",
    "compile": "compiles losses to machine code",
    "learning": "trains until something is learned",
    "benchmarks": "runs a benchmark for a moment",
}
"""The marks, most valuable first: in this order they have their turn."""
FOLDERS = {
    "end_to_end": "ray",
    "chaos": "chaos",
    "cluster": "cluster",
    "learning": "learning",
    "benchmarks": "benchmarks",
}
"""Folders whose tests all belong to a group, and need not say so."""
_NEVER_QUICK = ("benchmarks", "learning")
"""Folders without an essential test: the quick part does not even import them."""
_STEP = 8
_NO_TURN = "its turn did not come"

_thinning: tuple[int, int] = (1, 0)


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=["quick", "rest"], help="only the quick tests, or only the others")
    parser.addoption("--until", type=float, help="tests that have not begun at this Unix time are skipped, and named")


def configure(config: pytest.Config) -> None:
    """Registers the marks, and decides which points a thinned test takes."""
    for name, meaning in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "essential: in the quick part, whatever its group")
    config.addinivalue_line("markers", "thinned: in the quick part with every eighth point, in the rest with each")
    global _thinning
    _thinning = (_STEP, _offset()) if config.getoption("part") == "quick" else (1, 0)


def header() -> list[str]:
    """What is said before the first test."""
    step, offset = _thinning
    return [] if step == 1 else [f"thinned tests take every {step}th point, from number {offset} of this commit on"]


def thinned(points: Sequence[Item]) -> Sequence[Item]:
    """Of the points of a search, those that this session takes: each, or in the quick part every eighth one.

    At which one it begins follows from the commit, so that many commits together take all of them.
    """
    step, offset = _thinning
    return points[min(offset, max(len(points) - 1, 0)) :: step]


def some_quick(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """The cases of a parametrized test, of which the quick part takes those that are named."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]


def ignores(path: Path, config: pytest.Config) -> bool:
    """Whether no test of a folder belongs to the part that is asked for."""
    return config.getoption("part") == "quick" and path.is_dir() and path.name in _NEVER_QUICK


def group_of(item: pytest.Item) -> str | None:
    """The most valuable group that a test belongs to; None for a quick one."""
    marks = {mark.name for mark in item.iter_markers()} | {FOLDERS.get(item.path.parent.name, "")}
    return next((name for name in GROUPS if name in marks), None)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the part that is asked for; `-m` finds the groups of folders as well."""
    for item in items:
        if (folder := FOLDERS.get(item.path.parent.name)) is not None:
            item.add_marker(folder)
    part = config.getoption("part")
    if part is None:
        return
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        quick = group_of(item) is None or item.get_closest_marker("essential") is not None
        both = item.get_closest_marker("thinned") is not None
        (kept if both or quick == (part == "quick") else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def skip_if_too_late(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(_NO_TURN)


def name_those_without_a_turn(terminalreporter: Any) -> None:
    """Says for which files the time was not enough."""
    files = Counter(
        report.nodeid.partition("::")[0]
        for report in terminalreporter.stats.get("skipped", [])
        if _NO_TURN in str(report.longrepr)
    )
    if files:
        terminalreporter.section(f"the time was over: {files.total()} tests did not get their turn")
        for file, count in sorted(files.items()):
            terminalreporter.line(f"{file}: {count}")


def _offset() -> int:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(found.stdout[:8] or "0", 16) % _STEP
