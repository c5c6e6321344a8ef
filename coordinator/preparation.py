"""What is checked before a run starts, and what Redis and the store hold of it before any role does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import redis
import torch

from coordinator.environment_trial import try_environment
from rollout_worker.making import check_evaluation, describe_environment, make_native
from shared.bodies import bytes_by_shard
from shared.checkpoint import CONFIG, ENVIRONMENT, FINISHED, Checkpoint, checkpoint_name
from shared.config import Config, StopConfig
from shared.config_sources import dump_config
from shared.connection import Address, RoleName, check_shards, connect_redis, impatient
from shared.datasets.reading import read_dataset
from shared.errors import (
    ArchiveIncomplete,
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    ObjectMissing,
    RunExists,
    StagecoachError,
    UserError,
)
from shared.events import emit
from shared.experience_log import ExperienceLog
from shared.failure import RunEnd
from shared.ledger import read_books
from shared.object_store import open_store
from shared.policies.policy import Policy
from shared.policies.registry import build_policies
from shared.quarantine import drop_entries
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.spaces import EnvironmentDescription
from trainer_node.algorithms.compiling import check_compiling
from trainer_node.beginning import last_epoch, tell_other_versions
from trainer_node.filters import ExperienceFilter
from trainer_node.learner import make_learner
from trainer_node.onnx_export import require_onnx
from trainer_node.rebase import initialised, rebased
from trainer_node.recollection import restore_whole
from trainer_node.retention import status_file
from trainer_node.snapshot import other_versions

FIRST_CHECKPOINT = checkpoint_name(0, 0)
_MOST_VALUE_BYTES = 511 << 20
"""Redis refuses a value of more than 512 MiB (proto-max-bulk-len); names and a header come beside the arrays."""
_TRAINED_COPIES = 4
"""Weights, their gradients, and Adam's two moments."""
_LOGGER = logging.getLogger("stagecoach.coordinator")


def check(config: Config, inline: bool = False, strict: bool = False) -> EnvironmentDescription:
    """Tries the environment and makes the policies once, and refuses what would fail or wait for ever later on.

    The environment is tried in a process of its own; `inline` only makes it, here, where a debugger sees it.
    With `strict` it may not even raise.

    Raises `EnvironmentUnusable`, `UnsupportedSpace` or `ConfigError`.
    """
    algorithm = config.algorithm.resolved()
    try:
        algorithm.refuse(config)
        algorithm.refuse_demonstrations(config)
    except ValueError as error:  # of a user's own: those that come with Stagecoach said so as the config was read
        raise ConfigError(str(error)) from None
    description = _make_here(config) if inline else try_environment(config).refuse(config, strict)
    for policy_id, policy in config.policies.items():
        ExperienceFilter(policy, f"policies.{policy_id}")
    _check_networks(config, partial(build_policies, description.policies, config.policies, algorithm, seed=0))
    _check_device(config)
    if config.checkpoint.export != "off" and config.ray.address == "embedded":
        require_onnx()  # elsewhere the trainer's machine has to have it
    if config.trainer.compile:
        check_compiling(here=config.ray.address == "embedded")
    rollout = config.rollout
    fragment = description.fragment_bytes(rollout.fragment_steps, config.environment.num_envs, config.state_sizes)
    window = (rollout.max_policy_lag + 1) * rollout.fragments_per_update
    _check_fragment_fits(fragment, description)
    if fragment * (window + rollout.fragments_per_update) > rollout.max_log_bytes:
        raise ConfigError(
            f"rollout.max_log_bytes={rollout.max_log_bytes} cannot hold the fragments in flight: {window} + "
            f"{rollout.fragments_per_update} of about {fragment} bytes each; workers and trainer would wait for each "
            f"other for ever. Raise it, or lower rollout.fragment_steps or environment.num_envs"
        )
    return description


def _make_here(config: Config) -> EnvironmentDescription:
    description = describe_environment(config)
    if config.environment.vectorization == "native":
        make_native(config.environment).close()
    check_evaluation(config, description)
    return description


