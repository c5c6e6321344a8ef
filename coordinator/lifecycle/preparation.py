"""Prepares Redis and the store for a new or continued run, before any role starts."""

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import redis

from stagecoach.coordinator.catalog.fixed_players import NO_PLAYERS, Players, store_players
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import (
    ArchiveIncomplete,
    CheckpointDamaged,
    CheckpointNotFound,
    Fenced,
    ObjectMissing,
    RunExists,
    StagecoachError,
    UserError,
)
from stagecoach.shared.base.failure import RunEnd
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.sections import StopConfig
from stagecoach.shared.experience.log_entry import START
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.keys import BEATING, RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.payload_shards import bytes_by_shard
from stagecoach.shared.protocol.quarantine import drop_entries
from stagecoach.shared.protocol.shared_memory import PLACE
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import CONFIG, ENVIRONMENT, FINISHED, Checkpoint, CheckpointStore
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS
from stagecoach.trainer_node.checkpointing.retention import status_file
from stagecoach.trainer_node.learning.learner import make_learner
from stagecoach.trainer_node.recovery.recovery import last_epoch, restore_learner, tell_other_versions
from stagecoach.trainer_node.state.fork import Source, beginnings, forked, forked_whole, rolled_back
from stagecoach.trainer_node.state.snapshot import other_versions

FirstState = Mapping[str, Source] | Checkpoint
"""Source of version 0: policy id → source of its weights (none: untrained), or a checkpoint for all."""


