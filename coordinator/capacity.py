"""How many rollout workers there is room for: on the machines of the Ray cluster, and on those that may be added.

In: what each machine has in all (not what is free at the moment), what the roles ask for, and the autoscaler's own
config, as the head's monitor was given it. Out: a `Room`. A worker stands on one machine: twice half a CPU on two
machines is room for none that asks for one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from coordinator.placement import evaluator_options, needs, trainer_options, worker_options
from coordinator.room import NO_BOUND, Room
from shared.config import Config
from shared.printable import counted
from trainer_node.rendezvous import rank_id

Resources = Mapping[str, float]
_SMALL = 1e-6
_MONITOR = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_CONFIG_ARGUMENT = "--autoscaling-config="
_ASK_SECONDS = 30.0


@dataclass(frozen=True)
class Machines:
    """Of one kind, which an autoscaler may start."""

    resources: Resources | None
    """Of each; None where only the machine itself will tell (Ray's provider `local`)."""
    most: int


@dataclass(frozen=True)
class Additions:
    """What an autoscaler may bring the cluster to, the head apart."""

    kinds: tuple[Machines, ...] = ()
    most: int | None = None
    """Machines in all."""
    unknown: bool = False
    """There is one (KubeRay's, mostly), and it does not say how far it goes."""


def room(config: Config, additions: Additions, trainer_node: str | None = None) -> Room:
    """Of the cluster that this process has joined; `trainer_node` is where the trainer stands, once that is known."""
    machines = {
        str(node["NodeID"]): dict(node["Resources"])
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    roles = {"the trainer": needs(trainer_options(config)), "the evaluator": needs(evaluator_options(config))}
    roles |= {rank_id(rank): roles["the trainer"] for rank in range(1, config.trainer.ranks)}
    worker, apart = needs(worker_options(config)), config.rollout.avoid_trainer_node
    now = fit(list(machines.values()), list(roles.values()), worker, apart, _place(machines, trainer_node))
    what, there = "the cluster", _amounts(_total(machines.values(), {"CPU", *worker}))
    if config.ray.address == "embedded" and config.ray.num_cpus is None:
        what, there = "embedded Ray", f"{there} by count, on {counted(os.cpu_count() or 1, 'core')}"
    text = (
        f"{what} ({counted(len(machines), 'machine')}, {there}; "
        f"{', '.join(f'{name} takes {_amounts(need)}' for name, need in roles.items() if need)})"
    )
    each = _amounts(worker)
    if additions.unknown:
        return Room(now, None, each, text)
    added = _added(machines, additions, worker)
    if added is None:
        return Room(now, None, each, text)
    later = fit([*machines.values(), *added], list(roles.values()), worker, apart, _place(machines, trainer_node))
    if added:
        text += f", with the {counted(len(added), 'machine')} that its autoscaler may add,"
    return Room(now, later, each, text)


def fit(
    machines: Sequence[Resources], roles: Sequence[Resources], worker: Resources, apart: bool, trainer: int | None
) -> int:
    """How many workers fit once the roles (the trainer first) stand where they leave the most room.

    `trainer` is the machine where the trainer stands already; with `apart` no worker shares its machine.
    """
    free = [dict(machine) for machine in machines]
    for number, role in enumerate(roles):
        holding = [place for place, machine in enumerate(free) if _holds(machine, role)]
        if number == 0 and trainer is not None:
            holding = [trainer]
        if not holding:
            continue  # it waits for a place, by name; workers take what there is
        place = min(holding, key=lambda place: _loss(free[place], role, worker, apart and number == 0))
        free[place] = _less(free[place], role)
        if apart and number == 0:
            free[place] = {}
    return min(NO_BOUND, sum(_times(machine, worker) for machine in free))


def _loss(machine: Resources, role: Resources, worker: Resources, whole: bool) -> tuple[int, float]:
    """Workers that no longer fit there; where it is the same, the smaller machine."""
    left = 0 if whole else _times(_less(machine, role), worker)
    return _times(machine, worker) - left, machine.get("CPU", 0.0)


def _holds(machine: Resources, need: Resources) -> bool:
    return all(machine.get(name, 0.0) + _SMALL >= amount for name, amount in need.items())


def _less(machine: Resources, need: Resources) -> dict[str, float]:
    return {name: amount - need.get(name, 0.0) for name, amount in machine.items()}


def _times(machine: Resources, need: Resources) -> int:
    if not machine:
        return 0
    fits = [math.floor(machine.get(name, 0.0) / amount + _SMALL) for name, amount in need.items() if amount > 0]
    return max(0, min(fits, default=NO_BOUND))


def _place(machines: Mapping[str, Resources], node: str | None) -> int | None:
    return list(machines).index(node) if node is not None and node in machines else None


def _added(machines: Mapping[str, Resources], additions: Additions, worker: Resources) -> list[Resources] | None:
    """The machines that may still come, the best for workers first; None where they are of unknown size."""
    left = NO_BOUND if additions.most is None else additions.most - (len(machines) - 1)
    if left <= 0 or not additions.kinds:
        return []
    if any(kind.resources is None and kind.most > 0 for kind in additions.kinds):
        return None
    added: list[Resources] = []
    for kind in sorted(additions.kinds, key=lambda kind: -_times(kind.resources or {}, worker)):
        there = sum(1 for machine in machines.values() if _of_kind(machine, kind.resources or {}))
        added += [kind.resources or {}] * min(kind.most - there, left - len(added))
    return added


def _of_kind(machine: Resources, kind: Resources) -> bool:
    """Whether a machine that is there counts for this kind: Ray's table does not say which kind it is of."""
    return "node:__internal_head__" not in machine and all(
        machine.get(name) == amount for name, amount in kind.items() if name not in {"memory", "object_store_memory"}
    )


def check_room(config: Config, additions: Additions) -> None:
    """Refuses to begin with more workers than ever fit; raises `UserError`."""
    more = "raise ray.num_cpus" if config.ray.address == "embedded" else "add machines"
    room(config, additions).refuse(config.rollout.workers, "--set rollout.workers=", more)


# The autoscaler


def additions(config: Config) -> Additions:
    """What the autoscaler of the cluster may add; nothing where there is none.

    Ray 2.60 does not write its autoscaler's bounds anywhere that a driver can read: so a call on the head's machine
    reads the config that the monitor there was started with.
    """
    if config.ray.address == "embedded":
        return Additions()
    options = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}, "max_retries": 0}
    asked: Any = ray.remote(read_autoscaler_config).options(**options).remote(ray.get_runtime_context().gcs_address)
    try:
        return parse_additions(*ray.get(asked, timeout=_ASK_SECONDS))
    except ray.exceptions.GetTimeoutError:  # a head that takes no work: nobody can tell
        ray.cancel(asked, force=True)
        return Additions(unknown=True)


