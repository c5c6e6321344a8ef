"""Sections of the services of a run: Redis, the store, Ray."""

from pathlib import Path
from typing import Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, model_validator

from stagecoach.shared.base.address import check_redis_url, check_verified, redis_place
from stagecoach.shared.config.schema.section import Section

_REDIS = ("redis", "rediss", "unix")
_OR_EMBEDDED = "be 'embedded' or "


def _check_url(field: str, url: str, schemes: tuple[str, ...], variable: str, either: str = "") -> None:
    parts = urlsplit(url)
    asked = {key.lower() for key, _ in parse_qsl(parts.query)}
    if parts.username or parts.password or asked & {"username", "password"}:
        raise ValueError(f"{field} holds credentials; they would be stored with the run. Use {variable} instead")
    if parts.scheme not in schemes and not (either and url == "embedded"):
        expected = " or ".join(f"{scheme}://" for scheme in schemes)
        raise ValueError(f"{field} must {either}start with {expected}, found {url!r}")


def _check_tls_files(section: str, encrypted: bool, **files: Path | None) -> None:
    given = {name: path for name, path in files.items() if path is not None}
    for name, path in given.items():
        if not path.is_absolute():
            raise ValueError(f"{section}.{name}={path} must be an absolute path, since each machine reads its own copy")
    if given and not encrypted:
        url = {"redis": "redis.url begin with rediss://", "store": "store.endpoint_url begin with https://"}[section]
        raise ValueError(f"{section}.{next(iter(given))} is set, but nothing would be encrypted; let {url}")


class RedisConfig(Section):
    """The experience log, the policy board and the control keys."""

    url: str = "embedded"
    """`embedded` starts a server for this run; else `redis://host:port/db`, `rediss://…`, or `unix:///path` of a socket
    on this machine, if all roles run here. User and password are read
    from STAGECOACH_REDIS_USERNAME and STAGECOACH_REDIS_PASSWORD, or each role's own variables
    (docs/operations/security.md), never from the config."""
    ca_file: Path | None = None
    """Certificate (PEM) of a private authority for `rediss://`, in addition to the system's. An absolute path, the same
    on each machine. Certificates are always verified."""
    cert_file: Path | None = None
    """Client certificate (PEM), if the server requires one."""
    key_file: Path | None = None
    """Key of `cert_file` (PEM, without a passphrase)."""
    shards: tuple[str, ...] = ()
    """Addresses of additional servers for the fragments' bodies, if one server lacks the memory or bandwidth. The
    server at `url` keeps the log's order and each body's location. User and password are the same. Empty: the log holds
    the bodies. A resume may leave out a shard only if the log names no body on it."""
    shared_memory: bool = True
    """Keeps large policy versions and bodies of fragments in /dev/shm, if Redis is embedded and there is
    room. A reboot loses bodies that no checkpoint covers; `false` keeps them in the data of Redis."""
    timeout_seconds: float = Field(10.0, ge=2)
    """Time limit of one answer; must exceed the second that waiting workers block for."""
    retry_seconds: float = Field(14_400.0, ge=0, le=604_800)
    """Time to wait for a Redis or a shard that is down, loading, or without a master. Hours, since a failover or
    restart of a service should not fail the run. The start of a run tries once."""

    @model_validator(mode="after")
    def _addresses_can_be_used(self) -> Self:
        _check_url("redis.url", self.url, _REDIS, "STAGECOACH_REDIS_PASSWORD", _OR_EMBEDDED)
        for url in self.shards:
            _check_url("redis.shards", url, _REDIS[:2], "STAGECOACH_REDIS_PASSWORD")
        for url in (self.url, *self.shards):
            field = "redis.url" if url == self.url else "redis.shards"
            check_verified(field, url, "redis.ca_file")
            if url != "embedded":
                check_redis_url(field, url)
        encrypted = "rediss" in {urlsplit(url).scheme for url in (self.url, *self.shards)}
        _check_tls_files("redis", encrypted, ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file)
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError(f"redis.cert_file={self.cert_file} and redis.key_file={self.key_file} go together")
        names = [redis_place(url) for url in self.shards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"redis.shards names {', '.join(twice)} more than once")
        if self.shards and self.url == "embedded":
            raise ValueError(
                f"redis.url=embedded with redis.shards={list(self.shards)}: an embedded Redis has a password of its "
                f"own; give the address of a server in redis.url as well, or leave redis.shards empty"
            )
        return self


