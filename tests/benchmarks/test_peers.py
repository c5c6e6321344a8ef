"""The benchmark `peers`: its programs are started, read and ended for real; no peer is installed here."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contest.contestants import CARTPOLE, Contestant, contestants, stagecoach
from benchmarks.contest.programs.telling import WINDOW_EPISODES
from benchmarks.contest.virtual_environments import REQUIREMENTS
from benchmarks.contest.watching import (
    Program,
    ProgramFailed,
    env_steps_per_second,
    memory,
    recovery,
    seconds_to,
    undisturbed,
)
from benchmarks.kit.leaderboard import write_leaderboard
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.kit.report import write_page
from benchmarks.suite import time_to
from benchmarks.suite.peers import PAGES, QUICK, Times, contest
from tests.support.suite.speed import stretched

_FAKE = "tests.support.processes.fake_contestant"
_TIMES = Times(warm=0.2, window=0.3, tried_warm=0.1, tried_window=0.1, floor=0.1)
PINNED = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))

pytestmark = pytest.mark.timeout(300)


def fake(**settings: Any) -> Program:
    return Program(_FAKE, Path(sys.executable), {"rate": 1000, "lines": 10_000, **settings})


def fakes(name: str, library: str, **knobs: dict[str, Any]) -> Contestant:
    settings = {knob: {"lines": 10_000, **its} for knob, its in knobs.items()}
    return _Fake(name, library, settings, _FAKE)


class _Fake(Contestant):
    """Runs in this environment, whatever library it stands for."""

    peer = None


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


def test_memory_counts_all_processes_once(tmp_path: Path) -> None:
    alone = memory(fake(), 0.1, 0.2)
    with_child = memory(fake(child=str(tmp_path / "child")), 0.1, 0.2)
    assert 1e6 < alone < with_child < alone + 20e6


def test_memory_counts_files_of_runs_in_shared_memory() -> None:
    with tempfile.TemporaryDirectory(prefix="stagecoach-", dir="/dev/shm") as folder:
        Path(folder, "body").write_bytes(bytes(64 << 20))
        alone = memory(fake(), 0.1, 0.2)
        with_bodies = memory(fake(holds=str(Path(folder, "held"))), 0.1, 0.2)  # `owner`, unlocked, is removed by others
    assert alone + 50e6 < with_bodies < alone + 80e6


def test_recovery_counts_steps_and_compares_weights(tmp_path: Path) -> None:
    """It keeps every tenth line: what was told since the last one is lost."""
    program = fake(rate=None, lines=40, keep={"folder": str(tmp_path), "every_env_steps": 10})
    weights = undisturbed(fake(rate=None, lines=40)).weights
    found = recovery(program, env_steps=25, delay=0.0)
    assert 0 < found.env_steps_lost <= 10 and found.weights == weights
    assert 0 < found.seconds_to_learn <= found.seconds_to_catch_up


def test_killed_stagecoach_run_reports_only_its_new_start(tmp_path: Path) -> None:
    """Redis still has the row of the last update before the kill; without a checkpoint since, all of it is lost."""
    config = stagecoach(CARTPOLE, 0)["1 worker, 1 thread"]["config"]
    config |= {"checkpoint": {"every": "1000 updates"}, "stop_at": {"env_steps": 16 * CARTPOLE.batch}}
    settings = {"config": config, "inline": True, "keep": {"folder": str(tmp_path / "kept")}, "seed": 1}
    program = Program("benchmarks.contest.programs.stagecoach_run", Path(sys.executable), settings)
    found = recovery(program, 4 * CARTPOLE.batch, delay=0.0)
    assert found.env_steps_lost >= 4 * CARTPOLE.batch
    assert 0 < found.seconds_to_learn < found.seconds_to_catch_up


def test_ratios_compare_with_the_best_knobs_of_a_library(tmp_path: Path) -> None:
    entered = [
        fakes("ours", "Stagecoach", few={"rate": 3000}, many={"rate": 6000}),
        fakes("theirs", "RLlib", slow={"rate": 500}, fast={"rate": 1000}),
        fakes("broken", "TorchRL", only={"rate": 1, "lines": 1, "code": 1}),
    ]
    result = contest("peers", {CARTPOLE: entered}, Options(2, quick=False, cache=tmp_path), _TIMES)
    task = CARTPOLE.name
    lines = {measure.what.removeprefix(f"{task}: "): measure for measure in result.measures}
    assert set(lines) == {"the floor", "ours", "theirs", "ours, compared with RLlib", "ours, compared with the floor"}
    assert all(len(measure.samples) == 2 for measure in result.measures)
    assert lines["ours"].note.startswith("many, the best of 2 tried")
    beside = lines["ours, compared with RLlib"]
    assert (beside.against, beside.aim) == (f"{task}: theirs", 6.5)
    assert result.ratios(beside) == pytest.approx([6.0, 6.0], rel=0.05)
    assert [remark for remark in result.remarks if "broken" in remark and "its last words" in remark]
    write_page(result, tmp_path)
    floor = 100 * 6000 / lines["the floor"].median
    assert f"| {floor:.0f} % |" in (tmp_path / "peers.md").read_text()


def test_page_without_floor_says_why(tmp_path: Path) -> None:
    task = replace(CARTPOLE, name="unknown to the floor's program")
    ours = fakes("ours", "Stagecoach", only={"rate": 3000})
    result = contest("peers", {task: [ours]}, Options(2, quick=False, cache=tmp_path), _TIMES)
    assert [(line.what, line.floor, len(line.samples)) for line in result.measures] == [(f"{task.name}: ours", "", 2)]
    assert [remark for remark in result.remarks if remark.startswith(f"{task.name}: the floor is not measured")]
    write_page(result, tmp_path)


def test_leaderboard_has_one_table_and_one_picture(tmp_path: Path) -> None:
    goal, quick = time_to.GOALS[0].name, Options(2, quick=True, cache=tmp_path)
    programs = {"PPO": fake(rate=1, mean_return=480)}
    entries = [time_to.Entry(time_to.GOALS[0], one, programs) for one in time_to.GOALS[0].entered[1:3]]
    for entry in entries:
        time_to.run_entry(entry, 1, 60.0, quick)
    result = Result("time-to", "How long?", time_to.measures_of(entries, 60.0), command="python -m benchmarks time-to")
    write_leaderboard(result, tmp_path)
    page = (tmp_path / "time-to.md").read_text()
    assert "| seconds to | Stagecoach --inline | Stable-Baselines3 |" in page and f"| {goal} | " in page
    assert page.count("](time-to.png)") == 1 and (tmp_path / "time-to.png").read_bytes().startswith(b"\x89PNG")


def test_leaderboard_without_measures_is_a_page(tmp_path: Path) -> None:
    write_leaderboard(Result("time-to", "How long?", [], remarks=["nothing is installed"]), tmp_path)
    page = (tmp_path / "time-to.md").read_text()
    assert "nothing is installed" in page and ".png" not in page and not (tmp_path / "time-to.png").exists()


def test_leaderboard_leaves_out_undefined_samples(tmp_path: Path) -> None:
    nan = float("nan")
    lines = [Measure("goal: Stagecoach", "s", [nan, 3.0]), Measure("goal: TorchRL", "s", [nan])]
    write_leaderboard(Result("time-to", "How long?", lines), tmp_path)
    page = (tmp_path / "time-to.md").read_text()
    assert "| seconds to | Stagecoach |" in page and "| goal | **3** |" in page


@pytest.mark.parametrize("peer", PINNED)
def test_requirements_are_exact(peer: str) -> None:
    lines = [line for line in (REQUIREMENTS / f"{peer}.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines and all(line.count("==") == 1 and "*" not in line for line in lines)


def test_everyone_who_takes_part_has_a_program_and_requirements() -> None:
    entered = [one for tasks in PAGES.values() for task in tasks for one in contestants(task)]
    entered += [one for goal in time_to.GOALS for one in goal.entered]
    peers = {one.peer for one in entered if one.peer is not None}
    assert peers | {"mujoco"} == set(PINNED)
    assert all("torch==2.13.0\n" in (REQUIREMENTS / f"{peer}.txt").read_text() for peer in peers), "the same for all"
    for one in entered:
        assert Path(f"{one.module.replace('.', '/')}.py").is_file() and one.speed


def test_stagecoach_itself_takes_part_for_real(tmp_path: Path) -> None:
    ours = contestants(CARTPOLE)[0]
    inline = {knobs: {**settings, "inline": True} for knobs, settings in ours.speed.items()}
    options = Options(1, quick=True, only=("policy lag 1",), cache=tmp_path)
    result = contest("peers", {CARTPOLE: [replace(ours, speed=inline)]}, options, QUICK)
    floor, line, beside = result.measures
    assert (line.what, beside.against) == (f"{CARTPOLE.name}: {ours.name}", floor.what), result.remarks
    assert 0 < line.samples[0] < floor.samples[0]
