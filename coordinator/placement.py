"""Where the roles shall run: what each asks of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from shared.config import Config

_NODE = "ray.io/node-id"
"""The label that Ray gives each machine."""


def trainer_options(config: Config) -> dict[str, Any]:
    """Of the trainer and of each rank beside it: a GPU where there is one, unless the config says otherwise."""
    trainer = config.trainer
    gpus = trainer.num_gpus
    found: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if not gpus and trainer.device != "cpu" and found.get("GPU", 0) >= trainer.ranks:
        gpus = 1.0
    return {"num_cpus": trainer.num_cpus, "num_gpus": gpus, "resources": trainer.resources}


def evaluator_options(config: Config) -> dict[str, Any]:
    """The evaluator plays on CPUs."""
    return {"num_cpus": config.evaluation.num_cpus, "resources": config.evaluation.resources}


def worker_options(config: Config) -> dict[str, Any]:
    """Of each rollout worker."""
    rollout = config.rollout
    return {"num_cpus": rollout.num_cpus, "num_gpus": rollout.num_gpus, "resources": config.ray.resources}


class Places:
    """Where the workers that are started in one go shall run."""

    def __init__(self, config: Config, trainer_node: str | None) -> None:
        self._pack = config.rollout.placement == "pack"
        self._need = needs(worker_options(config))
        self._away = {_NODE: f"!{trainer_node}"} if config.rollout.avoid_trainer_node and trainer_node else {}
        self._free: dict[str, dict[str, float]] = {}
        if self._pack:
            state: Any = ray._private.state
            self._free = {node: dict(free) for node, free in state.available_resources_per_node().items()}
            if self._away:
                self._free.pop(trainer_node or "", None)

    def next(self) -> dict[str, Any]:
        """Options for one more worker. Ray itself fills machines to half only, and then spreads."""
        options: dict[str, Any] = {"scheduling_strategy": "DEFAULT" if self._pack else "SPREAD"}
        fullest = self._take_fullest()
        if fullest is not None:
            options["label_selector"] = {_NODE: fullest}
            options["fallback_strategy"] = [{"label_selector": self._away}]
        elif self._away:
            options["label_selector"] = self._away
        return options

    def _take_fullest(self) -> str | None:
        """The machine with the least left that still holds a worker."""
        holding = [
            node
            for node, free in self._free.items()
            if all(free.get(name, 0.0) >= amount for name, amount in self._need.items())
        ]
        fullest = min(holding, key=lambda node: (self._free[node].get("CPU", 0.0), node), default=None)
        for name, amount in self._need.items() if fullest is not None else ():
            self._free[fullest or ""][name] -= amount
        return fullest


def needs(options: dict[str, Any]) -> dict[str, float]:
    """The amounts in an actor's options, by the names of Ray's table of machines."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0.0), **options["resources"]}
    return {name: float(amount) for name, amount in named.items() if amount}


def nodes_of(actors: Mapping[str, Any]) -> dict[str, str | None]:
    """The machine where each actor stands, by the names given; None while Ray has no place for it, or starts it."""
    state: Any = ray._private.state  # the public one asks the dashboard, which need not be there
    found = {name: state.actors(actor._actor_id.hex()) for name, actor in actors.items()}
    return {
        name: str(entry["Address"]["NodeID"]) if entry and entry["State"] == "ALIVE" else None
        for name, entry in found.items()
    }