class StoreConfig(Section):
    """Storage of checkpoints, archives and metrics."""

    url: str = "embedded"
    """`embedded` starts an S3 server for this run; else `s3://bucket/prefix` or `file:///folder`. Credentials come from
    the standard AWS chain (AWS_ACCESS_KEY_ID, profiles, roles), never from the config."""
    endpoint_url: str | None = None
    """S3 endpoint, for MinIO and other servers; the default is AWS."""
    region: str = "us-east-1"
    """Region of the S3 bucket."""
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    """Location of the bucket in a request: in its `path` (`https://host/bucket/key`) or as a `virtual` host
    (`https://bucket.host/key`), which Alibaba OSS and Tencent COS require. `auto` is `path` with `endpoint_url`."""
    ca_file: Path | None = None
    """Certificate (PEM) of a private authority for `https://`. An absolute path, the same on each machine; by default
    AWS_CA_BUNDLE, else the authorities of boto3. Certificates are always verified."""
    timeout_seconds: float = Field(20.0, gt=0)
    """Time limit of one answer."""
    retries: int = Field(4, ge=0)
    """Retries within one request after a temporary failure, with growing pauses."""
    retry_seconds: float = Field(14_400.0, ge=0, le=604_800)
    """Time to wait for the store: at the start of a role, for a policy version, and at the end of the run. Training
    continues meanwhile, until the log is full. The start of a run tries once."""

    @model_validator(mode="after")
    def _addresses_can_be_used(self) -> Self:
        _check_url("store.url", self.url, ("s3", "file"), "AWS_ACCESS_KEY_ID", _OR_EMBEDDED)
        _check_url("store.endpoint_url", self.endpoint_url or "https:", ("http", "https"), "AWS_ACCESS_KEY_ID")
        _check_tls_files("store", urlsplit(self.endpoint_url or "https:").scheme == "https", ca_file=self.ca_file)
        parts = urlsplit(self.url)
        if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
            example = "file:///data/checkpoints"
            raise ValueError(f"store.url must be an absolute path, such as {example}, found {self.url!r}")
        if parts.scheme == "s3" and not parts.netloc:
            raise ValueError(f"store.url must name a bucket, as s3://bucket/prefix does, found {self.url!r}")
        return self


class RayConfig(Section):
    """Ray, which places and restarts the processes."""

    address: str = "embedded"
    """`embedded` starts Ray on this machine, on loopback; else the address of a cluster, for example `auto`."""
    num_cpus: int | None = Field(None, ge=1)
    """CPUs that embedded Ray hands out; by default at least 64, since the operating system shares cores on one
    machine."""
    resources: dict[str, float] = {}
    """Custom Ray resources of each rollout worker."""


class GatewayConfig(Section):
    """Gateways: the workers of a run with `environment.api: external`, which listen for clients
    (docs/guides/gateway.md)."""

    host: str = "127.0.0.1"
    """Address to listen at; `0.0.0.0` for clients on other machines, then with TLS, here or in a proxy."""
    port: int = Field(7700, ge=0, lt=65_536)
    """Port of worker-0; worker-1 has the next one. With 0 each takes a free port (`stagecoach gateway list`)."""
    cert_file: Path | None = None
    """Certificate (PEM) of the server, for `wss://`."""
    key_file: Path | None = None
    """Key of `cert_file` (PEM, without a passphrase)."""
    away_seconds: float = Field(600.0, ge=1)
    """A session keeps its slot for so long while its client is away."""
    idle_seconds: float = Field(30 * 86_400.0, ge=1)
    """The run fails after so long without a turn of any client, instead of `rollout.wait_deadline_seconds`."""
    fragment_seconds: float = Field(20.0, ge=1)
    """A fragment ends soon after an environment has `rollout.fragment_steps` turns in it, or after this time, so that
    slow clients do not hold up the others."""
    late: Literal["drop", "learn"] = "drop"
    """`learn`: turns that an earlier policy version acted are learned from, in the order in which they arrive. Only
    algorithms with a replay buffer can do that; others drop such turns, and count them."""
    max_message_bytes: int = Field(1_000_000, ge=1000)
    """Longest message that a client may send."""

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file without key_file, or key_file without cert_file: TLS needs both")
        _check_tls_files("gateway", True, cert_file=self.cert_file, key_file=self.key_file)
        return self
