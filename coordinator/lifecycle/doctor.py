"""`stagecoach doctor`: tries everything that a run needs, and says what to do about what fails."""

import http.client
import importlib.metadata
import ipaddress
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import redis
from botocore.handlers import disable_signing
from packaging.requirements import Requirement
from redis.utils import str_if_bytes

from stagecoach.coordinator.catalog.fixed_players import fixed_sources, with_fixed_players
from stagecoach.coordinator.diagnostics.store_trial import PROBE, try_store
from stagecoach.coordinator.lifecycle.launcher import first_state
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.coordinator.services.embedded import BUCKET, RayService, SocketFolder, new_secret, start_redis, start_s3
from stagecoach.coordinator.services.ray_head import join
from stagecoach.coordinator.services.ray_internals import CONNECT
from stagecoach.coordinator.services.redis_servers import missing_fixes, redis_binary
from stagecoach.rollout_worker.environments.description import check_new
from stagecoach.shared.base import world
from stagecoach.shared.base.address import Address, redis_place
from stagecoach.shared.base.errors import DeletionRefused, StagecoachError, headline
from stagecoach.shared.base.process import child_environment
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.redis_client import connect_redis, evicts, tls_options, without_retries
from stagecoach.shared.storage.object_store import open_store
from stagecoach.shared.storage.s3_store import FAILURES, s3_client
from stagecoach.trainer_node.state.fork import beginnings


@dataclass(frozen=True)
class Finding:
    name: str
    ok: bool
    text: str
    warning: bool = False

    @property
    def outcome(self) -> str:
        return "fail" if not self.ok else "warn" if self.warning else "ok"

    def as_dict(self) -> dict[str, object]:
        return {"name": self.name, "ok": self.ok, "outcome": self.outcome, "text": self.text}


def examine(config: Config | None) -> Iterator[Finding]:
    """All checks, one after another; with a config also its Redis, store, Ray and environment, and who may use them."""
    yield _try("Python and packages", _versions)
    yield _try("folder of runs", lambda: _writable(config.runs_dir if config else Path("runs")))
    yield _try("temporary folder", lambda: _writable(Path(tempfile.gettempdir())))
    yield _try("shared memory", _shared_memory)
    if config is None or config.redis.url == "embedded":
        yield _try_in_folder("embedded Redis", _embedded_redis)
        yield from _warnings("version of embedded Redis", old_embedded_redis, _FIXED)
    else:
        shards = [(f"Redis shard {redis_place(url)}", url) for url in config.redis.shards]
        for name, url in [("Redis", config.redis.url), *shards]:
            there = without_retries(config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})}))
            yield from _with_access(name, partial(_redis, there), partial(open_redis, there))
            yield from _warnings(f"version of {name}", partial(old_redis, there), _FIXED)
    if config is None or config.store.url == "embedded":
        yield _try_in_folder("embedded S3 server", _embedded_s3)
    else:
        store = Address("doctor", "", config.store.url, config.store.endpoint_url)
        refused: list[str] = []  # once it is tried
        yield from _with_access("store", lambda: _write_and_read(store, config, refused), lambda: open_bucket(config))
        if refused:
            yield Finding("deletion in the store", True, "; ".join(refused), True)
    if config is None or config.ray.address == "embedded":
        yield _try("Ray", _embedded_ray)
    else:
        ray: list[str] = []  # where it is, once it is joined
        yield from _with_access("Ray", lambda: _ray(config, ray), lambda: open_ray(*ray))
    if config is not None:
        yield _warned("encryption", in_the_clear(config), "nothing that leaves this machine goes in plain text")
        described: list[EnvironmentDescription] = []  # once it is known
        yield _try("environment and policies", lambda: _environment(config, described))
        begun = sorted({*beginnings(config).values()})
        players = fixed_sources(config)
        if described and (begun or players):
            yield _try("players and beginnings", lambda: _players(config, described[0], [*players, *begun]))


_FIXED = "has the published security fixes"


def _with_access(name: str, check: Callable[[], str], strangers: Callable[[], list[str]]) -> Iterator[Finding]:
    """A check and, if it succeeds, a warning of access by strangers."""
    found = _try(name, check)
    yield found
    if found.ok:
        yield from _warnings(f"access to {name}", strangers, "a stranger who tried to come in was refused")


def _warnings(name: str, ask: Callable[[], list[str]], fine: str) -> Iterator[Finding]:
    try:
        yield _warned(name, ask(), fine)
    except Exception as error:
        yield Finding(name, True, f"cannot be checked ({headline(error)})", True)


def _warned(name: str, open_: list[str], fine: str) -> Finding:
    return Finding(name, True, "; ".join(open_) or fine, bool(open_))


def _try(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, check())
    except Exception as error:
        return Finding(name, False, headline(error))


def _try_in_folder(name: str, check: Callable[[Path], str]) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        return _try(name, lambda: check(Path(folder)))


