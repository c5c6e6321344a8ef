"""Run by test_autoscaler.py in namespaces of its own: what is read of Ray's real autoscaler, as one JSON line."""

from __future__ import annotations

import copy
import json
from typing import Any

import ray
from ray.cluster_utils import AutoscalingCluster

from coordinator.capacity import additions, check_room, room
from shared.errors import UserError
from tests.conftest import minimal_config

MEMORY = 80_000_000
BASE: dict[str, Any] = {
    "cluster_name": "test", "max_workers": 2, "upscaling_speed": 1.0, "idle_timeout_minutes": 0.1, "docker": {},
    "provider": {
        "type": "external", "use_node_id_as_ip": True, "disable_node_updaters": True,
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "disable_launch_config_check": True,
    },
    "auth": {}, "file_mounts": {}, "initialization_commands": [], "setup_commands": [], "head_setup_commands": [],
    "worker_setup_commands": [], "head_start_ray_commands": [], "worker_start_ray_commands": [],
    "cluster_synced_files": [], "file_mounts_sync_continuously": False, "rsync_exclude": [], "rsync_filter": [],
    "head_node_type": "ray.head.default",
}  # fmt: skip


class Autoscaled(AutoscalingCluster):
    """Ray's wheel lacks the file that its own class begins with; a provider of type `external` needs none."""

    def _generate_config(
        self, head_resources: Any, worker_node_types: Any, autoscaler_v2: bool = False, **more: Any
    ) -> dict[str, Any]:
        head = {"resources": dict(head_resources), "node_config": {}, "max_workers": 0}
        kinds = {**copy.deepcopy(worker_node_types), "ray.head.default": head}
        return {**copy.deepcopy(BASE), "available_node_types": kinds, **more}


def main() -> None:
    """Two CPUs are there, and two machines of as many may come."""
    kind = {"resources": {"CPU": 2, "object_store_memory": MEMORY}, "node_config": {}, "min_workers": 0}
    cluster = Autoscaled(
        head_resources={"CPU": 2, "object_store_memory": MEMORY}, worker_node_types={"two": kind | {"max_workers": 2}}
    )
    cluster.start(override_env={"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"})
    config = minimal_config(
        redis={"url": "redis://127.0.0.1/0"}, store={"url": "file:///tmp/none"}, ray={"address": "auto"},
        rollout={"workers": 6, "num_cpus": 1, "fragment_steps": 8, "fragments_per_update": 2},
        trainer={"num_cpus": 1}, evaluation={"num_cpus": 0},
    )  # fmt: skip
    try:
        ray.init("auto", log_to_driver=False)
        found = additions(config)
        try:
            check_room(config, found)
        except UserError as error:
            print(json.dumps({"refused": str(error), "now": room(config, found).now}), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
