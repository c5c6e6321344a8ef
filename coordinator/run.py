"""`Run`: starting, watching, scaling and ending a run from Python; the command line only calls this."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from coordinator.checkpoints import (
    Removed,
    Verdict,
    export,
    list_checkpoints,
    promote,
    prune_checkpoints,
    verify,
    withdraw,
)
from coordinator.coordinator import Coordinator, Outcome
from coordinator.elsewhere import Submission, link
from coordinator.find import find_checkpoint
from coordinator.onnx_files import export_onnx
from coordinator.preparation import check, check_services, prepare_new, prepare_resume, with_recorded
from coordinator.redis_outage import outage_of_redis
from coordinator.room import refuse_order, room_of
from coordinator.run_folder import RunFolder, new_run_id
from coordinator.services import BUCKET
from coordinator.status import Status, ended_status, live_status, paused, tended
from coordinator.trust import require_trust
from shared.archive import Archive, experience
from shared.checkpoint import CONFIG, Checkpoint, CheckpointStore
from shared.config import Config
from shared.config_sources import parse_config, parse_yaml
from shared.connection import Address, RoleName, connect_redis, impatient
from shared.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    ConfigError,
    ObjectMissing,
    RedisUnavailable,
    UserError,
)
from shared.events import Event, read_events, recent_events
from shared.experience_log import id_order
from shared.exports import Export
from shared.flow import Flow
from shared.fragment import Fragment
from shared.heartbeat import Wait, poll, read_heartbeats
from shared.object_store import open_store
from shared.policies.deployed import DeployedPolicy, load_policy
from shared.printable import counted
from shared.quarantine import drop_ranges
from shared.redis_keys import check_run_id
from shared.role import open_role, read_description
from shared.user_code import extend_imports
from trainer_node.replay import BEGINNING, Replayed, replay

if TYPE_CHECKING:
    from coordinator.job import JobCoordinator


class Run:
    """A handle on one run: started here, or attached to (live or ended)."""

    def __init__(
        self, folder: RunFolder, config: Config, coordinator: Coordinator | JobCoordinator | None = None
    ) -> None:
        self.run_id = folder.run_id
        self.folder = folder
        self.config = config
        self._coordinator = coordinator
        self._clients: dict[RoleName, redis.Redis] = {}
        self._connected_to: Address | None = None
        self._unreachable: str | None = None
        """Why the Redis of a run that lives elsewhere cannot be reached from here."""

    @classmethod
    def start(
        cls,
        config: Config,
        run_id: str | None = None,
        *,
        inline: bool = False,
        or_resume: bool = False,
        import_path: tuple[str, ...] = (),
        begun: Callable[[], None] = lambda: None,
    ) -> Run:
        """Checks everything, then starts services and roles; returns while the run goes on in the background.

        `inline` puts all roles into this process; with `or_resume` a run of this id that is there already (here, or in
        the store) is continued, and one that has reached its end answered as it is; `import_path` names folders of the
        user's own modules, beside the current one. Raises a `UserError` before anything is started or written. Call it
        from a thread that lives as long as the run: the services end with the thread that started them. `begun` is
        called when the roles are about to start: from there on only `stop` ends the run in order, no exception does.
        """
        import_path = (os.getcwd(), *import_path)
        extend_imports(import_path)
        description = check(config, inline)
        config = with_recorded(config, description)
        check_services(config)
        name = new_run_id(config) if run_id is None else run_id
        before = _begun(config, name) if or_resume else None
        if before is not None:
            folder = RunFolder.of(config, name) or RunFolder.create(config, name, import_path)
            if before.stop_at == config.stop_at and cls(folder, before)._at_its_end():
                folder.unlock()
                return cls(folder, before)
            return cls._continue(folder, config, before, prepare_resume, inline, begun)
        source = _source(config)
        folder = RunFolder.create(config, name, import_path)
        try:
            prepare = partial(prepare_new, description=description, source=source)
            coordinator = Coordinator.launch(folder, config, prepare, inline, begun)
        except BaseException:
            folder.remove()
            raise
        return cls(folder, config, coordinator)

    @classmethod
    def prepare(cls, config: Config, run_id: str, *, import_path: tuple[str, ...] = ()) -> None:
        """Records a new run in Redis and the store and starts nothing: its roles come by other means (SSH, SLURM).

        Raises a `UserError`; the store and Redis are then as they were.
        """
        extend_imports((os.getcwd(), *import_path))
        if "embedded" in (config.redis.url, config.store.url):
            raise UserError("a run whose roles start elsewhere needs servers that stay: set redis.url and store.url")
        description = check(config)
        config = with_recorded(config, description)
        check_services(config)
        source = _source(config)
        address = Address(check_run_id(run_id), config.redis.url, config.store.url, config.store.endpoint_url)
        role = open_role(config, address, "coordinator")
        try:
            prepare_new(role, description, source)
        finally:
            role.redis.close()

    @classmethod
    def resume(
        cls, run_id: str, runs_dir: Path = Path("runs"), overrides: tuple[str, ...] = (), *, origin: str = "latest",
        drop: tuple[str, ...] = (), strict: bool = False, inline: bool = False,
        begun: Callable[[], None] = lambda: None,
    ) -> Run:  # fmt: skip
        """Continues an ended or interrupted run from its newest good checkpoint and the log behind it.
        From another `origin` (a checkpoint's name, `best`, `final`, `promoted`) its weights go on as a new version, and
        what was learnt since is left behind. `drop` names log entries that are not learnt from (`FIRST..LAST`), and
        `strict` refuses a checkpoint that other versions of code, PyTorch, NumPy or Python wrote.
        """
        folder = RunFolder.find(run_id, runs_dir)
        drop_ranges(drop)
        if folder.elsewhere is not None:
            raise UserError(f"run {run_id!r} lives on other machines; `stagecoach attach {run_id}` takes it up there")
        config = folder.config(overrides)
        extend_imports(folder.import_path())
        config = with_recorded(config, check(config, inline))
        check_services(config)
        resumed = partial(prepare_resume, origin=origin, drop=drop, strict=strict)
        return cls._continue(folder, config, folder.config(), resumed, inline, begun)

    @classmethod
    def _continue(
        cls, folder: RunFolder, config: Config, before: Config, prepare: Callable[..., None], inline: bool,
        begun: Callable[[], None],
    ) -> Run:  # fmt: skip
        """Of a run whose config was `before`; a folder that was made for it here goes where it cannot go on."""
        made_here = folder.held
        try:
            if config.hash() != before.hash():
                raise ConfigError(
                    f"{', '.join(config.decides_otherwise(before))} cannot change in a resume, because it decides the "
                    f"learning (stop_at, rollout.workers, checkpoint … may change); start a new run for that"
                )
            if not made_here:
                folder.lock()
            coordinator = Coordinator.launch(folder, config, partial(prepare, before=before.stop_at), inline, begun)
        except BaseException:
            folder.remove() if made_here else folder.unlock()
            raise
        folder.write_config(config)
        return cls(folder, config, coordinator)

    def _at_its_end(self) -> bool:
        return ended_status(self.checkpoint_store()).reason in ("solved", "exhausted")

    @classmethod
    def submit(cls, sent: Submission, config: Config, run_id: str, *, begun: Callable[[], None] = lambda: None) -> Run:
        """Starts a run on a cluster, as a Ray job (coordinator/job.py); returns once it trains there.

        Its folder here is a link: `stagecoach watch`, `scale`, `stop` … work with its id. `begun` as for `start`.
        """
        folder = RunFolder.create(config, run_id)
        try:
            run = cls._submitted(folder, config, sent)
        except BaseException:
            folder.remove()
            raise
        folder.unlock()
        begun()
        return run

    def take_up(self, *, begun: Callable[[], None] = lambda: None) -> Run:
        """Continues an interrupted run where it lives: here, or on its cluster by another job; answers a new handle."""
        if (elsewhere := self.folder.elsewhere) is None:
            return Run.resume(self.run_id, self.folder.path.parent, begun=begun)
        if elsewhere.submission is None:
            raise UserError(
                f"run {self.run_id!r} is interrupted, and was not submitted from here; continue it from where its "
                f"config is: stagecoach train CONFIG --address … --run-id {self.run_id} --or-resume"
            )
        run = self._submitted(self.folder, self.config, elsewhere.submission)
        begun()
        return run

    @classmethod
    def _submitted(cls, folder: RunFolder, config: Config, sent: Submission) -> Run:
        from coordinator.job import submit_and_follow

        return cls(folder, config, submit_and_follow(folder, config, sent))

    @classmethod
    def attach(
        cls,
        run: str,
        runs_dir: Path = Path("runs"),
        *,
        endpoint_url: str | None = None,
        redis_url: str | None = None,
    ) -> Run:
        """A handle on a run, live or ended: by its id, or by its folder in a store (`s3://bucket/prefix/RUN`).

        One that lives on other machines is known in `runs_dir` by its id from then on; `endpoint_url` and `redis_url`
        say how this machine reaches its store and Redis, where that is not as its own machines do.
        """
        run_id = link(run, runs_dir, endpoint_url, redis_url) if "://" in run else run
        folder = RunFolder.find(run_id, runs_dir)
        return cls(folder, folder.config())

    # What one can ask and order

    def status(self, books: bool = True) -> Status:
        """One look at the run; `books=False` spares Redis the ledger's look through the log."""
        try:
            client = self._connect()
            if client is not None:
                return paused(live_status(client, self.run_id, books), self._outage())
        except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError):
            if (waits := self._outage()) is None:
                raise
            return paused(ended_status(self._checkpoints(self.folder.offline_address(self.config))), waits)
        found = ended_status(self._checkpoints(self._address()))
        if self.folder.live and found.state == "interrupted":
            return dataclasses.replace(found, state="starting or ending", reason="its coordinator is at work")
        if self._unreachable is not None and found.state == "interrupted":
            reason = f"whether it is live cannot be seen from here: {self._unreachable}"
            return dataclasses.replace(found, state="unknown", reason=reason)
        return found

    def _outage(self) -> str | None:
        return outage_of_redis(self.folder.path) if self.folder.live else None

    @property
    def live(self) -> bool:
        """Whether a coordinator is at work on it, here or on another machine."""
        return self.folder.live or self._connect() is not None

    def scale(
        self, workers: int | None = None, *, min_workers: int | None = None, max_workers: int | None = None
    ) -> str:
        """Brings the fleet of a live run to `workers`; nothing restarts, nothing is lost. Answers what was ordered.

        Without a number the coordinator finds it from now on, between the bounds; a bound that is not given stays what
        it was. Raises `UserError` for what cannot be, or for more than there is room for.
        """
        refuse_order(self.run_id, workers, min_workers, max_workers)
        flow, client = self._flow(), self._connect()
        state = flow.read()
        least = state.min_workers if min_workers is None else min_workers
        most = state.max_workers if max_workers is None else max_workers
        if workers is None and most is not None and least > most:
            raise UserError(f"--min {least} is more than --max {most}; a bound that is not given stays what it was")
        found = room_of(read_heartbeats(client, self.run_id)) if client is not None else None
        if found is not None:
            found.refuse(workers or least, f"stagecoach scale {self.run_id} ", "add machines")
        if workers is not None:
            flow.set_scaling("fixed", least, most, workers)
            return f"to {counted(workers, 'worker')}"
        flow.set_scaling("auto", least, most)
        bound = "as many as there is room for" if most is None else str(most)
        return f"automatically between {least} and {bound} (now {state.desired_workers})"

    def stop(self) -> None:
        """Asks a live run to end: final checkpoint, `.finished: stopped`. Returns at once; see `wait`."""
        self._flow().set_state("stopping", "stopped", expected="running")

    def abandon(self) -> None:
        """Ends a run that was started here at once, without a final checkpoint; what is durable stays."""
        if self._coordinator is not None:
            self._coordinator.abandon()

    def wait(self, timeout_seconds: float = float("inf")) -> Outcome:
        """Until the run has ended and everything it started is gone; raises `WaitTimeout`."""
        if self._coordinator is not None:
            return self._coordinator.wait(timeout_seconds)
        started = time.monotonic()
        poll(Wait(f"run {self.run_id} to end", timeout_seconds), lambda: not self.live, 0.3)
        status = self.status()
        return Outcome(status.end, status, time.monotonic() - started)

    @property
    def ended(self) -> bool:
        """Whether what was started here is over; always so for a handle that has started nothing."""
        return self._coordinator is None or self._coordinator.outcome is not None

    @property
    def first_event(self) -> str:
        """Where the events of this start of the run begin."""
        return self._coordinator.first_event if self._coordinator is not None else "0-0"

    def checkpoints(self) -> list[dict[str, Any]]:
        """The kept checkpoints, oldest first: name, steps, mean return, evaluation, size, and which is what."""
        return list_checkpoints(self.checkpoint_store())

    def verify(self, checkpoint: str | None = None) -> list[Verdict]:
        """Reads and checks every byte of all checkpoints, or of one (a name, or a mark such as `best`)."""
        return verify(self.checkpoint_store(), checkpoint, live=self.live)

    def promote(self, checkpoint: str | None) -> str | None:
        """Marks a checkpoint for deployment, if it is whole and its weights are finite; answers its name.

        Nothing prunes it then, and `load_policy` and `evaluate` take it first. None clears the mark, and answers what
        had it.
        """
        store = self.checkpoint_store()
        return withdraw(store) if checkpoint is None else promote(store, checkpoint, live=self.live).checkpoint

    def export(self, directory: Path, checkpoint: str | None = None) -> Path:
        """Copies a checkpoint (else the promoted, best or newest one) to `directory/<run id>/`; answers its folder."""
        return export(self.checkpoint_store(), self.config, checkpoint, directory)

    def export_onnx(self, directory: Path, checkpoint: str | None = None) -> tuple[Export, dict[str, Path]]:
        """Writes the policies of a checkpoint as ONNX files; answers how they compare with torch, and the files."""
        return export_onnx(self.checkpoint_store(), self.config.model_dump(mode="json"), checkpoint, directory)

    def prune(
        self,
        keep_last: int | None = None,
        keep_best: int | None = None,
        keep_every: int | None = None,
        *,
        dry_run: bool = False,
    ) -> list[Removed]:
        """Removes what the retention rule lets go (the config's, changed by what is given) from a run that is not live.

        The newest, best, final and promoted ones stay in any case. Answers what was (or would be) removed.
        """
        given = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
        changes = {name: value for name, value in given.items() if value is not None}
        low = [f"{name}={value}" for name, value in changes.items() if value < 1]
        if low:
            raise UserError(f"{', '.join(low)}: expected at least 1")
        if self.live:
            raise UserError(
                f"run {self.run_id!r} is live, and its trainer prunes by itself after each checkpoint "
                f"(checkpoint.keep_last, keep_best, keep_every); prune it when it has ended"
            )
        store = self.checkpoint_store()
        self.folder.lock()
        try:
            return prune_checkpoints(store, self.config.checkpoint.model_copy(update=changes), dry_run=dry_run)
        finally:
            self.folder.unlock()

    def events(self, after: str = "0-0") -> list[Event]:
        """What has happened since the event with this id, in a live run or in one that was started here and is over."""
        if isinstance(self._coordinator, Coordinator) and self._coordinator.outcome is not None:
            return [event for event in self._coordinator.events if id_order(event.id) > id_order(after)]
        client = self._connect()
        return [] if client is None else read_events(client, self.run_id, after)

    def recent(self, count: int) -> str:
        """The id after which the last `count` events of a live run come."""
        client = self._connect()
        return "0-0" if client is None else recent_events(client, self.run_id, count)

    @property
    def store_location(self) -> str:
        """Where the run's checkpoints are, for people: a folder for embedded and file stores, else the URL."""
        if self.config.store.url == "embedded":
            return str(self.folder.path / "s3" / BUCKET / self.run_id)
        return f"{self.config.store.url.rstrip('/')}/{self.run_id}"

    def checkpoint_store(self) -> CheckpointStore:
        """The run's checkpoints, for reading."""
        return self._checkpoints(self._address())

    def load_policy(self, checkpoint: str | None = None, policy_id: str = "default") -> DeployedPolicy:
        """A policy that acts: of this checkpoint, else of the promoted, the best or the newest one."""
        store = self.checkpoint_store()
        name = store.preferred() if checkpoint is None else store.resolve(checkpoint)
        loaded = store.load(name, only="policy.safetensors")
        data = loaded.objects.get(f"{policy_id}/policy.safetensors")
        if data is None:
            raise CheckpointNotFound(f"{loaded.manifest.name} has no policy {policy_id!r}")
        return load_policy(data)

    def replay(
        self,
        start: str,
        goal: str,
        progress: Callable[[int, int], None] = lambda version, last: None,
        *,
        trust_config: bool = False,
    ) -> Replayed:
        """Trains again from one checkpoint (or `start`) over the archived log, and compares with another one.

        Raises `ArchiveIncomplete`, `CheckpointNotFound`, `CheckpointDamaged`, or `UserError` where no straight line
        leads from the one to the other, or a config that was not made on this machine names code to import and
        `trust_config` is not given. Nothing is written, and a live run is not disturbed.
        """
        require_trust(self.config, self.folder.made_here, trust_config, f"run {self.run_id}")
        store = self.checkpoint_store()
        begin = start if start == BEGINNING else store.resolve(start)
        return replay(store, self.config, read_description(store), begin, store.resolve(goal), progress)

    def experience(self, after: str | None = None, through: str | None = None) -> Iterator[Fragment]:
        """The archived experience, lazily, in the log's order; between two log positions where they are given.

        Raises `ArchiveIncomplete` where there is none, or a hole in it.
        """
        store = self.checkpoint_store()
        return experience(Archive(store.store, store.run_id), self.store_location, after, through)

    def _address(self) -> Address:
        return self.folder.live_address() or self.folder.offline_address(self.config)

    def _checkpoints(self, address: Address) -> CheckpointStore:
        return CheckpointStore(open_store(address, self.config), self.run_id)

    def _connect(self, role: RoleName = "viewer") -> redis.Redis | None:
        """Redis of the live run, connected to once; None where the run is not live or its Redis is gone."""
        address = self.folder.live_address()
        away = address is None and not self.folder.live and self.config.redis.url != "embedded"
        if away:
            address = self.folder.offline_address(self.config)
        if address != self._connected_to:
            while self._clients:
                self._clients.popitem()[1].close()
        self._connected_to, self._unreachable = address, None
        if address is None:
            return None
        try:
            if role not in self._clients:
                self._clients[role] = connect_redis(address, impatient(self.config), role)
            client = self._clients[role]
            return client if not away or tended(client, self.run_id) else None
        except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as error:
            if self.folder.live:
                raise
            self._unreachable = str(error) if self.folder.elsewhere is not None else None
            return None

    def _flow(self) -> Flow:
        client = self._connect("coordinator")
        if client is None and self._unreachable is not None:
            raise RedisUnavailable(self._unreachable)
        if client is None:
            raise UserError(f"run {self.run_id!r} is not live; `stagecoach resume {self.run_id}` continues it")
        return Flow(client, self.run_id)


def _begun(config: Config, run_id: str) -> Config | None:
    """The config of a run that is there already: in its folder here, or else in the store; None where it is not."""
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


def _source(config: Config) -> Checkpoint | None:
    """The checkpoint that a new run begins with, verified; None where it begins untrained."""
    if config.initialize_from is None:
        return None
    found = find_checkpoint(config.initialize_from, config.runs_dir)
    try:
        return found.store.load(found.name, only=("policy.safetensors", "algorithm.safetensors", "rewards.safetensors"))
    except CheckpointDamaged as error:
        raise UserError(f"initialize_from={config.initialize_from}: {error}; choose another checkpoint") from None