def _check_networks(config: Config, build: Callable[[], dict[str, Policy]]) -> None:
    """Makes the policies once, but not before it is known that they fit into this machine and into a policy version.

    Else Linux would end this process, or the trainer would fail at its first publication, after all else has started.
    """
    try:
        with torch.device("meta"):  # sizes without memory
            size = _size(build())
    except Exception:  # a class of the user's own may need real tensors
        size = _size(build())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    copies = _TRAINED_COPIES if config.ray.address == "embedded" else 1
    smaller = "make the network smaller (policies.<id>.hidden_sizes)"
    if size * copies > memory:
        trained = ", to train it takes four times as much" if copies > 1 else ""
        raise ConfigError(
            f"the policies take {size / 1e9:,.1f} GB{trained}, and this machine has {memory / 1e9:,.1f} GB; {smaller}"
        )
    if config.policy_versions.transport == "redis" and size > _MOST_VALUE_BYTES:
        raise ConfigError(
            f"a policy version of {size} bytes is more than one value of Redis holds ({_MOST_VALUE_BYTES} bytes); set "
            f"policy_versions.transport: object_store, or {smaller}"
        )
    build()  # perhaps gigabytes, free again at once


def _size(policies: dict[str, Policy]) -> int:
    return sum(part.nbytes for policy in policies.values() for part in (*policy.parameters(), *policy.buffers()))


def _check_fragment_fits(size: int, description: EnvironmentDescription) -> None:
    """Else a worker would fail at its first push. Images travel smaller than they are, by how much is not known."""
    leaves = [leaf for spaces in description.policies.values() for leaf in spaces.observation.leaves]
    if size > _MOST_VALUE_BYTES and not any(leaf.is_image for leaf in leaves):
        raise ConfigError(
            f"a fragment of about {size} bytes is more than one value of Redis holds ({_MOST_VALUE_BYTES} bytes); "
            f"lower rollout.fragment_steps or environment.num_envs, and raise rollout.fragments_per_update instead"
        )


def with_recorded(config: Config, description: EnvironmentDescription) -> Config:
    """The config with the SHA-256 of what its dataset and its demonstrations hold, by which they are known again.

    Raises `DatasetError` where one cannot be read, does not fit the environment, or is not what the config says.
    """
    sections = [section for section in (config.dataset, config.demonstrations) if section is not None]
    hashes = {item.section: {"sha256": read_dataset(item, description).sha256} for item in sections}
    return config.model_copy(update={item.section: item.model_copy(update=hashes[item.section]) for item in sections})


def _check_device(config: Config) -> None:
    """On a cluster the trainer's machine may have what this one lacks; here it can be known."""
    here = config.ray.address == "embedded"
    for field, device in (("trainer.device", config.trainer.device), ("rollout.device", config.rollout.device)):
        if here and device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"{field}={device}, but PyTorch finds no CUDA device here; use cpu or auto")


def check_services(config: Config) -> None:
    """Refuses, before anything is started, a Redis or store of one's own that cannot be used.

    Raises `RedisUnavailable` or `StoreUnavailable`, after one try: a person waits.
    """
    if config.redis.url != "embedded":
        address = Address("", config.redis.url, "")
        connect_redis(address, impatient(config), "coordinator").close()
        check_shards(address, impatient(config), "coordinator")
    if config.store.url != "embedded":
        open_store(Address("", "", config.store.url, config.store.endpoint_url), config).check()


def connect_once(role: Role, name: RoleName) -> redis.Redis:
    """A client that tries once, where Redis may be what failed; raises `RedisUnavailable`."""
    return connect_redis(role.address, impatient(role.config), name)


