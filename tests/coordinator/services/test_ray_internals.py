"""Ray's private interfaces are where they were in the version that Stagecoach was written for."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import ray

from stagecoach.coordinator.services.ray_internals import MONITORS
from stagecoach.shared.base.code_version import SOURCE

USED = (
    "ray._raylet.AuthenticationTokenLoader.instance", "ray._raylet.Config.initialize", "ray._raylet.GcsClient",
    "ray._private.ray_constants.ENABLE_RAY_CLUSTER", "ray._private.state.actors",
    "ray._private.node.Node.start_api_server",
    "ray._private.services._build_python_executable_command_memory_profileable",
    "ray._private.state.available_resources_per_node", "ray._private.worker.print_to_stdstream",
    "ray.job_config.JobConfig", "ray.actor.ActorHandle._actor_id",
)  # fmt: skip


@pytest.mark.parametrize("name", USED)
def test_ray_still_has_what_stagecoach_uses(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        break
    for part in parts[length:]:
        assert hasattr(found, part) or part in getattr(found, "__annotations__", {}), (
            f"Ray {ray.__version__} has no {name}; see coordinator/services/ray_internals.py"
        )
        found = getattr(found, part, None)


def test_autoscaler_runs_in_known_files() -> None:
    assert [name for name in MONITORS if not (Path(ray.__file__).parent / name).is_file()] == []


def test_no_other_module_uses_what_is_private_in_ray() -> None:
    private = ("ray._private", "ray._raylet", "_actor_id", "_py_driver_sys_path", "_server_ray_version")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in (SOURCE / "coordinator").rglob("*.py")
        if any(name in path.read_text() for name in private)
    }
    assert found == {"coordinator/services/ray_internals.py"}
