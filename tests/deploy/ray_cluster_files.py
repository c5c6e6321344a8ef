"""What a Ray cluster file of ours must be like, beyond what `ray up` itself checks.

Each rule takes a parsed file and answers what is wrong with it, so that the same rule is shown to find a break.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parent.parent.parent
ClusterFile = dict[str, Any]
Rule = Callable[[ClusterFile], list[str]]

_COMMANDS = ("setup_commands", "head_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
_PROVIDER = {
    "aws": {"type", "region", "availability_zone", "cache_stopped_nodes", "security_group"},
    "gcp": {"type", "project_id", "region", "availability_zone"},
    "local": {"type", "head_ip", "worker_ips", "external_head_ip"},
}
_GCP_NODE = {"machineType", "disks", "scheduling", "guestAccelerators"}
_ANYWHERE = {"0.0.0.0/0", "::/0"}


def node_types(cluster: ClusterFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of a cloud; a list of own machines has none."""
    yield from cluster.get("available_node_types", {}).items()


def refused_by_ray(cluster: ClusterFile) -> list[str]:
    """What `ray up` checks before it calls the provider; it raises whatever its parts raise."""
    try:
        validate_config(prepare_config(copy.deepcopy(cluster)))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def provider_unclear(cluster: ClusterFile) -> list[str]:
    provider, auth = cluster["provider"], cluster["auth"]
    kind = provider.get("type")
    found = [f"provider.{name} is unknown" for name in sorted(set(provider) - _PROVIDER[kind])]
    needed = _PROVIDER[kind] - {"security_group", "external_head_ip", "cache_stopped_nodes"}
    found += [f"provider.{name} is missing" for name in sorted(needed) if not provider.get(name)]
    found += [] if auth.get("ssh_user") else ["auth.ssh_user is missing"]
    zones = str(provider.get("availability_zone", "")).split(",")
    found += [f"zone {zone} is not in its region" for zone in zones if not zone.startswith(provider.get("region", ""))]
    if kind == "local" and "ssh_private_key" not in auth:
        found.append("auth.ssh_private_key is missing")
    return found


def wrong_numbers(cluster: ClusterFile) -> list[str]:
    found = [f"{name} is missing" for name in ("max_workers", "idle_timeout_minutes") if name not in cluster]
    head = cluster.get("head_node_type")
    for name, kind in node_types(cluster):
        if name != head and not 0 <= kind.get("min_workers", -1) <= kind.get("max_workers", -1):
            found.append(f"{name}: min_workers and max_workers are missing, or the wrong way round")
    most = sum(kind.get("max_workers", 0) for name, kind in node_types(cluster) if name != head)
    if most and cluster.get("max_workers") != most:
        found.append(f"max_workers is not the sum of the types' {most}")
    if cluster["provider"]["type"] == "local":
        machines = len(cluster["provider"].get("worker_ips", ()))
        if not 0 <= cluster.get("min_workers", -1) <= cluster.get("max_workers", -1) <= machines:
            found.append("expected 0 <= min_workers <= max_workers <= number of worker_ips")
    return found


def unknown_to_the_cloud(cluster: ClusterFile) -> list[str]:
    """`node_config` goes to the cloud as it is; Ray does not look into it."""
    found = []
    for name, kind in node_types(cluster):
        machine = kind.get("node_config", {})
        if cluster["provider"]["type"] == "aws":
            shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
            report = botocore.validate.ParamValidator().validate({"MinCount": 1, "MaxCount": 1, **machine}, shape)  # type: ignore[arg-type]
            found += [f"{name}: {report.generate_report()}"] if report.has_errors() else []
            found += [f"{name}: no {key}" for key in ("InstanceType", "ImageId") if key not in machine]
        else:
            found += [f"{name}: {key} is unknown" for key in sorted(set(machine) - _GCP_NODE)]
            found += [f"{name}: no {key}" for key in ("machineType", "disks") if key not in machine]
    return found


def spot_where_it_must_not_be(cluster: ClusterFile) -> list[str]:
    """The head holds Redis; the workers are what may go at any time."""

    def spot(kind: dict[str, Any]) -> bool:
        machine = kind["node_config"]
        return "InstanceMarketOptions" in machine or {"preemptible": True} in machine.get("scheduling", ())

    kinds = dict(node_types(cluster))
    found = [f"{name} is spot" for name, kind in kinds.items() if name != "workers" and spot(kind)]
    return found + (["workers are not spot"] if kinds and not spot(kinds["workers"]) else [])


def without_the_token(cluster: ClusterFile) -> list[str]:
    """Ray asks nobody for a token unless it is told to, on each machine."""
    found = [] if "~/.ray/auth_token" in cluster.get("file_mounts", {}) else ["the token does not travel"]
    for command in starts(cluster):
        before = command.partition("ray start")[0]
        found += [] if re.search(r"\bexport\b[^;]*\bRAY_AUTH_MODE=token\b", before) else [f"no token: {command}"]
    shells = [command for command in cluster.get("setup_commands", ()) if "~/.bashrc" in command]
    return found + ([] if any("RAY_AUTH_MODE=token" in shell for shell in shells) else ["no token in the shells"])


