"""Studies of real runs: results, failures, a full disk, and the same bytes after every kill."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import stagecoach as sc
from stagecoach.coordinator.studies.scores import Unscored, score_of
from stagecoach.coordinator.studies.study_config import ObjectiveConfig
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.experience import tensor_blob
from tests.support.processes.command_line import CommandLine, check_refused, command_line

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
SMALL: dict[str, Any] = {
    "config": "config.yaml", "trials": 4, "generation": 2, "evaluations": 3, "objective": "auc",
    "set": {"stop_at.updates": None, "stop_at.env_steps": 1500, "evaluation.num_envs": 2},
    "space": {
        "algorithm.learning_rate": {"log_uniform": [1e-4, 1e-2]}, "algorithm.epochs": {"integers": [1, 4]},
        "rollout.fragment_steps": {"choice": [16, 32]},
    },
}  # fmt: skip


LARGE: dict[str, Any] = {"trials": 8, "generation": 4, "parallel": 2, "seeds": 2, "pruning": {"at": [1000]}}
POPULATION: dict[str, Any] = {
    "trials": 12, "generation": 4, "parallel": 2, "population": {}, "set": SMALL["set"] | {"archive": "all"},
}  # fmt: skip
_LONGEST_SECONDS = 1800.0


def write_study(terminal: CommandLine, **changes: Any) -> None:
    terminal.write_config(checkpoint={"every": "5 updates"})
    (terminal.folder / "study.yaml").write_text(yaml.safe_dump(SMALL | changes))


@contextlib.contextmanager
def ended_study(folder: Path, **changes: Any) -> Iterator[CommandLine]:
    with command_line(folder) as terminal:
        write_study(terminal, **changes)
        terminal.run("tune", "study.yaml", seconds=_LONGEST_SECONDS).ok()
        yield terminal


def result(terminal: CommandLine) -> dict[str, str]:
    """Digest of every record of the study, of the best config, and of each trial's final policy."""
    runs = terminal.folder / "runs"
    files = {path.name: path for path in (runs / "study").rglob("*") if path.suffix in (".json", ".yaml")}
    for trial in sorted(runs.glob("study-*")):
        final = terminal.store(trial.name) / "checkpoints" / terminal.marker(trial.name, ".checkpoint")["final"]
        files[trial.name] = next(final.glob("*/default/policy.safetensors"))
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(files.items())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A study that ended without interruption."""
    with ended_study(tmp_path_factory.mktemp("undisturbed")) as terminal:
        yield terminal


def trials_of(terminal: CommandLine) -> dict[int, str]:
    """Processes of trials at work."""
    return {pid: command for pid, command in terminal.left().items() if "--run-id study-" in command}


def kill(terminal: CommandLine, process: subprocess.Popen[str], what: str) -> None:
    """`all`: SIGKILL to everything of the study; `study`: to its process; `trial`: to its run's; `stop`: SIGTERM."""
    if what == "stop":
        process.terminate()
        return
    left = terminal.left() if what != "study" else {process.pid: ""}
    if what == "trial":
        terminal.wait_until("a trial", lambda: bool(trials_of(terminal)) or process.poll() is not None)
        left = trials_of(terminal)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def disturb(terminal: CommandLine, points: list[tuple[float, str]]) -> int:
    """Runs the study with these kills, some seconds after each start, then to its end; returns how many hit."""
    hit = 0
    for seconds, what in points:
        process = terminal.start("tune", "study.yaml")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if process.poll() is not None:
            break
        kill(terminal, process, what)
        hit += 1
        code = process.wait(_LONGEST_SECONDS)
        assert code in {"all": (-9,), "study": (-9,), "trial": (0,), "stop": (130, -15)}[what], what
    terminal.run("tune", "study.yaml", seconds=_LONGEST_SECONDS).ok()
    return hit


def test_study_ends_with_same_bytes_after_kills(undisturbed: CommandLine, terminal: CommandLine) -> None:
    write_study(terminal)
    assert disturb(terminal, [(6.0, "all"), (5.0, "study"), (7.0, "stop"), (5.0, "trial")]) >= 3
    expected = result(undisturbed)
    assert {"0003.json", "study.json", "best.yaml", "study-0003"} <= expected.keys()
    assert result(terminal) == expected


