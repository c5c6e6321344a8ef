"""`Run`: a handle on one run, from Python; the command line only calls this.

It delegates: starting to lifecycle/launcher.py, its checkpoints to catalog/checkpoint_operations.py. It reaches the
run's Redis while the run is live, and its store always.
"""

import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import redis

from stagecoach.coordinator.catalog import checkpoint_operations as operations
from stagecoach.coordinator.catalog.checkpoint_lookup import Evaluation, evaluate, named_code, require_trust
from stagecoach.coordinator.catalog.checkpoint_operations import Removed
from stagecoach.coordinator.catalog.run_folder import RunFolder, Submission, link
from stagecoach.coordinator.catalog.run_metrics import all_rows, last_row
from stagecoach.coordinator.catalog.status import Status, check_order, order_scale
from stagecoach.coordinator.lifecycle import launcher
from stagecoach.coordinator.lifecycle.launcher import Begun
from stagecoach.coordinator.lifecycle.preparation import EXACTLY, Continuation
from stagecoach.coordinator.lifecycle.ray_job import JobCoordinator
from stagecoach.coordinator.lifecycle.supervisor import Coordinator, Outcome
from stagecoach.coordinator.run_access.run_connection import AWAY, RunConnection
from stagecoach.coordinator.run_access.summary import BestCheckpoint, PageAddress, as_html, best_checkpoint, rows
from stagecoach.shared.base.errors import CheckpointNotFound, PolicyKindUnknown, StagecoachError, UserError
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy, load_policy
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.policies.registry import import_policies
from stagecoach.shared.protocol.events import Event, emit
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.protocol.quarantine import drop_ranges
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.log_archive import Archive, experience
from stagecoach.shared.storage.metric_log import Rows
from stagecoach.shared.storage.players import read_mean
from stagecoach.trainer_node.checkpointing.verification import Verdict, promote, verify, withdraw
from stagecoach.trainer_node.export.checkpoint_export import Export
from stagecoach.trainer_node.replay import BEGINNING, Replayed, replay

_POLL_SECONDS = 0.25


