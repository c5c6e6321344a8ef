"""`python -m benchmarks.self_play_peer --rllib PYTHON`: RLlib's own example of self-play beside a league of ours.

Connect four, from the command until the policy that learns has won more than 95 % of its last 100 games against random
play and is taken into the league, which is where RLlib's example stops (a league of three: main, random, main's first
snapshot). PYTHON is the interpreter of a virtual environment with `ray[rllib]`, `open_spiel`, `pillow` and PyTorch.
RLlib's example plays OpenSpiel's game, where an illegal move is an error that costs; ours PettingZoo's, with its mask.
Both take turns, so that a slow machine is slow for both; printed are seconds, their median and its ratio.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

_EXAMPLE = "ray.rllib.examples.multi_agent.self_play_with_open_spiel"
_ADDED = "adding new opponent to the mix"
_AT_MOST = 3600.0
_OURS: dict[str, Any] = {
    "environment": {"api": "pettingzoo", "id": "classic/connect_four-v3", "num_envs": 16},
    "policies": {"default": {"hidden_sizes": [256, 256]}},
    "algorithm": {
        "name": "ppo", "learning_rate": 1e-3, "entropy_coefficient": 0.01, "epochs": 4, "minibatch_size": 512,
    },
    "rollout": {"fragment_steps": 64, "fragments_per_update": 2},
    "league": {
        "snapshot": {"every": None, "win_rate": 0.95, "min_games": 100},
        "opponents": {"latest": 0, "past": 0, "fixed": 1}, "fixed": {"random": "random"},
    },
    "evaluation": {"episodes": 0},
    "metrics": {"writers": ["csv"]},
    "stop_at": {"env_steps": 2_000_000},
}  # fmt: skip


def _ended(process: subprocess.Popen[Any]) -> None:
    """With all that it started."""
    for sent, seconds in ((signal.SIGINT, 60), (signal.SIGKILL, 10)):
        if process.poll() is None:
            os.killpg(process.pid, sent)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def seconds_of_peer(python: Path, folder: Path) -> float:
    """Until it says that an opponent is added."""
    command = [str(python), "-u", "-m", _EXAMPLE, "--algo", "PPO", "--num-env-runners", "1"]
    log, began = folder / "log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--num-episodes-human-play", "0"], cwd=folder, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        return _seconds_until(lambda: _ADDED in log.read_text(errors="replace"), process, log, began)
    finally:
        _ended(process)


def seconds_of_ours(seed: int, folder: Path) -> float:
    """Until the metrics tell a snapshot beside the first one, which is the untrained policy."""
    config, log = folder / "config.yaml", folder / "log"
    config.write_text(yaml.safe_dump(_OURS | {"seed": seed}))
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "stagecoach", "train", str(config), "--inline", "--run-id", "peer"], cwd=folder,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    metrics = folder / "runs" / "peer" / "metrics" / "train.csv"

    def joined() -> bool:
        rows = list(csv.DictReader(metrics.open())) if metrics.is_file() else []
        return any(float(row.get("league/snapshots/default") or 0) > 1 for row in rows)

    try:
        return _seconds_until(joined, process, log, began)
    finally:
        _ended(process)


def _seconds_until(there: Any, process: subprocess.Popen[Any], log: Path, began: float) -> float:
    while not there():
        if process.poll() is not None or time.monotonic() - began > _AT_MOST:
            raise SystemExit(f"it ended without the rule being reached; {log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rllib", type=Path, required=True, metavar="PYTHON", help="the peer's interpreter")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ours, theirs = [], []
    for number in range(1, arguments.rounds + 1):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
            ours.append(seconds_of_ours(number, Path(one)))
            print(f"round {number}: ours {ours[-1]:.0f} s", flush=True)
            theirs.append(seconds_of_peer(arguments.rllib, Path(other)))
            print(f"round {number}: RLlib {theirs[-1]:.0f} s", flush=True)
    ratio = statistics.median(theirs) / statistics.median(ours)
    print(f"median: ours {statistics.median(ours):.0f} s, RLlib {statistics.median(theirs):.0f} s, {ratio:.1f} ×")


if __name__ == "__main__":
    main()