def open_to_others(cluster: ClusterFile) -> list[str]:
    """Only SSH may be reached from anywhere; the dashboard listens on the head's loopback."""
    rules = cluster["provider"].get("security_group", {}).get("IpPermissions", ())
    found = [
        f"{rule.get('FromPort')}-{rule.get('ToPort')} is open to the world"
        for rule in rules
        if _ANYWHERE & set(_from(rule)) and (rule.get("FromPort"), rule.get("ToPort")) != (22, 22)
    ]
    heads = [command for command in starts(cluster) if "--head" in command]
    found += [] if len(heads) == 1 else [f"{len(heads)} heads are started"]
    found += [f"dashboard: {command}" for command in heads if "--dashboard-host=127.0.0.1" not in command]
    return found + [f"Redis or S3 on all addresses: {command}" for command in commands(cluster) if "0.0.0.0" in command]


def _from(rule: dict[str, Any]) -> Iterator[str]:
    yield from (given["CidrIp"] for given in rule.get("IpRanges", ()))
    yield from (given["CidrIpv6"] for given in rule.get("Ipv6Ranges", ()))


def services_amiss(cluster: ClusterFile) -> list[str]:
    """Redis runs on the head, with the secrets, before Ray starts there; own machines have an S3 server as well."""
    head = cluster.get("head_start_ray_commands", ())
    wanted = "services.sh start redis s3" if cluster["provider"]["type"] == "local" else "services.sh start redis"
    at = [index for index, command in enumerate(head) if command.endswith(wanted)]
    ray = [index for index, command in enumerate(head) if "ray start" in command]
    found = [] if at and ray and at[0] < ray[0] else [f"`{wanted}` does not come before Ray"]
    secrets = "set -a; . ~/stagecoach.env; set +a;"
    needing = [*starts(cluster), *(head[index] for index in at)]
    found += [f"without the secrets: {command}" for command in needing if secrets not in command]
    if cluster["provider"]["type"] != "local":
        url = "STAGECOACH__REDIS__URL=redis://$(hostname -I | cut -d' ' -f1):6380/0"
        found += [f"without the address of Redis: {head[index]}" for index in (*at, *ray) if url not in head[index]]
    return found


def not_installed(cluster: ClusterFile) -> list[str]:
    """What pip installs from must travel, be there, and be installed in the versions that are tested together."""
    mounts = cluster.get("file_mounts", {})
    here = [local for local in mounts.values() if not local.startswith("~")]
    found = [f"{local} is not in the checkout" for local in here if not (ROOT / local).exists()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    files = ["pyproject.toml", "constraints.txt", project["project"]["readme"], *project["project"]["license-files"]]
    for name in (*packages, *files, "deploy"):
        found += [] if mounts.get(f"~/stagecoach/{name}") == name else [f"{name} does not travel"]
    found += [] if mounts.get("~/stagecoach.env") else ["the secrets do not travel"]
    setup = cluster.get("setup_commands", ())
    found += [] if "chmod 600 ~/stagecoach.env ~/.ray/auth_token" in setup else ["others may read the secrets"]
    installs = [command for command in setup if "pip install" in command]
    pinned = "-c ~/stagecoach/constraints.txt 'ray[default]' ~/stagecoach"
    found += [] if any(command.endswith(pinned) for command in installs) else ["not installed from constraints.txt"]
    return found


def worker_would_be_missing(cluster: ClusterFile) -> list[str]:
    """Ray 2.60's second autoscaler starts one machine too few with provider `local`."""
    if cluster["provider"]["type"] != "local":
        return []
    heads = [command for command in starts(cluster) if "--head" in command]
    return [f"second autoscaler: {command}" for command in heads if "RAY_enable_autoscaler_v2=0" not in command]


def no_autoscaler(cluster: ClusterFile) -> list[str]:
    found = [f"no autoscaler: {c}" for c in starts(cluster) if "--head" in c and "--autoscaling-config=" not in c]
    joining = [command for command in starts(cluster) if "--head" not in command]
    found += [f"joins no head: {c}" for c in joining if "--address=$RAY_HEAD_IP:6379" not in c]
    return found + ([] if joining else ["no machine joins the head"])


def commands(cluster: ClusterFile) -> Iterator[str]:
    """All that is run on the machines."""
    for name in _COMMANDS:
        yield from cluster.get(name, ())


def starts(cluster: ClusterFile) -> Iterator[str]:
    """The commands that start Ray."""
    return (command for command in commands(cluster) if "ray start" in command)


RULES: tuple[Rule, ...] = (
    refused_by_ray, provider_unclear, wrong_numbers, unknown_to_the_cloud, spot_where_it_must_not_be, without_the_token,
    open_to_others, services_amiss, not_installed, worker_would_be_missing, no_autoscaler,
)  # fmt: skip
