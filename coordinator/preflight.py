"""Before a run starts on a cluster: can each of its machines do what a role there will have to?

Asked of every machine that is there now. One that joins later and cannot shows in the events: its roles fail by name.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coordinator.environment_trial import try_environment
from coordinator.job import PACKAGES
from shared.config_sources import parse_config
from shared.connection import check_shards, connect_redis, impatient
from shared.errors import StagecoachError, UserError
from shared.heartbeat import Wait, poll
from shared.launch import RoleLaunch
from shared.object_store import open_store
from shared.user_code import extend_imports

_SECONDS = 120.0
_LOOK_SECONDS = 0.2
_SHARED = ("torch", "numpy", "redis", "safetensors", "gymnasium")
"""Packages whose versions roles on several machines have to agree on."""


@dataclass(frozen=True)
class Machine:
    """What one machine answers."""

    versions: dict[str, str]
    problem: str | None


def check_machines(launch: RoleLaunch) -> None:
    """Raises `UserError` with what the first machine lacks that lacks anything."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    mine = versions()
    answers = [_ask(node["NodeID"], launch) for node in nodes]
    seconds = _SECONDS + 3 * launch.config["environment"]["step_deadline_seconds"]  # starts, one of them for evaluation
    wait = Wait(f"an answer from each of the cluster's {len(nodes)} machines", seconds)
    poll(wait, lambda: not ray.wait(answers, num_returns=len(answers), timeout=0)[1], _LOOK_SECONDS)
    for node, answer in zip(nodes, answers, strict=True):
        address = node["NodeManagerAddress"]
        try:
            machine: Machine = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise UserError(
                f"the machine {address} cannot run Stagecoach: {' '.join(str(error).split())[-400:]}"
            ) from None
        other = difference(machine.versions, mine)
        if other is not None:
            raise UserError(
                f"the machine {address} has other versions than the coordinator's: {other}; install the same on both"
            )
        if machine.problem is not None:
            raise UserError(f"seen from the machine {address}: {machine.problem}")


def difference(theirs: dict[str, str], mine: dict[str, str]) -> str | None:
    """What of `versions` is not equal, in words."""
    others = [f"{name} {theirs.get(name)} (here {mine[name]})" for name in mine if theirs.get(name) != mine[name]]
    return ", ".join(others) or None


def _ask(node: str, launch: RoleLaunch) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return _LOOK.options(scheduling_strategy=strategy).remote(launch)


def look(launch: RoleLaunch) -> Machine:
    """On the machine itself; the environment is tried in a process of its own, which may hang or die."""
    extend_imports(launch.import_path)
    config = impatient(parse_config(launch.config))
    problem = None
    try:
        connect_redis(launch.address, config, "worker").close()
        check_shards(launch.address, config, "worker")
        open_store(launch.address, config).check()
        try_environment(config).refuse(config, strict=False)
    except StagecoachError as error:
        problem = str(error)
    return Machine(versions(), problem)


def versions() -> dict[str, str]:
    """Of what all machines of a run have to agree on."""
    found = {"Stagecoach's code": _code(), "Python": ".".join(platform.python_version_tuple()[:2])}
    return found | {name: importlib.metadata.version(name) for name in _SHARED}


def _code() -> str:
    """Of the sources themselves: an installed version number says less."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


_LOOK: Any = ray.remote(num_cpus=0, max_retries=0)(look)
