"""Parts that the tests are run in: `quick` and `rest` gate a change, `nightly` takes what needs longer.

A test without a mark from `GROUPS` is quick: it is pure, or needs only the Redis and S3 servers of its process.

- `--part quick`: quick tests, of the files in `SLOW` about a fourth, and tests marked `essential`.
- `--part rest`: the other groups, another fourth of the `SLOW` tests, and about a fourth of the `exhaustive` ones.
- `--part nightly`: the groups in `NIGHTLY`, and the other `SLOW` and `exhaustive` tests.
- A `thinned` test belongs to each part: every 16th point in `quick`, every 8th (others) in `rest`, all in `nightly`.

Where each begins follows from the commit. Without `--part` everything runs. With `--until`, tests that have not begun
by then are skipped and named.
"""

from __future__ import annotations

import subprocess
import time
import zlib
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
    "nightly": "takes minutes, and once a night is often enough",
}
NIGHTLY = ("learning", "benchmarks", "nightly")
FOLDERS = {
    "end_to_end": "ray",
    "chaos": "chaos",
    "cluster": "cluster",
    "learning": "learning",
    "benchmarks": "benchmarks",
}
"""Folders whose tests all belong to a group without a mark."""
SLOW = (
    "/cli/test_app.py", "/test_checkpoint_operations.py", "/test_doctor.py", "/test_due_evaluations.py",
    "/test_environment_trial.py", "/lifecycle/test_inline.py", "/test_installing.py", "/catalog/test_league.py",
    "/run_access/test_train.py",
    "/cli/test_metrics.py", "/test_onnx_translation.py", "/test_options.py", "/test_remote_link.py",
    "/test_resuming_every_algorithm.py", "/cli/test_runs.py", "/page/test_server.py", "/test_tls.py",
)  # fmt: skip
"""Files without a group whose tests take half a second of a processor each, or more."""
PARTS = ("quick", "rest", "nightly")
_POINTS = {"quick": 16, "rest": 8}
_CASES = 4
_NO_TURN = "its turn did not come"

_thinning: tuple[int, int] = (1, 0)


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=PARTS, help="only the tests of this part")
    parser.addoption("--until", type=float, help="skip and name tests that have not begun at this Unix time")


def configure(config: pytest.Config) -> None:
    """Registers the marks and chooses the points of thinned tests."""
    for name, meaning in GROUPS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "essential: in the quick part, whatever its group")
    config.addinivalue_line("markers", "thinned: in each part, but `quick` and `rest` take some of its points")
    global _thinning
    part = config.getoption("part")
    step = _POINTS.get(part, 1)
    shift = 1 if part == "rest" else 0  # so that the two parts have no point in common
    _thinning = (step, (_commit() + shift) % step)


def header() -> list[str]:
    """Lines printed before the first test."""
    step, offset = _thinning
    return [] if step == 1 else [f"thinned tests take every {step}th point, from number {offset} of this commit on"]


def thinned(points: Sequence[Item]) -> Sequence[Item]:
    """Returns the points of a search that this part takes."""
    step, offset = _thinning
    return points[min(offset, max(len(points) - 1, 0)) :: step]


def some_quick(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Marks all cases of a parametrized test `exhaustive`, except for the given ones."""
    return [
        case
        if case in quick
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]


def ignores(path: Path, config: pytest.Config) -> bool:
    """Skips a folder without a test of the selected part, so that it is not imported."""
    return config.getoption("part") in ("quick", "rest") and path.is_dir() and FOLDERS.get(path.name) in NIGHTLY


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the selected part; `-m` selects the groups of folders too."""
    for item in items:
        if (folder := FOLDERS.get(item.path.parent.name)) is not None:
            item.add_marker(folder)
    part = config.getoption("part")
    if part is None:
        return
    commit = _commit()
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (kept if part in _parts_of(item, commit) else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def _parts_of(item: pytest.Item, commit: int) -> Sequence[str]:
    turn = (zlib.crc32(item.nodeid.encode()) + commit) % _CASES  # the same when only failed tests are collected
    marks = {mark.name for mark in item.iter_markers()}
    groups = marks & GROUPS.keys()
    if "thinned" in marks:
        return PARTS
    if "essential" in marks:
        return ["quick"]
    if not groups:
        slow = item.path.as_posix().endswith(SLOW)
        return [("quick", "rest", "nightly", "nightly")[turn if slow else 0]]
    if groups & set(NIGHTLY):
        return ["nightly"]
    return ["nightly" if "exhaustive" in groups and turn else "rest"]


def skip_if_too_late(item: pytest.Item) -> None:
    until = item.config.getoption("until")
    if until is not None and time.time() > until:
        pytest.skip(_NO_TURN)


def name_those_without_a_turn(terminalreporter: Any) -> None:
    """Prints the files whose tests were skipped for lack of time."""
    files = Counter(
        report.nodeid.partition("::")[0]
        for report in terminalreporter.stats.get("skipped", [])
        if _NO_TURN in str(report.longrepr)
    )
    if files:
        terminalreporter.section(f"the time was over: {files.total()} tests did not get their turn")
        for file, count in sorted(files.items()):
            terminalreporter.line(f"{file}: {count}")


def _commit() -> int:
    """A number that follows from the commit."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return int(found.stdout[:8] or "0", 16)
