"""Checks that each machine of a cluster can run a role, before a run starts.

A machine that joins later is not checked; its failing roles show in the events.
"""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stagecoach.coordinator.diagnostics.environment_trial import try_environment
from stagecoach.shared.base.errors import PACKAGE, StagecoachError, UserError
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.protocol.redis_client import check_redis
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.shared.storage.object_store import open_store

_SECONDS = 120.0
_POLL_SECONDS = 0.2
_SHARED = ("torch", "numpy", "redis", "safetensors", "gymnasium")
"""Packages whose versions roles on several machines have to agree on."""


def check_machines(launch: RoleLaunch) -> None:
    """Raises `UserError` with what the first machine lacks that lacks anything."""
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    mine = versions()
    on = [NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False) for node in nodes]
    answers = [_EXAMINE.options(scheduling_strategy=strategy).remote(launch) for strategy in on]
    seconds = _SECONDS + 3 * launch.config["environment"]["step_deadline_seconds"]  # starts, one of them for evaluation
    wait = Wait(f"an answer from each of the cluster's {len(nodes)} machines", seconds)
    poll(wait, lambda: not ray.wait(answers, num_returns=len(answers), timeout=0)[1], _POLL_SECONDS)
    for node, answer in zip(nodes, answers, strict=True):
        address = node["NodeManagerAddress"]
        try:
            there, problem = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise UserError(
                f"the machine {address} cannot run Stagecoach: {' '.join(str(error).split())[-400:]}"
            ) from None
        if (other := difference(there, mine)) is not None:
            raise UserError(
                f"the machine {address} has other versions than the coordinator's: {other}; install the same on both"
            )
        if problem is not None:
            raise UserError(f"seen from the machine {address}: {problem}")


def difference(theirs: dict[str, str], mine: dict[str, str]) -> str | None:
    others = [f"{name} {theirs.get(name)} (here {mine[name]})" for name in mine if theirs.get(name) != mine[name]]
    return ", ".join(others) or None


def examine_machine(launch: RoleLaunch) -> tuple[dict[str, str], str | None]:
    """Returns this machine's versions and problem; tries the environment in another process."""
    extend_imports(launch.import_path)
    config, problem = parse_config(launch.config), None
    try:
        check_redis(launch.address, config, "worker")
        open_store(launch.address, config).check()
        try_environment(config).refuse(config, strict=False)
    except StagecoachError as error:
        problem = str(error)
    return versions(), problem


def versions(package: Path = PACKAGE) -> dict[str, str]:
    """Versions on which all machines of a run must agree."""
    found = {"Stagecoach's code": _digest(package), "Python": ".".join(platform.python_version_tuple()[:2])}
    return found | {name: importlib.metadata.version(name) for name in _SHARED}


def _digest(package: Path) -> str:
    """Digests the sources themselves: an installed version number says less."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names):
        if path.suffix == ".py":
            digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


_EXAMINE: Any = ray.remote(num_cpus=0, max_retries=0)(examine_machine)
