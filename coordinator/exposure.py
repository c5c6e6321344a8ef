"""What strangers on the network could do with the servers that a config names: `stagecoach doctor` warns of it.

Each look answers what it found open, in words; nothing found is no proof that there is nothing.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

import redis
from botocore.handlers import disable_signing

from shared.child import child_environment
from shared.config import Config
from shared.connection import Address, connect_redis, tls_options
from shared.object_store import open_store, s3_client
from shared.s3_errors import FAILURES

_LOOK_SECONDS = 5.0
_RAY_SECONDS = 30.0
_PROBE = "probe"


def in_the_clear(config: Config) -> list[str]:
    """Servers beyond this machine that are spoken to without TLS."""
    found = []
    if urlsplit(config.redis.url).scheme == "redis" and not _loopback(config.redis.url):
        found.append(
            "redis.url is redis:// to another machine: whoever is on the way reads passwords and experience, and can "
            "change them; use rediss:// (docs/SECURITY.md)"
        )
    endpoint = config.store.endpoint_url or ""
    if urlsplit(endpoint).scheme == "http" and not _loopback(endpoint):
        found.append(
            "store.endpoint_url is http:// to another machine: whoever is on the way sees the requests' credentials "
            "(tokens in full) and can change checkpoints; use https:// (docs/SECURITY.md)"
        )
    return found


def open_redis(config: Config) -> list[str]:
    """A Redis that needs no password, and users that may do everything."""
    found = []
    once = {"socket_timeout": _LOOK_SECONDS, "socket_connect_timeout": _LOOK_SECONDS}
    with redis.Redis.from_url(config.redis.url, **once, **tls_options(config.redis.url, config.redis)) as stranger:
        try:
            stranger.ping()
            found.append("it answers without a password; give it users (deploy/users.acl), or a firewall at the least")
        except redis.RedisError:
            pass
    with connect_redis(Address("doctor", config.redis.url, ""), config, "coordinator") as client:
        try:
            users = dict.fromkeys([str(client.acl_whoami()), "default"])
            mighty = [user for user in users if _may_everything(client.acl_getuser(user))]
        except redis.ResponseError:
            return found  # who may not ask may not do everything
    if mighty:
        found.append(
            f"the user {' and the user '.join(mighty)} may do everything; give each role its own (deploy/users.acl)"
        )
    return found


def _may_everything(user: Any) -> bool:
    return bool(user) and "on" in user["flags"] and "+@all" in user["categories"] and "~*" in user["keys"]


def open_bucket(config: Config) -> list[str]:
    """A bucket that can be listed or read by anybody."""
    address = Address("doctor", "", config.store.url, config.store.endpoint_url)
    parts, store = urlsplit(config.store.url), open_store(address, config)
    if parts.scheme != "s3":
        return []
    stranger = s3_client(address, config.store)
    stranger.meta.events.register("choose-signer.s3.*", disable_signing)
    key = "/".join(part for part in (parts.path.strip("/"), "doctor", _PROBE) if part)
    store.put(_PROBE, b"stagecoach")
    try:
        asked = {
            "it can be listed": lambda: (
                stranger.list_objects_v2(Bucket=parts.netloc, MaxKeys=1)["IsTruncated"] in (True, False)
            ),
            "read": lambda: stranger.get_object(Bucket=parts.netloc, Key=key)["Body"].read() == b"stagecoach",
            "its policy says so": lambda: s3_client(address, config.store).get_bucket_policy_status(
                Bucket=parts.netloc
            )["PolicyStatus"]["IsPublic"],
        }
        done = [what for what, ask in asked.items() if _succeeds(ask)]
    finally:
        store.delete(_PROBE)
    advice = "block public access, or have the server ask for keys"
    return [f"anybody may use the bucket without credentials ({', '.join(done)}); {advice}"] if done else []


def _succeeds(ask: Any) -> bool:
    try:
        return bool(ask())
    except (*FAILURES, KeyError):
        return False


def open_ray(gcs_address: str, dashboard: str) -> list[str]:
    """A Ray that lets strangers run code: without a token, or by its dashboard."""
    found = []
    if _lets_in_without_token(gcs_address):
        found.append(
            "it asks for no token, so whoever reaches its ports runs code on the cluster; start it with "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (docs/SECURITY.md)"
        )
    if dashboard and _answers(dashboard, "/api/version"):
        found.append(
            f"its dashboard at {dashboard} answers without a token, and it takes jobs; turn token authentication on, "
            f"or start Ray with --include-dashboard=false"
        )
    return found


def _lets_in_without_token(gcs_address: str) -> bool:
    """Asks in a process of its own, since this one may hold the token, which Ray reads once."""
    command = [sys.executable, "-c", "import sys, ray; ray._raylet.GcsClient(address=sys.argv[1])", gcs_address]
    try:
        asked = subprocess.run(
            command, env=child_environment(RAY_AUTH_MODE="disabled"), capture_output=True, timeout=_RAY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def _answers(address: str, path: str) -> bool:
    connection = http.client.HTTPConnection(address, timeout=_LOOK_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _loopback(url: str) -> bool:
    """Whether this URL's host is this machine, and its packets never leave it."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(item[4][0]).partition("%")[0]).is_loopback for item in found)
