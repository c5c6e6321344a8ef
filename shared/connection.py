"""How a role reaches its run: address, credentials, and a Redis client that reconnects.

Credentials come from the environment (STAGECOACH_REDIS_USERNAME, STAGECOACH_REDIS_PASSWORD, the standard AWS chain)
or, for embedded services, from a file that only its owner may read. They never stand in a config, log or error text.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from shared.config import Config
from shared.errors import RedisUnavailable

_LONGEST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Address:
    """Where a run's services are. Holds no secret; `credentials_file` names the file that does."""

    run_id: str
    redis_url: str
    store_url: str
    endpoint_url: str | None = None
    credentials_file: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Credentials:
    """What the services ask for. Not printable."""

    redis_username: str | None = None
    redis_password: str | None = None
    s3_access_key: str | None = None
    s3_secret_key: str | None = None

    def __repr__(self) -> str:
        return "Credentials(…)"


def credentials(address: Address) -> Credentials:
    """From the credentials file of embedded services, else from the environment."""
    stored: dict[str, str] = {}
    if address.credentials_file:
        stored = json.loads(Path(address.credentials_file).read_text())
    own_redis = "redis_password" not in stored  # else user and password come from the file together
    return Credentials(
        os.environ.get("STAGECOACH_REDIS_USERNAME") if own_redis else stored.get("redis_username"),
        os.environ.get("STAGECOACH_REDIS_PASSWORD") if own_redis else stored["redis_password"],
        stored.get("s3_access_key"),
        stored.get("s3_secret_key"),
    )


def connect_redis(address: Address, config: Config) -> redis.Redis:
    """A checked connection that retries with backoff and jitter.

    Raises `RedisUnavailable` with the reason: not reachable, wrong password, still loading, too old.
    """
    secret = credentials(address)
    pauses = ExponentialWithJitterBackoff(base=0.02, cap=_LONGEST_PAUSE_SECONDS)
    try:
        client = redis.Redis.from_url(
            address.redis_url,
            username=secret.redis_username,
            password=secret.redis_password,
            socket_timeout=config.redis.timeout_seconds,
            socket_connect_timeout=config.redis.timeout_seconds,
            retry=Retry(pauses, _tries(config.redis.retry_seconds)),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError],
        )
    except ValueError as error:
        raise RedisUnavailable(f"redis.url {address.redis_url.rpartition('@')[2]!r} is no address: {error}") from None
    check_redis(client, address.redis_url)
    return client


def check_redis(client: redis.Redis, url: str) -> None:
    """Raises `RedisUnavailable` unless the server answers and is recent enough."""
    where = f"Redis at {_public(url)}"
    try:
        client.ping()
        info: Any = client.info("server")
    except redis.AuthenticationError as error:
        raise RedisUnavailable(
            f"{where} refuses the credentials ({error}); set STAGECOACH_REDIS_PASSWORD (and STAGECOACH_REDIS_USERNAME)"
        ) from None
    except redis.BusyLoadingError:
        raise RedisUnavailable(f"{where} is still loading its data; try again when it has finished") from None
    except redis.ResponseError as error:
        raise RedisUnavailable(f"{where} refuses to serve: {error}") from None
    except redis.InvalidResponse as error:
        raise RedisUnavailable(f"{where} does not answer as Redis does ({error}); correct redis.url") from None
    except (redis.ConnectionError, redis.TimeoutError, ValueError, OSError) as error:
        raise RedisUnavailable(
            f"{where} does not answer ({error}); start it, or correct redis.url, or use redis.url=embedded"
        ) from None
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise RedisUnavailable(f"{where} is version {version}; expected Redis 6.2 or newer, or Valkey")


def _tries(seconds: float) -> int:
    """Tries that fill about `seconds`: the pauses grow to one second and then stay there."""
    return max(1, int(seconds / _LONGEST_PAUSE_SECONDS) + 5) if seconds else 0


def _public(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}"
