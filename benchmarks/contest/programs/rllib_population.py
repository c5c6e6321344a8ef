"""Population based training of RLlib's PPO with Ray Tune, in the peer's own virtual environment; the folder is its only
argument. Started again in a folder whose experiment has not ended, it continues that (`Tuner.restore`).
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "environment": "CartPole-v1", "members": 4, "generations": 3, "rates": [3e-4, 6e-4, 1.2e-3, 2.4e-3], "clip": 0.2,
    "batch": 256, "updates": 3, "epochs": 4, "minibatch": 64, "seed": 1,
}  # fmt: skip
"""Also read by benchmarks/population.py: a generation is `updates` updates of `batch` env steps."""


def main(folder: Path) -> None:
    import numpy as np
    import ray
    from ray import tune
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.tune.schedulers import PopulationBasedTraining

    random.seed(SETTINGS["seed"])  # what the scheduler draws from
    np.random.seed(SETTINGS["seed"])
    ray.init(
        address="local", num_cpus=SETTINGS["members"], include_dashboard=False, log_to_driver=False,
        object_store_memory=200_000_000, _node_ip_address="127.0.0.1", _temp_dir=str(folder / "ray"),
    )  # fmt: skip
    path = folder / "population"
    if tune.Tuner.can_restore(str(path)):
        tuner = tune.Tuner.restore(str(path), trainable="PPO", resume_unfinished=True, resume_errored=True)
    else:
        config: Any = PPOConfig().environment(SETTINGS["environment"])
        config = (
            config.env_runners(num_env_runners=0, num_envs_per_env_runner=8)
            .training(
                lr=tune.grid_search(SETTINGS["rates"]), clip_param=SETTINGS["clip"], num_epochs=SETTINGS["epochs"],
                minibatch_size=SETTINGS["minibatch"], train_batch_size_per_learner=SETTINGS["batch"],
            )
            .learners(num_learners=0)
            .reporting(min_time_s_per_iteration=0)
            .debugging(seed=SETTINGS["seed"], log_level="ERROR")
        )  # fmt: skip
        scheduler = PopulationBasedTraining(
            time_attr="training_iteration", perturbation_interval=SETTINGS["updates"], quantile_fraction=0.25,
            resample_probability=0.25, perturbation_factors=(1.25, 0.8), synch=True,
            hyperparam_mutations={"lr": tune.loguniform(1e-4, 1e-2), "clip_param": tune.uniform(0.1, 0.4)},
        )  # fmt: skip
        tuner = tune.Tuner(
            "PPO", param_space=config,
            tune_config=tune.TuneConfig(
                scheduler=scheduler, metric="env_runners/episode_return_mean", mode="max", reuse_actors=False
            ),
            run_config=tune.RunConfig(
                name="population", storage_path=str(folder), verbose=0,
                stop={"training_iteration": SETTINGS["updates"] * SETTINGS["generations"]},
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            ),
        )  # fmt: skip
    results = tuner.fit()
    said: dict[str, Any] = {
        "errors": [str(error).splitlines()[-1] for error in results.errors],
        "weights": {},
        "members": {},
    }
    for result in results:  # type: ignore[attr-defined]
        name = Path(result.path).name
        number = name.split("_")[3]
        rows = [json.loads(line) for line in (Path(result.path) / "result.json").read_text().splitlines()]
        said["members"][number] = {
            str(row["training_iteration"]): [row["config"]["lr"], row["config"]["clip_param"], _rate(row)]
            for row in rows
        }
        if result.checkpoint is not None:
            with result.checkpoint.as_directory() as where:
                said["weights"][number] = _digest(Path(where))
    (folder / "result.json").write_text(json.dumps(said, indent=1))
    ray.shutdown()


def _rate(row: Mapping[str, Any]) -> float | None:
    """The learning rate that the optimizer acted with."""
    learner: Mapping[str, float] = row.get("learners", {}).get("default_policy", {})
    return learner.get("default_optimizer_learning_rate")


def _digest(checkpoint: Path) -> str:
    from ray.rllib.core.rl_module.rl_module import RLModule

    module = RLModule.from_checkpoint(checkpoint / "learner_group" / "learner" / "rl_module" / "default_policy")
    digest = hashlib.sha256()
    for name, value in sorted(module.get_state().items()):
        digest.update(name.encode() + value.tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