class Run:
    """A handle on one run: started here, or attached to (live or ended)."""

    def __init__(
        self, folder: RunFolder, config: Config, coordinator: Coordinator | JobCoordinator | None = None
    ) -> None:
        self.run_id, self.folder, self.config, self._coordinator = folder.run_id, folder, config, coordinator
        self._at = RunConnection(folder, config)
        self._page: PageAddress | None = None

    @classmethod
    def start(
        cls, config: Config, run_id: str | None = None, *, inline: bool = False, or_resume: bool = False,
        import_path: tuple[str, ...] = (), begun: Begun = lambda: None, make_room: Callable[[], None] = lambda: None,
        how: Continuation = EXACTLY,
    ) -> Self:  # fmt: skip
        """Checks everything, then starts services and roles; returns while the run continues in the background.

        Call it from a thread that lives as long as the run: the services end with the thread that started them.

        Args:
            inline: put all roles into this process.
            or_resume: continue a run of this id that exists already, here or in the store; return one that has
                reached its end as it is.
            import_path: folders of the user's modules, besides the current one.
            begun: called when the roles are about to start: from there on only `stop` ends the run in order, no
                exception does.
            make_room: called after all checks, before a new run's folder is created; may delete a former one.
            how: from which checkpoint a run that exists continues, and without which entries, as in `resume`.

        Raises:
            UserError: before anything is started or written.
        """
        return cls(*launcher.start(config, run_id, inline, or_resume, import_path, begun, make_room, how))

    @classmethod
    def prepare(cls, config: Config, run_id: str, *, import_path: tuple[str, ...] = ()) -> None:
        """Records a new run in Redis and the store and starts nothing: its roles come by other means (SSH, SLURM).

        Raises a `UserError`; the store and Redis are then as they were.
        """
        launcher.prepare(config, run_id, import_path)

    @classmethod
    def resume(
        cls, run_id: str, runs_dir: str | Path = "runs", overrides: tuple[str, ...] = (), *, origin: str = "latest",
        drop: tuple[str, ...] = (), strict: bool = False, inline: bool = False, begun: Begun = lambda: None,
        environment: Any = None,
    ) -> Self:  # fmt: skip
        """Continues an ended or interrupted run from its newest good checkpoint and the log behind it.

        From another `origin` (a checkpoint's name, `best`, `final`, `promoted`) its weights continue as a new version,
        and what was learned since is left behind. `drop` names log entries that are not learned from (`FIRST..LAST`),
        and `strict` rejects a checkpoint that other versions of code, PyTorch, NumPy or Python wrote. One that was
        submitted to a cluster continues there, by another job. `environment` is the class, function or registered id
        of a run whose environment is an object.
        """
        folder = RunFolder.find(run_id, Path(runs_dir))
        drop_ranges(drop)
        how = Continuation(origin, drop, strict)
        return cls(*launcher.resume(folder, overrides, how, inline, begun, environment))

    @classmethod
    def submit(
        cls, sent: Submission, config: Config, run_id: str, *, begun: Begun = lambda: None,
        make_room: Callable[[], None] = lambda: None, how: Continuation = EXACTLY,
    ) -> Self:  # fmt: skip
        """Starts a run on a cluster, as a Ray job (lifecycle/ray_job.py); returns once it trains there.

        Its folder here is a link: `stagecoach watch`, `scale`, `stop` … work with its id.
        """
        return cls(*launcher.submit(sent, config, run_id, begun, make_room, how))

    def take_up(self, *, begun: Begun = lambda: None) -> Self:
        """Continues an interrupted run where it lives: here, or on its cluster by another job; returns a new handle."""
        return type(self)(*launcher.take_up(self.folder, self.config, begun))

    @classmethod
    def attach(
        cls, run: str, runs_dir: str | Path = "runs", *, endpoint_url: str | None = None, redis_url: str | None = None
    ) -> Self:
        """A handle on a run, live or ended: by its id, or by its folder in a store (`s3://bucket/prefix/RUN`).

        One that lives on other machines is known in `runs_dir` by its id from then on; `endpoint_url` and `redis_url`
        say how this machine reaches its store and Redis, where that is not as its own machines do.
        """
        where = Path(runs_dir)
        run_id = link(run, where, endpoint_url, redis_url) if "://" in str(run) else run
        folder = RunFolder.find(run_id, where)
        return cls(folder, folder.config())

    # What the run is doing. None of this raises because services end.

    def status(self, accounting: bool = True) -> Status:
        """Current status of the run, such as `run.status().env_steps`.

        Args:
            accounting: False skips the ledger, for which the log is read.
        """
        return replace(self._at.status(accounting), evaluates=self.config.evaluation.enabled)

    @property
    def live(self) -> bool:
        """True while a coordinator supervises the run, here or on another machine."""
        return self._at.live

    @property
    def ended(self) -> bool:
        """True if the run started by this handle is over, or if the handle started none."""
        return self._coordinator is None or self._coordinator.outcome is not None

    def wait(self, timeout_seconds: float = float("inf")) -> Outcome:
        """Blocks until the run and everything it started has ended.

        Returns:
            Why it ended (`reason`, `failed`), its last status, and how long this handle's start took.

        Raises:
            WaitTimeout: it is still live after `timeout_seconds`.
        """
        started, wait = time.monotonic(), Wait(f"run {self.run_id} to end", timeout_seconds)
        if self._coordinator is not None:
            poll(wait, lambda: self.ended, 0.05)
            assert self._coordinator.outcome is not None
            return self._coordinator.outcome
        poll(wait, lambda: not self.live, 0.3)
        status = self.status()
        return Outcome(status.end, status, time.monotonic() - started)

    def __iter__(self) -> Iterator[Event]:
        """Yields the run's events as they come, each once, until it has ended.

        They begin with this start of the run; of a run that was attached to, with its first event. Each iterator keeps
        its own place. `score` and `env_steps` are numbers, or None where the event has none:

            for event in run:
                if (event.score or 0.0) >= 450.0:
                    run.stop()
        """
        after, seen, read = self.first_event, time.monotonic(), time.monotonic()
        while True:
            live = self.live if self._coordinator is None else not self.ended
            seen = time.monotonic() if live else seen
            settled = self._coordinator is not None or time.monotonic() - seen >= self._at.settle_seconds()
            over = not live and settled  # asked before the last events are read
            try:
                new, read = self.events(after), time.monotonic()
            except (StagecoachError, redis.RedisError):
                if time.monotonic() - read > self.config.store.retry_seconds:
                    raise
                new, over = [], False
            for event in new:
                after = event.id
                yield event
            if over:
                return
            time.sleep(_POLL_SECONDS)

    def events(self, after: str = "0-0") -> list[Event]:
        """All events so far, oldest first; with `after` those that come after an event's `id`."""
        ended = isinstance(self._coordinator, Coordinator) and self._coordinator.outcome is not None
        return self._at.events(after, self._coordinator.events if ended else None)  # type: ignore[union-attr]

    def recent(self, count: int) -> str:
        """Id of the event after which the last `count` events come."""
        found = self.events()
        return found[-count - 1].id if len(found) > count else "0-0"

    @property
    def first_event(self) -> str:
        """Id before the events of this start of the run."""
        return self._coordinator.first_event if self._coordinator is not None else "0-0"

    def metrics(self, stream: str = "train") -> Iterator[Rows]:
        """Yields all rows of a stream, in parts.

        Args:
            stream: `train`, `evaluations`, `episodes`, `fleet` or `events`.

        Returns:
            Parts with `columns` (metric → array) and `labels`; `Rows.joined(list(run.metrics()))` is all of them.
        """
        store, client = self._at.read(lambda client, found: (found.store, client))
        return all_rows(store, stream, client, self.run_id, instead=self._at.offline_store().store)

    def last_metrics(self, stream: str = "train") -> tuple[str, dict[str, float]]:
        """Label and metrics of the newest row, or empty: `run.last_metrics()[1]["rollout/ep_rew_mean"]`."""
        return self._at.read(lambda client, found: last_row(found.store, stream, client, self.run_id))

    def checkpoints(self) -> list[dict[str, Any]]:
        """The kept checkpoints, oldest first: name, steps, mean return, evaluation, size, and their marks."""
        return self._at.read(lambda _, store: operations.list_checkpoints(store))

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint so far; None before an evaluation was confirmed.

        To compare three learning rates:

            scores = {}
            for rate in (0.0003, 0.001, 0.003):
                run = Run.start(load_config("config.yaml", [f"algorithm.learning_rate={rate}"]), inline=True)
                run.wait()
                scores[rate] = run.best.score
            print(max(scores, key=scores.get))
        """
        return best_checkpoint(self.checkpoints(), self.store_location)

    def page(self, port: int = 0) -> PageAddress:
        """Serves the page with the run's curves from this process, until the process or this handle ends.

        Args:
            port: on loopback; 0 for a free one.

        Returns:
            The address with its token, a text that a notebook shows as a link; the same in each call.

        Raises:
            UserError: the port is taken.
        """
        if self._page is None:
            server = import_module("stagecoach.coordinator.page.server")  # it shows runs, so no module imports it here
            token, served = secrets.token_urlsafe(24), ExitStack()
            url = served.enter_context(server.serve(self.folder.path.parent, token, port=port))
            weakref.finalize(self, served.close)
            self._page = PageAddress(f"{url}/runs/{self.run_id}?token={token}")
        return self._page

    def __repr__(self) -> str:
        with suppress(StagecoachError, redis.RedisError):
            return f"<Run {self.run_id}: {', '.join(f'{title} {text}' for title, text in self._shown().items())}>"
        return f"<Run {self.run_id}>"

    def _repr_html_(self) -> str:
        """The run as a notebook shows it, at that moment; `for event in run` follows it."""
        return as_html(self.run_id, self._shown())

    def _shown(self) -> dict[str, str]:
        entries = self.checkpoints()
        return rows(self.status(accounting=False), best_checkpoint(entries, self.store_location), len(entries))

    @property
    def client(self) -> redis.Redis | None:
        """Redis of the live run, for reading; None where the run is not live."""
        return self._at.client()

    # Orders, as by the command line

    def checkpoint(self) -> None:
        """Requests a checkpoint of a live run after its current update; returns at once.

        Raises:
            UserError: the run is not live.
        """
        Flow(self._at.ordering_client(), self.run_id).order_checkpoint()

    def note(self, text: str) -> None:
        """Writes a line into the events of a live run, which are kept with its metrics: `run.note("lower noise")`.

        Raises:
            UserError: the run is not live, or the text is empty.
        """
        if not text.strip():
            raise UserError("a note needs text")
        emit(self._at.ordering_client(), self.run_id, "note", text)

    def scale(
        self, workers: int | None = None, *, min_workers: int | None = None, max_workers: int | None = None
    ) -> str:
        """Brings the fleet of a live run to `workers`; nothing restarts, nothing is lost: `run.scale(8)`.

        Without a number the coordinator finds it from now on, between the bounds; a bound that is not given stays what
        it was.

        Returns:
            The order in words.

        Raises:
            UserError: the order is impossible, more than the cluster has capacity for, or the run is not live.
        """
        check_order(self.run_id, workers, min_workers, max_workers)
        return order_scale(self._at.ordering_client(), self.run_id, workers, min_workers, max_workers)

    def stop(self) -> None:
        """Asks a live run to end: final checkpoint, `.finished: stopped`. Returns at once; see `wait`.

        A run that this handle started may have ended meanwhile; then there is nothing to do.

        Raises:
            UserError: the run was not started by this handle and is not live.
        """
        try:
            Flow(self._at.ordering_client(), self.run_id).order_stop()
        except (UserError, *AWAY):
            if self._coordinator is None or self.folder.live_address() is not None:
                raise

    def abandon(self) -> None:
        """Ends a run that was started here at once, without a final checkpoint; what is durable stays."""
        if self._coordinator is not None:
            self._coordinator.abandon()

    # Its checkpoints and its experience

    def policy(
        self, checkpoint: str | None = None, policy_id: str = "default", *, trust_config: bool = False
    ) -> DeployedPolicy:  # fmt: skip
        """Returns a policy that acts: `run.policy("best").act(observation)`.

        Args:
            checkpoint: a name, `best`, `final`, `promoted` or `latest`; else the promoted, best or newest one.
            policy_id: one of several policies, or `mean`, the mean strategy of its snapshots.
            trust_config: lets a config from another machine name a network's class to import, as in `export`.

        Raises:
            CheckpointNotFound: the run has no checkpoint or policy of that name, or no checkpoint yet.
        """
        return self._at.read(lambda _, store: self._policy(store, checkpoint, policy_id, trust_config))

    def _policy(
        self, store: CheckpointStore, checkpoint: str | None, policy_id: str, trust_config: bool
    ) -> DeployedPolicy:
        loaded = store.load(store.preferred(checkpoint), only="policy.safetensors")
        data = loaded.objects.get(f"{policy_id}/policy.safetensors")
        if data is None:
            data = read_mean(store, loaded.manifest.name, policy_id)
        if data is None:
            raise CheckpointNotFound(f"{loaded.manifest.name} has no policy {policy_id!r}")
        with suppress(PolicyKindUnknown):
            return load_policy(data)
        self._import_classes(trust_config)
        return load_policy(data)

    @property
    def store_location(self) -> str:
        """Location of the run's checkpoints for display: a folder or a URL."""
        url = self.folder.offline_address(self.config).store_url
        if self.config.store.url == "embedded":
            url = url.removeprefix("file://")
        return f"{url.rstrip('/')}/{self.run_id}"

    def checkpoint_store(self) -> CheckpointStore:
        """The run's checkpoints, for reading."""
        return self.folder.checkpoint_store(self.config)

    def verify(self, checkpoint: str | None = None) -> list[Verdict]:
        """Reads and checks every byte of all checkpoints, or of one: `run.verify("best")`."""
        return self._at.read(lambda _, store: verify(store, checkpoint, live=self.live))

    def promote(self, checkpoint: str | None) -> str | None:
        """Marks a checkpoint for deployment, if it is whole and its weights are finite; returns its name.

        It is never pruned then, and `policy` and `evaluate` take it first. None clears the mark, and returns the
        checkpoint that had it. `run.promote("best")` takes the best so far.

        Raises:
            CheckpointNotFound, CheckpointDamaged: the checkpoint is missing, incomplete or damaged.
        """
        if checkpoint is None:
            return self._at.read(lambda _, store: withdraw(store))
        return self._at.read(lambda _, store: promote(store, checkpoint, live=self.live).checkpoint)

    def _import_classes(self, trust_config: bool) -> None:
        """Imports the user's own algorithms and networks with their kinds; raises `UserError` without trust."""
        if any("algorithm" in field or "network" in field for field in named_code(self.config)):
            require_trust(self.config, self.folder.made_here, trust_config, f"run {self.run_id}")
            extend_imports((os.getcwd(), *self.folder.import_path()))
            import_policies(self.config.policies, self.config.algorithm)

    def export(self, directory: str | Path, checkpoint: str | None = None, *, trust_config: bool = False) -> Path:
        """Copies a checkpoint (else the promoted, best or newest one) to `directory/<run id>/`; returns its folder."""
        self._import_classes(trust_config)
        return operations.export(self.checkpoint_store(), self.config, checkpoint, Path(directory))

    def export_onnx(
        self, directory: str | Path, checkpoint: str | None = None, *, trust_config: bool = False
    ) -> tuple[Export, dict[str, Path]]:  # fmt: skip
        """Writes the policies of a checkpoint as ONNX files; returns how they compare with torch, and the files."""
        self._import_classes(trust_config)
        return operations.export_onnx(self.checkpoint_store(), self.config, checkpoint, Path(directory))

    def prune(
        self, keep_last: int | None = None, keep_best: int | None = None, keep_every: int | None = None, *,
        dry_run: bool = False,
    ) -> list[Removed]:  # fmt: skip
        """Removes what the retention rule (the config's, changed by what is given) does not keep; not of a live run.

        The newest, best, final and promoted checkpoints always stay. Returns what was (or would be) removed.
        """
        given = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
        changes = {name: value for name, value in given.items() if value is not None}
        if low := [f"{name}={value}" for name, value in changes.items() if value < 1]:
            raise UserError(f"{', '.join(low)}: expected at least 1")
        if self.live:
            raise UserError(
                f"run {self.run_id!r} is live, and its trainer prunes by itself after each checkpoint "
                f"(checkpoint.keep_last, keep_best, keep_every); prune it when it has ended"
            )
        rule = self.config.checkpoint.model_copy(update=changes)
        with self.folder.locked():
            return operations.prune_checkpoints(self.checkpoint_store(), rule, dry_run=dry_run)

    def evaluate(
        self, checkpoint: str | None = None, episodes: int | None = None, video: str | Path | None = None, *,
        environment: Any = None, trust_config: bool = False,
    ) -> Evaluation:  # fmt: skip
        """Plays a checkpoint (else the promoted, the best or the newest one) as `stagecoach evaluate` does.

        Args:
            video: folder for an MP4 of each episode.
            environment: the object of a run whose environment is one, by default that of this handle.
        """
        found = environment or self.config.environment.given_object
        target = self.run_id if checkpoint is None else f"{self.run_id}/{checkpoint}"
        runs_dir = self.folder.path.parent
        return evaluate(target, runs_dir, episodes, video, trust_config=trust_config, environment=found)

    def replay(
        self, start: str, goal: str, progress: Callable[[int, int], None] = lambda version, last: None, *,
        trust_config: bool = False,
    ) -> Replayed:  # fmt: skip
        """Trains again from one checkpoint (or `start`) over the archived log, and compares with another one.

        Nothing is written, and a live run is not disturbed.

        Raises:
            ArchiveIncomplete, CheckpointNotFound, CheckpointDamaged: where something is missing.
            UserError: where no straight line leads from the one to the other, or a config from another machine names
                code to import and `trust_config` is not given.
        """
        require_trust(self.config, self.folder.made_here, trust_config, f"run {self.run_id}")
        store = self.checkpoint_store()
        begin = start if start == BEGINNING else store.resolve(start)
        return replay(store, self.config, store.description(), begin, store.resolve(goal), progress)

    def experience(self, after: str | None = None, through: str | None = None) -> Iterator[Fragment]:
        """The archived experience, lazily, in the log's order; between two log positions where they are given.

        Raises `ArchiveIncomplete` if the archive is missing or has a hole.
        """
        store = self.checkpoint_store()
        return experience(Archive(store.store, store.run_id), self.store_location, after, through)