@dataclass(frozen=True)
class Continuation:
    """Arguments of a resume; see `prepare_resume`."""

    origin: str = "latest"
    drop: tuple[str, ...] = ()
    strict: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments for `stagecoach train --or-resume`."""
        origin = (f"--from={self.origin}",) if self.origin != "latest" else ()
        return (*origin, *(f"--drop={position}" for position in self.drop), *(("--strict",) if self.strict else ()))


EXACTLY = Continuation()
_LOGGER = logging.getLogger("stagecoach.coordinator")


def prepare_new(
    context: RunContext, description: EnvironmentDescription, source: FirstState = MappingProxyType({}),
    players: Players = NO_PLAYERS,
) -> None:  # fmt: skip
    """Records a new run; raises `RunExists`, and changes nothing, if Redis or the store has one of this id.

    Args:
        source: where version 0 comes from: policy id → source of its weights, or a checkpoint for all.
        players: bytes of the fixed players that were read already.
    """
    store = context.checkpoints.store
    if (holder := _holder(context)) is not None:
        raise RunExists(f"{holder} already has a run {context.run_id!r}; choose another --run-id, or resume it")
    try:
        store.put(ENVIRONMENT, json.dumps(description.as_dict(), indent=1).encode())
        first: Checkpoint | None
        if isinstance(source, Checkpoint):
            first = forked_whole(context, source)
        else:
            first = forked(context, source) if source else None
        store_players(store, context.config, players, first)
        if first is not None:
            context.checkpoints.write(first.manifest, first.objects)
        store.put(CONFIG, dump_config(context.config).encode())  # last: marks a complete preparation
        create_flow(context)
        if first is not None:
            said = first.manifest.provenance["initialized_from"]
            text = f"begins with {said['checkpoint']} of run {said['run_id']}; {said['summary']}"
            emit(context.redis, context.run_id, "trainer", text)
    except StagecoachError:
        with contextlib.suppress(StagecoachError):
            for name in context.checkpoints.names():
                context.checkpoints.delete(name)
            for key in (ENVIRONMENT, CONFIG, *store.keys(SHARED_OBJECTS)):
                store.delete(key)
        raise


def _holder(context: RunContext) -> str | None:
    """Names the service that already has this run; None if its preparation never completed."""
    with contextlib.suppress(ObjectMissing):
        context.checkpoints.store.get(CONFIG)
        return "the store"
    return "Redis" if context.redis.exists(RunKeys(context.run_id).flow) else None


def prepare_resume(
    context: RunContext, origin: str = "latest", before: StopConfig | None = None, drop: tuple[str, ...] = (),
    strict: bool = False, begin: Callable[[RunContext], None] | None = None,
) -> None:  # fmt: skip
    """Lets an ended run continue: removes `.finished` and releases the claims of dead workers.

    Args:
        origin: the checkpoint to continue from. An older one is verified first, continues as a new version, and
            discards what was learned since.
        before: the run's former goal; a run interrupted at that goal may be resumed to end in order.
        drop: log entries (`POSITION`, `FIRST..LAST`) to skip, such as those that ended the run.
        strict: rejects a checkpoint of other versions of code or libraries instead of reporting them.
        begin: prepares the run as a new one if its first preparation was interrupted.
    """
    if begin is not None and origin == "latest" and _holder(context) is None:
        begin(context)
        return
    _refuse_unbegun(context)
    checkpoint = _older(context, origin)
    if strict:
        _refuse_other_versions(context.checkpoints, checkpoint)
    refuse_reached(context.checkpoints, context.config.stop_at, checkpoint, before)
    _refuse_shards_left_out(context)
    if drop:
        drop_entries(context.redis, context.run_id, drop, _durable(context.checkpoints))
    if not create_flow(context):
        rollout = context.config.rollout
        context.check_config(shards_may_change=True)
        context.flow.set_bounds(rollout.lease_seconds, rollout.max_log_bytes, context.bodies.names)
        context.flow.set_scaling(rollout.scaling, rollout.min_workers, rollout.max_workers, rollout.workers)
        context.flow.release()
        keys = RunKeys(context.run_id)
        context.redis.delete(keys.draining, *map(keys.heartbeats, BEATING))
        known: Any = context.redis.hkeys(keys.incarnations)
        kept = {f"worker-{index}" for index in range(rollout.workers)}
        for worker in {name.decode(errors="replace") for name in known} - kept:
            ExperienceLog(context.redis, context.run_id).forget_action_trace(worker)
    epoch = context.flow.take_over(last_epoch(context.checkpoints))  # what a dead trainer has sent comes too late now
    if checkpoint is not None:
        taken = rolled_back(context, checkpoint, epoch).checkpoint
        context.checkpoints.write(taken.manifest, taken.objects)
        text = f"{checkpoint.manifest.name} continues as {taken.manifest.name}, as resume --from {origin} asked"
        emit(context.redis, context.run_id, "trainer", text)
        tell_other_versions(context.redis, checkpoint.manifest)  # the trainer reports it for the newest one
    context.checkpoints.clear_marker(FINISHED)
    while not _set_running(context, epoch):
        epoch = context.flow.take_over(epoch)


def _durable(checkpoints: CheckpointStore) -> str:
    """Returns the log position of the newest checkpoint."""
    try:
        return checkpoints.newest_good()[0].manifest.log_position
    except CheckpointNotFound:
        return START


def _set_running(context: RunContext, epoch: int) -> bool:
    """Sets the state from the one that it has, and as long as no trainer takes over: a late command must not undo an
    order to stop. Returns whether the run is running; else Redis was rolled back meanwhile, or a trainer was started.
    """
    try:
        return context.flow.set_state(RunState.RUNNING, "", expected=context.flow.read().state, epoch=epoch)
    except Fenced:
        return False


def _refuse_other_versions(checkpoints: CheckpointStore, checkpoint: Checkpoint | None) -> None:
    with contextlib.suppress(CheckpointNotFound):  # interrupted before its first checkpoint
        checkpoint = checkpoint or checkpoints.newest_good()[0]
    if checkpoint is not None and (said := other_versions(checkpoint.manifest)):
        raise UserError(f"resume --strict: {said}; nothing was changed; install those versions or leave --strict out")


def _refuse_shards_left_out(context: RunContext) -> None:
    """Raises `UserError` if the config omits a shard that holds bodies of the log."""
    sizes = bytes_by_shard(context.redis, context.run_id)
    missing = sorted(set(sizes) - {*context.bodies.names, PLACE})
    if missing:
        raise UserError(
            f"redis.shards={list(context.config.redis.shards)} leaves out {', '.join(missing)}, where the log of run "
            f"{context.run_id} has {sum(sizes[shard] for shard in missing)} bytes not learned from yet; add it again "
            f"(an empty server at that address if the data are lost: they are then dropped, and counted)"
        )


def _older(context: RunContext, origin: str) -> Checkpoint | None:
    """Loads and verifies an older checkpoint to return to; None if `origin` is the newest."""
    if origin == "latest":
        return None
    try:
        name = context.checkpoints.resolve(origin)
        newest, _ = context.checkpoints.newest_good()
        if name == newest.manifest.name:
            return None
        found = context.checkpoints.load(name)
        restore_learner(make_learner(context.config, context.description()), found, context.archive(), context.log())
    except (CheckpointDamaged, ArchiveIncomplete) as error:
        raise UserError(f"resume --from {origin}: {error}; nothing was changed; choose another checkpoint") from None
    return found


def _refuse_unbegun(context: RunContext) -> None:
    """Raises `UserError` for a run that was interrupted before it had its initial weights."""
    try:
        with contextlib.suppress(CheckpointDamaged):  # the trainer reports it
            if beginnings(context.config):
                context.checkpoints.newest_good()
    except CheckpointNotFound:
        origins = ", ".join(sorted({*beginnings(context.config).values()}))
        raise UserError(
            f"run {context.run_id!r} was interrupted before it had the policies of {origins}, and would start "
            f"without them; start a new run"
        ) from None


def record_failure(context: RunContext, end: RunEnd) -> None:
    """Writes `.finished` for a failed run whose trainer cannot."""
    try:
        if context.checkpoints.marker(FINISHED) is not None:
            return
        ledger = {}
        try:
            context.flow.set_state(RunState.FINISHED, end.reason, failure=end.failure)
            ledger = {name: line.as_dict() for name, line in read_accounting(context.redis, context.run_id).items()}
        except redis.RedisError as error:  # perhaps the failure itself
            _LOGGER.warning("Redis rejects the end of the run: %s", error)
        said: dict[str, Any] = {"reason": end.reason, "failure": end.failure, "ledger": ledger}
        said |= {"final": None, "counters": None, "time": round(world.unix_time(), 3)}
        context.checkpoints.write_marker(FINISHED, {"run_id": context.run_id, **said})
    except (StagecoachError, redis.RedisError):
        _LOGGER.exception("the failure could not be recorded in Redis or the store")


def create_flow(context: RunContext) -> bool:
    """Creates the flow hash of the run; returns False if it exists."""
    return context.flow.create(context.config, context.bodies.names)


def refuse_reached(
    checkpoints: CheckpointStore, stop_at: StopConfig, origin: Checkpoint | None, before: StopConfig | None
) -> None:
    """Raises `UserError` if the run, whose former goal was `before`, would end at once."""
    finished = checkpoints.marker(FINISHED) or {}
    newest: dict[str, Any] = next(reversed(status_file(checkpoints).get("checkpoints", [])), {})
    reached = (finished.get("counters") or {}).get("train") or newest
    if origin is not None:
        reached = origin.manifest.provenance["counters"]["train"]
    in_order = finished.get("final") is not None  # else it failed or was interrupted, perhaps while ending
    for name in ("env_steps", "updates", "episodes"):
        bound, value = getattr(stop_at, name), int(reached.get(name, 0))
        if not in_order and origin is None and bound == getattr(before, name, None):
            continue
        if bound is not None and value >= bound:
            raise UserError(
                f"the run has {value} {name} and stop_at.{name}={bound}, so it would end at once; "
                f"continue it with --set stop_at.{name}={bound + max(value, 1)} (in Python: overrides)"
            )