def _versions() -> str:
    found, wrong = [], []
    for text in importlib.metadata.requires("stagecoach-rl") or []:
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
    mine = importlib.metadata.version("stagecoach-rl")
    return f"stagecoach {mine}, Python {platform.python_version()}, " + ", ".join(found)


def _writable(folder: Path) -> str:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StagecoachError(f"{existing} cannot be written by this user; choose another folder or change its owner")
    gigabytes = shutil.disk_usage(existing).free / 1e9
    if gigabytes < 0.5:
        raise StagecoachError(f"{existing} has {gigabytes:.1f} GB free; make room, checkpoints and the log need some")
    return f"{folder} is writable, {gigabytes:.0f} GB free"


def _shared_memory() -> str:
    if not sys.platform.startswith("linux"):
        return "not needed here"
    megabytes = shutil.disk_usage("/dev/shm").free / 1e6
    if megabytes < 150:
        raise StagecoachError(f"/dev/shm has {megabytes:.0f} MB free; Ray needs about 100 (docker: --shm-size=1g)")
    return f"/dev/shm has {megabytes:,.0f} MB free"


def _embedded_redis(folder: Path) -> str:
    with closing(SocketFolder()) as here:
        start_redis(folder / "data", folder / "redis.log", new_secret(), here.socket).stop()
    return "starts on a socket, takes its password, writes its append-only file"


def _embedded_s3(folder: Path) -> str:
    access, secret = new_secret(), new_secret()
    service = start_s3(folder / "data", folder / "s3.log", access, secret)
    try:
        path = folder / "credentials.json"
        path.write_text(json.dumps({"s3_access_key": access, "s3_secret_key": secret}))
        address = Address("doctor", "", f"s3://{BUCKET}", f"http://127.0.0.1:{service.port}", str(path))
        config = Config.model_validate({"environment": {"id": "-"}, "stop_at": {"updates": 1}})
        return _write_and_read(address, config, [])
    finally:
        service.stop()


def _embedded_ray() -> str:
    started = world.monotonic()
    head = RayService(1, new_secret(), loopback=True).wait()
    seconds = world.monotonic() - started
    head.stop()
    return f"a Ray of one's own starts in {seconds:.1f} s, on loopback and with a token, and ends"


def _redis(config: Config) -> str:
    client = connect_redis(Address("doctor", config.redis.url, ""), config, "coordinator")
    if policy := evicts(client):
        raise StagecoachError(policy)
    try:
        settings: Any = client.config_get("appendonly")
    except redis.ResponseError:  # a managed server
        return f"{config.redis.url} answers and never evicts, but hides its settings; see to it that it persists"
    if "yes" not in map(str_if_bytes, settings.values()):
        raise StagecoachError("appendonly is off; turn it on, or a restarted Redis forgets what is not checkpointed")
    return f"{config.redis.url} answers, never evicts, and keeps an append-only file"


def _write_and_read(address: Address, config: Config, refused: list[str]) -> str:
    if kept := try_store(open_store(address, config)):
        refused.append(kept)
    return f"{address.store_url} can be listed, written{' and read' if kept else ', read and deleted from'}"


def _ray(config: Config, where: list[str]) -> str:
    """Joins the cluster; adds the address of its GCS and that of its dashboard to `where`."""
    import ray

    joined = join(config.ray.address)
    try:
        where += [ray.get_runtime_context().gcs_address, joined.dashboard_url or ""]
        resources: Any = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return f"{config.ray.address} answers with {resources.get('CPU', 0):g} CPUs"
    finally:
        ray.shutdown()


def _environment(config: Config, described: list[EnvironmentDescription]) -> str:
    found = check(config, strict=True)
    check_new(config, found)
    described.append(found)
    return f"{config.environment.id}: agents {', '.join(found.agents)}; policies {', '.join(found.policies)}"


def _players(config: Config, description: EnvironmentDescription, sources: Sequence[str]) -> str:
    """Resolves what a run takes from other runs, as its start would."""
    with_fixed_players(config, description)
    first_state(config, description)
    return f"found: {', '.join(sources)}"


_ASK_SECONDS = 5.0
_RAY_SECONDS = 30.0


def in_the_clear(config: Config) -> list[str]:
    """Servers beyond this machine that are spoken to without TLS."""
    servers = {
        ("redis.url", config.redis.url, "redis"): "passwords and experience, and can change them",
        ("store.endpoint_url", config.store.endpoint_url or "", "http"):
            "the requests' credentials (tokens in full) and can change checkpoints",
    }  # fmt: skip
    return [
        f"{field} is {plain}:// to another machine: the network between sees {risk}; "
        f"use {plain}s:// (docs/operations/security.md)"
        for (field, url, plain), risk in servers.items()
        if urlsplit(url).scheme == plain and not _on_this_machine(url)
    ]


