"""The files of deploy/: what the tools' own validators say, and what no validator knows and would do harm.

A check takes a file's text and returns what is wrong with it; each is shown to find a break.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
KUBERNETES = "1.34"
CLUSTER_FILES = ("aws.yaml", "gcp.yaml", "local.yaml")
COMPOSE, IMAGE, KUBERAY = "docker-compose.yaml", "Dockerfile", "kuberay/raycluster.yaml"
SECRETS = "set -a; . ~/stagecoach.env; set +a;"
Check = Callable[[str], list[str]]


def said_by(program: str, *arguments: str, text: str) -> list[str]:
    """What a program of a development dependency says about the text, where it fails."""
    command = [str(Path(sys.executable).with_name(program)), *arguments, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()] if done.returncode else []


# Validators of others


def compose_schema(text: str) -> list[str]:
    """check-jsonschema with the compose specification."""
    return said_by(
        "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "--default-filetype", "yaml", text=text
    )


def hadolint(text: str) -> list[str]:
    """Finds what fails and what is bad style in a Dockerfile."""
    return said_by("hadolint", "--no-color", text=text)


def kubernetes_schemas(text: str) -> list[str]:
    """Kubernetes' own schemas of its objects, and of the pods in KubeRay's."""
    found = []
    pods = [
        {"apiVersion": "v1", "kind": "Pod", **template, "metadata": {**template.get("metadata", {}), "name": "pod"}}
        for template in pod_templates(text)
    ]
    for manifest in [*(each for each in yaml.safe_load_all(text) if "ray.io/" not in each["apiVersion"]), *pods]:
        try:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{manifest['kind']} {manifest['metadata']['name']}: {error}")
    return found


def ray_autoscaler_on_kubernetes(text: str) -> list[str]:
    """What Ray's autoscaler makes of a RayCluster, checked as a cluster file is."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    found = []
    for manifest in yaml.safe_load_all(text):
        if manifest["kind"] == "RayCluster":
            manifest["metadata"]["namespace"] = "default"
            try:
                found += ray_schema(yaml.safe_dump(autoscaling_config._derive_autoscaling_config_from_ray_cr(manifest)))
            except Exception as error:  # whatever its parts raise
                found.append(f"{type(error).__name__}: {error}")
    return found


def ray_schema(text: str) -> list[str]:
    """What `ray up` checks before it calls the provider."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(yaml.safe_load(text)))
    except Exception as error:  # whatever its parts raise
        return [f"{type(error).__name__}: {error}"]
    return []


def ec2_parameters(text: str) -> list[str]:
    """botocore's model of EC2 for `node_config`, which goes there as it is; Ray does not look into it."""
    cluster = yaml.safe_load(text)
    shape = botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    assert shape is not None
    found = []
    for kind in cluster["available_node_types"].values():
        report = botocore.validate.ParamValidator().validate(
            {"MinCount": 1, "MaxCount": 1, **kind["node_config"]}, shape
        )
        found += [report.generate_report()] if report.has_errors() else []
    return found


# Checks of our own


def pod_templates(text: str) -> list[dict[str, Any]]:
    """Every pod template of the manifests."""
    specs = [manifest["spec"] for manifest in yaml.safe_load_all(text)]
    groups = [group for spec in specs for group in (spec.get("headGroupSpec"), *spec.get("workerGroupSpecs", ()))]
    return [place["template"] for place in (*specs, *groups) if place and "template" in place]


def secrets(text: str) -> list[str]:
    """Lines that give a password, key or token a value instead of the place where it comes from."""
    given = re.compile(
        r"(?i)(password|secret_access_key|access_key_id|auth_token|auth-key|secret)\b\"?'?(?:=|:\s)\s*\"?'?([^\s\"'#]+)"
    )
    return [
        line
        for line in text.splitlines()
        for _, value in given.findall(line)
        if not line.lstrip().startswith("#") and not value.startswith(("$", "{", "~", "[", "<"))
    ]


