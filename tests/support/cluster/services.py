"""Redis with a user for each role and an S3 server with keys, as deploy/services.sh starts them on a host."""

from __future__ import annotations

import json
from typing import Any

import boto3
import redis

from stagecoach.coordinator.services.embedded import new_secret
from tests.support.cluster.hosts import SOURCE, Host

BUCKET, PREFIX = "stagecoach", "experiments"
_ROLES = ("WORKER", "EVALUATOR", "TRAINER", "COORDINATOR", "VIEWER")


class Services:
    """Services that outlive everything else; clients here reach it by its host's address."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.endpoint_url = f"http://{host.address}:9000"
        self.redis_url = f"redis://{host.address}:6380/0"
        self._keys = {"AWS_ACCESS_KEY_ID": new_secret(), "AWS_SECRET_ACCESS_KEY": new_secret()}
        self._passwords = {f"STAGECOACH_{role}_REDIS_PASSWORD": new_secret() for role in _ROLES}

    @property
    def environ(self) -> dict[str, str]:
        """The content of ~/stagecoach.env: secrets and addresses."""
        return {
            **self._passwords, **self._keys,
            "STAGECOACH__REDIS__URL": self.redis_url,
            "STAGECOACH__STORE__URL": f"s3://{BUCKET}/{PREFIX}",
            "STAGECOACH__STORE__ENDPOINT_URL": self.endpoint_url,
        }  # fmt: skip

    def start(self) -> None:
        """Both servers, over what is on the host's disk; for a host that no cluster file starts them on."""
        self.host.run("bash", f"{SOURCE}/deploy/services.sh", "start", "redis", "s3", environ=self.environ)

    def redis(self) -> redis.Redis:
        """A connection of somebody who may look."""
        password = self._passwords["STAGECOACH_VIEWER_REDIS_PASSWORD"]
        return redis.Redis.from_url(self.redis_url, username="viewer", password=password)

    def marker(self, run_id: str, name: str) -> Any:
        """The JSON content of a sync file, as any S3 client reads it."""
        return json.load(self._s3().get_object(Bucket=BUCKET, Key=f"{PREFIX}/{run_id}/{name}")["Body"])

    def names(self, run_id: str) -> set[str]:
        prefix = f"{PREFIX}/{run_id}/"
        pages = self._s3().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {item["Key"].removeprefix(prefix) for page in pages for item in page.get("Contents", [])}

    def _s3(self) -> Any:
        keys: Any = {name.lower(): value for name, value in self._keys.items()}
        return boto3.client("s3", endpoint_url=self.endpoint_url, region_name="us-east-1", **keys)
