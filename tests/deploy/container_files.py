"""What the files for containers must be like: compose, Kubernetes, Dockerfile. Each rule answers what is wrong."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate

ROOT = Path(__file__).parent.parent.parent
Manifest = dict[str, Any]
KUBERNETES = "1.34"


def program(name: str) -> str:
    """One that a development dependency brings."""
    return str(Path(sys.executable).with_name(name))


# Compose


def against_the_compose_schema(compose: Manifest) -> list[str]:
    schema = json.loads((resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    return [error.message for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(compose)]


def published_to_others(compose: Manifest) -> list[str]:
    found = [(name, port) for name, service in compose["services"].items() for port in service.get("ports", ())]
    return [f"{name}: {port}" for name, port in found if not str(port).startswith("127.0.0.1:")]


def loose_ends(compose: Manifest) -> list[str]:
    """Services, volumes and mounted files that are named but not there."""
    services, volumes = compose["services"], compose.get("volumes", {})
    found = [
        f"{name} depends on {other}"
        for name, service in services.items()
        for other in service.get("depends_on", {})
        if other not in services or services[other].get("profiles")
    ]
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            there = (ROOT / "deploy" / source).is_file() if source.startswith(".") else source in volumes
            found += [] if there else [f"{name} mounts {source}"]
        build = service.get("build", {})
        if build and not (ROOT / "deploy" / build["context"] / build["dockerfile"]).is_file():
            found.append(f"{name} is built from nothing")
    stores = [service for service in services.values() if service.get("profiles")]
    found += [
        f"{service['image']} is not the store"
        for service in stores
        if service["networks"]["default"]["aliases"] != ["store"]
    ]
    return found + ([] if {p for s in stores for p in s["profiles"]} == {"minio", "rclone"} else ["no two stores"])


def containers_without_the_token(compose: Manifest) -> list[str]:
    starting = {n: s for n, s in compose["services"].items() if "ray start" in str(s.get("command"))}
    found = [
        f"{name} has no token"
        for name, service in starting.items()
        if service.get("environment", {}).get("RAY_AUTH_MODE") != "token"
        or "RAY_AUTH_TOKEN" not in service["environment"]
    ]
    return found + ([] if {"head", "worker"} <= set(starting) else ["no head, or no worker"])


def redis_amiss(compose: Manifest) -> list[str]:
    """With the shipped configuration and users, which are made first."""
    service = compose["services"].get("redis", {})
    mounts = service.get("volumes", ())
    wanted = ("./redis.conf:/redis.conf:ro", "users:/etc/redis:ro", "redis:/var/lib/redis")
    found = [f"Redis without {mount}" for mount in wanted if mount not in mounts]
    waits = service.get("depends_on", {}).get("users", {}).get("condition")
    return found + ([] if waits == "service_completed_successfully" else ["Redis does not wait for its users"])


COMPOSE_RULES = (
    against_the_compose_schema, published_to_others, loose_ends, containers_without_the_token, redis_amiss,
)  # fmt: skip


# Kubernetes

_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
_RAY_KEYS = {
    "RayCluster": {
        "rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec",
        "workerGroupSpecs",
    },
    "RayJob": {"clusterSelector", "entrypoint", "backoffLimit", "runtimeEnvYAML"},
}  # fmt: skip
_SECRET = re.compile("(?i)password|secret|token|access")
_PARTS = [{"podSelector": {"matchLabels": {"stagecoach": "part"}}}]
_START_PARAMETERS = {"dashboard-host", "num-cpus", "object-store-memory"}


def pods(manifests: list[Manifest]) -> list[tuple[str, Manifest]]:
    """Every pod template: where it stands, and the template."""
    found = []
    for manifest in manifests:
        spec, name = manifest["spec"], f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == "RayCluster":
            groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
            found += [(f"{name} {group.get('groupName', 'head')}", group["template"]) for group in groups]
        elif "template" in spec:
            found.append((name, spec["template"]))
    return found


def against_the_kubernetes_schemas(manifests: list[Manifest]) -> list[str]:
    plain = [manifest for manifest in manifests if not manifest["apiVersion"].startswith("ray.io/")]
    for where, template in pods(manifests):
        name = re.sub("[^a-z]+", "-", where.lower())
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            **template,
            "metadata": {**template.get("metadata", {}), "name": name},
        }
        plain.append(pod)
    found = []
    for manifest in plain:
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{manifest['kind']} {manifest['metadata']['name']}: {error}")
    return found


def unknown_ray_fields(manifests: list[Manifest]) -> list[str]:
    """KubeRay's own definition is not at hand; these are the fields of it that are used here."""
    found = []
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest["spec"]
        if kind not in _RAY_KEYS:
            continue
        found += [f"{kind}: {key}" for key in sorted(set(spec) - _RAY_KEYS[kind])]
        if kind == "RayCluster":
            found += [] if spec.get("authOptions") == {"mode": "token"} else ["no token"]
            found += [] if set(spec["autoscalerOptions"]) == {"idleTimeoutSeconds"} else ["autoscalerOptions"]
            found += [f"head: {key}" for key in set(spec["headGroupSpec"]) - {"rayStartParams", "template"}]
            for group in spec["workerGroupSpecs"]:
                found += [f"group: {key}" for key in sorted(set(group) ^ _GROUP)]
            starts = [group.get("rayStartParams", {}) for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
            found += [f"ray start --{key}" for start in starts for key in sorted(set(start) - _START_PARAMETERS)]
        elif spec.get("clusterSelector") != {"ray.io/cluster": "stagecoach"}:
            found.append("the job is for no cluster")
    return found


def refused_by_rays_autoscaler(manifests: list[Manifest]) -> list[str]:
    """What Ray's autoscaler makes of the cluster, checked as a cluster file is; it raises whatever its parts raise."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import prepare_config, validate_config

    found = []
    for cluster in [manifest for manifest in manifests if manifest["kind"] == "RayCluster"]:
        try:
            derived = _derive_autoscaling_config_from_ray_cr(
                {**cluster, "metadata": {"namespace": "default", **cluster["metadata"]}}
            )
            validate_config(prepare_config(derived))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        found += [
            f"{group.get('groupName')}: expected minReplicas <= replicas <= maxReplicas"
            for group in cluster["spec"]["workerGroupSpecs"]
            if not group.get("minReplicas", 1) <= group.get("replicas", 0) <= group.get("maxReplicas", 0)
        ]
    return found


def secrets_not_from_the_secret(manifests: list[Manifest]) -> list[str]:
    found = [f"{manifest['metadata']['name']} is a Secret" for manifest in manifests if manifest["kind"] == "Secret"]
    for where, template in pods(manifests):
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            takes = container.get("envFrom") == [{"secretRef": {"name": "stagecoach"}}]
            if container["image"].startswith("stagecoach") and not takes:
                found.append(f"{where} {container['name']} has no secrets")
            found += [
                f"{where}: {variable['name']} is not from the Secret"
                for variable in container.get("env", ())
                if _SECRET.search(variable["name"]) and "secretKeyRef" not in variable.get("valueFrom", {})
            ]
    return found


def open_services(manifests: list[Manifest]) -> list[str]:
    """Nothing is published, and only the run's own pods reach Redis and the store."""
    found = [
        f"{m['metadata']['name']} is published" for m in manifests
        if m["kind"] in ("Ingress",) or (m["kind"] == "Service" and m["spec"].get("type", "ClusterIP") != "ClusterIP")
    ]  # fmt: skip
    guarded = {
        manifest["spec"]["podSelector"]["matchLabels"]["app"] for manifest in manifests
        if manifest["kind"] == "NetworkPolicy" and [rule.get("from") for rule in manifest["spec"]["ingress"]] == [_PARTS]  # noqa: E501
    }  # fmt: skip
    offered = {m["spec"]["selector"]["app"] for m in manifests if m["kind"] == "Service"}
    found += [f"{name} is open" for name in sorted(offered - guarded)]
    parts = [
        where for where, template in pods(manifests)
        if where.startswith("RayCluster") and template["metadata"]["labels"] != {"stagecoach": "part"}
    ]  # fmt: skip
    return found + [f"{where} cannot reach Redis" for where in parts]


KUBERNETES_RULES = (
    against_the_kubernetes_schemas, unknown_ray_fields, refused_by_rays_autoscaler, secrets_not_from_the_secret,
    open_services,
)  # fmt: skip


# Dockerfile


def found_by_hadolint(dockerfile: str) -> list[str]:
    done = subprocess.run([program("hadolint"), "--no-color", "-"], input=dockerfile, capture_output=True, text=True)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def not_in_the_context(dockerfile: str) -> list[str]:
    """What is copied must be in the checkout, and let through by .dockerignore."""
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    found = []
    for line in dockerfile.splitlines():
        if line.startswith("COPY "):
            sources = shlex.split(line)[1:-1]
            found += [name for name in sources if name not in let_through or not (ROOT / name).exists()]
    return found


def image_amiss(dockerfile: str) -> list[str]:
    targets = re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE)
    found = [] if {"cpu", "cuda"} <= set(targets) else ["a target is missing"]
    installs = [line for line in dockerfile.splitlines() if "pip install" in line]
    found += [line for line in installs if "-c constraints.txt" not in line]
    found += [] if any('"ray[default]"' in line for line in installs) else ["no Ray"]
    found += [] if re.search(r"^ENV RAY_AUTH_MODE=token", dockerfile, re.MULTILINE) else ["no token"]
    return found + ([] if re.search(r"^USER [1-9]", dockerfile, re.MULTILINE) else ["runs as root"])


IMAGE_RULES = (found_by_hadolint, not_in_the_context, image_amiss)
