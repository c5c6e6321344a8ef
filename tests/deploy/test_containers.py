"""Compose, Kubernetes and the image: public schemas and our own rules; each is shown to find a break."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy import container_files as rules
from tests.deploy.container_files import Manifest

DEPLOY = rules.ROOT / "deploy"
COMPOSE: Manifest = yaml.safe_load((DEPLOY / "docker-compose.yaml").read_text())
KUBERAY = {
    name: list(yaml.safe_load_all((DEPLOY / "kuberay" / f"{name}.yaml").read_text()))
    for name in ("raycluster", "rayjob")
}
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def changed(document: Any, path: str, value: Any) -> Any:
    """A copy with one value replaced (None: taken out); `a/b/0` is a path."""
    document = copy.deepcopy(document)
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    at = document
    for key in parents:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return document


COMPOSE_BREAKS: list[tuple[Callable[[Manifest], list[str]], str, Any]] = [
    (rules.against_the_compose_schema, "services/head/comand", ["ray"]),
    (rules.against_the_compose_schema, "services/redis/depends_on/users/condition", "completed"),
    (rules.against_the_compose_schema, "services/worker/shm_size", ["1gb"]),
    (rules.published_to_others, "services/redis/ports", ["6380:6379"]),
    (rules.published_to_others, "services/head/ports", ["0.0.0.0:8265:8265"]),
    (rules.loose_ends, "services/worker/depends_on", {"haed": {"condition": "service_healthy"}}),
    (rules.loose_ends, "services/redis/volumes/0", "./redis.cnf:/redis.conf:ro"),
    (rules.loose_ends, "volumes/redis", None),
    (rules.loose_ends, "services/head/build/dockerfile", "Dockerfile"),
    (rules.loose_ends, "services/rclone/networks/default/aliases", ["s3"]),
    (rules.loose_ends, "services/minio", None),
    (rules.containers_without_the_token, "services/head/environment/RAY_AUTH_MODE", "disabled"),
    (rules.containers_without_the_token, "services/worker/environment/RAY_AUTH_TOKEN", None),
    (rules.redis_amiss, "services/redis/volumes/1", None),
    (rules.redis_amiss, "services/redis/depends_on", None),
]


@pytest.mark.parametrize("rule", rules.COMPOSE_RULES, ids=lambda rule: rule.__name__)
def test_compose_keeps_the_rule(rule: Callable[[Manifest], list[str]]) -> None:
    assert rule(COMPOSE) == []


@pytest.mark.parametrize(("rule", "path", "value"), COMPOSE_BREAKS, ids=[path for _, path, _ in COMPOSE_BREAKS])
def test_a_break_in_compose_is_found(rule: Callable[[Manifest], list[str]], path: str, value: Any) -> None:
    assert rule(changed(COMPOSE, path, value)) != []


def test_a_secret_that_is_not_given_keeps_compose_from_starting() -> None:
    text = (DEPLOY / "docker-compose.yaml").read_text()
    for name in ("RAY_AUTH_TOKEN", "STAGECOACH_ENV", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert f"${{{name}:?" in text
        assert text.count(f"${{{name}") == text.count(f"${{{name}:?")


CLUSTER, REDIS = len(KUBERAY["raycluster"]) - 1, 1
KUBERNETES_BREAKS: list[tuple[Callable[[list[Manifest]], list[str]], str, Any]] = [
    (rules.against_the_kubernetes_schemas, f"{REDIS}/spec/replica", 1),
    (rules.against_the_kubernetes_schemas, f"{REDIS}/spec/template/spec/containers/0/readinessProbe", {"tcp": 1}),
    (rules.against_the_kubernetes_schemas, f"{CLUSTER}/spec/headGroupSpec/template/spec/containers/0/imag", "x"),
    (rules.against_the_kubernetes_schemas, f"{CLUSTER}/spec/workerGroupSpecs/0/template/spec/containers/0/envFrom", {}),
    (rules.against_the_kubernetes_schemas, "0/spec/ports", [{"prt": 1}]),
    (rules.unknown_ray_fields, f"{CLUSTER}/spec/authOptions", {"mode": "disabled"}),
    (rules.unknown_ray_fields, f"{CLUSTER}/spec/enableInTreeAutoscalling", True),
    (rules.unknown_ray_fields, f"{CLUSTER}/spec/workerGroupSpecs/0/groupName", None),
    (rules.unknown_ray_fields, f"{CLUSTER}/spec/headGroupSpec/rayStartParams", {"dashbord-host": "0.0.0.0"}),
    (rules.refused_by_rays_autoscaler, f"{CLUSTER}/spec/workerGroupSpecs/0/maxReplicas", None),
    (rules.refused_by_rays_autoscaler, f"{CLUSTER}/spec/workerGroupSpecs/0/minReplicas", 9),
    (rules.refused_by_rays_autoscaler, f"{CLUSTER}/spec/workerGroupSpecs/0/template/spec/containers/0/resources", None),
    (rules.secrets_not_from_the_secret, f"{CLUSTER}/spec/headGroupSpec/template/spec/containers/0/envFrom", None),
    (rules.secrets_not_from_the_secret, "3/spec/template/spec/containers/0/env/1", {"name": "SECRET", "value": "abc"}),
    (rules.secrets_not_from_the_secret, "0/kind", "Secret"),
    (rules.open_services, "0/spec/type", "LoadBalancer"),
    (rules.open_services, "4/spec/podSelector/matchLabels/app", "another"),
    (rules.open_services, f"{CLUSTER}/spec/workerGroupSpecs/0/template/metadata/labels", {}),
]


@pytest.mark.parametrize("rule", rules.KUBERNETES_RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", KUBERAY)
def test_kubernetes_keeps_the_rule(name: str, rule: Callable[[list[Manifest]], list[str]]) -> None:
    assert rule(KUBERAY[name]) == []


@pytest.mark.parametrize(("rule", "path", "value"), KUBERNETES_BREAKS, ids=[path for _, path, _ in KUBERNETES_BREAKS])
def test_a_break_in_kubernetes_is_found(rule: Callable[[list[Manifest]], list[str]], path: str, value: Any) -> None:
    assert rule(changed(KUBERAY["raycluster"], path, value)) != []


def test_a_job_for_no_cluster_is_found() -> None:
    assert rules.unknown_ray_fields(changed(KUBERAY["rayjob"], "0/spec/clusterSelector", {})) != []


DOCKERFILE_BREAKS: list[tuple[Callable[[str], list[str]], str, str]] = [
    (rules.found_by_hadolint, "COPY shared shared", "COPPY shared shared"),
    (rules.found_by_hadolint, "WORKDIR /opt/stagecoach", "WORKDIR opt/stagecoach"),
    (rules.found_by_hadolint, "pip install --no-cache-dir -c", "pip install -c"),
    (rules.not_in_the_context, "COPY shared shared", "COPY sharde shared"),
    (rules.not_in_the_context, "COPY shared shared", "COPY tests tests"),
    (rules.image_amiss, "AS cuda", "AS gpu"),
    (rules.image_amiss, "-c constraints.txt torch", "torch"),
    (rules.image_amiss, "RAY_AUTH_MODE=token", "RAY_AUTH_MODE=disabled"),
    (rules.image_amiss, "USER 1000", "USER 0"),
]


@pytest.mark.parametrize("rule", rules.IMAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_image_keeps_the_rule(rule: Callable[[str], list[str]]) -> None:
    assert rule(DOCKERFILE) == []


@pytest.mark.parametrize(("rule", "good", "bad"), DOCKERFILE_BREAKS)
def test_a_break_in_the_image_is_found(rule: Callable[[str], list[str]], good: str, bad: str) -> None:
    assert good in DOCKERFILE
    assert rule(DOCKERFILE.replace(good, bad)) != []


def make_bucket(**environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEPLOY / "make_bucket.py")], env={**os.environ, **environ}, capture_output=True, text=True
    )


@pytest.mark.parametrize("server", ["rclone", "moto"])
def test_a_bucket_is_made_once_on_each_server(s3_servers: dict[str, tuple[str, str, str]], server: str) -> None:
    endpoint, access, secret = s3_servers[server]
    keys = {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "STAGECOACH__STORE__ENDPOINT_URL": endpoint}
    for _ in range(2):
        made = make_bucket(STAGECOACH__STORE__URL="s3://a-new-bucket/experiments", **keys)
        assert (made.returncode, made.stdout) == (0, "bucket a-new-bucket is there\n"), made


def test_what_keeps_a_bucket_from_being_made_is_told(s3_servers: dict[str, tuple[str, str, str]]) -> None:
    wrong = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing"}
    refused = make_bucket(
        STAGECOACH__STORE__URL="s3://other/x", STAGECOACH__STORE__ENDPOINT_URL=s3_servers["rclone"][0], **wrong
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1), refused
    assert make_bucket(STAGECOACH__STORE__URL="file:///tmp").stderr == (
        "Error: STAGECOACH__STORE__URL is not s3://BUCKET/PREFIX\n"
    )
