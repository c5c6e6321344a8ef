"""The kit behind `make learning`: the table, the plan, one real run, what is made again and what is not, the report."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from benchmarks.learning import __main__ as learning
from benchmarks.learning import runner
from benchmarks.learning.environments import Corridor, DeepSea, Locks, shuffled_rewards
from benchmarks.learning.report import fails, write_report
from benchmarks.learning.results import Result, place, read, write
from benchmarks.learning.runner import Job, RunLost, run
from benchmarks.learning.tasks import Mode, Task, load_tasks
from benchmarks.provenance import ROOT, commit
from stagecoach.shared.config.loading import parse_config, parse_yaml
from tests.support.processes.command_line import CommandLine

TINY = {
    "environment": {"id": "CartPole-v1", "num_envs": 2},
    "algorithm": {"minibatch_size": 16, "epochs": 1},
    "rollout": {"fragment_steps": 8, "fragments_per_update": 2},
    "checkpoint": {"every": "4 updates"},
    "evaluation": {"episodes": 2, "num_envs": 2},
}

FIRST = "824c91537037"
"""The first commit of the log."""
HEAD = commit().removesuffix("-dirty")
with_log = pytest.mark.skipif(not HEAD, reason="results count by the log of commits, and there is no git")
TEACHER = TINY | {"stop_at": {"env_steps": 128}}
CLONING = {"algorithm": {"name": "bc", "minibatch_size": 16}, "dataset": {"evaluation": {"every_updates": 0}}}


def task(**fields: Any) -> Task:
    """Two updates' worth of CartPole, unless `fields` say otherwise."""
    return Task.model_validate(
        {
            "name": "tiny", "algorithm": "PPO", "environment": "CartPole-v1", "reach": 10, "within": 256,
            "reference": "100", "source": "nobody", "minutes": 1, "config": TINY,
        } | fields
    )  # fmt: skip


def result(
    of: Task, evaluations: list[tuple[int, float]], mode: Mode = "inline", seed: int = 1, **fields: Any
) -> Result:
    """Builds a result without a run."""
    made = Result(
        task=of.name, mode=mode, seed=seed, digest=of.digest(mode, seed), reason="exhausted", env_steps=300,
        seconds=1.0, evaluations=evaluations, episodes=100, training=[], config={}, config_hash="",
        machine={"cpu": "slow", "cores": 2}, commit=HEAD, versions={"torch": "2"}, day="2026-01-31",
    )  # fmt: skip
    return dataclasses.replace(made, **fields)


