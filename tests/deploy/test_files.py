"""The files of deploy/: what the tools' own validators say, and what no validator knows and would do harm."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
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
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
KUBERNETES = "1.34"
CLUSTER_FILES = ("aws.yaml", "gcp.yaml", "local.yaml")
COMPOSE, IMAGE, KUBERAY = "docker-compose.yaml", "Dockerfile", "kuberay/raycluster.yaml"
SECRETS = "set -a; . ~/stagecoach.env; set +a;"
Validator = Callable[[str], list[str]]


def said_by(program: str, *arguments: str, text: str) -> list[str]:
    """Output of a program of a development dependency about the text, if it fails."""
    command = [str(Path(sys.executable).with_name(program)), *arguments, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    return [*done.stdout.splitlines(), *done.stderr.splitlines()] if done.returncode else []


def compose_schema(text: str) -> list[str]:
    """check-jsonschema with the compose specification."""
    options = ("--builtin-schema", "vendor.compose-spec", "--default-filetype", "yaml")
    return said_by("check-jsonschema", *options, text=text)


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


def ray_schema(text: str) -> list[str]:
    """Checks of `ray up` before it calls the provider, and for a RayCluster those of Ray's autoscaler."""
    from ray.autoscaler._private.kuberay import autoscaling_config
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        for cluster in yaml.safe_load_all(text):
            if cluster.get("kind") == "RayCluster":
                cluster["metadata"]["namespace"] = "default"
                cluster = autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster)
            if "kind" not in cluster:
                validate_config(prepare_config(cluster))
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
        parameters = {"MinCount": 1, "MaxCount": 1, **kind["node_config"]}
        report = botocore.validate.ParamValidator().validate(parameters, shape)
        found += [report.generate_report()] if report.has_errors() else []
    return found


def pod_templates(text: str) -> list[dict[str, Any]]:
    """Every pod template of the manifests."""
    specs = [manifest["spec"] for manifest in yaml.safe_load_all(text)]
    groups = [group for spec in specs for group in (spec.get("headGroupSpec"), *spec.get("workerGroupSpecs", ()))]
    return [place["template"] for place in (*specs, *groups) if place and "template" in place]


CHECKS: list[tuple[Validator, str, str, str]] = [
    (compose_schema, COMPOSE, "shm_size: 1gb", "shm_size: [1gb]"),
    (hadolint, IMAGE, "WORKDIR /opt/stagecoach", "WORKDIR opt/stagecoach"),
    (kubernetes_schemas, KUBERAY, "  replicas: 1\n", "  replica: 1\n"),
    (kubernetes_schemas, KUBERAY, "name: ray-head\n            image:", "name: ray-head\n            imag:"),
    (ray_schema, KUBERAY, "      maxReplicas: 8\n", ""),
    *((ray_schema, name, "cluster_name: stagecoach", "cluster_nam: stagecoach") for name in CLUSTER_FILES),
    (ec2_parameters, "aws.yaml", "InstanceType: m5.xlarge", "InstanceTyp: m5.xlarge"),
]


@pytest.mark.parametrize(("find", "name", "good", "bad"), CHECKS, ids=[f"{row[0].__name__}-{row[1]}" for row in CHECKS])
def test_validators_report_exactly_what_is_broken(find: Validator, name: str, good: str, bad: str) -> None:
    text = (DEPLOY / name).read_text()
    assert find(text) == []
    assert find(text.replace(good, bad)) != []


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


def test_no_file_holds_a_secret() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert [f"{path.name}: {line}" for path in files for line in secrets(path.read_text())] == []
    given = [
        "AWS_SECRET_ACCESS_KEY=abcdefgh", "export STAGECOACH_WORKER_REDIS_PASSWORD=hunter2hunter2",
        "  password: s3cret-s3cret", "user worker on >password: abc", "RAY_AUTH_TOKEN: 0123456789abcdef",
        'MINIO_ROOT_PASSWORD: "minioadmin"',
    ]  # fmt: skip
    assert secrets("\n".join(given)) == given


