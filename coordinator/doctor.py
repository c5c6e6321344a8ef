"""`stagecoach doctor`: tries everything that a run needs, and says what to do about what fails."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import redis
from packaging.requirements import Requirement

from coordinator.exposure import in_the_clear, open_bucket, open_ray, open_redis
from coordinator.preparation import check
from coordinator.services import BUCKET, new_secret, start_ray, start_redis, start_s3
from shared.config import Config
from shared.connection import Address, connect_redis, impatient
from shared.errors import StagecoachError
from shared.object_store import open_store
from shared.redis_keys import redis_place

_HIDDEN = "hidden"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    name: str
    ok: bool
    text: str
    warning: bool = False
    """It works, and somebody should look at it all the same."""

    @property
    def outcome(self) -> str:
        """`ok`, `warn` or `fail`."""
        return "fail" if not self.ok else "warn" if self.warning else "ok"

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {"name": self.name, "ok": self.ok, "outcome": self.outcome, "text": self.text}


def examine(config: Config | None) -> Iterator[Finding]:
    """All checks, one after another; with a config also its Redis, store, Ray and environment, and who may use them."""
    yield _try("Python and packages", _versions)
    yield _try("folder of runs", lambda: _writable(config.runs_dir if config else Path("runs")))
    yield _try("temporary folder", lambda: _writable(Path(tempfile.gettempdir())))
    yield _try("shared memory", _shared_memory)
    yield _try("loopback", _loopback)
    if config is None or config.redis.url == "embedded":
        yield _try("embedded Redis", _embedded_redis)
    else:
        yield from _with_access("Redis", lambda: _redis(config), lambda: open_redis(impatient(config)))
        for url in config.redis.shards:
            there = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
            name, open_there = f"Redis shard {redis_place(url)}", partial(open_redis, impatient(there))
            yield from _with_access(name, partial(_redis, there), open_there)
    if config is None or config.store.url == "embedded":
        yield _try("embedded S3 server", _embedded_s3)
    else:
        yield from _with_access("store", lambda: _store(config), lambda: open_bucket(config))
    if config is None or config.ray.address == "embedded":
        yield _try("Ray", _embedded_ray)
    else:
        ray: list[str] = []  # where it is, once it is joined
        yield from _with_access("Ray", lambda: _ray(config, ray), lambda: open_ray(*ray))
    if config is not None:
        yield _warned("encryption", in_the_clear(config), "nothing that leaves this machine goes in plain text")
        yield _try("environment and policies", lambda: _environment(config))


def _with_access(name: str, check: Callable[[], str], look: Callable[[], list[str]]) -> Iterator[Finding]:
    """A check, and where it goes well a look at who else could come in."""
    found = _try(name, check)
    yield found
    if found.ok:
        try:
            yield _warned(f"access to {name}", look(), "a stranger who tried to come in was refused")
        except Exception as error:
            yield Finding(f"access to {name}", True, f"cannot be looked at ({type(error).__name__}: {error})", True)


def _warned(name: str, open_: list[str], fine: str) -> Finding:
    return Finding(name, True, "; ".join(open_) or fine, bool(open_))


def _try(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except StagecoachError as error:
        return Finding(name, False, str(error))
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _versions() -> str:
    """What is installed, held against what the package asks for."""
    found, wrong = [], []
    for text in importlib.metadata.requires("stagecoach") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "missing"
        found.append(f"{requirement.name} {version}")
        if version == "missing" or not requirement.specifier.contains(version.partition("+")[0], prereleases=True):
            wrong.append(f"{requirement.name} is {version}, expected {requirement.specifier}")
    if wrong:
        raise StagecoachError("; ".join(wrong) + "; install with: pip install -c constraints.txt -e .")
    mine = importlib.metadata.version("stagecoach")
    return f"stagecoach {mine}, Python {platform.python_version()}, " + ", ".join(found)


def _writable(folder: Path) -> str:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StagecoachError(f"{existing} cannot be written by this user; choose another folder or change its owner")
    free = os.statvfs(existing)
    gigabytes = free.f_bavail * free.f_frsize / 1e9
    if gigabytes < 0.5:
        raise StagecoachError(f"{existing} has {gigabytes:.1f} GB free; make room, checkpoints and the log need some")
    return f"{folder} is writable, {gigabytes:.0f} GB free"


def _shared_memory() -> str:
    if not sys.platform.startswith("linux"):
        return "not needed here"
    stats = os.statvfs("/dev/shm")
    megabytes = stats.f_bavail * stats.f_frsize / 1e6
    if megabytes < 150:
        raise StagecoachError(f"/dev/shm has {megabytes:.0f} MB free; Ray needs about 100 (docker: --shm-size=1g)")
    return f"/dev/shm has {megabytes:,.0f} MB free"


def _loopback() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"ports can be bound on 127.0.0.1 (tried {server.getsockname()[1]})"


def _embedded_redis() -> str:
    with tempfile.TemporaryDirectory() as folder:
        service = start_redis(Path(folder) / "data", Path(folder) / "redis.log", new_secret())
        service.stop()
    return "starts, takes its password, writes its append-only file"


def _embedded_s3() -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        access, secret = new_secret(), new_secret()
        service = start_s3(Path(folder) / "data", Path(folder) / "s3.log", access, secret)
        stack.callback(service.stop)
        path = Path(folder) / "credentials.json"
        path.write_text(f'{{"s3_access_key": "{access}", "s3_secret_key": "{secret}"}}')
        address = Address("doctor", "", f"s3://{BUCKET}", f"http://127.0.0.1:{service.port}", str(path))
        return _write_and_read(address, Config.model_validate({"environment": {"id": "-"}, "stop_at": {"updates": 1}}))


def _redis(config: Config) -> str:
    client = connect_redis(Address("doctor", config.redis.url, ""), impatient(config), "coordinator")
    policy, appendonly = _setting(client, "maxmemory-policy"), _setting(client, "appendonly")
    if policy not in ("noeviction", _HIDDEN):
        raise StagecoachError(f"maxmemory-policy is {policy}; set it to noeviction, or Redis may throw the log away")
    if appendonly not in ("yes", _HIDDEN):
        raise StagecoachError(
            "appendonly is off; turn it on, or a Redis that restarts forgets what is not checkpointed"
        )
    if _HIDDEN in (policy, appendonly):
        return f"{config.redis.url} answers, but hides its settings; see to it that it never evicts and persists"
    return f"{config.redis.url} answers, never evicts, and keeps an append-only file"


def _setting(client: Any, name: str) -> str:
    """One Redis setting; managed servers do not show theirs."""
    try:
        pairs = {_text(key): _text(value) for key, value in client.config_get(name).items()}
    except redis.ResponseError:
        return _HIDDEN
    return pairs.get(name, "unknown")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _store(config: Config) -> str:
    return _write_and_read(Address("doctor", "", config.store.url, config.store.endpoint_url), config)


def _write_and_read(address: Address, config: Config) -> str:
    store = open_store(address, config)
    store.check()
    store.put("probe", b"stagecoach")
    read = store.get("probe")
    store.delete("probe")
    if read != b"stagecoach":
        raise StagecoachError("the store gave back other bytes than it was given; do not use it")
    return f"{address.store_url} can be written, read and deleted from"


def _embedded_ray() -> str:
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        head = start_ray(Path(folder) / "ray.log", 1, new_secret(), loopback=True)
        seconds = time.monotonic() - started
        head.stop()
    return f"a Ray of one's own starts in {seconds:.1f} s, on loopback and with a token, and ends"


def _ray(config: Config, where: list[str]) -> str:
    """Joins the cluster; adds the address of its GCS and that of its dashboard to `where`."""
    import ray

    try:
        joined: Any = ray.init(address=config.ray.address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise StagecoachError(
            f"{config.ray.address} cannot be joined: {' '.join(str(error).split())}; correct ray.address, or set "
            f"RAY_AUTH_TOKEN where the cluster asks for a token"
        ) from None
    try:
        where += [ray.get_runtime_context().gcs_address, joined.dashboard_url or ""]
        resources: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return f"{config.ray.address} answers with {resources.get('CPU', 0):g} CPUs"
    finally:
        ray.shutdown()


def _environment(config: Config) -> str:

    description = check(config, strict=True)
    return (
        f"{config.environment.id}: agents {', '.join(description.agents)}; policies {', '.join(description.policies)}"
    )