def rows(report: str, name: str) -> list[list[str]]:
    """The cells of each line of a table that begins with `name`."""
    lines = [line for line in report.splitlines() if line.startswith(f"| `{name}`")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# The table


@pytest.mark.parametrize("entry", load_tasks().values(), ids=lambda entry: entry.name)
def test_tasks_end_in_time_and_are_evaluated(entry: Task) -> None:
    config = entry.parse()
    assert config.stop_at.env_steps is not None
    assert config.stop_at.env_steps >= entry.within
    assert config.rollout.workers in (1, 2)
    assert (entry.reference, entry.source) != ("", "")


PRESETS = {
    "a2c": "cartpole-a2c", "acrobot": "acrobot-ppo", "appo": "cartpole-appo", "bitflip": "bitflip-dqn",
    "cartpole": "cartpole-ppo", "cartpole_dqn": "cartpole-dqn", "cartpole_gail": "cartpole-gail",
    "cartpole_memory": "cartpole-memory-ppo-lstm", "cartpole_memory_r2d2": "cartpole-memory-r2d2",
    "deep_sea_ensemble": "deepsea-bootstrapped", "deep_sea_rnd": "deepsea-ppo-rnd", "impala": "cartpole-impala",
    "lunarlander": "lunarlander-ppo", "mountain_car_continuous": "mountain-car-continuous-sac",
    "options": "maze-options", "pendulum": "pendulum-ppo", "pendulum_cql": "pendulum-cql",
    "pendulum_sac": "pendulum-sac", "tictactoe": "tictactoe-league",
}  # fmt: skip
"""Preset → the row of the table that shows what it learns."""


@pytest.mark.parametrize(("preset", "row"), PRESETS.items(), ids=lambda name: name)
def test_presets_are_the_recipes_of_the_table(preset: str, row: str) -> None:
    text = (ROOT / "examples" / f"{preset}.yaml").read_text()
    assert parse_config(parse_yaml(text, preset) | {"seed": 1}).decides_otherwise(load_tasks()[row].parse(1)) == []


def test_task_with_teacher_reads_its_experience(tmp_path: Path) -> None:
    taught = task(config=TINY | CLONING, teacher=TEACHER)
    otherwise = task(config=TINY | CLONING, teacher=TEACHER | {"heatup": "8 env_steps"})
    assert taught.digest("inline", 1) != otherwise.digest("inline", 1)
    dataset = taught.parse(3, tmp_path).dataset
    assert dataset is not None
    assert dataset.path == str(tmp_path / "tiny-teacher-3" / "s3" / "stagecoach" / "tiny-teacher-3")
    assert parse_config(taught.teacher_data(3, tmp_path)).archive.keep == "all"
    assert "tiny" not in json.dumps(taught.settings), "they are the same for all seeds, and name no place"
    algorithm = {"minibatch_size": 16, "reward_signals": {"gail": {}}}
    imitating = {"algorithm": algorithm, "demonstrations": {"min_return": 9}}
    shown = task(config=TINY | imitating, teacher=TEACHER, taught_by="demonstrations").parse(3, tmp_path)
    assert shown.dataset is None and shown.demonstrations is not None
    assert (shown.demonstrations.path, shown.demonstrations.min_return) == (dataset.path, 9.0)


def test_shuffled_rewards_are_those_of_other_steps() -> None:
    """The same rewards, but none belongs to its step any more; without the shuffling they are as they were."""
    kept: dict[bool, list[float]] = {}
    for shuffled in (False, True):
        environment = shuffled_rewards("Pendulum-v1", shuffled)
        environment.reset(seed=1)
        action = np.zeros(1, np.float32)
        kept[shuffled] = [float(environment.step(action)[1]) for _ in range(200)]
        environment.close()
    plain = gym.make("Pendulum-v1")
    plain.reset(seed=1)
    assert kept[False] == [float(plain.step(np.zeros(1, np.float32))[1]) for _ in range(200)]
    plain.close()
    assert {*kept[True]} <= {*kept[False]}
    assert abs(np.corrcoef(kept[True], kept[False])[0, 1]) < 0.3


def test_deep_sea_rewards_one_dive_alone() -> None:
    environment = DeepSea(5)
    check_env(environment, skip_render_check=True)
    returns: list[float] = []
    for dive in itertools.product((0, 1), repeat=5):
        environment.reset(seed=len(returns))
        steps = [environment.step(np.int64(action)) for action in dive]
        assert [step[2:4] for step in steps] == [(False, False)] * 4 + [(True, False)]
        returns.append(sum(float(step[1]) for step in steps))
        assert steps[-1][4]["is_success"] == (returns[-1] > 0.5)
    assert max(returns) == pytest.approx(0.99) and sorted(returns)[-2] == 0
    assert sorted(round(total, 3) for total in returns).count(-0.008) == 5, "four to the right, one to the left"
    assert max(returns) != returns[0] and max(returns) != returns[-1], "not one action all the way"


def _crossings(environment: gym.Env[Any, Any], actions: int, steps: int, **options: int) -> list[float]:
    """The return of each line of play."""
    found = []
    for line in itertools.product(range(actions), repeat=steps):
        environment.reset(options=options)
        rewards, ended = [], False
        for action in line:
            if not ended:
                _, reward, ended, _, _ = environment.step(np.int64(action))
                rewards.append(float(reward))
        assert ended
        found.append(sum(rewards))
    return found


def test_corridors_and_locks_have_one_solution() -> None:
    corridor, locks = Corridor(), Locks()
    check_env(corridor, skip_render_check=True)
    check_env(locks, skip_render_check=True)
    assert sorted(_crossings(corridor, 2, 8, length=8)) == [0] * 255 + [1]
    returns = [_crossings(locks, 4, Locks.DIGITS, level=level) for level in (0, Locks.ALIKE - 1, Locks.ALIKE)]
    assert [sum(total > 0.99 for total in each) for each in returns] == [1, 1, 1]
    assert returns[0] == returns[1] != returns[2]


# The runs


@with_log
def test_plan_orders_jobs_and_skips_finished_ones(tmp_path: Path) -> None:
    short, long, odd = task(name="short"), task(name="long"), task(name="odd", needs=["no_such_module"])
    write(result(short, [(0, 1.0)], seed=1), tmp_path)
    write(result(long, [(0, 1.0)], "distributed", seed=2, digest="of other settings"), tmp_path)
    jobs = learning.plan([short, long, odd], ["inline", "distributed"], 2, tmp_path, again=False)
    assert [job.run_id for job in jobs] == [
        "short-inline-2", "long-inline-1", "long-inline-2",
        "short-distributed-1", "short-distributed-2", "long-distributed-1", "long-distributed-2",
    ]  # fmt: skip
    assert len(learning.plan([short, long, odd], ["inline", "distributed"], 2, tmp_path, again=True)) == 8


def test_run_leaves_only_its_curves(tmp_path: Path) -> None:
    folder, data = tmp_path / "runs", tmp_path / "data"
    found = run(Job(task(config={**TINY, "heatup": "32 env_steps"}), "inline", 3), folder)
    assert (found.task, found.mode, found.seed, found.reason) == ("tiny", "inline", 3, "exhausted")
    assert [at for at, _ in found.evaluations] in ([0, 160, 288], [0, 288])  # a checkpoint may be passed over
    assert found.env_steps == 288
    assert all(score >= 8 for _, score in found.evaluations)
    assert found.training[-1][0] == 288
    assert all(value >= 8 for _, value in found.training)
    assert found.episodes == 100 and found.day >= "2026-11-30"
    assert found.versions["torch"] and found.machine["cores"] > 0 and found.seconds > 0
    assert list(folder.iterdir()) == []
    write(found, data)
    path = place(data, "tiny", "inline", 3)
    assert read(path) == found
    assert str(folder) not in path.read_text(), "the data name no place on this machine"
    assert parse_config({**found.config, "seed": found.seed}).hash() == found.config_hash


def test_teacher_runs_before_its_pupils(tmp_path: Path) -> None:
    taught = task(config=TINY | CLONING, teacher=TEACHER)
    found = run(Job(taught, "inline", 1), tmp_path)
    assert found.reason == "exhausted" and found.env_steps == 256 and 2 <= len(found.evaluations) <= 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["inline", "teacher"])
