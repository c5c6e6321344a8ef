"""Redis and an S3 server on a host of the cluster, with a password and keys; they hold what outlives everything else."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import redis

from coordinator.services import new_secret, rclone_binary, redis_binary
from tests.cluster.hosts import HOME, Host

BUCKET = "stagecoach"
_START_SECONDS = 60.0


@dataclass
class Services:
    """Servers on `host`; clients here reach them by its address."""

    host: Host
    redis_password: str = field(default_factory=new_secret)
    access_key: str = field(default_factory=new_secret)
    secret_key: str = field(default_factory=new_secret)
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def redis_url(self) -> str:
        """What `redis.url` is."""
        return f"redis://{self.host.address}:6379/0"

    @property
    def endpoint_url(self) -> str:
        """What `store.endpoint_url` is."""
        return f"http://{self.host.address}:9000"

    @property
    def secrets(self) -> dict[str, str]:
        """What a process needs in its environment to use them."""
        return {
            "STAGECOACH_REDIS_PASSWORD": self.redis_password,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def start(self) -> None:
        """Both servers, over what is on the host's disk; returns when they answer."""
        data, buckets = self.host.path(HOME / "redis"), self.host.path(HOME / "buckets")
        (buckets / BUCKET).mkdir(parents=True, exist_ok=True)
        data.mkdir(exist_ok=True)
        (data / "redis.conf").write_text(
            f"bind 0.0.0.0\nrequirepass {self.redis_password}\nappendonly yes\nmaxmemory-policy noeviction\n"
        )
        keys = {"RCLONE_AUTH_KEY": f'"{self.access_key},{self.secret_key}"', "RCLONE_CONFIG": "/dev/null"}
        self._spawn("redis", "bash", "-c", f"cd ~/redis && exec {redis_binary()} redis.conf")
        self._spawn(
            "s3", rclone_binary(), "serve", "s3", "buckets", "--addr", ":9000", "--vfs-cache-mode", "off", environ=keys
        )
        self._until_ready()

    def redis(self) -> redis.Redis:
        """A new connection."""
        return redis.Redis.from_url(self.redis_url, password=self.redis_password)

    def read(self, run_id: str, name: str) -> bytes:
        """An object of a run, as any S3 client reads it."""
        key = f"{run_id}/{name}"
        return bytes(self._s3().get_object(Bucket=BUCKET, Key=key)["Body"].read())

    def names(self, run_id: str) -> set[str]:
        """All objects of a run."""
        pages = self._s3().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{run_id}/")
        return {item["Key"].removeprefix(f"{run_id}/") for page in pages for item in page.get("Contents", [])}

    def marker(self, run_id: str, name: str) -> Any:
        """The JSON content of a sync file."""
        return json.loads(self.read(run_id, name))

    def _s3(self) -> Any:
        return boto3.client(
            "s3", endpoint_url=self.endpoint_url, region_name="us-east-1",
            aws_access_key_id=self.access_key, aws_secret_access_key=self.secret_key,
        )  # fmt: skip

    def _spawn(self, log: str, *arguments: str, environ: dict[str, str] | None = None) -> None:
        with self._log(log).open("ab") as output:
            self._processes.append(self.host.start(*arguments, environ=environ, stdout=output, stderr=output))

    def _log(self, name: str) -> Path:
        return self.host.path(HOME / f"{name}.log")

    def _until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                with self.redis() as client:
                    client.ping()
                self.names("nothing")
                return
            except Exception as error:
                logs = "".join(self._log(name).read_text() for name in ("redis", "s3"))
                assert time.monotonic() < deadline, f"{error}: {logs}"
            time.sleep(0.1)