def open_redis(config: Config) -> list[str]:
    """A Redis that needs no password, and users that may do everything."""
    found = []
    once = {"socket_timeout": _ASK_SECONDS, "socket_connect_timeout": _ASK_SECONDS}
    with redis.Redis.from_url(config.redis.url, **once, **tls_options(config.redis.url, config.redis)) as stranger:
        try:
            stranger.ping()
            found.append("it answers without a password; give it users (deploy/users.acl), or a firewall at the least")
        except redis.RedisError:
            pass
    with connect_redis(Address("doctor", config.redis.url, ""), config, "coordinator") as client:
        try:
            users = dict.fromkeys([str(client.acl_whoami()), "default"])
            rights: dict[str, Any] = {user: client.acl_getuser(user) for user in users}
        except redis.ResponseError:
            return found  # a user that may not ask may not do everything
    all_of = {"flags": "on", "categories": "+@all", "keys": "~*"}
    mighty = [user for user, may in rights.items() if may and all(what in may[part] for part, what in all_of.items())]
    if named := " and the user ".join(mighty):
        found.append(f"the user {named} may do everything; give each role its own (deploy/users.acl)")
    return found


def old_redis(config: Config) -> list[str]:
    """Advice if the server lacks published security fixes."""
    with connect_redis(Address("doctor", config.redis.url, ""), config, "coordinator") as client:
        info: Any = client.info("server")
    valkey = info.get("valkey_version")
    advice = missing_fixes("Valkey" if valkey else "Redis", str(valkey or info["redis_version"]))
    return [advice] if advice else []


def old_embedded_redis() -> list[str]:
    """Advice if the server of embedded runs lacks published security fixes."""
    said = subprocess.run([redis_binary(), "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    found = re.search(r"(Redis|Valkey) server v=(\d+\.\d+\.\d+)", said)
    if found is None:
        raise ValueError(f"{redis_binary()} --version printed {said[:80]!r}")
    advice = missing_fixes(*found.groups())
    return [f"{redis_binary()}: {advice}"] if advice else []


def open_bucket(config: Config) -> list[str]:
    """A bucket that can be listed or read by anybody."""
    address = Address("doctor", "", config.store.url, config.store.endpoint_url)
    parts, store = urlsplit(config.store.url), open_store(address, config)
    if parts.scheme != "s3":
        return []
    bucket, client, stranger = parts.netloc, s3_client(address, config.store), s3_client(address, config.store)
    stranger.meta.events.register("choose-signer.s3.*", disable_signing)
    key = "/".join(part for part in (parts.path.strip("/"), "doctor", PROBE) if part)
    store.put(PROBE, b"stagecoach")
    try:
        asked: dict[str, Callable[[], object]] = {
            "it can be listed": lambda: "IsTruncated" in stranger.list_objects_v2(Bucket=bucket, MaxKeys=1),
            "read": lambda: stranger.get_object(Bucket=bucket, Key=key)["Body"].read() == b"stagecoach",
            "its policy says so": lambda: client.get_bucket_policy_status(Bucket=bucket)["PolicyStatus"]["IsPublic"],
        }
        done = [what for what, ask in asked.items() if _succeeds(ask)]
    finally:
        with suppress(DeletionRefused):
            store.delete(PROBE)
    advice = "block public access, or have the server ask for keys"
    return [f"anybody may use the bucket without credentials ({', '.join(done)}); {advice}"] if done else []


def _succeeds(ask: Callable[[], object]) -> bool:
    try:
        return bool(ask())
    except (*FAILURES, KeyError):
        return False


def open_ray(gcs_address: str, dashboard: str) -> list[str]:
    """A Ray that lets strangers run code: without a token, or by its dashboard."""
    found = []
    if _lets_in_without_token(gcs_address):
        found.append(
            "it asks for no token, so anyone who reaches its ports runs code on the cluster; start it with "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (docs/operations/security.md)"
        )
    if dashboard and _answers(dashboard, "/api/version"):
        found.append(
            f"its dashboard at {dashboard} answers without a token, and it takes jobs; turn token authentication on, "
            f"or start Ray with --include-dashboard=false"
        )
    return found


def _lets_in_without_token(gcs_address: str) -> bool:
    """Asks in a process of its own, since this one may hold the token, which Ray reads once."""
    command, environment = [sys.executable, "-c", CONNECT, gcs_address], child_environment(RAY_AUTH_MODE="disabled")
    try:
        return subprocess.run(command, env=environment, capture_output=True, timeout=_RAY_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _answers(address: str, path: str) -> bool:
    with closing(http.client.HTTPConnection(address, timeout=_ASK_SECONDS)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def _on_this_machine(url: str) -> bool:
    """Returns whether this URL's host is on loopback."""
    try:
        found = socket.getaddrinfo(urlsplit(url).hostname, None)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(item[4][0]).partition("%")[0]).is_loopback for item in found)
