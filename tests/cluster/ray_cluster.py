"""A Ray cluster on the hosts, launched from the laptop with `ray up` as its user does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from coordinator.services import new_secret
from tests.cluster.hosts import HOME, Host, Network
from tests.cluster.services import Services

NAME = "stagecoach"
DEADLINE_SECONDS = 180.0
"""No promise: only what tells a cluster that hangs from one on a busy machine."""
_QUICK = {
    # a dead host is noticed within some five seconds instead of thirty, and the autoscaler looks once a second
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
}


class RayCluster:
    """Head and workers from the cluster file; the laptop has the file, the key and the secrets."""

    def __init__(self, network: Network, services: Services, workers: list[str], **sections: Any) -> None:
        self.network = network
        self.services = services
        self.laptop, self.head = network.hosts["laptop"], network.hosts["head"]
        self.workers = [network.hosts[name] for name in workers]
        self.token = new_secret() + new_secret()
        self._write_files(sections)

    @property
    def secrets(self) -> dict[str, str]:
        """What every process of a run needs in its environment."""
        return self.services.secrets | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}

    def up(self) -> None:
        """`ray up`; it returns when the head is up."""
        self.ray("up", "-y", "--disable-usage-stats")

    def down(self) -> None:
        """`ray down`."""
        self.ray("down", "-y")

    def ray(self, *arguments: str, seconds: float = DEADLINE_SECONDS) -> str:
        """A command of Ray's launcher on the laptop."""
        done = self.laptop.run(
            "ray", *arguments, "cluster.yaml", environ={"RAY_UP_enable_autoscaler_v2": "0"}, seconds=seconds
        )
        return done.stdout

    def nodes(self) -> set[str]:
        """Addresses of the nodes that Ray takes for alive; none while its head does not answer."""
        request = urllib.request.Request(
            f"http://{self.head.address}:8265/nodes?view=summary", headers={"Authorization": f"Bearer {self.token}"}
        )
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=5) as answer:
            summary = json.load(answer)["data"]["summary"]
            return {node["ip"] for node in summary if node["raylet"]["state"] == "ALIVE"}
        return set()

    def wait_for_nodes(self, *hosts: Host) -> None:
        """Until the head and exactly these hosts are alive."""
        expected = {host.address for host in (self.head, *hosts)}
        until(f"the nodes {sorted(expected)}", lambda: self.nodes() == expected, lambda: f"{self.nodes()}; {self.log()}")

    def log(self) -> str:
        """The end of the autoscaler's log."""
        logs = sorted(self.head.path("/tmp/ray").glob("session_2*/logs/monitor.log"))
        return logs[-1].read_text()[-3000:] if logs else "the autoscaler has no log"

    def _write_files(self, sections: dict[str, Any]) -> None:
        home = self.laptop.path(HOME)
        shutil.copy(self.network.key, home / "key")
        self.write_secrets(home / "stagecoach.env")
        content = _cluster_file() | {
            "provider": {
                "type": "local",
                "head_ip": self.head.address,
                "worker_ips": [worker.address for worker in self.workers],
            },
            "auth": {"ssh_user": "root", "ssh_private_key": "~/key"},
        }
        (home / "cluster.yaml").write_text(yaml.safe_dump(content | sections, width=10_000, sort_keys=False))

    def write_secrets(self, path: Path) -> None:
        """The file that the cluster file mounts on every host."""
        path.write_text("".join(f"export {name}={value}\n" for name, value in self.secrets.items()))
        os.chmod(path, 0o600)


def _cluster_file() -> dict[str, Any]:
    quick = " ".join(f"{name}={value}" for name, value in _QUICK.items())
    start = ". ~/stagecoach.env; {} ray start --num-cpus={} --object-store-memory=80000000 --disable-usage-stats"
    return {
        "cluster_name": NAME,
        "min_workers": 2,
        "max_workers": 2,
        "idle_timeout_minutes": 5,
        "file_mounts": {"~/stagecoach.env": "~/stagecoach.env"},
        "head_start_ray_commands": [
            "ray stop --force",
            start.format(quick, 0)
            + " --head --port=6379 --dashboard-host=0.0.0.0 --autoscaling-config=~/ray_bootstrap_config.yaml",
        ],
        "worker_start_ray_commands": [
            "ray stop --force",
            start.format("", 4) + " --address=$RAY_HEAD_IP:6379",
        ],
    }


def until(what: str, done: Callable[[], bool], seen: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    """Looks again and again until `done` says so; `seen` is asked when it never does."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"never saw: {what}; last: {seen()}"
        time.sleep(0.2)
