"""Where the roles shall run: what each asks of Ray."""

from __future__ import annotations

from typing import Any

import ray

from shared.config import Config


def trainer_options(config: Config) -> dict[str, Any]:
    """The trainer takes a GPU where there is one, unless the config says otherwise."""
    trainer = config.trainer
    gpus = trainer.num_gpus
    found: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if not gpus and trainer.device != "cpu" and found.get("GPU", 0) >= 1:
        gpus = 1.0
    return {"num_cpus": trainer.num_cpus, "num_gpus": gpus}


def evaluator_options(config: Config) -> dict[str, Any]:
    """The evaluator plays on CPUs."""
    return {"num_cpus": config.evaluation.num_cpus}


def worker_options(config: Config) -> dict[str, Any]:
    """Of each rollout worker."""
    rollout = config.rollout
    return {
        "num_cpus": rollout.num_cpus,
        "num_gpus": rollout.num_gpus,
        "resources": config.ray.resources,
        "scheduling_strategy": "SPREAD" if rollout.placement == "spread" else "DEFAULT",
    }