def open_compose(text: str) -> list[str]:
    """Ports for others, Ray without its token, Redis without its users, secrets that may be left out."""
    services = yaml.safe_load(text)["services"]
    ports = [f"{name}: {port}" for name, each in services.items() for port in each.get("ports", ())]
    found = [port for port in ports if ": 127.0.0.1:" not in port]
    for name in ("head", "worker"):
        known = services[name].get("environment", {})
        found += [] if known.get("RAY_AUTH_MODE") == "token" and "RAY_AUTH_TOKEN" in known else [f"{name}: no token"]
    redis = services["redis"]
    found += [] if {"./redis.conf:/redis.conf:ro", "users:/etc/redis:ro"} <= {*redis["volumes"]} else ["no users"]
    waits = redis.get("depends_on", {}).get("users", {}).get("condition")
    found += [] if waits == "service_completed_successfully" else ["Redis does not wait for its users"]
    needed = ("RAY_AUTH_TOKEN", "STAGECOACH_ENV", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    return found + [f"{name} may be left out" for name in needed if re.search(rf"\$\{{{name}(?!:\?)", text)]


def open_kubernetes(text: str) -> list[str]:
    """A secret in the file, Ray without its token, a service that is published, or reached by other pods."""
    manifests = list(yaml.safe_load_all(text))
    kinds = [manifest["kind"] for manifest in manifests]
    found = [kind for kind in kinds if kind in ("Secret", "Ingress")]
    services = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Service"}
    found += [f"{name} is published" for name, spec in services.items() if spec.get("type", "ClusterIP") != "ClusterIP"]
    ours = [{"podSelector": {"matchLabels": {"stagecoach": "part"}}}]
    guarded = {
        each["spec"]["podSelector"]["matchLabels"]["app"] for each in manifests
        if each["kind"] == "NetworkPolicy" and [rule.get("from") for rule in each["spec"]["ingress"]] == [ours]
    }  # fmt: skip
    found += [f"{name} is open" for name in {spec["selector"]["app"] for spec in services.values()} - guarded]
    clusters = [each["spec"] for each in manifests if each["kind"] == "RayCluster"]
    found += ["Ray asks for no token" for spec in clusters if spec.get("authOptions") != {"mode": "token"}]
    pinned = [f"ray=={spec['rayVersion']}" for spec in clusters]
    found += [f"{version} is not in constraints.txt" for version in pinned if version not in CONSTRAINTS.splitlines()]
    for template in pod_templates(text):
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            takes = container.get("envFrom") == [{"secretRef": {"name": "stagecoach"}}]
            found += [f"{container['name']} has no secrets"] * (container["image"].startswith("stagecoach") > takes)
            found += [
                f"{variable['name']} is not from the Secret" for variable in container.get("env", ())
                if re.search("(?i)password|secret|token|access", variable["name"])
                and "secretKeyRef" not in variable.get("valueFrom", {})
            ]  # fmt: skip
    return found


def unpinned_image(text: str) -> list[str]:
    """Root, Ray without its token, versions that were not tested together, packages that are left out."""
    copied = {name for line in re.findall("^COPY (.*)", text, re.MULTILINE) for name in shlex.split(line)[:-1]}
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    found = [f"{name} is not there" for name in sorted(copied) if name not in let_through or not (ROOT / name).exists()]
    found += [f"{name} is not copied" for name in sorted(installed_from() - copied)]
    found += [line for line in re.findall(".*pip install.*", text) if "-c constraints.txt" not in line]
    needed = {"token": "^ENV RAY_AUTH_MODE=token", "user": "^USER [1-9]", "Ray": 'pip install .*"ray.default."'}
    return found + [f"no {what}" for what, line in needed.items() if not re.search(line, text, re.MULTILINE)]


def installed_from() -> set[str]:
    """What pip needs of the checkout."""
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    project = PROJECT["project"]
    return {"pyproject.toml", "constraints.txt", project["readme"], *project["license-files"], *packages, "deploy"}


def cluster_amiss(text: str) -> list[str]:
    """What each machine must be told: the token, the secrets, where the head is; what travels; which versions."""
    cluster = yaml.safe_load(text)
    local, mounts = cluster["provider"]["type"] == "local", cluster["file_mounts"]
    services = "services.sh start redis s3" if local else "services.sh start redis"
    head, worker = cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]
    needed = [
        *[(each, "ray start", (SECRETS, "RAY_AUTH_MODE=token")) for each in (head, worker)],
        (head, services, (SECRETS,)),
        (head, "ray start", ("--head", "--dashboard-host=127.0.0.1", "--autoscaling-config=")),
        (worker, "ray start", ("--address=$RAY_HEAD_IP:6379",)),
        # with provider `local` the second autoscaler of Ray 2.60 starts one machine too few
        (head, "ray start", ("RAY_enable_autoscaler_v2=0",) if local else ()),
        *[(head, what, () if local else ("STAGECOACH__REDIS__URL=redis://",)) for what in (services, "ray start")],
        (cluster["setup_commands"], "pip install", ("-c ~/stagecoach/constraints.txt 'ray[default]' ~/stagecoach",)),
        (cluster["setup_commands"], "chmod 600 ~/stagecoach.env ~/.ray/auth_token", ()),
        (cluster["setup_commands"], "~/.bashrc", ("RAY_AUTH_MODE=token",)),
    ]
    found = []
    for commands, what, parts in needed:
        (command,) = [command for command in commands if what in command] or [""]
        found += [f"{what}: no {part}" for part in (what, *parts) if part not in command]
    found += [] if services in "".join(head).partition("ray start")[0] else ["Ray starts before Redis"]
    found += [f"{name} does not travel" for name in installed_from() if mounts.get(f"~/stagecoach/{name}") != name]
    found += [f"{name} does not travel" for name in ("~/stagecoach.env", "~/.ray/auth_token") if name not in mounts]
    machine = cluster.get("available_node_types", {}).get(cluster.get("head_node_type"), {}).get("node_config", {})
    harm = {
        "the head, which holds Redis, is spot": "InstanceMarketOptions" in machine or "scheduling" in machine,
        "bound to all addresses": "0.0.0.0" in text,
        "a security group of its own": "security_group" in cluster["provider"],
    }
    return found + [what for what, so in harm.items() if so]