def test_compose_is_open_to_nobody_else() -> None:
    text = (DEPLOY / COMPOSE).read_text()
    services = yaml.safe_load(text)["services"]
    assert {port.split(":")[0] for each in services.values() for port in each.get("ports", ())} == {"127.0.0.1"}
    for name in ("head", "worker"):
        assert services[name]["environment"]["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" in services[name]["environment"]
    redis = services["redis"]
    assert {"./redis.conf:/redis.conf:ro", "users:/etc/redis:ro"} <= set(redis["volumes"])
    assert redis["depends_on"]["users"]["condition"] == "service_completed_successfully"
    needed = ("RAY_AUTH_TOKEN", "STAGECOACH_ENV", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    assert [name for name in needed if re.search(rf"\$\{{{name}(?!:\?)", text)] == [], "these may be left out"


def test_kubernetes_is_closed_and_keeps_secrets_in_a_secret() -> None:
    text = (DEPLOY / KUBERAY).read_text()
    kinds = defaultdict(list)
    for manifest in yaml.safe_load_all(text):
        kinds[manifest["kind"]].append(manifest)
    assert not {"Secret", "Ingress"} & kinds.keys()
    services = [each["spec"] for each in kinds["Service"]]
    assert {spec.get("type", "ClusterIP") for spec in services} <= {"ClusterIP"}
    ours = [{"podSelector": {"matchLabels": {"stagecoach": "part"}}}]
    guarded = {
        each["spec"]["podSelector"]["matchLabels"]["app"] for each in kinds["NetworkPolicy"]
        if [rule.get("from") for rule in each["spec"]["ingress"]] == [ours]
    }  # fmt: skip
    assert {spec["selector"]["app"] for spec in services} <= guarded, "others are open to all pods"
    for spec in (each["spec"] for each in kinds["RayCluster"]):
        assert spec["authOptions"] == {"mode": "token"}
        assert f"ray=={spec['rayVersion']}" in CONSTRAINTS.splitlines()
    for template in pod_templates(text):
        for container in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"]):
            if container["image"].startswith("stagecoach"):
                assert container["envFrom"] == [{"secretRef": {"name": "stagecoach"}}], container["name"]
            for variable in container.get("env", ()):
                if re.search("(?i)password|secret|token|access", variable["name"]):
                    assert "secretKeyRef" in variable["valueFrom"], variable["name"]


def test_image_has_tested_versions_and_runs_without_root() -> None:
    text = (DEPLOY / IMAGE).read_text()
    assert [line for line in re.findall(".*pip install.*", text) if "-c constraints.txt" not in line] == []
    for line in ("^ENV RAY_AUTH_MODE=token", "^USER [1-9]", 'pip install .*"ray.default."'):
        assert re.search(line, text, re.MULTILINE), line


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_each_machine_gets_token_secrets_and_head_address(name: str) -> None:
    """Harmful settings, and which versions are installed; test_installing.py installs them."""
    text = (DEPLOY / name).read_text()
    cluster = yaml.safe_load(text)
    local = cluster["provider"]["type"] == "local"
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
    for commands, what, parts in needed:
        (command,) = [command for command in commands if what in command]
        assert [part for part in parts if part not in command] == [], what
    assert services in "".join(head).partition("ray start")[0], "Ray starts before Redis"
    machine = cluster.get("available_node_types", {}).get(cluster.get("head_node_type"), {}).get("node_config", {})
    assert not {"InstanceMarketOptions", "scheduling"} & machine.keys(), "the head, which holds Redis, is spot"
    assert "0.0.0.0" not in text
    assert "security_group" not in cluster["provider"]


@pytest.mark.parametrize("name", CLUSTER_FILES)
def test_top_block_names_every_value_to_edit(name: str) -> None:
    text = (DEPLOY / name).read_text()
    box, rest = text[text.index("┌─ Edit") :].split("└─", 1)
    edited = {line.partition(":")[0].strip() for line in rest.splitlines() if "EDIT-ME" in line}
    edited |= set(yaml.safe_load(text)["provider"]) - {"type", "cache_stopped_nodes"}
    assert {key for key in (*edited, "min_workers", "max_workers", "idle_timeout_minutes") if key not in box} == set()
