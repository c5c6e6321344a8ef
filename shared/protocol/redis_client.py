"""A Redis client that reconnects, and names what is wrong with a server, a connection or a key."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import ContextVar
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from stagecoach.shared.base import tls, world
from stagecoach.shared.base.address import Address, RoleName, check_redis_url, check_verified, credentials, redis_place
from stagecoach.shared.base.errors import RedisUnavailable
from stagecoach.shared.base.local_disk import unwritten
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.services import RedisConfig
from stagecoach.shared.protocol.flow_control import KeyDamaged, parse_flow
from stagecoach.shared.protocol.keys import COUNTS, key_name, key_type

_LONGEST_PAUSE_SECONDS = 1.0
_LASTING_SECONDS = 2.0
"""A Redis that is away for longer has an outage with a name; the others are ridden out in silence."""
_HURRY_SECONDS = 3.0
_GROWING_PAUSES = 16
"""Failures after which the pauses are as long as they get; a power of all of them would overflow."""
_PASSING = re.compile(r"\b(LOADING|READONLY|MASTERDOWN|MISCONF|NOREPLICAS|TRYAGAIN|CLUSTERDOWN|BUSY)\b")
"""Refusals that pass: loading, no master (yet, or no more: after a failover), no room on its disk. Redis before 7 hides
the word within the text when a script meets it."""
_UNWRITTEN = re.compile(r"MISCONF (?:Errors writing to the AOF file: )?(.*?)\.?(?: script: .*)?$")
_PASSING_ERRORS = (
    redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError, redis.ReadOnlyError,
    redis.exceptions.MasterDownError, redis.exceptions.TryAgainError, redis.exceptions.ClusterDownError,
    redis.InvalidResponse,
)  # fmt: skip
_GARBAGE = re.compile(r"WRONGTYPE|user_script|not an integer|no hash table|not a valid float")
"""Texts of Redis for a key of another type, and of our scripts for a value that is not a number."""
_FULL = "exhausted the last possible ID"
"""Error of a stream with an entry at the greatest possible position."""
_NUMBER = re.compile(rb"-?[0-9]{1,18}")
_CALLING = ContextVar("calling", default=False)
"""True in a thread that is in a call which is repeated."""
_NAMED = ContextVar("named", default=False)
"""True if the outage has a name already."""
_T = TypeVar("_T")


class _Secrets(redis.CredentialProvider):
    """Looks the credentials up at each connection, so that a rotated secret needs no restart."""

    def __init__(self, address: Address, role: RoleName | None) -> None:
        self._address, self._role = address, role

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        secret = credentials(self._address, self._role)
        password = secret.redis_password or ""
        return (secret.redis_username, password) if secret.redis_username else (password,)


class NamingRedis(redis.Redis):
    """A client that names the key that another program has changed, which Redis does not."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            keys = [arg for arg in args[1:] if isinstance(arg, str) and key_name(arg)]
            if _FULL in str(error):
                raise KeyDamaged(" or ".join(key for key in keys if key_type(key) == "stream"), error) from None
            if not keys or not _GARBAGE.search(str(error)):
                raise
            for key in keys:
                if what := self._damage(key):
                    raise KeyDamaged(key, what) from None
            if len(keys) == 1 or "WRONGTYPE" in str(error):
                raise KeyDamaged(" or ".join(keys), error) from None
            raise

    def _damage(self, key: str) -> str | None:
        """Returns what is wrong with a key; None if nothing is, or if this client may not read it."""
        try:
            found, expected = self._ask("TYPE", key).decode(), key_type(key)
            if found not in (expected, "none"):
                return f"expected a {expected}, found a {found}"
            if key_name(key) == "flow" and (raw := self._ask("HGETALL", key)):
                parse_flow(raw)
            if key_name(key) in COUNTS:
                odd = [pair for pair in self._ask("HGETALL", key).items() if not _NUMBER.fullmatch(pair[1])]
                return f"its field {odd[0][0]!r} is {odd[0][1][:40]!r} (expected a number)" if odd else None
        except redis.RedisError:
            return None
        except ValueError as error:
            return str(error)
        return None

    def _ask(self, command: str, key: str) -> Any:
        return super().execute_command(command, key)  # type: ignore[no-untyped-call]


