"""Number of rollout workers that fit on a Ray cluster, now and with added machines.

In: what each machine has in all (not what is free at the moment), what the roles ask for, and the autoscaler's own
config, as the head's monitor was given it. Out: a `WorkerCapacity`. A worker needs one machine: twice half a CPU on two
machines does not hold one that asks for a CPU.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from stagecoach.coordinator.catalog.status import NO_BOUND, WorkerCapacity
from stagecoach.coordinator.fleet.managed_actor import ManagedActor
from stagecoach.coordinator.services.ray_internals import MONITORS, nodes_of
from stagecoach.shared.base.printable import counted
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Beat
from stagecoach.trainer_node.distributed.leader import rank_id

Resources = Mapping[str, float]
_SMALL = 1e-6
_ORDERS = 120
"""Maximum number of placement orders tried: all of them for five roles."""
_CONFIG_ARGUMENT = "--autoscaling-config="
_ASK_SECONDS = 30.0
_REFRESH_SECONDS = 2.0
_PLACED_SECONDS = 20.0
"""A role that has not said anything for this long after its start probably waits for Ray to place it."""


@dataclass(frozen=True)
class Machines:
    resources: Resources | None
    """Resources of each; None if unknown in advance (Ray's provider `local`)."""
    most: int


@dataclass(frozen=True)
class Additions:
    """Limits of an autoscaler, without the head."""

    kinds: tuple[Machines, ...] = ()
    most: int | None = None
    unknown: bool = False
    """True for an autoscaler with unknown limits (mostly KubeRay's)."""


def trainer_options(config: Config) -> dict[str, Any]:
    """Ray options of the trainer and its other ranks: a GPU if available, unless the config says otherwise."""
    trainer = config.trainer
    found: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpu = 1.0 if trainer.device != "cpu" and found.get("GPU", 0) >= trainer.ranks else 0.0
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

    def __init__(self, config: Config, additions: Additions, embedded: bool) -> None:
        self._config, self._additions, self._embedded = config, additions, embedded
        self._next_refresh = 0.0
        self.trainer_node: str | None = ray.get_runtime_context().get_node_id() if embedded else None
        self.most_workers = NO_BOUND
        self.unplaced: list[str] = []

    def refresh(self, trainer: Any) -> WorkerCapacity | None:
        """The cluster's capacity, and the node of the trainer's actor; None where it is not yet time for that."""
        if time.monotonic() < self._next_refresh:
            return None
        self._next_refresh = float("inf") if self._embedded else time.monotonic() + _REFRESH_SECONDS
        if not self._embedded:
            self.trainer_node = nodes_of({"trainer": trainer})["trainer"] or self.trainer_node
        found = worker_capacity(self._config, self._additions, self.trainer_node)
        self.most_workers = found.most
        return found

    def find_unplaced(self, members: Sequence[ManagedActor], beats: Mapping[str, Beat]) -> None:
        """Finds roles that never sent a heartbeat, or whose machine is gone without a replacement."""
        late = time.monotonic() - _PLACED_SECONDS
        self.unplaced = [member.name for member in members if member.name not in beats and member.started < late]
        if not self._embedded:
            silent = {
                member.name: member.actor
                for member in members
                if (beat := beats.get(member.name)) is not None and not beat.alive
                and (beat.ended is None or beat.process in member.former)
            }  # fmt: skip
            self.unplaced += [name for name, node in nodes_of(silent).items() if node is None]


def worker_capacity(config: Config, additions: Additions, trainer_node: str | None = None) -> WorkerCapacity:
    """Capacity of the joined cluster; `trainer_node` is the trainer's node, once known."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    machines = {str(node["NodeID"]): dict(node["Resources"]) for node in nodes if node["Alive"]}
    roles = {"the trainer": needs(trainer_options(config))}
    if config.evaluation.enabled:
        roles["the evaluator"] = needs(evaluator_options(config))
    roles |= {rank_id(rank): roles["the trainer"] for rank in range(1, config.trainer.ranks)}
    worker, apart = needs(worker_options(config)), config.rollout.avoid_trainer_node
    place = list(machines).index(trainer_node) if trainer_node in machines else None
    now, later = fit(list(machines.values()), list(roles.values()), worker, apart, place), None
    total = {name: sum(machine.get(name, 0.0) for machine in machines.values()) for name in sorted({"CPU", *worker})}
    what, there = "the cluster", _amounts(total)
    if config.ray.address == "embedded" and config.ray.num_cpus is None:
        what, there = "embedded Ray", f"{there} by count, on {counted(os.cpu_count() or 1, 'core')}"
    taken = ", ".join(f"{name} takes {_amounts(need)}" for name, need in roles.items() if need)
    text = f"{what} ({counted(len(machines), 'machine')}, {there}; {taken})"
    added = _added(machines, additions, worker)
    if added is not None:
        later = fit([*machines.values(), *added], list(roles.values()), worker, apart, place)
        text += f", with the {counted(len(added), 'machine')} that its autoscaler may add," if added else ""
    return WorkerCapacity(now, later, _amounts(worker), text)


def fit(
    machines: Sequence[Resources], roles: Sequence[Resources], worker: Resources, apart: bool, trainer: int | None
) -> int:
    """Number of workers that fit after the best placement of the roles (the trainer first).

    `trainer` is the machine where the trainer runs already; with `apart` no worker shares its machine.
    """
    first = 0 if trainer is None else 1  # a trainer that runs already has its place before all others
    orders = itertools.permutations(range(first, len(roles)))
    best = (-1, 0)
    for order in itertools.islice(orders, _ORDERS):
        best = max(best, _placed(machines, roles, [*range(first), *order], worker, apart, trainer))
        if best[0] == len(roles):  # each has its place, nearly always in the first order
            break
    return min(NO_BOUND, best[1])


def _placed(
    machines: Sequence[Resources], roles: Sequence[Resources], order: Sequence[int], worker: Resources, apart: bool,
    trainer: int | None,
) -> tuple[int, int]:  # fmt: skip
    """Numbers of roles placed in this order, and of workers that then fit."""
    free, placed = [dict(machine) for machine in machines], 0
    for number in order:
        role, alone = roles[number], apart and number == 0
        holding = [place for place, machine in enumerate(free) if holds(machine, role)]
        if number == 0 and trainer is not None:
            holding = [trainer]
        left = {place: {} if alone else less(free[place], role) for place in holding}
        lost = {place: _times(free[place], worker) - _times(left[place], worker) for place in holding}
        if holding:  # else it waits for a place, by name; workers take what there is
            place = min(holding, key=lambda place: (lost[place], free[place].get("CPU", 0.0)))
            free[place], placed = left[place], placed + 1
    return placed, sum(_times(machine, worker) for machine in free)


def holds(machine: Resources, need: Resources) -> bool:
    return all(machine.get(name, 0.0) + _SMALL >= amount for name, amount in need.items())


def less(machine: Resources, need: Resources) -> dict[str, float]:
    return {name: amount - need.get(name, 0.0) for name, amount in machine.items()}


def _times(machine: Resources, need: Resources) -> int:
    fits = [math.floor(machine.get(name, 0.0) / amount + _SMALL) for name, amount in need.items() if amount > 0]
    return max(0, min(fits, default=NO_BOUND)) if machine else 0


def _added(machines: Mapping[str, Resources], additions: Additions, worker: Resources) -> list[Resources] | None:
    """The machines that may still come, the best for workers first; None where they are of unknown size or number."""
    left = NO_BOUND if additions.most is None else additions.most - (len(machines) - 1)
    if left <= 0 and not additions.unknown:
        return []
    if additions.unknown or any(kind.resources is None and kind.most > 0 for kind in additions.kinds):
        return None
    added: list[Resources] = []
    for kind in sorted(additions.kinds, key=lambda kind: -_times(kind.resources or {}, worker)):
        there = sum(1 for machine in machines.values() if _of_kind(machine, kind.resources or {}))
        added += [kind.resources or {}] * min(kind.most - there, left - len(added))
    return added


def _of_kind(machine: Resources, kind: Resources) -> bool:
    """Returns whether a machine matches this kind, which Ray's table does not record."""
    return "node:__internal_head__" not in machine and all(
        machine.get(name) == amount for name, amount in kind.items() if name not in {"memory", "object_store_memory"}
    )


def check_capacity(config: Config, additions: Additions) -> None:
    """Rejects a start with more workers than ever fit; raises `UserError`."""
    more = "raise ray.num_cpus" if config.ray.address == "embedded" else "add machines"
    worker_capacity(config, additions).refuse(config.rollout.workers, "--set rollout.workers=", more)


def additions(config: Config) -> Additions:
    """Limits of the cluster's autoscaler, if there is one.

    Ray 2.60 does not write its autoscaler's bounds anywhere that a driver can read: so a call on the head's machine
    reads the config that the monitor there was started with.
    """
    if config.ray.address == "embedded":
        return Additions()
    options = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_retries": 0}
    asked: Any = ray.remote(read_autoscaler_config).options(**options).remote(ray.get_runtime_context().gcs_address)
    try:
        return parse_additions(*ray.get(asked, timeout=_ASK_SECONDS))
    except ray.exceptions.GetTimeoutError:  # a head that takes no work cannot tell
        ray.cancel(asked, force=True)
        return Additions(unknown=True)


def read_autoscaler_config(gcs_address: str, processes: Path = Path("/proc")) -> tuple[str | None, bool]:
    """Runs on the head: returns the config of this cluster's monitor, and whether it is visible.

    Other clusters' monitors may be seen from there, too (containers, network namespaces).
    """
    for command in processes.glob("[0-9]*/cmdline"):
        try:
            arguments = command.read_bytes().decode(errors="replace").split("\0")
            if f"--gcs-address={gcs_address}" in arguments and any(one.endswith(MONITORS) for one in arguments):
                paths = [one.removeprefix(_CONFIG_ARGUMENT) for one in arguments if one.startswith(_CONFIG_ARGUMENT)]
                return (Path(paths[0]).expanduser().read_text() if paths else None), True
        except OSError:
            continue  # it has ended
    return None, "KUBERNETES_SERVICE_HOST" not in os.environ


def parse_additions(text: str | None, monitored: bool) -> Additions:
    """Parses the launcher's cluster file. On Kubernetes the autoscaler is a separate container."""
    if text is None:
        return Additions(unknown=not monitored)
    cluster: dict[str, Any] = yaml.safe_load(text)
    kinds = []
    for name, kind in (cluster.get("available_node_types") or {}).items():
        if name != cluster.get("head_node_type") or cluster.get("provider", {}).get("type") == "local":
            most = kind.get("max_workers", cluster.get("max_workers", 0))
            kinds.append(Machines(kind.get("resources") or None, int(most)))
    return Additions(tuple(kinds), int(cluster.get("max_workers", 0)))


def _amounts(need: Resources) -> str:
    """`1 CPU`, `8 CPUs and 2 GPUs`."""
    plural = {name: "s" if amount != 1 and name in {"CPU", "GPU"} else "" for name, amount in need.items()}
    return " and ".join(f"{need[name]:g} {name}{ending}" for name, ending in plural.items() if need[name]) or "nothing"
