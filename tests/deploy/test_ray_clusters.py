"""The Ray cluster files: Ray's own schema check, our rules for what it does not catch, and AWS as far as a stand-in of
EC2 goes. Each rule is shown to find the breaks that it is there for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy import ray_cluster_files as rules
from tests.deploy.ray_cluster_files import ClusterFile, Rule

DEPLOY = rules.ROOT / "deploy"
FILES = ("aws", "gcp", "local")
REGION = "us-west-2"
IMAGE = "ami-12345678"


def load(name: str) -> ClusterFile:
    return dict(yaml.safe_load((DEPLOY / f"{name}.yaml").read_text()))


def changed(name: str, path: str, value: Any) -> ClusterFile:
    """The file with one value replaced (None: taken out); `a.b.0` is a path."""
    cluster = copy.deepcopy(load(name))
    *parents, last = path.split(".")
    at: Any = cluster
    for key in parents:
        at = at[int(key) if isinstance(at, list) else key]
    where = int(last) if isinstance(at, list) else last
    if value is None:
        del at[where]
    elif callable(value):
        at[where] = value(at[where])
    else:
        at[where] = value
    return cluster


def without(text: str) -> Any:
    """For a command: the same without `text`, which must be in it."""

    def cut(command: str) -> str:
        assert text in command
        return command.replace(text, "")

    return cut


WORLD = [{"FromPort": 6380, "ToPort": 6380, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
BREAKS: list[tuple[Rule, str, str, Any]] = [
    (rules.refused_by_ray, "aws", "max_worker", 3),
    (rules.refused_by_ray, "aws", "head_node_type", "hed"),
    (rules.refused_by_ray, "aws", "available_node_types.workers.min_worker", 1),
    (rules.refused_by_ray, "aws", "available_node_types.workers.node_config", None),
    (rules.refused_by_ray, "gcp", "available_node_types.workers.resources", {"CPU": "eight"}),
    (rules.refused_by_ray, "gcp", "setup_commands", "pip install ."),
    (rules.refused_by_ray, "local", "provider.type", "lokal"),
    (rules.refused_by_ray, "local", "provider.worker_ips", None),
    (rules.provider_unclear, "aws", "provider.region", None),
    (rules.provider_unclear, "aws", "provider.regoin", "us-west-2"),
    (rules.provider_unclear, "aws", "provider.availability_zone", "us-east-1a"),
    (rules.provider_unclear, "gcp", "provider.project_id", None),
    (rules.provider_unclear, "gcp", "auth.ssh_user", None),
    (rules.provider_unclear, "local", "auth.ssh_private_key", None),
    (rules.provider_unclear, "local", "provider.head_ip", None),
    (rules.wrong_numbers, "aws", "available_node_types.workers.min_workers", 9),
    (rules.wrong_numbers, "aws", "available_node_types.workers.max_workers", 4),
    (rules.wrong_numbers, "gcp", "idle_timeout_minutes", None),
    (rules.wrong_numbers, "local", "min_workers", 3),
    (rules.wrong_numbers, "local", "max_workers", 3),
    (rules.unknown_to_the_cloud, "aws", "available_node_types.workers.node_config.InstanceTyp", "m5.large"),
    (rules.unknown_to_the_cloud, "aws", "available_node_types.workers.node_config.InstanceMarketOptions", {"Typ": 1}),
    (rules.unknown_to_the_cloud, "aws", "available_node_types.head.node_config.ImageId", None),
    (rules.unknown_to_the_cloud, "gcp", "available_node_types.head.node_config.machinType", "e2-standard-4"),
    (rules.unknown_to_the_cloud, "gcp", "available_node_types.workers.node_config.machineType", None),
    (rules.spot_where_it_must_not_be, "aws", "available_node_types.head.node_config.InstanceMarketOptions", {}),
    (rules.spot_where_it_must_not_be, "aws", "available_node_types.workers.node_config.InstanceMarketOptions", None),
    (rules.spot_where_it_must_not_be, "gcp", "available_node_types.workers.node_config.scheduling", None),
    *[(rules.without_the_token, name, "head_start_ray_commands.2", without("RAY_AUTH_MODE=token")) for name in FILES],
    *[(rules.without_the_token, name, "worker_start_ray_commands.1", without("RAY_AUTH_MODE=token")) for name in FILES],
    (rules.without_the_token, "local", "file_mounts.~/.ray/auth_token", None),
    (rules.without_the_token, "local", "setup_commands.3", without("RAY_AUTH_MODE=token")),
    (rules.open_to_others, "aws", "provider.security_group", {"IpPermissions": WORLD}),
    *[(rules.open_to_others, it, "head_start_ray_commands.2", without("--dashboard-host=127.0.0.1")) for it in FILES],
    (rules.open_to_others, "local", "head_start_ray_commands.1", lambda it: it.replace("bash", "BIND=0.0.0.0 bash")),
    *[(rules.services_amiss, name, "head_start_ray_commands.1", None) for name in FILES],
    *[(rules.services_amiss, name, "worker_start_ray_commands.1", without(". ~/stagecoach.env;")) for name in FILES],
    (rules.services_amiss, "aws", "head_start_ray_commands.2", without("STAGECOACH__REDIS__URL")),
    (rules.services_amiss, "local", "head_start_ray_commands.1", without(" s3")),
    (rules.not_installed, "aws", "file_mounts.~/stagecoach/shared", None),
    (rules.not_installed, "gcp", "file_mounts.~/stagecoach/shared", "sharde"),
    (rules.not_installed, "gcp", "file_mounts.~/stagecoach.env", None),
    (rules.not_installed, "local", "setup_commands.0", None),
    (rules.not_installed, "local", "setup_commands.2", without("-c ~/stagecoach/constraints.txt")),
    (rules.worker_would_be_missing, "local", "head_start_ray_commands.2", without("RAY_enable_autoscaler_v2=0")),
    (rules.no_autoscaler, "aws", "head_start_ray_commands.2", without("--autoscaling-config")),
    (rules.no_autoscaler, "gcp", "worker_start_ray_commands.1", None),
    (rules.no_autoscaler, "local", "worker_start_ray_commands.1", without("$RAY_HEAD_IP")),
]  # fmt: skip


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", FILES)
def test_the_file_keeps_the_rule(name: str, rule: Rule) -> None:
    assert rule(load(name)) == []


def broken(name: str, path: str, value: Any) -> ClusterFile:
    if path.startswith("file_mounts."):  # its keys hold dots
        cluster = copy.deepcopy(load(name))
        key = path.removeprefix("file_mounts.")
        cluster["file_mounts"] |= {key: value}
        if value is None:
            del cluster["file_mounts"][key]
        return cluster
    return changed(name, path, value)


@pytest.mark.parametrize(
    ("rule", "name", "path", "value"), BREAKS, ids=[f"{rule.__name__}-{name}-{path}" for rule, name, path, _ in BREAKS]
)
def test_the_rule_finds_a_break(rule: Rule, name: str, path: str, value: Any) -> None:
    assert rule(broken(name, path, value)) != []


def test_every_rule_is_shown_to_find_a_break() -> None:
    assert {rule for rule, *_ in BREAKS} == set(rules.RULES)


@pytest.mark.parametrize("name", FILES)
def test_the_block_at_the_top_names_what_is_to_be_edited(name: str) -> None:
    text = (DEPLOY / f"{name}.yaml").read_text()
    box = text[text.index("┌─ Edit") : text.index("└─")]
    for line in text[text.index("└─") :].splitlines():
        if "EDIT-ME" in line:
            assert line.partition(":")[0].strip() in box
    provider = set(load(name)["provider"]) - {"type", "cache_stopped_nodes"}
    assert {key for key in provider if key not in box} == set()
    assert set(re.findall(r"\b(?:min_workers|max_workers|idle_timeout_minutes)\b", box)) == {
        "min_workers", "max_workers", "idle_timeout_minutes",
    }  # fmt: skip


# AWS: Ray's own launcher code against a stand-in of EC2 and IAM


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pretended AWS for Ray's launcher; the instance role is there already, or Ray would wait for it to spread."""
    from moto import mock_aws

    with pytest.MonkeyPatch.context() as patch, mock_aws():
        import boto3

        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "stand-in")
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        iam = boto3.client("iam")
        iam.create_role(RoleName="ray-autoscaler-v1", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
        iam.add_role_to_instance_profile(InstanceProfileName="ray-autoscaler-v1", RoleName="ray-autoscaler-v1")
        yield boto3.client("ec2", region_name=REGION)


@pytest.fixture(scope="module")
def prepared(aws: Any) -> ClusterFile:
    """The file as `ray up` prepares it."""
    return prepare(load("aws"))


def prepare(cluster: ClusterFile) -> ClusterFile:
    """With an image that the stand-in has (it asks for one only to copy its disks)."""
    from ray.autoscaler._private import commands

    for _, kind in rules.node_types(cluster):
        kind["node_config"]["ImageId"] = IMAGE
    return dict(commands._bootstrap_config(cluster, no_config_cache=True))


def launch(cluster: ClusterFile, name: str) -> Any:
    """Starts one machine of a type as the autoscaler does; answers its description."""
    from ray.autoscaler import tags
    from ray.autoscaler._private.providers import _get_node_provider

    provider = _get_node_provider(cluster["provider"], cluster["cluster_name"], use_cache=False)
    kind = {
        tags.TAG_RAY_NODE_KIND: tags.NODE_KIND_WORKER, tags.TAG_RAY_NODE_NAME: name,
        tags.TAG_RAY_NODE_STATUS: tags.STATUS_UNINITIALIZED, tags.TAG_RAY_LAUNCH_CONFIG: "hash",
        tags.TAG_RAY_USER_NODE_TYPE: name,
    }  # fmt: skip
    provider.create_node(cluster["available_node_types"][name]["node_config"], kind, 1)
    (made,) = provider.non_terminated_nodes({tags.TAG_RAY_USER_NODE_TYPE: name})
    return provider, made


@pytest.mark.parametrize(("name", "lifecycle"), [("head", None), ("workers", "spot"), ("gpu_trainer", None)])
def test_each_type_of_aws_becomes_a_machine_that_ends(
    aws: Any, prepared: ClusterFile, name: str, lifecycle: str | None
) -> None:
    provider, made = launch(prepared, name)
    (found,) = aws.describe_instances(InstanceIds=[made])["Reservations"][0]["Instances"]
    assert found["InstanceType"] == load("aws")["available_node_types"][name]["node_config"]["InstanceType"]
    assert found.get("InstanceLifecycle") == lifecycle
    assert found["Placement"]["AvailabilityZone"] == f"{REGION}a"
    provider.terminate_nodes([made])
    assert provider.non_terminated_nodes({"ray-user-node-type": name}) == []


def test_on_aws_only_ssh_is_open_to_the_world(aws: Any, prepared: ClusterFile) -> None:
    groups = {group for _, kind in rules.node_types(prepared) for group in kind["node_config"]["SecurityGroupIds"]}
    (group,) = aws.describe_security_groups(GroupIds=sorted(groups))["SecurityGroups"]
    world = [rule for rule in group["IpPermissions"] if rule["IpRanges"] or rule["Ipv6Ranges"]]
    assert [(rule["FromPort"], rule["ToPort"], rule["IpProtocol"]) for rule in world] == [(22, 22, "tcp")]
    (within,) = [rule for rule in group["IpPermissions"] if rule["UserIdGroupPairs"]]
    assert [pair["GroupId"] for pair in within["UserIdGroupPairs"]] == [group["GroupId"]]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("provider.availability_zone", f"{REGION}q"),
        ("available_node_types.workers.node_config.InstanceTyp", "m5.large"),
    ],
)
@pytest.mark.usefixtures("aws")
def test_ray_and_the_stand_in_refuse_a_broken_file(path: str, value: Any) -> None:
    with pytest.raises(BaseException, match=r".") as raised:  # Ray ends the process where a zone is wrong
        launch(prepare(changed("aws", path, value)), "workers")
    assert not isinstance(raised.value, KeyboardInterrupt | AssertionError), raised.value


def test_no_file_of_deploy_holds_a_secret() -> None:
    assert [found for path in files_of_deploy() for found in secrets_in(path.read_text())] == []


def files_of_deploy() -> list[Path]:
    return [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix not in (".py", ".pyc")]


def secrets_in(text: str) -> list[str]:
    """Lines that give a password, key or token a value instead of the place where it comes from."""
    given = re.compile(
        r"(?i)(password|secret_access_key|access_key_id|auth_token|auth-key|secret)\b\"?'?(?:=|:\s)\s*\"?'?([^\s\"'#]+)"
    )
    return [
        line
        for line in text.splitlines()
        if not line.lstrip().startswith("#")
        for _, value in given.findall(line)
        if not value.startswith(("$", "{", "~", "[", "<"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "AWS_SECRET_ACCESS_KEY=abcdefgh", "export STAGECOACH_WORKER_REDIS_PASSWORD=hunter2hunter2",
        "  password: s3cret-s3cret",
        "user worker on >password: abc", "RAY_AUTH_TOKEN: 0123456789abcdef", 'MINIO_ROOT_PASSWORD: "minioadmin"',
    ],
)  # fmt: skip
def test_a_secret_in_a_file_is_found(line: str) -> None:
    assert secrets_in(line) == [line]
