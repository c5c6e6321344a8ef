"""Addresses of a run's services, and the credentials for them.

Credentials come from the environment, from files that it names (mounted secrets), or, for embedded services, from a
file that only its owner may read. Each role may have its own for Redis: STAGECOACH_WORKER_REDIS_PASSWORD, say, comes
before STAGECOACH_REDIS_PASSWORD. They never stand in a config, log or error text.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from stagecoach.shared.base.errors import ConfigError

_DATABASE = re.compile(r"(?:/[0-9]*)?")
_OPTION = re.compile(r"[a-z_]+")

RoleName = Literal["worker", "evaluator", "trainer", "coordinator", "viewer"]
"""Roles that connect to Redis; `deploy/users.acl` has a user for each. A viewer only reads (`status`, `watch`)."""


@dataclass(frozen=True)
class Address:
    """Addresses of a run's services. Holds no secret; `credentials_file` names the file that does."""

    run_id: str
    redis_url: str
    store_url: str
    endpoint_url: str | None = None
    credentials_file: str | None = None
    store_folder: str | None = None
    """Folder of the embedded S3 server's buckets on this machine; the server itself does not sync its files."""
    redis_folder: str | None = None
    memory_folder: str | None = None
    """Folder of the run in the shared memory of the host on which the embedded Redis runs."""


@dataclass(frozen=True, repr=False)
class Credentials:
    redis_username: str | None
    redis_password: str | None


def credentials(address: Address, role: RoleName | None = None) -> Credentials:
    """Returns those in the credentials file of embedded services, else those in the environment: the role's own, else
    those for all roles. A viewer may use those of the coordinator. Raises `ConfigError`."""
    stored = _stored(address)
    if "redis_password" in stored:  # user and password come from the file together
        return Credentials(stored.get("redis_username"), stored["redis_password"])
    for name in {None: (), "viewer": ("viewer", "coordinator")}.get(role, (role,)):
        own = f"STAGECOACH_{str(name).upper()}_REDIS"
        password = _secret(f"{own}_PASSWORD")
        if password is not None:
            return Credentials(os.environ.get(f"{own}_USERNAME") or name, password)
    return Credentials(os.environ.get("STAGECOACH_REDIS_USERNAME") or None, _secret("STAGECOACH_REDIS_PASSWORD"))


def s3_keys(address: Address) -> tuple[str | None, str | None]:
    """Access key and secret key of an embedded S3 server; for any other boto3 finds them itself."""
    stored = _stored(address)
    return stored.get("s3_access_key"), stored.get("s3_secret_key")


def _stored(address: Address) -> dict[str, str | None]:
    return dict(json.loads(Path(address.credentials_file).read_text())) if address.credentials_file else {}


def _secret(variable: str) -> str | None:
    """The variable's value, else the first line of the file that VARIABLE_FILE names."""
    path = os.environ.get(f"{variable}_FILE")
    if os.environ.get(variable) or not path:
        return os.environ.get(variable) or None
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{variable}_FILE={path} cannot be read: {reason}; correct it, or its permissions") from None
    if not lines or not lines[0]:
        raise ConfigError(f"{variable}_FILE={path} is empty; expected the password in its first line")
    return lines[0]


def redis_place(url: str) -> str:
    """Returns `host:port/db` of a Redis address, or the path of its socket, which identifies its contents."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return f"{parts.hostname}:{parts.port or 6379}/{parts.path.strip('/') or 0}"


def check_redis_url(field: str, url: str) -> None:
    """Raises `ValueError` unless `url` is an address and no more: an option would be redis-py's, behind our back."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{field} {url.rpartition('@')[2]!r} is not an address: {error}") from None
    local = parts.scheme == "unix"
    if local and (parts.netloc or not parts.path.startswith("/")):
        raise ValueError(f"{field} {url.rpartition('@')[2]!r} is not an address; expected unix:///path/of/the/socket")
    if parts.query or parts.fragment or not (local or _DATABASE.fullmatch(parts.path)):
        # only what looks like options: a password with such a character in it would stand there as well
        options = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if _OPTION.fullmatch(name)]
        expected = "unix:///path" if local else f"{parts.scheme}://host:port/db"
        wrong = f"sets {', '.join(options)}" if options else "has more behind its port than the number of a database"
        raise ValueError(
            f"{field} {wrong}; expected {expected} and no options (redis.timeout_seconds, "
            f"redis.retry_seconds and redis.ca_file are fields of the config)"
        )


def check_verified(field: str, url: str, ca_field: str) -> None:
    """Raises `ValueError` where a URL has a say in how TLS is verified."""
    query = parse_qsl(url.partition("?")[2], keep_blank_values=True)
    if asked := [key for key, _ in query if key.lower().startswith("ssl")]:
        raise ValueError(
            f"{field} sets {', '.join(asked)}: certificates are always verified, and not by the URL; take it out, and "
            f"name an authority of your own in {ca_field}"
        )