CHECKS: dict[str, tuple[Check, ...]] = {
    COMPOSE: (compose_schema, open_compose),
    IMAGE: (hadolint, unpinned_image),
    KUBERAY: (kubernetes_schemas, ray_autoscaler_on_kubernetes, open_kubernetes),
    "kuberay/rayjob.yaml": (kubernetes_schemas, open_kubernetes),
    **dict.fromkeys(CLUSTER_FILES, (ray_schema, cluster_amiss)),
    "aws.yaml": (ray_schema, ec2_parameters, cluster_amiss),
}  # fmt: skip


def all_files() -> list[str]:
    files = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix not in (".py", ".pyc")]
    return [path.relative_to(DEPLOY).as_posix() for path in files]


@pytest.mark.parametrize("name", all_files())
def test_nothing_is_wrong_with_the_file(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert [f"{check.__name__}: {each}" for check in (secrets, *CHECKS.get(name, ())) for each in check(text)] == []


BREAKS: list[tuple[Check, str, str, str]] = [
    (compose_schema, COMPOSE, "shm_size: 1gb", "shm_size: [1gb]"),
    (compose_schema, COMPOSE, "    working_dir:", "    working_directory:"),
    (open_compose, COMPOSE, '"127.0.0.1:6380:6379"', '"6380:6379"'),
    (open_compose, COMPOSE, '"127.0.0.1:8265:8265"', '"0.0.0.0:8265:8265"'),
    (open_compose, COMPOSE, "RAY_AUTH_MODE: token", "RAY_AUTH_MODE: disabled"),
    (open_compose, COMPOSE, "      - users:/etc/redis:ro\n", ""),
    (open_compose, COMPOSE, "users: {condition: service_completed_successfully}", "head: {condition: service_healthy}"),
    (open_compose, COMPOSE, "${AWS_SECRET_ACCESS_KEY:?}", "${AWS_SECRET_ACCESS_KEY}"),
    (hadolint, IMAGE, "COPY shared shared", "COPPY shared shared"),
    (hadolint, IMAGE, "WORKDIR /opt/stagecoach", "WORKDIR opt/stagecoach"),
    (unpinned_image, IMAGE, "COPY shared shared", "COPY tests tests"),
    (unpinned_image, IMAGE, "COPY shared shared\n", ""),
    (unpinned_image, IMAGE, "-c constraints.txt torch", "torch"),
    (unpinned_image, IMAGE, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled"),
    (unpinned_image, IMAGE, "USER 1000", "USER 0"),
    (kubernetes_schemas, KUBERAY, "  replicas: 1\n", "  replica: 1\n"),
    (kubernetes_schemas, KUBERAY, "name: ray-head\n            image:", "name: ray-head\n            imag:"),
    (ray_autoscaler_on_kubernetes, KUBERAY, "      maxReplicas: 8\n", ""),
    (ray_autoscaler_on_kubernetes, KUBERAY, 'resources: {requests: {cpu: "4", memory: 8Gi}, limits:', "other: {a:"),
    (open_kubernetes, KUBERAY, "authOptions: {mode: token}", "authOptions: {mode: disabled}"),
    (open_kubernetes, KUBERAY, "rayVersion: 2.60.0", "rayVersion: 2.59.0"),
    (open_kubernetes, KUBERAY, "  ports: [{name: redis", "  type: LoadBalancer\n  ports: [{name: redis"),
    (open_kubernetes, KUBERAY, "matchLabels: {app: stagecoach-redis}}\n  p", "matchLabels: {app: a}}\n  p"),
    (open_kubernetes, KUBERAY, "stagecoach: part}}}], ports: [{port: 6379}]", "app: any}}}], ports: [{port: 6379}]"),
    (open_kubernetes, KUBERAY, "envFrom: [{secretRef: {name: stagecoach}}]\n            env: *pl", "env: *pl"),
    (open_kubernetes, KUBERAY, "secretKeyRef: {name: stagecoach, key: AWS_SECRET_ACCESS_KEY}", "value: {key: a}"),
    (open_kubernetes, KUBERAY, "kind: Service\n", "kind: Secret\n"),
    (ray_schema, "aws.yaml", "max_workers: 9", "max_worker: 9"),
    (ray_schema, "aws.yaml", "head_node_type: head", "head_node_type: hed"),
    (ray_schema, "gcp.yaml", "setup_commands:\n", "setup_commands: pip install .\nother:\n"),
    (ray_schema, "local.yaml", "  type: local", "  type: lokal"),
    (ec2_parameters, "aws.yaml", "InstanceType: m5.xlarge", "InstanceTyp: m5.xlarge"),
    (ec2_parameters, "aws.yaml", "{MarketType: spot}", "{Typ: 1}"),
    *[
        (cluster_amiss, name, good, bad)
        for name in CLUSTER_FILES
        for good, bad in [
            ("RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled"), (SECRETS, ""), ("--dashboard-host=127.0.0.1", ""),
            ("~/stagecoach/shared: shared", "~/stagecoach/shared: sharde"), ("--autoscaling-config=", "--config="),
            ("  ~/stagecoach.env: ~/stagecoach.env\n", ""), ("-c ~/stagecoach/constraints.txt", ""),
            ("services.sh start redis", "services.sh start"), ("$RAY_HEAD_IP", "here"),
            ("  - chmod 600 ~/stagecoach.env ~/.ray/auth_token\n", ""),
        ]
    ],
    (cluster_amiss, "local.yaml", " RAY_enable_autoscaler_v2=0;", ";"),
    (cluster_amiss, "aws.yaml", "STAGECOACH__REDIS__URL", "REDIS_URL"),
    (cluster_amiss, "aws.yaml", "InstanceType: m5.xlarge", "InstanceMarketOptions: {MarketType: spot}"),
    (cluster_amiss, "local.yaml", "; bash ~/stagecoach", "; BIND=0.0.0.0 bash ~/stagecoach"),
    (cluster_amiss, "aws.yaml", "  type: aws\n", "  type: aws\n  security_group: {IpPermissions: []}\n"),
    *[
        (secrets, "cluster.env.example", "# What the machines", line) for line in (
            "AWS_SECRET_ACCESS_KEY=abcdefgh", "export STAGECOACH_WORKER_REDIS_PASSWORD=hunter2hunter2",
            "  password: s3cret-s3cret", "user worker on >password: abc", "RAY_AUTH_TOKEN: 0123456789abcdef",
            'MINIO_ROOT_PASSWORD: "minioadmin"',
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("check", "name", "good", "bad"), BREAKS, ids=[f"{c.__name__}-{n}" for c, n, *_ in BREAKS])
def test_a_break_is_found(check: Check, name: str, good: str, bad: str) -> None:
    text = (DEPLOY / name).read_text()
    assert good in text
    assert check(text.replace(good, bad)) != []


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_the_block_at_the_top_names_what_is_to_be_edited(name: str) -> None:
    text = (DEPLOY / name).read_text()
    box, rest = text[text.index("┌─ Edit") :].split("└─", 1)
    edited = {line.partition(":")[0].strip() for line in rest.splitlines() if "EDIT-ME" in line}
    edited |= set(yaml.safe_load(text)["provider"]) - {"type", "cache_stopped_nodes"}
    assert {key for key in (*edited, "min_workers", "max_workers", "idle_timeout_minutes") if key not in box} == set()
