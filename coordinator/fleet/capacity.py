"""Number of rollout workers that fit on a Ray cluster.

Computed from the total (not the free) resources of each machine and the needs of the roles. A worker needs one machine:
half a CPU on each of two machines does not hold a worker that needs one CPU.
"""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
import yaml

from stagecoach.coordinator.catalog.status import NO_BOUND, WorkerCapacity
from stagecoach.coordinator.fleet.managed_actor import ManagedActor
from stagecoach.coordinator.services.ray_head import embedded_nodes
from stagecoach.coordinator.services.ray_internals import MONITORS, nodes_of
from stagecoach.shared.base import world
from stagecoach.shared.base.printable import counted
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Beat
from stagecoach.trainer_node.distributed.leader import rank_id

Resources = Mapping[str, float]
_SMALL = 1e-6
_CONFIG_ARGUMENT = "--autoscaling-config="
_ASK_SECONDS = 30.0
_REFRESH_SECONDS = 2.0
_PLACED_SECONDS = 20.0
"""A role that has not said anything for this long after its start probably waits for Ray to place it."""


def _machines() -> dict[str, dict[str, float]]:
    """Resources of each node of the joined Ray. Embedded Ray is sent no call, since one during which its GCS dies never
    returns, and Ray ends the process a minute later."""
    nodes: list[dict[str, Any]] = embedded_nodes() or ray.nodes()  # type: ignore[no-untyped-call]
    return {str(node["NodeID"]): dict(node["Resources"]) for node in nodes if node["Alive"]}


def total_resources() -> dict[str, float]:
    machines = _machines().values()
    return {name: sum(its.get(name, 0.0) for its in machines) for name in sorted({*itertools.chain(*machines)})}


def trainer_options(config: Config) -> dict[str, Any]:
    """Ray options of the trainer and its other ranks: a GPU if available, unless the config says otherwise."""
    trainer = config.trainer
    gpu = 1.0 if trainer.device != "cpu" and total_resources().get("GPU", 0) >= trainer.ranks else 0.0
    return {"num_cpus": trainer.num_cpus, "num_gpus": trainer.num_gpus or gpu, "resources": trainer.resources}


def evaluator_options(config: Config) -> dict[str, Any]:
    """The evaluator plays on CPUs."""
    return {"num_cpus": config.evaluation.num_cpus, "resources": config.evaluation.resources}


def worker_options(config: Config) -> dict[str, Any]:
    rollout = config.rollout
    return {"num_cpus": rollout.num_cpus, "num_gpus": rollout.num_gpus, "resources": config.ray.resources}


