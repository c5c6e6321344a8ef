"""`python -m benchmarks.tuned_settings`: do tuned settings beat the defaults at equal steps, with fresh seeds?

For each environment three studies (`stagecoach tune`, seeds 1 to 3), then their best configs and the defaults with five
fresh seeds each; the score is the mean return over 100 episodes of the last checkpoint. Results lie in a folder, a file
each, and are not made again. The median of the three studies is compared with the defaults.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import stagecoach as sc
from benchmarks.provenance import ROOT, commit, machine
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config

SEEDS = range(101, 106)
STUDIES = 3
EPISODES = 100
PPO: dict[str, Any] = {
    "algorithm.learning_rate": {"log_uniform": [1e-4, 3e-3]},
    "algorithm.gamma": {"choice": [0.9, 0.95, 0.98, 0.99, 0.995, 0.999]},
    "algorithm.gae_lambda": {"choice": [0.8, 0.9, 0.95, 0.98]},
    "algorithm.epochs": {"integers": [4, 20]},
    "algorithm.entropy_coefficient": {"log_uniform": [1e-5, 3e-2]},
    "algorithm.minibatch_size": {"choice": [64, 128, 256]},
    "rollout.fragment_steps": {"choice": [16, 32, 64, 128]},
    "policies.default.normalize_observations": {"choice": [False, True]},
    "policies.default.normalize_rewards": {"choice": [False, True]},
}


class Task(NamedTuple):
    environment: str
    steps: int
    seeds: int
    """Seeds of each trial: several where settings that work with one seed fail with another."""


TASKS = {
    "acrobot": Task("Acrobot-v1", 20_000, 2), "pendulum": Task("Pendulum-v1", 100_000, 1),
    "lunarlander": Task("LunarLander-v3", 60_000, 2), "cartpole": Task("CartPole-v1", 20_000, 2),
    "lunarlander-continuous": Task("LunarLanderContinuous-v3", 60_000, 1),
    "mountain-car-continuous": Task("MountainCarContinuous-v0", 100_000, 1),
    "halfcheetah": Task("HalfCheetah-v5", 100_000, 1),
}  # fmt: skip
COMPARED = ("acrobot", "pendulum", "lunarlander")


def study_of(name: str, seed: int) -> dict[str, Any]:
    """The study's file, as it is given to `stagecoach tune`."""
    environment, steps, seeds = TASKS[name]
    config = {"environment": {"id": environment}, "rollout": {"workers": 1}, "stop_at": {"env_steps": steps}}
    return {
        "config": config, "trials": 16, "generation": 4, "parallel": 2, "seed": seed, "seeds": seeds,
        "space": PPO,
        "set": {"evaluation.episodes": 10}, "pruning": {"at": [steps * 2 // 5], "keep": 0.5},
    }  # fmt: skip


def tuned(name: str, seed: int, runs: Path) -> Config:
    folder = runs / "studies"
    folder.mkdir(parents=True, exist_ok=True)
    study = study_of(name, seed)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(study.pop("config")))
    path = folder / f"{name}-{seed}.yaml"
    path.write_text(yaml.safe_dump(study | {"config": f"{name}.yaml"}, sort_keys=False))
    return sc.tune(path, runs_dir=runs, report=lambda line: print(line, flush=True)).best_config


def score(config: Config, run_id: str, seed: int, runs: Path) -> float:
    """Trains with this seed; mean return of the last checkpoint."""
    stops = dict.fromkeys(("stop_at.mean_return", "stop_at.updates"))
    config = config.replace({"seed": seed, "runs_dir": str(runs), "evaluation.episodes": 0, **stops})
    shutil.rmtree(runs / run_id, ignore_errors=True)  # of an interrupted measurement
    run = sc.train(config, run_id=run_id, inline=True)
    run.wait()
    return float(run.evaluate("final", EPISODES).scores["mean_return"])


def results(names: list[str], studies: int, data: Path, runs: Path) -> Iterator[dict[str, Any]]:
    for name in names:
        for study in range(studies + 1):
            path = data / f"{name}-{study or 'defaults'}.json"
            if not path.exists():
                config = tuned(name, study, runs) if study else parse_config(study_of(name, 0)["config"])
                scores = {seed: score(config, f"{name}-{study}-fresh-{seed}", seed, runs) for seed in SEEDS}
                found = {field: config_value(config, field) for field in PPO} if study else {}
                said = {"task": name, "study": study, "scores": scores, "parameters": found, "commit": commit()}
                data.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(said | {"machine": machine()}, indent=1) + "\n")
            yield json.loads(path.read_text())


def config_value(config: Config, field: str) -> Any:
    value: Any = config.model_dump(mode="json")
    for part in field.split("."):
        value = value[part]
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=COMPARED)
    parser.add_argument("--studies", type=int, default=STUDIES, help="So many studies for each.")
    parser.add_argument("--data", type=Path, default=ROOT / "docs" / "benchmarks" / "tuned-settings")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs-tuning"))
    arguments = parser.parse_args()
    numbers = range(1, arguments.studies + 1)
    rows = list(results(arguments.only, arguments.studies, arguments.data, arguments.runs_dir))
    print(f"| environment, steps | defaults | {' | '.join(f'study {n}' for n in numbers)} | median of the studies |")
    print("|---" * (len(numbers) + 3) + "|")
    for name in arguments.only:
        means = [statistics.fmean(row["scores"].values()) for row in rows if row["task"] == name]
        cells = [f"{mean:,.1f}" for mean in (*means, statistics.median(means[1:]))]
        print(f"| {TASKS[name].environment}, {TASKS[name].steps:,} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
