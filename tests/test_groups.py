"""The parts of the tests: nothing falls between them, a day that is too short is told, and a failure stays one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.groups import GROUPS

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.support import groups

pytest_addoption = groups.add_options
pytest_configure = groups.configure
pytest_runtest_setup = groups.skip_if_too_late
pytest_collection_modifyitems = groups.select
pytest_terminal_summary = groups.name_those_without_a_turn
"""
TESTS = """
import pytest
from tests.support.groups import thinned

def test_plain(): pass

@pytest.mark.chaos
def test_chaos(): pass

@pytest.mark.chaos
@pytest.mark.essential
def test_essential(): pass

@pytest.mark.chaos
@pytest.mark.thinned
def test_thinned():
    print("points:", *thinned(range(20)))
"""


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


def test_the_parts_together_are_all_tests(folder: Path) -> None:
    _, quick = run(folder, "--part", "quick")
    _, rest = run(folder, "--part", "rest")
    _, everything = run(folder)
    assert passed(quick) == {"test_plain", "test_essential", "test_thinned"}
    assert passed(rest) == {"test_chaos", "test_thinned", "test_learns"}
    assert passed(everything) == passed(quick) | passed(rest)
    assert points(rest) == points(everything) == set(range(20))
    first = min(points(quick))
    assert points(quick) == set(range(first, 20, 8)) and first < 8


def test_a_group_can_be_asked_for_by_its_mark(folder: Path) -> None:
    assert passed(run(folder, "-m", "learning")[1]) == {"test_learns"}


def test_what_comes_too_late_is_skipped_and_named_and_fails_nothing(folder: Path) -> None:
    code, out = run(folder, "--part", "rest", "--until", "1")
    assert code == 0 and passed(out) == set()
    assert "the time was over: 3 tests did not get their turn" in out
    assert "learning/test_of_a_folder.py: 1" in out and "test_some.py: 2" in out


def test_a_failure_in_time_fails_the_part(folder: Path) -> None:
    (folder / "learning" / "test_of_a_folder.py").write_text("def test_learns(): assert False\n")
    assert run(folder, "--part", "rest", "--until", "1e12")[0] == 1


def test_contributing_names_every_group() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [name for name in (*GROUPS, "essential", "thinned") if f"`{name}`" not in text] == []