def test_run_that_cannot_begin_reports_why(tmp_path: Path, role: str) -> None:
    wrong = TINY | {"environment": {"id": "NoSuchThing-v0"}}
    teacher = {"config": TINY | CLONING, "teacher": wrong | {"stop_at": {"updates": 1}}}
    lost = task(**(teacher if role == "teacher" else {"config": wrong}))
    with pytest.raises(RunLost, match=rf"(?s)tiny-{role}-1 .*; it said: .*NoSuchThing"):
        run(Job(lost, "inline", 1), tmp_path)


@with_log
def test_command_runs_missing_jobs_and_writes_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "load_tasks", lambda: {"tiny": task()})
    monkeypatch.setattr(learning, "commit", lambda: f"{HEAD}-dirty")
    monkeypatch.setattr(runner, "commit", lambda: HEAD)
    given = ["--mode", "inline", "--data", str(tmp_path / "data"), "--runs-dir", str(tmp_path / "runs")]
    assert learning.main([*given, "--seeds", "1"]) == 0
    first = place(tmp_path / "data", "tiny", "inline", 1).read_text()
    assert learning.main([*given, "--seeds", "2"]) == 0
    said = capsys.readouterr()
    assert "[1/1] tiny-inline-2" in said.out
    assert "Warning: the code is not as committed" in said.err
    assert place(tmp_path / "data", "tiny", "inline", 1).read_text() == first
    assert " of 2 |" in (tmp_path / "README.md").read_text()
    assert (tmp_path / "curves.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="no task nothing; there are tiny"):
        learning.main([*given, "--only", "nothing"])


def test_interrupt_ends_started_jobs_and_drops_their_data(terminal: CommandLine, tmp_path: Path) -> None:
    runs, data = terminal.temporary / "runs", tmp_path / "data"
    process = terminal.module(
        "benchmarks.learning", "--only", "cartpole-ppo", "--mode", "inline", "--data", data, "--runs-dir", runs,
        environ={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    figures = runs / "cartpole-ppo-inline-1" / "metrics" / "train.csv"
    terminal.wait_until("the first run learns", figures.exists)
    assert len(terminal.left()) > 1
    process.terminate()
    ended = terminal.ended(process)
    assert (ended.code, "interrupted" in ended.err) == (130, True)
    terminal.wait_until("nothing is left", lambda: not terminal.left())
    assert not data.exists()


# The report


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1, 500, 9, 9, 9], None),  # the luckiest of all
        ([1, 10, 11, 12, 9], None),  # three in a row, and then lost
        ([1, 10, 11, 12, 9, 10], 150),
        ([1, 9, 9, 9, 10], 200),  # the last
        ([1, 10, 11, 9, 10], 200),  # two in a row
        ([10], 0),
    ],
)
def test_last_checkpoint_decides_and_three_in_a_row_say_when(scores: list[float], expected: float | None) -> None:
    found = result(task(), [(50 * turn, score) for turn, score in enumerate(scores)])
    assert found.reached_at(task(within=256)) == (float("inf") if expected is None else expected)


