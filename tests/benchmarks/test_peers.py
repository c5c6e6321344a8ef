"""The benchmark `peers`: its programs are started, read and ended for real; no peer is installed here."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest.contestants import Contestant, contestants
from benchmarks.contest.programs.telling import WINDOW_EPISODES
from benchmarks.contest.virtual_environments import REQUIREMENTS
from benchmarks.contest.watching import Program, ProgramFailed, env_steps_per_second, seconds_to
from benchmarks.kit.options import Options
from benchmarks.suite.peers import Times, contest
from tests.support.suite.speed import stretched

_FAKE = "tests.support.processes.fake_contestant"
_TIMES = Times(warm=0.2, window=0.3, tried_warm=0.1, tried_window=0.1, at_most=60.0)
PINNED = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))

pytestmark = pytest.mark.timeout(300)


def fake(**settings: Any) -> Program:
    return Program(_FAKE, Path(sys.executable), {"rate": 1000, "lines": 10_000, **settings})


def fakes(name: str, library: str, *, peer: str | None = None, **knobs: dict[str, Any]) -> Contestant:
    settings = {knob: {"lines": 10_000, **its} for knob, its in knobs.items()}
    solve = {"rate": 1, "mean_return": 480, "lines": 10_000}
    return Contestant(name, _FAKE, peer, library, settings, solve, "nowhere")


def test_rate_covers_env_steps_between_two_reports() -> None:
    assert env_steps_per_second(fake(rate=1000), 0.2, 0.5) == pytest.approx(1000, rel=0.02)


def test_mean_return_needs_a_full_window_of_episodes() -> None:
    assert seconds_to(fake(mean_return=480, lines=WINDOW_EPISODES // 10), 475, 60) is None
    reached = seconds_to(fake(mean_return=480), 475, 60)
    assert reached is not None and reached >= WINDOW_EPISODES // 10 * 0.06
    assert seconds_to(fake(mean_return=470), 475, 1.0) is None, "not reached in time"


def test_failed_program_reports_its_last_output() -> None:
    with pytest.raises(ProgramFailed, match="code 3: its last words"):
        env_steps_per_second(fake(lines=2, code=3), 10, 10)


def test_nothing_that_a_program_started_outlives_it(tmp_path: Path) -> None:
    env_steps_per_second(fake(child=str(tmp_path / "child")), 0.1, 0.1)
    child, deadline = Path("/proc") / (tmp_path / "child").read_text() / "stat", time.monotonic() + stretched(30)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while ") Z " not in child.read_text():  # nobody may wait for it in a container
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_ratios_compare_with_the_best_settings_of_a_library(tmp_path: Path) -> None:
    entered = [
        fakes("ours", "Stagecoach", few={"rate": 3000}, many={"rate": 6000}),
        fakes("theirs, slow", "RLlib", only={"rate": 500}),
        fakes("theirs, fast", "RLlib", only={"rate": 1000}),
        fakes("broken", "Sample Factory", only={"rate": 1, "lines": 1, "code": 1}),
    ]
    entered = [replace(one, solve=None) if one.name != "ours" else one for one in entered]
    result = contest(entered, Options(2, quick=False, cache=tmp_path), _TIMES)
    lines = {measure.what: measure for measure in result.measures}
    assert set(lines) == {
        "ours", "theirs, slow", "theirs, fast", "ours, to a mean return of 475", "ours, beside RLlib"
    }  # fmt: skip
    assert all(len(measure.samples) == 2 for measure in result.measures)
    assert lines["ours"].note == "the best of 2 tried: many"
    beside = lines["ours, beside RLlib"]
    assert (beside.against, beside.aim) == ("theirs, fast", 10.0)
    assert result.ratios(beside) == pytest.approx([6.0, 6.0], rel=0.05)
    assert [remark for remark in result.remarks if "broken" in remark and "its last words" in remark]
    tried = result.settings["tried (env steps/s)"]["ours"]
    assert result.settings["taken"]["ours"] == "many" and set(tried) == {"few", "many"}


@pytest.mark.parametrize("peer", PINNED)
def test_requirements_are_exact(peer: str) -> None:
    lines = [line for line in (REQUIREMENTS / f"{peer}.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines and all(line.count("==") == 1 and "*" not in line for line in lines)


def test_everyone_who_takes_part_has_a_program_and_requirements() -> None:
    entered = contestants()
    peers = {one.peer for one in entered if one.peer is not None}
    assert peers <= set(PINNED)
    assert all("torch==2.13.0\n" in (REQUIREMENTS / f"{peer}.txt").read_text() for peer in peers), "the same for all"
    for one in entered:
        assert Path(f"{one.program.replace('.', '/')}.py").is_file() and one.speed


def test_stagecoach_itself_takes_part_for_real(tmp_path: Path) -> None:
    ours = contestants()[0]
    inline = {knobs: {**settings, "inline": True} for knobs, settings in ours.speed.items()}
    options = Options(1, quick=True, only=("policy lag 1",), cache=tmp_path)
    result = contest([replace(ours, speed=inline, solve=None)], options, _TIMES)
    assert [measure.what for measure in result.measures] == ["Stagecoach PPO, policy lag 1"], result.remarks
    assert result.measures[0].samples[0] > 0
