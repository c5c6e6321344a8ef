"""Stagecoach's use of Ray's private interfaces, and its hooks; none has a public equivalent.

Written for Ray 2.60; `tests/coordinator/services/test_ray_internals.py` names what another version moved. Ray is
imported only inside functions: some settings must precede the import, and Ray waits for its start hook.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Set to 0 before Ray is imported, keeps a driver on loopback; by default Ray uses the machine's address."""
HEAD_MODULE = "ray.scripts.scripts"
"""Module of the program `ray`."""
START_HOOK = "stagecoach.coordinator.services.ray_internals.without_unused_servers"
"""Function that `ray start` calls first (RAY_START_HOOK)."""
MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
"""Files of the autoscaler's process on the head's machine."""
_NO_AGENT = (
    'cd "$0" && for name in metrics_agent metrics_export dashboard_agent_listen; do '
    'printf %s -1 > "$name" && mv "$name" "${name}_port_$RAY_NODE_ID"; done && exec cat > /dev/null'
)
"""Script in place of the dashboard's agent, without which the raylet does not run: it says that no port is in use, as
Ray's own agent does in an installation without a dashboard, and ends with the raylet."""
CONNECT = "import sys, ray; ray._raylet.GcsClient(address=sys.argv[1])"
"""Program that exits with 0 if the GCS at its argument accepts this process's token."""


def without_unused_servers(parameters: Any, head: bool) -> None:
    """Disables the server for Ray Client (`ray://`), the process of the dashboard, which starts even if it is excluded,
    and the dashboard's agent: four seconds of processor time."""
    import ray._private.node
    import ray._private.services

    parameters.ray_client_server_port = None
    node: Any = ray._private.node.Node
    node.start_api_server = lambda self, **_: None
    services: Any = ray._private.services
    python = services._build_python_executable_command_memory_profileable

    def without_agent(component: str, session: str, *given: Any, **options: Any) -> list[str]:
        command: list[str] = python(component, session, *given, **options)
        return ["/bin/sh", "-c", _NO_AGENT, session] if component == "dashboard_agent" else command

    services._build_python_executable_command_memory_profileable = without_agent


def outlive_ray() -> None:
    """Keeps this process alive when Ray dies; must be called before Ray is imported, which reads this once.

    When the connection to its raylet breaks, a driver exits if the process with this id has ended, or, without an id,
    if its parent is process 1 (containers, systemd, background processes). `RayHead.lost` detects Ray's death instead.
    """
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())


def reread_settings() -> None:
    """Makes Ray reread its settings and token, which it reads when it is imported."""
    import ray

    raylet: Any = ray._raylet
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    raylet.Config.initialize("")


def stays_on_loopback() -> bool:
    """Returns whether a driver in this process stays on loopback, which is decided when Ray is imported."""
    if not imported():
        return os.environ.setdefault(LOOPBACK_VARIABLE, "0") == "0"
    import ray._private.ray_constants

    return not ray._private.ray_constants.ENABLE_RAY_CLUSTER


def server_version(client: Any) -> str:
    """Ray's version at the server of a `JobSubmissionClient`; its public `get_version` is an interface's."""
    return str(client._server_ray_version)


def redirect_prints(write: Callable[[str], None]) -> None:
    """Redirects Ray's own prints (independent of `log_to_driver`) to `write`, line by line."""
    import ray._private.worker

    worker: Any = ray._private.worker

    def to_log(printed: dict[str, Any], ignore_prefix: bool) -> None:
        for line in printed["lines"]:
            write(line.strip().partition("\n")[0])  # without the page of node state that follows

    worker.print_to_stdstream = to_log


def job_config() -> Any:
    """Makes Ray's processes import as their Python does, not from the driver's working directory first."""
    from ray.job_config import JobConfig

    class Fixed(list[str]):
        """A list that ignores `extend`, with which Ray would put the driver's working directory first."""

        def extend(self, folders: Iterable[str]) -> None:
            pass

    return JobConfig(_py_driver_sys_path=Fixed())


def free_resources() -> dict[str, dict[str, float]]:
    """Free resources by node; the public function returns only the sum."""
    import ray._private.state

    found: Any = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: dict(free) for node, free in found.items()}


def nodes_of(actors: Mapping[str, Any]) -> dict[str, str | None]:
    """Node of each actor, by name; None while Ray places or starts it.

    The public function (`ray.util.state`) needs the dashboard, which may not run.
    """
    import ray._private.state

    state: Any = ray._private.state
    found = {name: state.actors(actor._actor_id.hex()) or {"State": ""} for name, actor in actors.items()}
    return {name: entry["Address"]["NodeID"] if entry["State"] == "ALIVE" else None for name, entry in found.items()}


def process_of(actor: Any) -> tuple[str, int] | None:
    """Node and process id of an actor according to Ray; None if it has no process."""
    import ray._private.state

    entry: Any = ray._private.state.actors(actor._actor_id.hex())
    return (entry["Address"]["NodeID"], entry["Pid"]) if entry and entry["State"] == "ALIVE" else None


def imported() -> bool:
    return "ray" in sys.modules