def read_autoscaler_config(gcs_address: str, processes: Path = Path("/proc")) -> tuple[str | None, bool]:
    """On the head's machine: the config of this cluster's monitor, and whether it can be told what may be added.

    Other clusters' monitors may be seen from there, too (containers, network namespaces).
    """
    for command in processes.glob("[0-9]*/cmdline"):
        try:
            arguments = command.read_bytes().decode(errors="replace").split("\0")
            ours = f"--gcs-address={gcs_address}" in arguments and any(one.endswith(_MONITOR) for one in arguments)
            paths = [one.removeprefix(_CONFIG_ARGUMENT) for one in arguments if one.startswith(_CONFIG_ARGUMENT)]
            if ours:
                return (Path(paths[0]).expanduser().read_text() if paths else None), True
        except OSError:
            continue  # it has ended
    return None, "KUBERNETES_SERVICE_HOST" not in os.environ


def parse_additions(text: str | None, monitored: bool) -> Additions:
    """Of a cluster file as the launcher has filled it in. On Kubernetes the autoscaler is a container of its own."""
    if text is None:
        return Additions(unknown=not monitored)
    cluster: dict[str, Any] = yaml.safe_load(text)
    kinds = []
    for name, kind in (cluster.get("available_node_types") or {}).items():
        if name == cluster.get("head_node_type") and cluster.get("provider", {}).get("type") != "local":
            continue
        most = kind.get("max_workers", cluster.get("max_workers", 0))
        kinds.append(Machines(kind.get("resources") or None, int(most)))
    return Additions(tuple(kinds), int(cluster.get("max_workers", 0)))


# For people


def _total(machines: Any, names: set[str]) -> dict[str, float]:
    return {name: sum(machine.get(name, 0.0) for machine in machines) for name in sorted(names)}


def _amounts(need: Resources) -> str:
    """`1 CPU`, `8 CPUs and 2 GPUs`."""
    words = [_count(amount, name) for name, amount in need.items() if amount]
    return " and ".join(words) or "nothing"


def _count(number: float, name: str) -> str:
    plural = "s" if number != 1 and name in {"CPU", "GPU"} else ""
    return f"{number:g} {name}{plural}"