@pytest.fixture(scope="module")
def undisturbed_large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """The same of a study with pruning, several runs at a time and several seeds."""
    with ended_study(tmp_path_factory.mktemp("large"), **LARGE) as terminal:
        yield terminal


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["all", "study", "stop", "trial"])
def test_large_study_ends_with_same_bytes_after_kills(
    what: str, undisturbed_large: CommandLine, terminal: CommandLine
) -> None:
    """20 points in all, drawn from what is killed."""
    write_study(terminal, **LARGE)
    random_ = random.Random(what)
    hit = disturb(terminal, [(random_.uniform(2.0, 15.0), what) for _ in range(5)])
    assert hit == 5 or what == "trial"  # a study whose trial is killed ends by itself
    assert result(terminal) == result(undisturbed_large)


@pytest.fixture(scope="module")
def undisturbed_population(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Four members in three generations."""
    with ended_study(tmp_path_factory.mktemp("population"), **POPULATION) as terminal:
        yield terminal


def test_population_is_a_lineage_of_forks(undisturbed_population: CommandLine) -> None:
    """Each trial begins with its parent's learner, learns with its own parameters, and replays from there."""
    terminal = undisturbed_population
    study = terminal.json("tune", "study.yaml")
    trials = study["trials"]
    assert [trial["parent"] is None for trial in trials] == [True] * 4 + [False] * 8
    assert [sum(trial["copied"] for trial in trials[first : first + 4]) for first in (0, 4, 8)] == [0, 1, 1]
    for trial in trials[4:]:
        run, parent = (terminal.handle(f"study-{number:04}") for number in (trial["number"], trial["parent"]))
        store, name = run.checkpoint_store(), trials[trial["parent"]]["checkpoint"].partition("@")[0]
        first = next(its for its in store.names() if its.startswith("0_"))
        given, theirs = parent.checkpoint_store().load(name), store.load(first)
        for key in ("default/policy.safetensors", "trainer/default.algorithm.safetensors"):
            ours, its = (tensor_blob.decode(found.objects[key])[0] for found in (theirs, given))
            assert all(np.array_equal(array, its[name]) for name, array in ours.items()) and ours
        assert store.manifest(first).provenance["counters"] == given.manifest.provenance["counters"]
        rates = {row["train/learning_rate"] for rows in run.metrics() for _, row in rows.named()}
        assert rates == {trial["parameters"]["algorithm.learning_rate"]}
        if not trial["copied"]:
            assert trial["parent"] == trial["number"] - 4
            assert trial["parameters"] == trials[trial["parent"]]["parameters"]
        replayed = run.replay("start", "final")
        assert replayed.equal and replayed.start == first
    best = max(trials[8:], key=lambda trial: trial["score"])
    assert study["best"] == best
    grown = yaml.safe_load((terminal.folder / "study.yaml").read_text()) | {"trials": 16, "evaluations": 4}
    (terminal.folder / "grown.yaml").write_text(yaml.safe_dump(grown))
    check_refused(terminal.run("tune", "grown.yaml", "--name", "study"), "study.trials: recorded 12, found 16")


@pytest.mark.parametrize("points", [pytest.param(2, id="two"), pytest.param(10, id="ten", marks=[pytest.mark.nightly])])
@pytest.mark.timeout(3600)
def test_population_ends_with_same_bytes_after_kills(
    points: int, undisturbed_population: CommandLine, terminal: CommandLine
) -> None:
    write_study(terminal, **POPULATION)
    random_, kinds = random.Random(points), ["all", "study", "stop"]
    hit = disturb(terminal, [(random_.uniform(3.0, 9.0), kinds[number % 3]) for number in range(points)])
    assert hit == points
    assert result(terminal) == result(undisturbed_population)


def test_finished_study_repeats_and_refuses_changes(undisturbed: CommandLine) -> None:
    terminal = undisturbed
    before = result(terminal)
    began = time.monotonic()
    again = terminal.json("tune", "study.yaml")
    assert result(terminal) == before and time.monotonic() - began < 60
    assert [trial["number"] for trial in again["trials"]] == [0, 1, 2, 3]
    best = max(again["trials"], key=lambda trial: trial["score"])
    assert again["best"] == best and again["exact"] is True
    config = load_config(again["best_config"])
    assert config.algorithm.learning_rate.start == best["parameters"]["algorithm.learning_rate"]
    (terminal.folder / "other.yaml").write_text(yaml.safe_dump(SMALL | {"seed": 2}))
    refused = terminal.run("tune", "other.yaml", "--name", "study")
    check_refused(refused, "study.seed: recorded 1, found 2", "--name")
    check_refused(terminal.run("tune", "study.yaml", "--name", "a/b"), "a/b")


def test_pruned_trials_end_early_and_the_api_returns_the_best(terminal: CommandLine, monkeypatch: Any) -> None:
    monkeypatch.chdir(terminal.folder)
    write_study(terminal)
    lines: list[str] = []
    changes = {"pruning": {"at": [500], "keep": 0.5}, "seeds": 2, "trials": 2}
    study = sc.tune(SMALL | changes, name="p", report=lines.append)
    assert [trial.state for trial in study.trials].count("pruned") == 1
    pruned = next(trial for trial in study.trials if trial.state == "pruned")
    assert pruned.scores.keys() == {500} and study.best.scores.keys() == {500, 1500}
    assert study.best.scores[500] >= pruned.scores[500]
    assert study.best.seeds.keys() == {1, 2} and study.best.score == pytest.approx(sum(study.best.seeds.values()) / 2)
    steps = {
        run: sc.Run.attach(run).status().env_steps
        for run in (f"p-{study.best.number:04}-seed-2", f"p-{pruned.number:04}-seed-2")
    }
    ended, early = steps.values()
    assert ended >= 1500 > early >= 500
    assert load_config(study.best_path) == study.best_config
    assert "history.png" in [path.name for path in study.plot(terminal.folder / "plots")]
    assert any("pruned at 500" in line for line in lines)
    grown = sc.tune(SMALL | changes | {"trials": 4}, name="p", parallel=2)
    assert grown.trials[:2] == study.trials and len(grown.trials) == 4


def test_failed_trials_are_retried_and_shown(terminal: CommandLine) -> None:
    ids = {"environment.id": {"choice": ["CartPole-v1", "NoSuch-v0"]}}
    write_study(terminal, space=ids, seed=4)
    done = terminal.run("tune", "study.yaml")
    failed = done.out.count("-v0': Environment `NoSuch`")
    assert "NoSuch" in done.ok() and "trains again" in done.out and failed >= 3
    records = [
        json.loads(path.read_text()) for path in sorted((terminal.folder / "runs" / "study" / "trials").iterdir())
    ]
    assert {(each["state"], each["parameters"]["environment.id"]) for each in records} == {
        ("complete", "CartPole-v1"), ("failed", "NoSuch-v0"),
    }  # fmt: skip
    write_study(terminal, space={"environment.id": {"choice": ["NoSuch-v1", "NoSuch-v0"]}})
    none = terminal.run("tune", "study.yaml", "--name", "none")
    assert none.code == 1 and "all 2 trials failed, the first with: " in none.err and "NoSuch" in none.err


def test_full_disk_stops_the_study_which_then_continues(undisturbed: CommandLine, terminal: CommandLine) -> None:
    write_study(terminal)
    runs = terminal.folder / "runs"
    runs.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(runs)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("a small file system needs root")
    try:
        process = terminal.start("tune", "study.yaml")
        terminal.wait_until("a trial at work", lambda: (runs / "study-0001" / "begun").exists())
        with contextlib.suppress(OSError), (runs / "ballast").open("ab", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))
        done = terminal.ended(process)
        assert done.code == 1 and "its disk is full" in done.err and "the same command continues" in done.err
        (runs / "ballast").unlink()
        terminal.run("tune", "study.yaml", seconds=_LONGEST_SECONDS).ok()
        assert result(terminal) == result(undisturbed)
    finally:
        terminal.close()
        subprocess.run(["umount", "-l", str(runs)], check=True)


