"""Starts, resumes and submits runs, after checking everything."""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import redis

from stagecoach.coordinator.catalog.checkpoint_lookup import Found, find_checkpoint, named_code
from stagecoach.coordinator.catalog.fixed_players import Players, read_snapshot, with_fixed_players
from stagecoach.coordinator.catalog.run_folder import RemoteLink, RunFolder, Submission, new_run_id
from stagecoach.coordinator.catalog.status import ended_status, is_supervised
from stagecoach.coordinator.lifecycle.preparation import (
    EXACTLY,
    Continuation,
    FirstState,
    prepare_new,
    prepare_resume,
    refuse_reached,
)
from stagecoach.coordinator.lifecycle.ray_job import OR_RESUME, JobCoordinator, JobServer, submit_and_follow
from stagecoach.coordinator.lifecycle.supervisor import Coordinator
from stagecoach.coordinator.lifecycle.validation import check, check_services, with_recorded
from stagecoach.coordinator.services.ray_head import launched_ahead
from stagecoach.rollout_worker.environments.description import check_new, check_recorded
from stagecoach.rollout_worker.environments.objects import pack, with_object
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    ObjectMissing,
    RedisUnavailable,
    RunNotFound,
    StoreUnavailable,
    UserError,
)
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.loading import parse_config, parse_yaml
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.protocol.keys import check_run_id
from stagecoach.shared.protocol.redis_client import connect_redis, without_retries
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import CONFIG, Checkpoint
from stagecoach.shared.storage.object_store import open_store
from stagecoach.trainer_node.state.fork import Source, beginnings, policies_in, take_over
from stagecoach.trainer_node.state.snapshot import POLICY, learned_sha256

Begun = Callable[[], None]
"""Called right before the roles start: from then on only `stop`, not an exception, ends the run cleanly."""
Started = tuple[RunFolder, Config, Coordinator | JobCoordinator | None]
"""Folder, config and supervisor (None if the run has already reached its end)."""


def start(
    config: Config, run_id: str | None, inline: bool, or_resume: bool, import_path: tuple[str, ...], begun: Begun,
    make_room: Callable[[], None], how: Continuation,
) -> Started:  # fmt: skip
    with _ray_ahead(config, inline):
        import_path = (os.getcwd(), *import_path)
        extend_imports(import_path)
        name = new_run_id(config) if run_id is None else run_id
        before = _config_of_existing(config, name) if or_resume else None
        scripts = [f"{field}={path}" for field, path in named_code(config).items() if "__main__:" in path]
        if scripts and not inline:
            raise ConfigError(
                f"{', '.join(scripts)}: workers and trainer cannot import a script; put this into a module"
            )
        config, description, players = _checked(config, import_path, inline, before)
        if before is not None:
            _check_same_learning(config, before)
            folder = RunFolder.of(config, name) or RunFolder.create(config, name, import_path)
            at_its_end = ended_status(folder.checkpoint_store(before)).reason in ("solved", "exhausted")
            if before.stop_at == config.stop_at and at_its_end and not how.arguments:
                folder.unlock()
                return folder, before, None
            return _continue(folder, config, description, players, before, how, inline, begun)
        if how.arguments:
            raise UserError(f"{' '.join(how.arguments)}: run {name!r} does not exist yet; leave that out to start it")
        source = first_state(config, description)
        make_room()
        folder = RunFolder.create(config, name, import_path)
        try:
            prepare = partial(prepare_new, description=description, source=source, players=players)
            return folder, config, Coordinator(folder, config, prepare, inline, begun)
        except BaseException:
            folder.remove()
            raise


def _ray_ahead(config: Config, inline: bool) -> AbstractContextManager[None]:
    """Ray and the zygote start while the run is checked."""
    _refuse_fork()
    return nullcontext() if inline else launched_ahead(config)


def prepare(config: Config, run_id: str, import_path: tuple[str, ...]) -> None:
    if config.environment.given_object is not None:
        raise UserError(
            f"environment.id={config.environment.id}: roles that are started by other means cannot get an object; name "
            f"a factory, module:factory"
        )
    if "embedded" in (config.redis.url, config.store.url):
        raise UserError("roles on other machines need permanent servers: set redis.url and store.url")
    _refuse_fork()
    config, description, players = _checked(config, (os.getcwd(), *import_path))
    source = first_state(config, description)
    address = Address(check_run_id(run_id), config.redis.url, config.store.url, config.store.endpoint_url)
    context = open_run_context(config, address, "coordinator")
    with context.redis:
        prepare_new(context, description, source, players)


