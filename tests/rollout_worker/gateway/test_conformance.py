"""The conformance suite: the Python client passes it, and wrong clients fail in the scenario for what they do."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from stagecoach.rollout_worker.gateway.conformance import SCENARIOS, run_scenario
from stagecoach.rollout_worker.gateway.scripted_server import Stage
from tests.support.suite.speed import stretched

FOLDER = Path(__file__).parents[3] / "clients/python"
PROGRAM = [sys.executable, str(FOLDER / "conformance.py")]


@pytest.mark.timeout(180)
def test_python_client_passes_every_scenario() -> None:
    suite = [sys.executable, "-m", "stagecoach", "gateway", "conformance", "--", *PROGRAM]
    done = subprocess.run(suite, capture_output=True, text=True, timeout=stretched(120))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SCENARIOS)} of {len(SCENARIOS)} scenarios passed" in done.stdout


WRONG = {
    "forgets its answers": (
        "replaced", "_connect", "[its.pop('version', None) for its in self._journal]; old(self)",
        "expected message 1 with action and version (1, 0); got (1, None)",
    ),
    "forgets its journal": (
        "cut_lost", "_connect", "self._journal.clear(); old(self)",
        "expected journal_from 0, the oldest not acknowledged; got 3",
    ),
    "connects again after an error": (
        "error_gap", "_handle", "raise_cut() if given[0]['type'] == 'error' else old(self, *given)",
        "expected exit code 2 without another connection; got another connection",
    ),
    "takes another answer": (
        "late_duplicate", "_handle",
        "[its.pop('version', 0) for its in self._journal if its['seq'] == given[0]['seq']]; old(self, *given)",
        "expected message 0 with action and version (1, 0); got (0, 99)",
    ),
    "leaves early": ("play", "settle", "return 0", "expected no message before all is acknowledged"),
    "counts wrongly": (
        "fresh", "step", "return old(self, given[0] + 1, *given[1:])",
        "expected (observation, reward, terminated, truncated) = ([0, 1], 0.0, False, False) in message 43; got",
    ),
}  # fmt: skip
"""Wrong client → scenario, method of `Session`, what it does instead, what is found."""


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_client_fails_by_name(wrong: str, tmp_path: Path) -> None:
    scenario, method, body, problem = WRONG[wrong]
    program = tmp_path / "wrong.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import conformance

def raise_cut():
    raise ConnectionError

old = conformance.Session.{method}
def new(self, *given):
    {body}
conformance.Session.{method} = new
sys.exit(conformance.main())
""")
    result = run_scenario(scenario, [sys.executable, str(program)])
    assert result.scenario == scenario and problem in result.problem


def test_journal_with_a_torn_line_loses_nothing_after_it(tmp_path: Path) -> None:
    with closing(Stage(PROGRAM, tmp_path, stretched(45), journal=True)) as stage:
        link = stage.connect()
        link.play(3)
        for seen in range(2):
            link.take()
            stage.kill()
            if not seen:
                with (tmp_path / "journal").open("a") as journal:
                    journal.write('{"seq": 3, "act')
            stage.start()
            if seen:
                stage.replace(0)
            link = stage.connect()
        link.answer(link.take_through(4))
        stage.finish(link)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "nothing", "--", "true"], "no scenario is named nothing"),
        (["--", "/nowhere/program"], "cannot start /nowhere/program: No such file"), ([], "name the program"),
    ],
)  # fmt: skip
def test_unusable_request_is_refused_by_name(arguments: list[str], said: str) -> None:
    suite = [sys.executable, "-m", "stagecoach", "gateway", "conformance", *arguments]
    done = subprocess.run(suite, capture_output=True, text=True, timeout=stretched(60))
    assert done.returncode == 2 and said in done.stderr, done