def prepare_new(role: Role, description: EnvironmentDescription, source: Checkpoint | None = None) -> None:
    """Records a new run; raises `RunExists` where Redis or the store has one of this id, and then changes nothing.

    With `source`, a checkpoint of any run, version 0 has its policies.
    """
    store, config = role.checkpoints.store, role.config
    try:
        store.get(CONFIG)
    except ObjectMissing:
        pass
    else:
        raise RunExists(f"the store has a run {role.run_id!r} already; choose another --run-id, or resume it")
    if role.redis.exists(RunKeys(role.run_id).flow):
        raise RunExists(f"Redis has a run {role.run_id!r} already; choose another --run-id, or resume it")
    try:
        store.put(ENVIRONMENT, json.dumps(description.as_dict(), indent=1).encode())
        store.put(CONFIG, dump_config(config).encode())
        first = None if source is None else initialised(role, source)
        if first is not None:
            role.checkpoints.write(first.manifest, first.objects)
        create_flow(role)
        if first is not None:
            said = first.manifest.provenance["initialized_from"]
            text = f"begins with {said['checkpoint']} of run {said['run_id']}; {said['summary']}"
            emit(role.redis, role.run_id, "trainer", text)
    except StagecoachError:
        with contextlib.suppress(StagecoachError):
            if source is not None:
                role.checkpoints.delete(FIRST_CHECKPOINT)
            for key in (ENVIRONMENT, CONFIG):
                store.delete(key)
        raise


def prepare_resume(
    role: Role,
    origin: str = "latest",
    before: StopConfig | None = None,
    drop: tuple[str, ...] = (),
    strict: bool = False,
) -> None:
    """Makes an ended run run again: takes `.finished` away and gives back what dead workers had claimed.

    `before` says where it was to end so far: what was cut off just there may be resumed to end in order.
    From the newest good checkpoint and the log behind it; or from `origin`, an older checkpoint, which then goes on as
    a new version: what was learnt since is left behind. Nothing is written before `origin` is found good. `drop` names
    log entries (`POSITION`, `FIRST..LAST`) that are not learnt from, such as those that ended the run. With `strict` a
    checkpoint of other versions of code or libraries is refused; else that is told.
    """
    _refuse_unbegun(role)
    checkpoint = _older(role, origin)
    if strict:
        _refuse_other_versions(role, checkpoint)
    _refuse_reached(role, checkpoint, before)
    _refuse_shards_left_out(role)
    drop_entries(role, drop)
    if not create_flow(role):
        rollout = role.config.rollout
        role.check_config(shards_may_change=True)
        role.flow.set_bounds(rollout.lease_seconds, rollout.max_log_bytes, role.bodies.names)
        role.flow.set_scaling(rollout.scaling, rollout.min_workers, rollout.max_workers, rollout.workers)
        role.flow.release()
        role.redis.delete(RunKeys(role.run_id).heartbeats, RunKeys(role.run_id).draining)
        _forget_trails(role)
    if checkpoint is not None:
        taken = rebased(role, checkpoint, role.flow.take_over(last_epoch(role)))
        role.checkpoints.write(taken.manifest, taken.objects)
        text = f"{checkpoint.manifest.name} goes on as {taken.manifest.name}, as resume --from {origin} asked"
        emit(role.redis, role.run_id, "trainer", text)
        tell_other_versions(role, checkpoint)  # of the newest one the trainer tells
    role.checkpoints.store.delete(FINISHED)
    role.flow.set_state("running", "")


def _refuse_other_versions(role: Role, checkpoint: Checkpoint | None) -> None:
    """Before anything is changed; raises `UserError`."""
    with contextlib.suppress(CheckpointNotFound):  # cut off before its first one, it begins with these versions
        checkpoint = checkpoint or role.checkpoints.newest_good()[0]
    if checkpoint is not None and (said := other_versions(checkpoint.manifest)):
        raise UserError(f"resume --strict: {said}; nothing was changed, install those versions or leave --strict out")


def _refuse_shards_left_out(role: Role) -> None:
    """What the log names on a shard can be read from that one only."""
    sizes = bytes_by_shard(role.redis, role.run_id)
    missing = sorted(set(sizes) - set(role.bodies.names))
    if missing:
        raise UserError(
            f"redis.shards={list(role.config.redis.shards)} leaves out {', '.join(missing)}, where the log of run "
            f"{role.run_id} has {sum(sizes[shard] for shard in missing)} bytes that are not learnt from yet; name it "
            f"again. (If its data are gone, an empty server at that address will do: they are dropped, and counted.)"
        )


