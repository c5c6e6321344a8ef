"""`python -m benchmarks.population`: populations that are killed; Stagecoach's beside Ray Tune's over RLlib's PPO.

Four members in three generations on CartPole change their learning rate and clip range. Each side runs twice without
interruption, then once with all its processes killed (SIGKILL) at evenly spaced shares of its progress, and continued
each time as its documentation says. Compared are the values that each member
trained with (ours with its parent and the hash of what it copied) and the bytes of each member's last policy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml

from benchmarks.contest.programs.rllib_population import SETTINGS
from benchmarks.contest.virtual_environments import python_of
from benchmarks.provenance import ROOT, commit, machine

UPDATES = SETTINGS["members"] * SETTINGS["generations"] * SETTINGS["updates"]
_MARK, _STILL_SECONDS, _POLL_SECONDS = "BENCHMARK_POPULATION", 180.0, 0.2


class Outcome(NamedTuple):
    ended: bool
    lineage: Any
    policies: dict[str, str]
    """Member of the last generation → digest."""
    seconds: float
    kills: int


class Side(Protocol):
    def command(self, folder: Path) -> list[str]:
        """Starts a population in this folder, or continues it."""

    def updates(self, folder: Path) -> int:
        """Returns how many updates were made, each counted once."""

    def outcome(self, folder: Path) -> tuple[Any, dict[str, str]]:
        """Returns lineage and policies; after the end."""


class Stagecoach:
    """`stagecoach tune` with `population`."""

    def command(self, folder: Path) -> list[str]:
        batch, rates = SETTINGS["batch"], [min(SETTINGS["rates"]), max(SETTINGS["rates"])]
        config = {
            "environment": {"id": SETTINGS["environment"], "num_envs": 8},
            "algorithm": {
                "name": "ppo", "minibatch_size": SETTINGS["minibatch"], "epochs": SETTINGS["epochs"],
                "clip_range": SETTINGS["clip"],
            },
            "rollout": {"workers": 1, "fragment_steps": batch // 8, "fragments_per_update": 1},
            "stop_at": {"env_steps": batch * SETTINGS["updates"] * SETTINGS["generations"]},
            "checkpoint": {"every": "2 updates"}, "metrics": {"every": "1 updates"}, "evaluation": {"episodes": 5},
        }  # fmt: skip
        space = {"algorithm.learning_rate": {"log_uniform": rates}, "algorithm.clip_range": {"uniform": [0.1, 0.4]}}
        study = {
            "config": "config.yaml", "trials": SETTINGS["members"] * SETTINGS["generations"], "population": {},
            "generation": SETTINGS["members"], "evaluations": SETTINGS["generations"], "parallel": 2,
            "seed": SETTINGS["seed"], "space": space,
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        (folder / "study.yaml").write_text(yaml.safe_dump(study))
        return [sys.executable, "-m", "stagecoach", "tune", str(folder / "study.yaml"), "--runs-dir", str(folder)]

    def updates(self, folder: Path) -> int:
        tables = folder.glob("study-*/metrics/train.csv")
        return sum(max(0, len(table.read_text().splitlines()) - 1) for table in tables)

    def outcome(self, folder: Path) -> tuple[Any, dict[str, str]]:
        trials = [json.loads(path.read_text()) for path in sorted((folder / "study" / "trials").iterdir())]
        lineage = [[its["number"], its["parent"], its["checkpoint"], its["parameters"]] for its in trials]
        last = sorted(folder.glob("study-*"))[-SETTINGS["members"] :]
        return lineage, {run.name: _digest(self._final(run)) for run in last}

    def _final(self, run: Path) -> Path:
        (pointer,) = run.glob("s3/stagecoach/*/.checkpoint")
        name: str = json.loads(pointer.read_text())["final"]
        return next((pointer.parent / "checkpoints" / name).glob("*/default/policy.safetensors"))


class RayTune:
    """`PopulationBasedTraining(synch=True)` with seeds, checkpoints at each update, and `Tuner.restore`."""

    def __init__(self, python: Path) -> None:
        self._python = python

    def command(self, folder: Path) -> list[str]:
        return [str(self._python), "-m", "benchmarks.contest.programs.rllib_population", str(folder)]

    def updates(self, folder: Path) -> int:
        """Returns the sum of the trials' last iterations."""
        found = folder.glob("population/PPO_*/result.json")
        tables = [path.read_text().rpartition("\n")[0].splitlines() for path in found]  # without one half-written
        return sum(json.loads(lines[-1])["training_iteration"] for lines in tables if lines)

    def outcome(self, folder: Path) -> tuple[Any, dict[str, str]]:
        said = json.loads((folder / "result.json").read_text())
        return said["members"], said["weights"]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _marked(mark: str) -> Iterator[int]:
    """Processes that have inherited this mark."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}\0".encode() in path.read_bytes():
                yield int(path.parent.name)
        except OSError:
            continue


def play(side: Side, folder: Path, kills: int) -> Outcome:
    """Runs a population to its end, with so many kills on the way."""
    folder.mkdir(parents=True)
    began, done, mark = time.monotonic(), 0, secrets.token_hex(8)
    while True:
        with (folder / "output.txt").open("ab") as output:
            environ = os.environ | {
                _MARK: mark,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "RAY_worker_niceness": "0",
            }
            process = subprocess.Popen(side.command(folder), env=environ, stdout=output, stderr=output, cwd=folder)
        seen, since = -1, time.monotonic()
        while process.poll() is None:
            if (now := side.updates(folder)) != seen:
                seen, since = now, time.monotonic()
            late = time.monotonic() - since > _STILL_SECONDS
            if late or (done < kills and now >= UPDATES * (done + 1) / (kills + 1)):
                _kill(mark)
                process.wait()
                break
            time.sleep(_POLL_SECONDS)
        else:
            ended = process.returncode == 0
            if not ended:
                print((folder / "output.txt").read_text()[-2000:], flush=True)
            lineage, policies = side.outcome(folder) if ended else (None, {})
            _kill(mark)
            return Outcome(ended, lineage, policies, time.monotonic() - began, done)
        if late:
            print(f"{folder.name}: no update for {_STILL_SECONDS:g} s, at {seen} of {UPDATES}", flush=True)
            return Outcome(False, None, {}, time.monotonic() - began, done)
        done += 1
        print(f"{folder.name}: killed at {side.updates(folder)} of {UPDATES} updates", flush=True)


def _kill(mark: str) -> None:
    while left := list(_marked(mark)):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def compared(first: Outcome, other: Outcome) -> dict[str, Any]:
    """How another outcome equals the first."""
    same = sum(other.policies.get(name) == digest for name, digest in first.policies.items())
    lineage = first.lineage is not None and first.lineage == other.lineage
    return {
        "kills": other.kills, "ended": other.ended, "same lineage": lineage,
        "same policies": f"{same} of {SETTINGS['members']}", "seconds": round(other.seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["stagecoach", "ray-tune"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="where RLlib is installed")
    arguments = parser.parse_args()
    print(json.dumps({"commit": commit(), "machine": machine()}), flush=True)
    for name in ("stagecoach", "ray-tune") if arguments.only is None else (arguments.only,):
        side = (
            Stagecoach()
            if name == "stagecoach"
            else RayTune(python_of("rllib", arguments.cache, install=True, tell=print))
        )
        with tempfile.TemporaryDirectory(prefix="p-") as temporary:
            plan = {"first": 0, "again": 0, "killed": arguments.kills}
            found = {what: play(side, Path(temporary) / what, kills) for what, kills in plan.items()}
            first = found["first"]
            print(json.dumps({"side": name, "first": first._asdict()}), flush=True)
            for what in ("again", "killed"):
                print(json.dumps({"side": name, "what": what} | compared(first, found[what])), flush=True)


if __name__ == "__main__":
    main()