class RetryForSeconds(Retry):
    """Retries until a deadline, with growing and jittered pauses; then raises what it met, and for how long.

    redis-py counts tries, so a server that never answers takes a timeout for each of them; and it connects within the
    call that it repeats, with tries of its own. Here the outermost call of a thread alone repeats.
    """

    def __init__(self, where: str, seconds: float, folder: str | None = None) -> None:
        pauses = ExponentialWithJitterBackoff(base=0.02, cap=_LONGEST_PAUSE_SECONDS)
        super().__init__(pauses, -1, (Exception,))
        self._where, self.seconds, self.folder = where, seconds, folder
        self.named: list[Callable[[str], AbstractContextManager[None]]] = []
        """Context managers entered with the error when an outage lasts, and left after it; they may not call Redis."""
        self.outages = 0
        self.abandoned = False

    def __deepcopy__(self, memo: object) -> RetryForSeconds:
        """redis-py gives each connection a copy; one outage is the same for all."""
        return self

    def hurry(self) -> None:
        """Limits each call to some seconds: the process is about to end."""
        self.seconds = min(self.seconds, _HURRY_SECONDS)

    def abandon(self) -> None:
        """Stops all retries: the role ends at once, and its other waits (`Wait`) end with this."""
        self.seconds, self.abandoned = 0.0, True

    def call_with_retry(
        self, do: Callable[[], _T], fail: Callable[..., Any], is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> _T:  # fmt: skip
        outermost = not _CALLING.get()
        calling = _CALLING.set(True)
        started, failures, lasting = world.monotonic(), 0, ExitStack()
        try:
            while True:
                try:
                    return do()
                except Exception as error:
                    if not passes(error) or (is_retryable is not None and not is_retryable(error)):
                        raise
                    failures += 1
                    fail(*([error, failures] if with_failure_count else [error]))
                    if not outermost:
                        raise
                    self._pause(error, started, failures, lasting)
        finally:
            lasting.close()
            _CALLING.reset(calling)

    def _pause(self, error: Exception, started: float, failures: int, lasting: ExitStack) -> None:
        """Sleeps before the next try, in a named wait once the outage lasts; raises `error` at the deadline."""
        seconds, pause = world.monotonic() - started, self._backoff.compute(min(failures, _GROWING_PAUSES))
        if seconds + pause <= self.seconds:
            lasts = seconds >= _LASTING_SECONDS and self.seconds > _HURRY_SECONDS
            if lasts and self.named and not _NAMED.get():
                self.outages += 1
                lasting.callback(_NAMED.reset, _NAMED.set(True))
                for name in self.named:
                    lasting.enter_context(name(_told(error, self.folder)))
            world.sleep(pause)
        elif self.seconds > 0:
            kind = type(error) if isinstance(error, redis.RedisError) else redis.ConnectionError
            told = _told(error, self.folder)
            raise kind(f"{self._where} could not be used for {seconds:.1f} s, {failures} tries: {told}") from None
        else:
            raise error


class _LivingPool(redis.ConnectionPool):
    """redis-py looks whether a connection is alive before it begins to count tries; here that look is a try as well."""

    def get_connection(self, *arguments: Any, **options: Any) -> Any:
        take = super().get_connection
        retry: RetryForSeconds = self.connection_kwargs["retry"]
        return retry.call_with_retry(lambda: take(*arguments, **options), lambda error: None)


def passes(error: Exception) -> bool:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    if isinstance(error, redis.ResponseError) and _PASSING.search(str(error)):
        return True
    return isinstance(error, (*_PASSING_ERRORS, TimeoutError))


def _told(error: Exception, folder: str | None) -> str:
    """Returns the error of Redis, with the remedy if it cannot write to its disk (`folder`, if known)."""
    found = _UNWRITTEN.search(str(error))
    return str(error) if found is None else unwritten(found[1], folder or "Redis")


def connect_redis(address: Address, config: Config, role: RoleName | None = None) -> redis.Redis:
    """Returns a checked connection that retries for `redis.retry_seconds`; raises `RedisUnavailable`."""
    return _checked_client(address.redis_url, address, config, role, "redis.url")


def without_retries(config: Config) -> Config:
    """Returns the config with a single try to reach Redis, of the full timeout, since a stalled disk delays replies."""
    return config.model_copy(update={"redis": config.redis.model_copy(update={"retry_seconds": 0.0})})


def retries(client: redis.Redis) -> RetryForSeconds:
    """Returns the retries of a client; for a client of other origin, an object without effect."""
    found = client.connection_pool.connection_kwargs.get("retry")
    return found if isinstance(found, RetryForSeconds) else RetryForSeconds("Redis", 0.0)


def shard_clients(address: Address, config: Config, role: RoleName | None = None) -> dict[str, redis.Redis]:
    """Returns unchecked connections without retries to `redis.shards`, by place."""
    return {redis_place(url): _client(url, address, config, role, 0.0, "redis.shards") for url in config.redis.shards}


def check_redis(address: Address, config: Config, role: RoleName) -> None:
    """Tries once; raises `RedisUnavailable` unless Redis and each of `redis.shards` answer, are recent enough, and
    evict no keys."""
    config = without_retries(config)
    for url, field in ((address.redis_url, "redis.url"), *((shard, "redis.shards") for shard in config.redis.shards)):
        with _checked_client(url, address, config, role, field) as client:
            if policy := evicts(client):
                raise RedisUnavailable(f"Redis at {_public(url)}: {policy}")


def evicts(client: redis.Redis) -> str | None:
    """Returns what is wrong with a server that evicts keys as its memory fills (no key of a run expires, so
    `volatile-…` evicts none). Managed servers forbid CONFIG, but not INFO."""
    info: Any = client.info("memory")
    policy = str(info.get("maxmemory_policy", ""))
    if not policy.startswith("allkeys"):
        return None
    return f"maxmemory-policy is {policy}; set it to noeviction, or Redis may throw the log away"


def _client(
    url: str, address: Address, config: Config, role: RoleName | None, retry_seconds: float, field: str
) -> redis.Redis:
    secret, secured = credentials(address, role), tls_options(url, config.redis, field)
    folder = address.redis_folder if field == "redis.url" else None
    try:
        pool = _LivingPool.from_url(
            url,
            **secured,
            credential_provider=_Secrets(address, role) if secret.redis_username or secret.redis_password else None,
            socket_timeout=config.redis.timeout_seconds,
            socket_connect_timeout=config.redis.timeout_seconds,
            **({} if urlsplit(url).scheme == "unix" else {"socket_keepalive": True}),
            driver_info=None,  # else each connection says which library it is, which Redis 7.0 has no word to permit
            retry=RetryForSeconds(f"Redis at {_public(url)}", retry_seconds, folder),
        )
        return NamingRedis.from_pool(pool)
    except ValueError as error:
        raise RedisUnavailable(f"{field} {url.rpartition('@')[2]!r} is not a valid address: {error}") from None


def _checked_client(url: str, address: Address, config: Config, role: RoleName | None, field: str) -> redis.Redis:
    client = _client(url, address, config, role, config.redis.retry_seconds, field)
    where = f"Redis at {_public(url)}"
    try:
        client.ping()
        info: Any = client.info("server")
    except redis.AuthenticationError as error:
        own = f"STAGECOACH_{role.upper()}_REDIS_PASSWORD, or " if role else ""
        raise RedisUnavailable(
            f"{where} refuses the credentials ({error}); set {own}STAGECOACH_REDIS_PASSWORD (and "
            f"STAGECOACH_REDIS_USERNAME)"
        ) from None
    except redis.BusyLoadingError:
        raise RedisUnavailable(f"{where} is still loading its data; try again when it has finished") from None
    except redis.ResponseError as error:
        raise RedisUnavailable(f"{where} refuses to serve: {_told(error, retries(client).folder)}") from None
    except (redis.InvalidResponse, redis.ConnectionError, redis.TimeoutError, ValueError, OSError) as error:
        raise RedisUnavailable(f"{where} {_why_not(error, url, field)}") from None
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
        raise RedisUnavailable(f"{where} is version {version}; expected Redis 6.2 or newer, or Valkey")
    if (mode := str(info.get("redis_mode", "standalone"))) != "standalone":
        raise RedisUnavailable(
            f"{where} runs in {mode} mode (INFO: redis_mode); expected a standalone server, with or without replicas, "
            f"since all keys of a run are on one server; name such a server in {field}"
        )
    return client


def tls_options(url: str, config: RedisConfig, field: str = "redis.url") -> dict[str, Any]:
    """Returns the options of `rediss://`; raises `RedisUnavailable` if it would not be verified."""
    try:
        check_verified(field, url, "redis.ca_file")
        check_redis_url(field, url)
        if not url.startswith("rediss://"):
            return {}
        tls.check_files("redis", config.ca_file, config.cert_file, config.key_file)
    except ValueError as error:
        raise RedisUnavailable(str(error)) from None
    files = {"ssl_ca_certs": config.ca_file, "ssl_certfile": config.cert_file, "ssl_keyfile": config.key_file}
    options: dict[str, Any] = {name: str(path) for name, path in files.items() if path is not None}
    return options | {"ssl_cert_reqs": "required", "ssl_check_hostname": True}


def _why_not(error: Exception, url: str, field: str) -> str:
    """Explains why Redis cannot be reached; probes the port to separate a wrong scheme from a server that is away."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"does not answer ({error}); start it, or correct {field}"
    secure, (host, port) = parts.scheme == "rediss", (parts.hostname or "localhost", parts.port or 6379)
    wrong = tls.cause(str(error), "redis") if secure else None
    if wrong:
        return f"cannot be trusted: {wrong.replace('redis.url', field)}"
    if not secure and tls.speaks_tls(host, port):
        return f"speaks TLS; begin {field} with rediss://"
    if secure and tls.speaks_plain_redis(host, port):
        return (
            f"does not speak TLS; turn it on there (deploy/redis.conf), or begin {field} with redis:// on a network of "
            f"your own"
        )
    if isinstance(error, redis.InvalidResponse):
        return f"does not answer as Redis does ({error}); correct {field}"
    embedded = ", or use redis.url=embedded" if field == "redis.url" else ""
    return f"does not answer ({error}); start it, or correct {field}{embedded}"


def own_address(client: redis.Redis) -> str:
    """Returns this machine's address on the route to Redis, or "" without a route. Sends nothing."""
    where = client.connection_pool.connection_kwargs
    if "path" in where:  # a socket of this machine
        return "127.0.0.1"
    try:
        family, kind, _, _, target = socket.getaddrinfo(where["host"], where["port"], type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def _public(url: str) -> str:
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