def test_scores_follow_from_due_evaluations(undisturbed: CommandLine) -> None:
    runs, run = undisturbed.folder / "runs", undisturbed.handle("study-0001")
    rows = [row for part in run.metrics("evaluations") for _, row in part.named()]
    steps, returns = [row["time/env_steps"] for row in rows], [row["eval/ep_rew_mean"] for row in rows]
    due = sorted({min(its for its in steps if its >= at) for at in (500, 1000, 1500)})
    one, two, three = (returns[steps.index(its)] for its in due)

    def score(**objective: Any) -> float:
        return score_of("study-0001", runs, ObjectiveConfig(**objective), 500, 1500)

    assert score(last=2) == pytest.approx((two + three) / 2)
    area = (one + two) / 2 * (due[1] - due[0]) + (two + three) / 2 * (due[2] - due[1])
    assert score(measure="auc") == pytest.approx(area / (due[2] - due[0]))
    first, last = (score(measure="seconds", score=its) for its in (1.0, max(one, two, three)))
    assert 0 < first <= last < 60
    with pytest.raises(Unscored, match="no evaluation reached a return of 501"):
        score(measure="seconds", score=501)
    with pytest.raises(Unscored, match="the evaluation at 9,000 env steps is missing"):
        score_of("study-0001", runs, ObjectiveConfig(), 9000, 9000)