def resume(
    folder: RunFolder, overrides: tuple[str, ...], how: Continuation, inline: bool, begun: Begun,
    environment: Any = None,
) -> Started:  # fmt: skip
    if (elsewhere := folder.remote) is not None:
        return _resume_there(folder, elsewhere, overrides, how, inline, begun)
    before = folder.config()
    config = with_object(folder.config(overrides), environment)
    with _ray_ahead(config, inline):
        config, description, players = _checked(config, folder.import_path(), inline, before)
        _check_same_learning(config, before)
        return _continue(folder, config, description, players, before, how, inline, begun)


def _resume_there(
    folder: RunFolder, elsewhere: RemoteLink, overrides: tuple[str, ...], how: Continuation, inline: bool, begun: Begun
) -> Started:
    """Continues a run by another job on its cluster."""
    sent = _submission_of(folder, elsewhere)
    if inline:
        raise UserError(f"--inline runs all roles in this process, but run {folder.run_id!r} is on a cluster")
    before, config = folder.config(), folder.config(overrides)
    _check_same_learning(config, before)
    _refuse_live(folder, config)
    if how.origin == "latest":  # the cluster checks an older one
        refuse_reached(folder.checkpoint_store(config), config.stop_at, None, before.stop_at)
    sent = sent.model_copy(update={"command": (*sent.command, *(f"--set={item}" for item in overrides))})
    coordinator = submit_and_follow(folder, config, sent, JobServer(sent.cluster), how.arguments, replace=True)
    folder.write_config(config)
    begun()
    return folder, config, coordinator


def _submission_of(folder: RunFolder, elsewhere: RemoteLink) -> Submission:
    if elsewhere.submission is None:
        raise UserError(
            f"run {folder.run_id!r} is on other machines and was not submitted from here; continue it where its "
            f"config is: {folder.continued_by}"
        )
    return elsewhere.submission


def _refuse_live(folder: RunFolder, config: Config) -> None:
    """Raises `RunLive` if the run's Redis shows a coordinator on another machine."""
    if config.redis.url == "embedded":
        return
    address, once = folder.offline_address(config), without_retries(config)
    with (
        suppress(RedisUnavailable, redis.ConnectionError, redis.TimeoutError),
        connect_redis(address, once, "viewer") as client,
    ):
        if is_supervised(client, folder.run_id):
            raise folder.already_live()


def submit(
    sent: Submission, config: Config, run_id: str, begun: Begun, make_room: Callable[[], None], how: Continuation
) -> Started:
    with ExitStack() as undo:
        jobs = JobServer(sent.cluster)  # first: if it does not answer, nothing has been deleted
        undo.callback(jobs.close)
        make_room()
        folder = RunFolder.known(config, run_id) if OR_RESUME in sent.command else None
        if folder is not None and folder.remote is not None:
            _refuse_live(folder, config)
        else:
            folder = RunFolder.create(config, run_id)
            undo.callback(folder.remove)
        coordinator = submit_and_follow(folder, config, sent, jobs, how.arguments, replace=True)
        undo.pop_all()
    folder.unlock()
    folder.write_config(config)
    begun()
    return folder, config, coordinator


def take_up(folder: RunFolder, config: Config, begun: Begun) -> Started:
    if (elsewhere := folder.remote) is None:
        return resume(folder, (), EXACTLY, False, begun)
    sent = _submission_of(folder, elsewhere)
    coordinator = submit_and_follow(folder, config, sent, JobServer(sent.cluster))
    begun()
    return folder, config, coordinator


def _checked(
    config: Config, import_path: tuple[str, ...], inline: bool = False, before: Config | None = None
) -> tuple[Config, EnvironmentDescription, Players]:
    """Checks a run; raises a `UserError` if it would fail.

    Returns the config with data hashes and fixed players (those of `before` in a resume), the environment, and the
    players' bytes.
    """
    extend_imports(import_path)
    if (own := config.environment.given_object) is not None and not inline:
        config.environment.hold(own, pack(own))  # before the trial, which may change what its class holds
    description = check(config, inline)
    if before is None:
        check_new(config, description)
    config, players = with_fixed_players(with_recorded(config, description), description, before)
    check_services(config)
    return config, description, players


_starting_process = 0
"""The process that started a run first, here or in a parent."""


def _refuse_fork() -> None:
    """Raises `UserError` in a fork of a process that started runs: PyTorch waits forever for threads it had there."""
    global _starting_process
    _starting_process = _starting_process or os.getpid()
    if _starting_process != os.getpid():
        raise UserError(
            "this process was forked from one that has started runs, and PyTorch would hang in it; create it with "
            "multiprocessing.get_context('spawn') or 'forkserver'"
        )