@pytest.mark.parametrize(
    ("reached", "seeds", "negative", "expected"),
    [
        (4, 5, False, False), (3, 5, False, True), (2, 4, False, False), (0, 5, True, False), (1, 5, True, True),
    ],
)  # fmt: skip
def test_gate_needs_four_seeds_and_no_negative_control(
    reached: int, seeds: int, negative: bool, expected: bool
) -> None:
    of = task(negative=negative)
    assert fails(of, [result(of, [(0, 20.0 if seed < reached else 0.0)]) for seed in range(seeds)]) == expected


@with_log
def test_report_shows_gates_controls_and_parity(tmp_path: Path) -> None:
    gate, control, few, empty = (
        task(name="gate", family="dqn"), task(name="control", negative=True, note="Chance."), task(name="few"),
        task(name="empty"),
    )  # fmt: skip
    for seed, score in enumerate([2.0, 12.0, 13.0, 14.0, 30.0], 1):
        write(result(gate, [(0, 0.0), (100 * seed, score)], seed=seed), tmp_path / "data")
        write(result(gate, [(0, 0.0), (100, score + 100)], "distributed", seed), tmp_path / "data")
        write(result(control, [(0, score / 2)], seed=seed), tmp_path / "data")
    write(result(few, [(0, 20.0)]), tmp_path / "data")
    write_report([gate, control, few, empty], tmp_path / "data")
    report = (tmp_path / "README.md").read_text()
    inline, distributed, parity = rows(report, "gate")
    assert inline[1:4] == ["10 within 256", "inline", "4 of 5"]
    assert (inline[5], inline[7]) == ("400", f"{HEAD[:8]}, 0 ago")
    assert distributed[2:4] == ["distributed", "5 of 5"]
    assert distributed[4].startswith("113 [")
    assert distributed[5] == "100"
    assert rows(report, "control")[0][1:4] == ["below 10 within 256", "inline", "**1 of 5: fails**"]
    assert float(parity[5].strip("[]").split(",")[0]) > 0
    headings = [line for line in report.splitlines() if line.startswith("## ")]
    assert headings == [
        "## DQN and Rainbow", "## Negative controls", "## Fewer than five seeds", "## Distributed and inline",
        "## What does not work", "## Repeat a row", "## How it was measured",
    ]  # fmt: skip
    assert report.index("## Fewer") < report.index("| `few`") < report.index("## Distributed")
    assert "- `control`, inline: 1 of 5 seeds at 10. Chance.\n" in report
    assert "nothing is known of them: `empty`." in report
    assert (tmp_path / "curves.png").stat().st_size > 1000


@with_log
@pytest.mark.parametrize("void", ["digest", "dirty", "unknown", "minority"])
def test_report_counts_no_result_that_is_void(tmp_path: Path, void: str) -> None:
    """Of another row or other defaults; of a commit that is not in the log; or of a commit unlike the others'."""
    gate = task(name="gate")
    fields: dict[str, Any] = {
        "digest": {"digest": "of other settings"}, "dirty": {"commit": f"{HEAD}-dirty"},
        "unknown": {"commit": "0" * 12}, "minority": {"commit": FIRST},
    }[void]  # fmt: skip
    for seed in (1, 2):
        write(result(gate, [(0, 20.0)], seed=seed), tmp_path / "data")
    write(result(gate, [(0, 20.0)], seed=3, **fields), tmp_path / "data")
    write_report([gate], tmp_path / "data")
    assert rows((tmp_path / "README.md").read_text(), "gate")[0][3] == "2 of 2"


@with_log
def test_peer_stands_beside_ours(tmp_path: Path) -> None:
    """The real Stable-Baselines3, evaluated as a run of ours is."""
    peer = {"algorithm": "PPO", "num_envs": 2, "normalize": True, "every": 128}
    beside = task(sb3=peer | {"arguments": {"n_steps": 64, "learning_rate": ["linear", 1e-3]}})
    assert [job.mode for job in learning.plan([beside, task()], ["sb3"], 1, tmp_path, again=False)] == ["sb3"]
    found = run(Job(beside, "sb3", 1), tmp_path / "runs")
    assert [at for at, _ in found.evaluations] == [0, 128, 256]
    assert all(8 <= score <= 500 for _, score in found.evaluations)
    assert list((tmp_path / "runs").iterdir()) == []
    for seed in range(1, 6):
        write(result(beside, [(0, 500.0)], seed=seed), tmp_path / "data")
        write(result(beside, [(0, 10.0)], "sb3", seed), tmp_path / "data")
    write_report([beside], tmp_path / "data")
    (shown,) = [row for row in rows((tmp_path / "README.md").read_text(), "tiny") if len(row) == 6]
    assert shown[1:] == ["500 [500, 500] of 5", "10 [10, 10] of 5", "500", "10", "[490, 490]"]
