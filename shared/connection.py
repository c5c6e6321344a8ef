"""How a role reaches its run: address, credentials, and a Redis client that reconnects.

Credentials come from the environment (STAGECOACH_REDIS_USERNAME, STAGECOACH_REDIS_PASSWORD, the standard AWS chain)
or, for embedded services, from a file that only its owner may read. They never stand in a config, log or error text.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from shared.config import Config
from shared.errors import RedisUnavailable

_LONGEST_PAUSE_SECONDS = 1.0
_GROWING_PAUSES = 16
"""Failures after which the pauses are as long as they get; a power of all of them would overflow."""
_PASSING = re.compile(r"\b(LOADING|READONLY|MASTERDOWN|MISCONF|NOREPLICAS|TRYAGAIN|CLUSTERDOWN|BUSY)\b")
"""Refusals that pass: loading, no master (yet, or no more: after a failover), no room on its disk. Redis before 7 hides
the word within the text when a script meets it."""
_PASSING_ERRORS = (
    redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, redis.ReadOnlyError,
    redis.exceptions.MasterDownError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError,
)  # fmt: skip
_T = TypeVar("_T")


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


class RetryForSeconds(Retry):
    """Tries again for so many seconds, with growing and jittered pauses; then raises what it met, and for how long.

    redis-py counts tries, so a server that never answers takes a timeout for each of them; and it connects within the
    call that it repeats, with tries of its own. Here the outermost call of a thread alone repeats.
    """

    __hash__ = Retry.__hash__
    _inside = threading.local()

    def __init__(self, where: str, seconds: float) -> None:
        pauses = ExponentialWithJitterBackoff(base=0.02, cap=_LONGEST_PAUSE_SECONDS)
        super().__init__(pauses, -1, (Exception,))
        self._where, self._seconds = where, seconds

    def call_with_retry(
        self,
        do: Callable[[], _T],
        fail: Callable[[Exception], Any] | Callable[[Exception, int], Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> _T:
        """Answers what `do` answers; `fail` is called after each failure that may pass (it disconnects)."""
        outermost = not getattr(self._inside, "busy", False)
        self._inside.busy = True
        started, failures = time.monotonic(), 0
        try:
            while True:
                try:
                    return do()
                except Exception as error:
                    if not _passes(error) or (is_retryable is not None and not is_retryable(error)):
                        raise
                    failures += 1
                    cast(Callable[..., Any], fail)(*([error, failures] if with_failure_count else [error]))
                    if not outermost:
                        raise
                    self._pause(error, started, failures)
        finally:
            if outermost:
                self._inside.busy = False

    def _pause(self, error: Exception, started: float, failures: int) -> None:
        """Sleeps before the next try; raises `error`, completed, where there is none."""
        seconds, pause = time.monotonic() - started, self._backoff.compute(min(failures, _GROWING_PAUSES))
        if seconds + pause <= self._seconds:
            time.sleep(pause)
        elif self._seconds > 0:
            kind = type(error) if isinstance(error, redis.RedisError) else redis.ConnectionError
            raise kind(f"{self._where} could not be used for {seconds:.1f} s, {failures} tries: {error}") from None
        else:
            raise error


class _LivingPool(redis.ConnectionPool):
    """redis-py looks whether a connection is alive before it begins to count tries; here that look is a try as well."""

    def get_connection(self, *arguments: Any, **options: Any) -> Any:
        """A connection that was alive a moment ago."""
        take = super().get_connection
        retry: RetryForSeconds = self.connection_kwargs["retry"]
        return retry.call_with_retry(lambda: take(*arguments, **options), lambda error: None)


def _passes(error: Exception) -> bool:
    """Whether it may be over in a moment."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ResponseError) and _PASSING.search(str(error)):
        return True
    return isinstance(error, (*_PASSING_ERRORS, TimeoutError))


def connect_redis(address: Address, config: Config) -> redis.Redis:
    """A checked connection that retries with backoff and jitter, for `redis.retry_seconds`.

    Raises `RedisUnavailable` with the reason: not reachable, wrong password, still loading, too old.
    """
    secret = credentials(address)
    try:
        pool = _LivingPool.from_url(
            address.redis_url,
            username=secret.redis_username,
            password=secret.redis_password,
            socket_timeout=config.redis.timeout_seconds,
            socket_connect_timeout=config.redis.timeout_seconds,
            socket_keepalive=True,
            retry=RetryForSeconds(f"Redis at {_public(address.redis_url)}", config.redis.retry_seconds),
        )
        client = redis.Redis.from_pool(pool)
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


def _public(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}"
