"""One run of one task, as a user runs it: the command line in a process of its own, with Redis, S3 and (unless inline)
Ray. Comes in: task, seed, mode. Goes out: its `Result`, read from what the run has left.
"""

from __future__ import annotations

import csv
import datetime
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning import scores
from benchmarks.learning.results import Result
from benchmarks.learning.tasks import PEERS, Mode, Task
from benchmarks.provenance import ROOT, commit, machine, versions
from stagecoach.coordinator.catalog.checkpoint_lookup import evaluate
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy, load_policy
from stagecoach.shared.storage.checkpoint_store import FINISHED
from stagecoach.shared.storage.players import LEAGUE
from stagecoach.shared.storage.shared_objects import read_shared_object
from stagecoach.trainer_node.learning.league import LeagueState

_SIGNAL = "rollout/ep_rew_mean"
_POINTS = 200
_PATIENCE = 20
"""A run that takes as many times what the task says hangs; on a busy machine a few times as long is usual."""
_LEAVE_SECONDS = 90.0


class RunLost(Exception):
    """A run that has no end of its own: nothing can be said of the algorithm."""


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    task: Task
    mode: Mode
    seed: int

    @property
    def run_id(self) -> str:
        """Its name in the folder of runs."""
        return f"{self.task.name}-{self.mode}-{self.seed}"


def run(job: Job, runs_dir: Path, *, until_reached: bool = False) -> Result:
    """Raises `RunLost` where the run did not end by itself; its folder stays then, else it goes."""
    runs_dir.mkdir(parents=True, exist_ok=True)
    if job.mode in PEERS:
        return _peer(job, runs_dir)
    teacher = job.task.teacher_id(job.seed)
    if job.task.teacher is not None:
        said = _train(job, teacher, "inline", runs_dir, job.task.teacher_data(job.seed, runs_dir.resolve()))
        if (
            not (runs_dir / teacher).exists()
            or Run.attach(teacher, runs_dir).checkpoint_store().marker(FINISHED) is None
        ):
            raise RunLost(f"{teacher} did not come to its end; it said: {said[-2000:]}")
    began = time.monotonic()
    data = job.task.data(job.seed, runs_dir.resolve(), until_reached=until_reached)
    said = _train(job, job.run_id, job.mode, runs_dir, data)
    seconds = time.monotonic() - began
    try:
        result = _result(job, Run.attach(job.run_id, runs_dir), seconds)
    except Exception as error:
        raise RunLost(f"{job.run_id} left no result ({error}); it said: {said[-2000:]}") from error
    for run_id in (job.run_id, teacher):
        shutil.rmtree(runs_dir / run_id, ignore_errors=True)
    return result


def _train(job: Job, run_id: str, mode: Mode, runs_dir: Path, data: dict[str, Any]) -> str:
    """Until the command has ended; returns what it wrote. An interrupt waits for its end."""
    shutil.rmtree(runs_dir / run_id, ignore_errors=True)
    config = runs_dir / f"{run_id}.yaml"
    config.write_text(yaml.safe_dump(data))
    inline = ["--inline"] if mode == "inline" else []
    said = _said(job, ["-m", "stagecoach", "train", str(config), "--run-id", run_id, *inline], config)
    config.unlink()
    return said


def _said(job: Job, arguments: Sequence[str], config: Path) -> str:
    """What a Python process wrote until its end; raises `RunLost` where it takes too long."""
    command = [sys.executable, *arguments]
    log = config.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(max(20.0, job.task.minutes * _PATIENCE) * 60)
        except subprocess.TimeoutExpired:
            raise RunLost(f"{config.stem} took more than {_PATIENCE} times what its task says") from None
        finally:
            _end(process)
    said = log.read_text()
    log.unlink()
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _peer(job: Job, runs_dir: Path) -> Result:
    """Stable-Baselines3's run, evaluated as ours are."""
    settings = job.task.peer_data(job.seed)
    assert settings is not None, "a job of a peer is planned only with settings of it"
    given, shown = (runs_dir / f"{job.run_id}{end}" for end in (".given.json", ".shown.json"))
    given.write_text(json.dumps(settings))
    began = time.monotonic()
    said = _said(job, ["-m", "benchmarks.learning.peer", str(given), str(shown)], given)
    if not shown.exists():
        raise RunLost(f"{job.run_id} left no result; it said: {said[-2000:]}")
    evaluations = [(int(at), round(float(score), 4)) for at, score in json.loads(shown.read_text())]
    given.unlink()
    shown.unlink()
    return Result(
        task=job.task.name, mode=job.mode, seed=job.seed, digest=job.task.digest(job.mode, job.seed),
        reason="exhausted", env_steps=evaluations[-1][0], seconds=round(time.monotonic() - began, 1),
        evaluations=evaluations, episodes=job.task.last_episodes, training=[], config=settings, config_hash="",
        **_made_with(),
    )  # fmt: skip


def _made_with() -> dict[str, Any]:
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"machine": machine(), "commit": commit(), "versions": versions(), "day": day}


def _result(job: Job, run: Run, seconds: float) -> Result:
    finished = run.checkpoint_store().marker(FINISHED)
    if finished is None or finished["reason"] == "stopped":
        raise RunLost("it was ended from outside")
    counters = finished["counters"]
    heatup = int(counters["heatup"]["env_steps"])
    return Result(
        task=job.task.name, mode=job.mode, seed=job.seed, digest=job.task.digest(job.mode, job.seed),
        reason=str(finished["reason"]).splitlines()[0], env_steps=heatup + int(counters["train"]["env_steps"]),
        seconds=round(seconds, 1),
        evaluations=_evaluations(run, job.task, heatup), episodes=0 if job.task.judge else job.task.last_episodes,
        training=_training(run.folder.path / "metrics" / "train.csv", heatup),
        config=job.task.settings, config_hash=run.config.hash(), **_made_with(),
    )  # fmt: skip


def _evaluations(run: Run, task: Task, heatup: int) -> list[tuple[int, float]]:
    """The evaluator plays the newest checkpoint, where they come faster than it plays; the others are played here, and
    the last one is played again, longer."""
    found: list[tuple[int, float]] = []
    checkpoints = run.checkpoints()
    last = checkpoints[-1]
    for entry in checkpoints:
        if task.judge:
            score = judged(run, entry["name"], task)
        else:
            played: dict[str, Any] | None = entry["evaluation"]
            if played is None or entry is last:
                episodes = task.last_episodes if entry is last else None
                played = evaluate(f"{run.run_id}/{entry['name']}", run.folder.path.parent, episodes).scores
            score = float(played[task.measure])
        steps = int(entry["env_steps"])
        found.append((steps + heatup if steps else 0, round(score, 4)))
    return found


def judged(run: Run, checkpoint: str, task: Task) -> float:
    """What the task's judge says of a checkpoint."""
    store = run.checkpoint_store()
    objects = store.load(checkpoint).objects

    def snapshots() -> list[DeployedPolicy]:
        taken = LeagueState.from_dict(json.loads(objects[LEAGUE])).snapshots
        return [load_policy(read_shared_object(store.store, its.sha256)) for its in taken if its.policy == task.policy]

    policy = load_policy(objects[f"{task.policy}/policy.safetensors"])
    return float(getattr(scores, task.judge)(policy, snapshots))


def _training(path: Path, heatup: int) -> list[tuple[int, float]]:
    """Thinned to a few hundred points."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(_SIGNAL)]
    kept = rows[:: max(1, len(rows) // _POINTS)]
    return [(heatup + int(float(row["time/env_steps"])), round(float(row[_SIGNAL]), 4)) for row in kept]
