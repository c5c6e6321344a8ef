"""Do learning curves depend on the number of workers? `python -m benchmarks.rehearsal.curves --seeds 3`.

CartPole-v1 in lockstep: each update learns from the same number of fragments, acted by the newest policy. What is
measured is env steps, not seconds: how many it took until a checkpoint's mean return (acting as in training, not
greedily) had passed a mark. The return of the episodes in training would not do: more workers have more episodes on
their way, and what has not ended does not count yet. All roles run in this process, so that the machine's speed does
not matter; `--ray` runs them as processes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.loading import parse_config

_MARKS = (200.0, 400.0)
_ENV_STEPS = 100_000


def config(folder: Path, workers: int, seed: int) -> dict[str, Any]:
    """examples/cartpole.yaml with four fragments for each update, so that four workers have something to do."""
    over = {"kind": "linear", "end": 0, "over": f"{_ENV_STEPS} env_steps"}
    return {
        "seed": seed,
        "runs_dir": str(folder),
        "environment": {"id": "CartPole-v1", "num_envs": 8},
        "algorithm": {
            "learning_rate": over | {"start": 1e-3}, "clip_range": over | {"start": 0.2},
            "gamma": 0.98, "gae_lambda": 0.8, "epochs": 10, "minibatch_size": 128,
        },
        "rollout": {"workers": workers, "fragment_steps": 16, "fragments_per_update": 4},
        "checkpoint": {"every": "8 updates", "keep_last": 1000},
        "evaluation": {"episodes": 20, "num_envs": 20, "greedy": False},
        "stop_at": {"env_steps": _ENV_STEPS},
    }  # fmt: skip


def measure(workers: int, seed: int, inline: bool) -> tuple[list[float], float]:
    """Env steps to each mark (infinite where it was not reached), and the mean over all checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run.start(parse_config(config(Path(folder), workers, seed)), "scaling", inline=inline)
        run.wait()
        entries = [entry for entry in run.checkpoints() if entry["evaluation"]]
    points = [(float(entry["env_steps"]), float(entry["evaluation"]["mean_return"])) for entry in entries]
    steps = [min((at for at, mean in points if mean >= mark), default=float("inf")) for mark in _MARKS]
    return steps, statistics.mean(mean for _, mean in points)


def main() -> None:
    """Prints a Markdown table, a row for each number of workers; medians, and in brackets each seed's."""
    parser = argparse.ArgumentParser(description="Learning curves for several numbers of workers.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="roles as processes, instead of all in this one")
    given = parser.parse_args()
    print(f"| workers | {' | '.join(f'env steps to {mark:g}' for mark in _MARKS)} | mean to {_ENV_STEPS:,} |")
    print("|---|" + "---|" * (len(_MARKS) + 1))
    for workers in given.workers:
        found = [measure(workers, seed, not given.ray) for seed in range(1, given.seeds + 1)]
        columns = [[steps[place] for steps, _ in found] for place in range(len(_MARKS))]
        cells = [f"{statistics.median(column):,.0f} ({'; '.join(f'{at:,.0f}' for at in column)})" for column in columns]
        scores = [score for _, score in found]
        cells.append(f"{statistics.median(scores):.0f} ({'; '.join(f'{score:.0f}' for score in scores)})")
        print(f"| {workers} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