def _forget_trails(role: Role) -> None:
    """Of workers that the run no longer has; they would stay in Redis."""
    keys, wanted = RunKeys(role.run_id), {f"worker-{index}" for index in range(role.config.rollout.workers)}
    known: Any = role.redis.hkeys(keys.incarnations)
    for worker in {name.decode(errors="replace") for name in known} - wanted:
        ExperienceLog(role.redis, role.run_id).forget_trail(worker)


def _older(role: Role, origin: str) -> Checkpoint | None:
    """The checkpoint to go back to, verified and restored once; None where `origin` is where the run goes on anyway."""
    if origin == "latest":
        return None
    try:
        name = role.checkpoints.resolve(origin)
        newest, _ = role.checkpoints.newest_good()
        if name == newest.manifest.name:
            return None
        found = role.checkpoints.load(name)
        restore_whole(make_learner(role.config, role.description()), found, role.archive(), role.log())
    except (CheckpointDamaged, ArchiveIncomplete) as error:
        raise UserError(f"resume --from {origin}: {error}; nothing was changed, choose another checkpoint") from None
    return found


def _refuse_unbegun(role: Role) -> None:
    """A run that was cut off before it had the weights that it was to begin with would begin without them."""
    if role.config.initialize_from is None:
        return
    try:
        role.checkpoints.newest_good()
    except CheckpointNotFound:
        raise UserError(
            f"run {role.run_id!r} was cut off before it had the policies of {role.config.initialize_from}, and would "
            f"begin without them; start a new run"
        ) from None
    except CheckpointDamaged:
        return  # the trainer tells


def record_failure(role: Role, end: RunEnd) -> None:
    """`.finished` for a run that fails where no trainer can write it (any more)."""
    try:
        if role.checkpoints.marker(FINISHED) is not None:
            return
        books = {}
        try:
            role.flow.set_state("finished", end.reason, failure=end.failure)
            books = {worker: line.as_dict() for worker, line in read_books(role.redis, role.run_id).items()}
        except redis.RedisError as error:  # perhaps the very failure; the store shall have it all the same
            _LOGGER.warning("Redis does not take the end of the run: %s", error)
        content: dict[str, Any] = {"run_id": role.run_id, "reason": end.reason, "failure": end.failure, "ledger": books}
        content |= {"final": None, "counters": None, "time": round(time.time(), 3)}
        role.checkpoints.write_marker(FINISHED, content)
    except (StagecoachError, redis.RedisError):
        _LOGGER.exception("the failure could not be recorded in Redis or the store")


def create_flow(role: Role) -> bool:
    """The flow hash of the run, from its config; False where it is there already."""
    rollout = role.config.rollout
    return role.flow.create(
        fragments_per_update=rollout.fragments_per_update,
        max_policy_lag=rollout.max_policy_lag,
        lease_seconds=rollout.lease_seconds,
        max_log_bytes=rollout.max_log_bytes,
        workers=rollout.workers,
        scaling=rollout.scaling,
        min_workers=rollout.min_workers,
        max_workers=rollout.max_workers,
        config_hash=role.config.hash(),
        shards=role.bodies.names,
    )


def _refuse_reached(role: Role, origin: Checkpoint | None, before: StopConfig | None) -> None:
    finished, status = role.checkpoints.marker(FINISHED) or {}, status_file(role.checkpoints)
    newest: dict[str, Any] = next(reversed(status.get("checkpoints", [])), {})
    reached = (finished.get("counters") or {}).get("train") or newest
    if origin is not None:
        reached = origin.manifest.provenance["counters"]["train"]
    in_order = finished.get("final") is not None  # else it failed or was cut off, perhaps in the midst of ending
    for name in ("env_steps", "updates", "episodes"):
        bound, value = getattr(role.config.stop_at, name), int(reached.get(name, 0))
        if not in_order and origin is None and bound == getattr(before, name, None):
            continue
        if bound is not None and value >= bound:
            raise UserError(
                f"the run has {value} {name} and stop_at.{name}={bound}, so it would end at once; "
                f"continue it with --set stop_at.{name}={bound + max(value, 1)}"
            )