def _check_same_learning(config: Config, before: Config) -> None:
    by, ranked = config.checkpoint.best_by, before.checkpoint.best_by
    if by != ranked:
        raise ConfigError(
            f"checkpoint.best_by={by} cannot change in a resume: existing scores are ranked by {ranked}, which do "
            f"not compare; leave it, or start a new run with initialize_from"
        )
    if config.hash() != before.hash():
        raise ConfigError(
            f"{', '.join(config.decides_otherwise(before))} cannot change in a resume, because it decides the "
            f"learning (stop_at, rollout.workers, checkpoint … may change); start a new run, which may take over "
            f"this run's policies (initialize_from)"
        )


def _continue(
    folder: RunFolder, config: Config, description: EnvironmentDescription, players: Players, before: Config,
    how: Continuation, inline: bool, begun: Begun,
) -> Started:  # fmt: skip
    """Continues a run whose config was `before`. Removes the folder if it is new and the run cannot continue."""
    changed = config.environment.code_sha256 != before.environment.code_sha256
    text = f"the code of environment {config.environment.id} is not the one that the run was started with"

    def prepared(context: RunContext) -> None:
        beginning = None if folder.begun else begin
        prepare_resume(context, **vars(how), before=before.stop_at, begin=beginning)
        if changed:
            context.emit_event("environment", text)

    def begin(context: RunContext) -> None:
        prepare_new(context, description, first_state(config, description), players)

    made_here = folder.held
    try:
        if not made_here:
            folder.lock()
        with suppress(RunNotFound, StoreUnavailable):  # not written yet; what is lost is reported below
            check_recorded(description, folder.checkpoint_store(config, offline=True).description())
        if changed:
            warnings.warn(f"run {folder.run_id}: {text}; it continues with the new code", stacklevel=4)
        coordinator = Coordinator(folder, config, prepared, inline, begun)
    except BaseException:
        folder.remove() if made_here else folder.unlock()
        raise
    folder.write_config(config)
    return folder, config, coordinator


def _config_of_existing(config: Config, run_id: str) -> Config | None:
    """Config of an existing run, from its folder here or the store; None for a new run."""
    folder = RunFolder.of(config, run_id)
    if folder is not None:
        return folder.config()
    if "embedded" in (config.redis.url, config.store.url):
        return None
    store = open_store(Address(run_id, "", config.store.url, config.store.endpoint_url), config)
    try:
        return parse_config(parse_yaml(store.get(CONFIG).decode(), f"{CONFIG} of run {run_id}"))
    except ObjectMissing:
        return None


def first_state(config: Config, description: EnvironmentDescription) -> FirstState:
    """Returns the source of a new run's version 0, verified to exist."""
    if config.fork_from is None:
        return first_policies(config, description)
    target, _, wanted = config.fork_from.partition("@sha256:")
    try:
        found = find_checkpoint(target, config.runs_dir, config.store)
        checkpoint = found.store.load(found.name)
    except (RunNotFound, CheckpointNotFound) as error:
        raise type(error)(f"fork_from={config.fork_from}: {error}") from None
    except CheckpointDamaged as error:
        raise UserError(f"fork_from={config.fork_from}: {error}; choose another checkpoint") from None
    if wanted and (sha256 := learned_sha256(checkpoint.manifest)) != wanted:
        raise UserError(f"fork_from={config.fork_from}: what {target} has learned has another hash, {sha256}")
    return checkpoint


def first_policies(config: Config, description: EnvironmentDescription) -> dict[str, Source]:
    """Sources of a new run's policies that do not begin untrained, verified to fit."""
    sources, loaded, begun = {}, dict[str, tuple[Found, Checkpoint]](), beginnings(config)
    asked = (description.policies, config.policies, config.algorithm, 0, description.slots)
    made = build_policies(*asked) if begun else {}
    for policy_id, told in begun.items():
        target, _, theirs = told.partition("#")
        if target not in loaded:
            own = "" if config.policies[policy_id].initialize_from is None else f"policies.{policy_id}."
            try:
                found = find_checkpoint(target, config.runs_dir, config.store)
                needed = "policy", "algorithm", "rewards"
                only = tuple(f"{name}.safetensors" for name in needed)
                loaded[target] = found, found.store.load(found.name, only=only)
            except (RunNotFound, CheckpointNotFound) as error:
                raise type(error)(f"{own}initialize_from={told}: {error}") from None
            except CheckpointDamaged as error:
                raise UserError(f"{own}initialize_from={told}: {error}; choose another checkpoint") from None
        found, checkpoint = loaded[target]
        if theirs and (name := POLICY.format(theirs)) not in checkpoint.objects:  # perhaps a snapshot
            snapshot = read_snapshot(f"initialize_from={told}", found, theirs)
            checkpoint = checkpoint if snapshot is None else Checkpoint(checkpoint.manifest, {name: snapshot})
        there = policies_in(checkpoint)
        sources[policy_id] = Source(checkpoint, theirs or (there[0] if len(there) == 1 else policy_id))
        take_over(policy_id, made[policy_id], sources[policy_id])
    return sources
