"""deploy/aws.yaml as Ray's own launcher uses it, against a stand-in of EC2 and IAM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

FILE = Path(__file__).parents[2] / "deploy" / "aws.yaml"
REGION = "us-west-2"
IMAGE = "ami-12345678"


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pretended AWS for Ray's launcher; the instance role is there already, or Ray would wait for it to spread."""
    from moto import mock_aws

    mocked = mock_aws()
    with pytest.MonkeyPatch.context() as patch:
        mocked.start(reset=False)  # or the S3 server of other tests, moto in this process too, loses its bucket
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "stand-in")
        patch.setenv("AWS_DEFAULT_REGION", REGION)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        iam = boto3.client("iam")
        iam.create_role(RoleName="ray-autoscaler-v1", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
        iam.add_role_to_instance_profile(InstanceProfileName="ray-autoscaler-v1", RoleName="ray-autoscaler-v1")
        yield boto3.client("ec2", region_name=REGION)
        mocked.stop(remove_data=False)


@pytest.fixture(scope="module")
def prepared(aws: Any) -> dict[str, Any]:
    """The file as `ray up` prepares it, with an image that the stand-in has (Ray looks at it to copy its disks)."""
    from ray.autoscaler.sdk import bootstrap_config

    cluster = yaml.safe_load(FILE.read_text())
    for kind in cluster["available_node_types"].values():
        kind["node_config"]["ImageId"] = IMAGE
    return bootstrap_config(cluster, no_config_cache=True)


def test_aws_opens_only_ssh_to_the_world(aws: Any, prepared: dict[str, Any]) -> None:
    groups = {
        group for kind in prepared["available_node_types"].values() for group in kind["node_config"]["SecurityGroupIds"]
    }
    (group,) = aws.describe_security_groups(GroupIds=sorted(groups))["SecurityGroups"]
    world = [rule for rule in group["IpPermissions"] if rule["IpRanges"] or rule["Ipv6Ranges"]]
    assert [(rule["FromPort"], rule["ToPort"], rule["IpProtocol"]) for rule in world] == [(22, 22, "tcp")]
    (within,) = [rule for rule in group["IpPermissions"] if rule["UserIdGroupPairs"]]
    assert [pair["GroupId"] for pair in within["UserIdGroupPairs"]] == [group["GroupId"]]
