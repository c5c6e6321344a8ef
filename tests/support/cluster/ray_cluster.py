"""A Ray cluster on the hosts, launched from the laptop with `ray up` and deploy/local.yaml as its user does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from stagecoach.coordinator.services.embedded import new_secret
from tests.support.cluster.hosts import HOME, SOURCE, Host, Network
from tests.support.cluster.services import Services
from tests.support.processes.installation import download_build_system, make_environment, write_pip_config

DEADLINE_SECONDS = 180.0
"""No promise: only what tells a cluster that hangs from one on a busy machine."""
CLUSTER_FILE = "my-machines.yaml"
_QUICK = {
    # a dead host is noticed within some seconds instead of thirty, and the autoscaler looks once a second
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "20",  # shorter, and a host that has just come back is started a second time
}
_NODES = """
import json, pathlib, urllib.request
token = pathlib.Path("~/.ray/auth_token").expanduser().read_text().strip()
address, headers = "http://127.0.0.1:8265/nodes?view=summary", {"Authorization": "Bearer " + token}
request = urllib.request.Request(address, headers=headers)
nodes = json.load(urllib.request.urlopen(request, timeout=10))["data"]["summary"]
raylets = [node["raylet"] for node in nodes if node.get("raylet", {}).get("state") == "ALIVE"]
print(json.dumps([raylet["nodeManagerAddress"] for raylet in raylets]))
"""


class RayCluster:
    """Head and workers from the cluster file; the laptop has the file, the key and the secrets."""

    def __init__(
        self,
        network: Network,
        services: Services,
        workers: Sequence[Host],
        cpus: tuple[int, int] = (2, 2),
        environ: Mapping[str, str] | None = None,
        **values: Any,
    ) -> None:
        self.services = services
        self.laptop, self.head, self.workers = network.hosts["laptop"], network.hosts["head"], list(workers)
        self._prepare_laptop(network)
        download_build_system(wheels := network.folder / "wheels")
        for host in (self.head, *self.workers):
            prepare_machine(host, wheels)
        self.write_file(cpus, _QUICK | dict(environ or {}), values)

    def up(self, *workers: Host) -> None:
        """`ray up`, until the head and these workers are alive."""
        self.launcher("up", "-y")
        self.wait_for_nodes(*workers)

    def launcher(self, order: str, *arguments: str) -> str:
        """A command of Ray's launcher, given in the checkout's folder."""
        script = f'cd {SOURCE} && exec ray {order} ~/{CLUSTER_FILE} "$@"'
        return self.laptop.run("bash", "-c", script, "bash", *arguments, seconds=DEADLINE_SECONDS).stdout

    def stagecoach(
        self,
        *arguments: str,
        seconds: float = DEADLINE_SECONDS,
        check: bool = True,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """`stagecoach` on the laptop; `environ` takes the place of what its profile sets."""
        changed = [f"{name}={value}" for name, value in (environ or {}).items()]
        return self.laptop.run("env", *changed, "stagecoach", *arguments, seconds=seconds, check=check)

    def train(self, run_id: str, config: Path, *arguments: str) -> None:
        """`stagecoach train` on the laptop; returns while the run goes on on the cluster."""
        options = ("--address", CLUSTER_FILE, "--run-id", run_id, "--detach")
        self.stagecoach("train", str(config), *options, *arguments)

    def nodes(self) -> set[str]:
        """Addresses of the nodes that Ray takes for alive; none while its head does not answer."""
        asked = self.head.run("python", "-c", _NODES, check=False)
        return set(json.loads(asked.stdout)) if asked.returncode == 0 else set()

    def wait_for_nodes(self, *hosts: Host) -> None:
        """Waits until the head and exactly these hosts are alive."""
        expected = {host.address for host in (self.head, *hosts)}
        until(
            f"the nodes {sorted(expected)}", lambda: self.nodes() == expected, lambda: f"{self.nodes()}; {self.log()}"
        )

    def log(self) -> str:
        """The end of the autoscaler's log."""
        logs = sorted(self.head.path("/tmp/ray").glob("session_2*/logs/monitor.log"))
        return logs[-1].read_text()[-3000:] if logs else "the autoscaler has no log"

    def write_file(self, cpus: tuple[int, int], environ: Mapping[str, str], values: Mapping[str, Any]) -> None:
        """deploy/local.yaml with our addresses, `environ` of every Ray, and processors for head and workers.

        Each host would otherwise report all of this machine's.
        """
        content = yaml.safe_load((SOURCE / "deploy" / "local.yaml").read_text())
        content["provider"] |= {"head_ip": self.head.address, "worker_ips": [host.address for host in self.workers]}
        content["auth"]["ssh_user"] = "root"
        content |= values
        quick = " ".join(f"{name}={value}" for name, value in environ.items())
        for key, count in zip(("head_start_ray_commands", "worker_start_ray_commands"), cpus, strict=True):
            lines = [line.replace("ray start ", f"ray start --num-cpus={count} ") for line in content[key]]
            content[key] = [line.replace("export RAY_AUTH_MODE", f"export {quick} RAY_AUTH_MODE") for line in lines]
        if self.services.host is not self.head:  # its comment tells users so
            lines = content["head_start_ray_commands"]
            content["head_start_ray_commands"] = [line for line in lines if "services.sh" not in line]
        self.laptop.path(HOME / CLUSTER_FILE).write_text(yaml.safe_dump(content, width=10_000, sort_keys=False))

    def _prepare_laptop(self, network: Network) -> None:
        home = self.laptop.path(HOME)
        _private(home / ".ray" / "auth_token", new_secret() + new_secret())
        _private(home / "stagecoach.env", "".join(f"{name}={value}\n" for name, value in self.services.environ.items()))
        (home / ".ssh").mkdir(mode=0o700, exist_ok=True)
        shutil.copy(network.key, home / ".ssh" / "id_ed25519")
        with (home / ".bashrc").open("a") as profile:
            profile.write(
                f"export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONPATH={SOURCE}/src\n"
                "set -a; . ~/stagecoach.env; set +a\n"
            )


def prepare_machine(host: Host, wheels: Path, environment: Path = HOME / "stagecoach-venv") -> None:
    """A machine whose user has made the virtual environment already; it has no network to install from."""
    make_environment(host.path(environment), environment)
    write_pip_config(host.path(HOME), wheels)


def _private(path: Path, content: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(content)
    os.chmod(path, 0o600)


def until(what: str, done: Callable[[], bool], seen: Callable[[], object], seconds: float = DEADLINE_SECONDS) -> None:
    """Looks again and again until `done` says so; `seen` is asked when it never does."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"never saw: {what}; last: {seen()}"
        time.sleep(0.2)