def needs(options: dict[str, Any]) -> dict[str, float]:
    """The amounts in an actor's options, by the names of Ray's table of machines."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0.0), **options["resources"]}
    return {name: float(amount) for name, amount in named.items() if amount}


class ClusterView:
    """The fleet's view of its machines: capacity for workers, the trainer's node, and unplaced roles.

    Refreshed every two seconds; embedded Ray is this one machine, which is counted once: a process that asks the GCS of
    embedded Ray while that dies hangs, and is ended by Ray a minute later.
    """

    def __init__(self, config: Config, added_machines: float, embedded: bool) -> None:
        self._config, self._added_machines, self._embedded = config, added_machines, embedded
        self._next_refresh = 0.0
        self.trainer_node: str | None = ray.get_runtime_context().get_node_id() if embedded else None
        self.most_workers = NO_BOUND
        self.unplaced: list[str] = []

    def refresh(self, trainer: Any) -> WorkerCapacity | None:
        """The cluster's capacity, and the node of the trainer's actor; None where it is not yet time for that."""
        if world.monotonic() < self._next_refresh:
            return None
        self._next_refresh = float("inf") if self._embedded else world.monotonic() + _REFRESH_SECONDS
        if not self._embedded:
            self.trainer_node = nodes_of({"trainer": trainer})["trainer"] or self.trainer_node
        found = worker_capacity(self._config, self._added_machines, self.trainer_node)
        self.most_workers = found.most
        return found

    def find_unplaced(self, members: Sequence[ManagedActor], beats: Mapping[str, Beat]) -> None:
        """Finds roles that never sent a heartbeat, or whose machine is gone without a replacement."""
        late = world.monotonic() - _PLACED_SECONDS
        self.unplaced = [member.name for member in members if member.name not in beats and member.started < late]
        if not self._embedded:
            silent = {
                member.name: member.actor
                for member in members
                if (beat := beats.get(member.name)) is not None and not beat.alive
                and (beat.ended is None or beat.process in member.former)
            }  # fmt: skip
            self.unplaced += [name for name, node in nodes_of(silent).items() if node is None]


def worker_capacity(config: Config, added_machines: float, trainer_node: str | None = None) -> WorkerCapacity:
    """Capacity of the joined cluster; `trainer_node` is the trainer's node, once known.

    `added_machines` is the autoscaler's limit (`autoscaler_limit`).
    """
    machines = _machines()
    roles = {"the trainer": needs(trainer_options(config))}
    if config.evaluation.enabled:
        roles["the evaluator"] = needs(evaluator_options(config))
    roles |= {rank_id(rank): roles["the trainer"] for rank in range(1, config.trainer.ranks)}
    worker = needs(worker_options(config))
    place = list(machines).index(trainer_node) if trainer_node in machines else None
    now = fit(list(machines.values()), list(roles.values()), worker, place)
    total = {name: sum(machine.get(name, 0.0) for machine in machines.values()) for name in sorted({"CPU", *worker})}
    what, there = "the cluster", _amounts(total)
    if config.ray.address == "embedded" and config.ray.num_cpus is None:
        what, there = "embedded Ray", f"{there} by count, on {counted(os.cpu_count() or 1, 'core')}"
    taken = ", ".join(f"{name} takes {_amounts(need)}" for name, need in roles.items() if need)
    text = f"{what} ({counted(len(machines), 'machine')}, {there}; {taken})"
    return WorkerCapacity(now, len(machines) - 1 < added_machines, _amounts(worker), text)


def fit(machines: Sequence[Resources], roles: Sequence[Resources], worker: Resources, trainer: int | None) -> int:
    """Number of workers that fit after each role (the trainer first) is placed where it costs the fewest workers.

    `trainer` is the machine where the trainer already runs. A role that fits nowhere takes nothing.
    """
    free = [dict(machine) for machine in machines]
    for number, role in enumerate(roles):
        holding = [place for place, machine in enumerate(free) if holds(machine, role)]
        if number == 0 and trainer is not None:
            holding = [trainer]
        left = {place: less(free[place], role) for place in holding}
        lost = {place: _times(free[place], worker) - _times(left[place], worker) for place in holding}
        if holding:
            place = min(holding, key=lambda place: (lost[place], free[place].get("CPU", 0.0)))
            free[place] = left[place]
    return min(NO_BOUND, sum(_times(machine, worker) for machine in free))


def holds(machine: Resources, need: Resources) -> bool:
    return all(machine.get(name, 0.0) + _SMALL >= amount for name, amount in need.items())


def less(machine: Resources, need: Resources) -> dict[str, float]:
    return {name: amount - need.get(name, 0.0) for name, amount in machine.items()}


def _times(machine: Resources, need: Resources) -> int:
    fits = [math.floor(machine.get(name, 0.0) / amount + _SMALL) for name, amount in need.items() if amount > 0]
    return max(0, min(fits, default=NO_BOUND)) if machine else 0


def check_capacity(config: Config, added_machines: float) -> None:
    """Rejects a start with more workers than ever fit; raises `UserError`."""
    more = "raise ray.num_cpus" if config.ray.address == "embedded" else "add machines"
    worker_capacity(config, added_machines).refuse(config.rollout.workers, "--set rollout.workers=", more)


def autoscaler_limit(config: Config) -> float:
    """Number of machines besides the head that the cluster's autoscaler may start; 0 without one, or infinite.

    Ray does not record it, so a call on the head's machine reads the config of the autoscaler's monitor there.
    """
    if config.ray.address == "embedded":
        return 0
    options = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_retries": 0}
    asked: Any = ray.remote(read_autoscaler_limit).options(**options).remote(ray.get_runtime_context().gcs_address)
    try:
        return float(ray.get(asked, timeout=_ASK_SECONDS))
    except ray.exceptions.GetTimeoutError:  # a busy head
        ray.cancel(asked, force=True)
        return math.inf


def read_autoscaler_limit(gcs_address: str, processes: Path = Path("/proc")) -> float:
    """Runs on the head. KubeRay's monitor is in another container, so its limit is unknown: infinite.

    Monitors of other clusters may be visible, too (containers, network namespaces).
    """
    for command in processes.glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            arguments = command.read_bytes().decode(errors="replace").split("\0")
            if f"--gcs-address={gcs_address}" in arguments and any(one.endswith(MONITORS) for one in arguments):
                paths = [one.removeprefix(_CONFIG_ARGUMENT) for one in arguments if one.startswith(_CONFIG_ARGUMENT)]
                cluster = yaml.safe_load(Path(paths[0]).expanduser().read_text()) if paths else {}
                return int(cluster.get("max_workers", 0))
    return math.inf if "KUBERNETES_SERVICE_HOST" in os.environ else 0


def _amounts(need: Resources) -> str:
    """`1 CPU`, `8 CPUs and 2 GPUs`."""
    plural = {name: "s" if amount != 1 and name in {"CPU", "GPU"} else "" for name, amount in need.items()}
    return " and ".join(f"{need[name]:g} {name}{ending}" for name, ending in plural.items() if need[name]) or "nothing"
