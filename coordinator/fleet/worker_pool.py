"""The rollout workers of a fleet: started lowest number first, drained where there are too many."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ray

from stagecoach.coordinator.fleet.capacity import holds, less, needs, worker_options
from stagecoach.coordinator.fleet.managed_actor import ManagedActor
from stagecoach.coordinator.services.ray_internals import free_resources
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Beat, forget_heartbeat
from stagecoach.shared.runtime.restarts import acting_progress
from stagecoach.shared.runtime.run_context import RunContext

Start = Callable[..., ManagedActor]
"""Starts a role: name, progress, and options of each of its actors."""
_NODE = "ray.io/node-id"
"""The label that Ray gives each machine."""


class Places:
    """Placement of the workers that are started together."""

    def __init__(self, config: Config) -> None:
        self._pack = config.rollout.placement == "pack"
        self._options = worker_options(config)
        self._need = needs(self._options)
        self._free = free_resources() if self._pack else {}

    def next(self) -> dict[str, Any]:
        """Options for one more worker. Ray itself fills machines to half only, and then spreads."""
        options = self._options | {"scheduling_strategy": "DEFAULT" if self._pack else "SPREAD"}
        holding = [node for node, free in self._free.items() if holds(free, self._need)]
        if holding:
            fullest = min(holding, key=lambda node: (self._free[node].get("CPU", 0.0), node))
            self._free[fullest] = less(self._free[fullest], self._need)
            options |= {"label_selector": {_NODE: fullest}, "fallback_strategy": [{"label_selector": {}}]}
        return options


class WorkerPool:
    """Workers by number. One that was given up is not started again until a scale leaves it out."""

    def __init__(self, context: RunContext, start: Start) -> None:
        self._redis, self._run_id, self._flow = context.redis, context.run_id, context.flow
        self._config, self._start = context.config, start
        self._workers: dict[int, ManagedActor] = {}
        self._given_up: set[int] = set()
        self._drained: set[str] = set()
        """Excess workers that are leaving."""
        self._places: Places | None = None
        """Placement while several workers are started together."""

    @property
    def members(self) -> list[ManagedActor]:
        return list(self._workers.values())

    @property
    def names(self) -> list[str]:
        return [worker.name for worker in self.members]

    def _options(self) -> dict[str, Any]:
        return (self._places or Places(self._config)).next()

    def scale(self, desired: int, beats: Mapping[str, Beat]) -> None:
        """Starts the workers that are missing, and drains those beyond `desired`."""
        missing = [index for index in range(desired) if index not in self._workers and index not in self._given_up]
        if missing:
            self._places = Places(self._config)
            for index in missing:
                self._flow.undrain(name := f"worker-{index}")
                progress = partial(acting_progress, self._redis, self._run_id, name)
                self._workers[index] = self._start(name, progress, self._options)
            self._places = None
        self._given_up = {index for index in self._given_up if index < desired}
        for index, worker in self._workers.items():
            if index < desired and worker.name in self._drained:  # called back before it has left
                self._flow.undrain(worker.name)
                self._drained.discard(worker.name)
        self._drain([worker for index, worker in self._workers.items() if index >= desired], beats)

    def _drain(self, workers: list[ManagedActor], beats: Mapping[str, Beat]) -> None:
        """Lets workers finish their fragments and leave; those without a living process have none to finish."""
        asked = []
        for worker in workers:
            beat = beats.get(worker.name)
            if beat is None or not beat.alive or worker.call is None:
                self.remove(worker)
            else:  # each time: Redis may have lost it
                asked.append(worker.name)
        self._flow.drain(*asked)
        self._drained.update(asked)

    def give_up(self, worker: ManagedActor) -> None:
        self._given_up.add(self.remove(worker))

    def remove(self, worker: ManagedActor) -> int:
        """Ends its process, releases its claim, removes its heartbeat; returns its number."""
        index = next(number for number, other in self._workers.items() if other is worker)
        del self._workers[index]
        self._drained.discard(worker.name)
        ray.kill(worker.actor, no_restart=True)
        self._flow.release(worker.name)
        forget_heartbeat(self._redis, self._run_id, "worker", worker.name)
        return index
