"""Stagecoach's use of Ray's private interfaces, and its hooks; none has a public equivalent.

Written for Ray 2.60; `tests/coordinator/services/test_ray_internals.py` names what another version moved. Ray is
imported only inside functions: some settings must precede the import, and Ray waits for its start hook.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, it keeps a driver on loopback; by default Ray talks over the machine's address."""
HEAD_MODULE = "ray.scripts.scripts"
"""What the program `ray` runs."""
START_HOOK = "stagecoach.coordinator.services.ray_internals.without_client_server"
"""What `ray start` calls as it begins (RAY_START_HOOK)."""
MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
"""The files of the process that runs the autoscaler on the head's machine."""
CONNECT = "import sys, ray; ray._raylet.GcsClient(address=sys.argv[1])"
"""A program that ends with 0 if the GCS at the address in its argument accepts this process's token."""


def without_client_server(parameters: Any, head: bool) -> None:
    """No server for Ray Client (`ray://`), which Stagecoach does not use: a second of processor time, and 70 MB."""
    parameters.ray_client_server_port = None


def outlive_ray() -> None:
    """To be called before Ray is imported, which reads this then and never again.

    Where a connection to its raylet breaks, a driver ends its process at once if the process of this id has ended, or,
    without one, if its parent is process 1: as in a container, under systemd, and of what was started in the
    background. Ours names itself; that Ray has died is noticed by `RayHead.lost`.
    """
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


def reread_settings() -> None:
    """Ray reads its settings and token while it is imported, perhaps long before they were made: it reads them anew."""
    import ray

    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")


def stays_on_loopback() -> bool:
    """Whether a driver in this process does: decided as Ray is imported, by us until then."""
    if not imported():
        return os.environ.setdefault(LOOPBACK_VARIABLE, "0") == "0"
    import ray._private.ray_constants

    return not ray._private.ray_constants.ENABLE_RAY_CLUSTER


def server_version(client: Any) -> str:
    """Ray's version at the other end of a `JobSubmissionClient`; its public `get_version` is that of an interface."""
    return str(client._server_ray_version)


def redirect_prints(write: Callable[[str], None]) -> None:
    """Sends what Ray prints itself (whatever `log_to_driver` says) to `write`, line by line."""
    import ray._private.worker

    worker: Any = ray._private.worker

    def to_log(printed: dict[str, Any], ignore_prefix: bool) -> None:
        for line in printed["lines"]:
            write(line.strip().partition("\n")[0])  # not the state of its node, a page of it

    worker.print_to_stdstream = to_log


def job_config() -> Any:
    """Ray's processes find modules where their Python has them, not in the driver's working directory first."""
    from ray.job_config import JobConfig

    class Fixed(list[str]):
        """Nothing is added to it: Ray would put the driver's working directory before all other folders."""

        def extend(self, folders: Iterable[str]) -> None:
            pass

    return JobConfig(_py_driver_sys_path=Fixed())


def free_resources() -> dict[str, dict[str, float]]:
    """What is free on each node; the public function only tells the sum."""
    import ray._private.state

    found: Any = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: dict(free) for node, free in found.items()}


def nodes_of(actors: Mapping[str, Any]) -> dict[str, str | None]:
    """Each actor's node, by the names given; None while Ray has no place for it, or starts it.

    The public function (`ray.util.state`) asks the dashboard, which may not be there.
    """
    import ray._private.state

    state: Any = ray._private.state
    found = {name: state.actors(actor._actor_id.hex()) or {"State": ""} for name, actor in actors.items()}
    return {name: entry["Address"]["NodeID"] if entry["State"] == "ALIVE" else None for name, entry in found.items()}


def process_of(actor: Any) -> tuple[str, int] | None:
    """The node and process id of an actor, as Ray, which started it, knows them; None where it has no process."""
    import ray._private.state

    entry: Any = ray._private.state.actors(actor._actor_id.hex())
    return (entry["Address"]["NodeID"], entry["Pid"]) if entry and entry["State"] == "ALIVE" else None


def imported() -> bool:
    return "ray" in sys.modules
