"""Parts of the tests: no test is in none, tests without a turn are named, flakes are judged."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.suite import durations, flakes, reports
from tests.support.suite.groups import GROUPS, PARTS, SLOW

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.support.suite import groups

pytest_addoption = groups.add_options
pytest_configure = groups.configure
pytest_runtest_setup = groups.skip_if_too_late
pytest_collection_modifyitems = groups.select
pytest_terminal_summary = groups.name_those_without_a_turn
"""
TESTS = """
import pytest
from tests.support.suite.groups import thinned

def test_plain(): pass

@pytest.mark.chaos
def test_chaos(): pass

@pytest.mark.chaos
@pytest.mark.essential
def test_essential(): pass

@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(8))
def test_exhaustive(case): pass

@pytest.mark.nightly
def test_long(): pass

@pytest.mark.chaos
@pytest.mark.thinned
def test_thinned():
    print("points:", *thinned(range(40)))
"""
EXHAUSTIVE = {f"test_exhaustive[{case}]" for case in range(8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "learning").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "learning" / "test_of_a_folder.py").write_text("def test_learns(): pass\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-vs", "-p", "no:cacheprovider", "--rootdir", str(folder), *arguments]
    done = subprocess.run(
        [*command, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
    )
    return done.returncode, done.stdout


def passed(out: str) -> set[str]:
    return {line.partition("::")[2].split()[0] for line in out.splitlines() if "::" in line and "SKIPPED" not in line}


def points(out: str) -> set[int]:
    return {int(point) for line in re.findall("points:(.*)", out) for point in line.split()}


def test_parts_together_are_all_tests(folder: Path) -> None:
    (_, quick), (_, rest), (_, nightly), (_, everything) = (
        run(folder, *arguments) for arguments in (["--part", "quick"], ["--part", "rest"], ["--part", "nightly"], [])
    )
    assert passed(quick) == {"test_plain", "test_essential", "test_thinned"}
    assert passed(rest) - EXHAUSTIVE == {"test_chaos", "test_thinned"}
    assert passed(nightly) - EXHAUSTIVE == {"test_long", "test_thinned", "test_learns"}
    assert len(passed(rest) & EXHAUSTIVE) == 2 and passed(rest) ^ passed(nightly) >= EXHAUSTIVE
    assert passed(everything) == passed(quick) | passed(rest) | passed(nightly)
    assert points(nightly) == points(everything) == set(range(40))
    for part, step in ((quick, 16), (rest, 8)):
        first = min(points(part))
        assert points(part) == set(range(first, 40, step)) and first < step
    assert not points(quick) & points(rest)


def test_scopes_are_ordered_by_recorded_duration() -> None:
    for part in PARTS:
        seconds = durations.read(part)
        assert list(seconds.values()) == sorted(seconds.values(), reverse=True)


def test_slow_files_exist() -> None:
    files = [path.as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [end for end in SLOW if not any(file.endswith(end) for file in files)] == []


def test_flakes_fail_unless_known_or_at_a_time_limit() -> None:
    first = [
        reports.Test("known", 1, "AssertionError"),
        reports.Test("late", 1, "Failed: Timeout (>120.0s) from pytest-timeout."),
        reports.Test("broken", 1, "AssertionError"),
        reports.Test("sound", 1, None),
    ]
    again = [reports.Test(name, 1, None) for name in ("known", "late")] + [reports.Test("broken", 1, "AssertionError")]
    text, refused = flakes.judge(first, again, {"known": "its reason"}, 1.0)
    assert refused == 0 and re.findall("flaky: (.*)", text) == ["known", "late"] and "its reason" in text
    text, refused = flakes.judge(first, again, {}, 1.0)
    assert refused == 1 and "NOT KNOWN" in text
    assert flakes.judge(first, again, {}, flakes.SLOW)[1] == 0


def test_known_flakes_name_tests_and_reasons() -> None:
    known = tomllib.loads(flakes.KNOWN.read_text())
    assert all(isinstance(reason, str) and reason for reason in known.values())
    assert [name for name in known if not (ROOT / name.partition("::")[0]).exists()] == []


def test_mark_selects_the_group_of_a_folder(folder: Path) -> None:
    assert passed(run(folder, "-m", "learning")[1]) == {"test_learns"}


def test_tests_past_the_deadline_are_skipped_and_named(folder: Path) -> None:
    code, out = run(folder, "--part", "nightly", "--until", "1")
    assert code == 0 and passed(out) == set()
    assert "the time was over: 9 tests did not get their turn" in out
    assert "learning/test_of_a_folder.py: 1" in out and "test_some.py: 8" in out


def test_failure_before_the_deadline_fails_the_part(folder: Path) -> None:
    (folder / "learning" / "test_of_a_folder.py").write_text("def test_learns(): assert False\n")
    assert run(folder, "--part", "nightly", "--until", "1e12")[0] == 1


def test_contributing_names_every_group() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in (*GROUPS, "essential", "thinned") if f"`{name}`" not in text] == []
