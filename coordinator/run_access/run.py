"""`Run`: a handle on one run, from Python; the command line only calls this.

It delegates: starting to lifecycle/launcher.py, its checkpoints to run_checkpoints.py,
what its recorded log is good for to run_history.py. It reaches the run's Redis
while the run is live, and its store always.
"""

import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import redis

from stagecoach.coordinator.catalog.evidence import Evidence, Sources, check_target, write_evidence
from stagecoach.coordinator.catalog.run_folder import RunFolder, Submission, link
from stagecoach.coordinator.catalog.run_metrics import all_rows, last_row
from stagecoach.coordinator.catalog.status import Status, check_order, order_scale
from stagecoach.coordinator.lifecycle import launcher
from stagecoach.coordinator.lifecycle.launcher import Begun
from stagecoach.coordinator.lifecycle.preparation import EXACTLY, Continuation
from stagecoach.coordinator.lifecycle.ray_job import JobCoordinator
from stagecoach.coordinator.lifecycle.supervisor import Coordinator, Outcome
from stagecoach.coordinator.run_access.run_connection import AWAY
from stagecoach.coordinator.run_access.run_history import RunHistory
from stagecoach.coordinator.run_access.summary import PageAddress, as_html, best_checkpoint, rows
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import ArchiveIncomplete, CheckpointDamaged, StagecoachError, UserError
from stagecoach.shared.base.foreign_names import missing
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.events import Event, emit
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.protocol.quarantine import drop_ranges
from stagecoach.shared.storage.metric_log import Rows
from stagecoach.trainer_node.replay.rerun import earliest_start, open_archive

_POLL_SECONDS = 0.25


class Run(RunHistory):
    """A handle on one run: started here, or attached to (live or ended)."""

    def __init__(
        self, folder: RunFolder, config: Config, coordinator: Coordinator | JobCoordinator | None = None
    ) -> None:
        super().__init__(folder, config)
        self._coordinator = coordinator
        self._page: PageAddress | None = None

    @classmethod
    def start(
        cls, config: Config, run_id: str | None = None, *, inline: bool = False, or_resume: bool = False,
        import_path: tuple[str, ...] = (), begun: Begun = lambda: None, make_room: Callable[[], None] = lambda: None,
        how: Continuation = EXACTLY,
    ) -> Self:  # fmt: skip
        """Checks everything, then starts the run in the background: `run = Run.start(load_config("cartpole"))`.

        Call it from a thread that lives as long as the run: the services end with the thread that started them.

        Args:
            config: The run's config, as `load_config` gives it.
            run_id: Its name, by default the environment's with the time.
            inline: put all roles into this process.
            or_resume: continue a run of this id that exists already, here or in the store; return one that has
                reached its end as it is.
            import_path: folders of the user's modules, besides the current one.
            begun: called when the roles are about to start: from there on only `stop` ends the run in order, no
                exception does.
            make_room: called after all checks, before a new run's folder is created; may delete a former one.
            how: from which checkpoint a run that exists continues, and without which entries, as in `resume`.

        Returns:
            The run's handle.

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
        """Continues a run from its newest good checkpoint and the log behind it: `run = Run.resume("my-run")`.

        One that was submitted to a cluster continues there, by another job.

        Args:
            run_id: The run's name.
            runs_dir: Folder of the runs.
            overrides: Changed fields, such as `("stop_at.env_steps=50000",)`.
            origin: Another checkpoint (a name, `best`, `final`, `promoted`). Its weights continue as a new version, and
                what was learned since is left behind.
            drop: Log entries that are not learned from, `FIRST..LAST`.
            strict: Reject a checkpoint that other versions of code, PyTorch, NumPy or Python wrote.
            inline: Put all roles into this process.
            begun: Called when the roles are about to start.
            environment: Class, function or registered id of a run whose environment is an object.

        Returns:
            The run's handle.

        Raises:
            RunNotFound: The run does not exist.
            UserError: The run is live or cannot continue.
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
        """Returns a handle on a run, live or ended: `Run.attach("my-run").status().env_steps`.

        Args:
            run: The run's id, or its folder in a store (`s3://bucket/prefix/RUN`); its id suffices from then on.
            runs_dir: Folder of the runs.
            endpoint_url: The store as this machine reaches it, if not as the run's own machines do.
            redis_url: The same for Redis.

        Returns:
            The run's handle.

        Raises:
            RunNotFound: The run does not exist.
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

        Returns:
            State, reason, counters, newest metrics, scores, checkpoints and ledger.
        """
        return replace(self._at.status(accounting), evaluates=self.config.evaluation.enabled)

    @property
    def ended(self) -> bool:
        """True if the run started by this handle is over, or if the handle started none."""
        return self._coordinator is None or self._coordinator.outcome is not None

    def wait(self, timeout_seconds: float = float("inf")) -> Outcome:
        """Blocks until the run and everything it started has ended: `print(run.wait())`.

        Args:
            timeout_seconds: The longest wait.

        Returns:
            Why it ended (`reason`, `failed`), its last `status`, and the `seconds` of this handle's start.

        Raises:
            WaitTimeout: it is still live after `timeout_seconds`.
        """
        started, wait = world.monotonic(), Wait(f"run {self.run_id} to end", timeout_seconds)
        if self._coordinator is not None:
            poll(wait, lambda: self.ended, 0.05)
            assert self._coordinator.outcome is not None
            return self._coordinator.outcome
        poll(wait, lambda: not self.live, 0.3)
        status = self.status()
        return Outcome(status.end, status, world.monotonic() - started)

    def __iter__(self) -> Iterator[Event]:
        """Yields the run's events as they come, each once, until it has ended.

        They begin with this start of the run; of a run that was attached to, with its first event. Each iterator keeps
        its own place. `score` and `env_steps` are numbers, or None where the event has none:

            for event in run:
                if (event.score or 0.0) >= 450.0:
                    run.stop()
        """
        after, seen, read = self.first_event, world.monotonic(), world.monotonic()
        while True:
            live = self.live if self._coordinator is None else not self.ended
            seen = world.monotonic() if live else seen
            settled = self._coordinator is not None or world.monotonic() - seen >= self._at.settle_seconds()
            over = not live and settled  # asked before the last events are read
            try:
                new, read = self.events(after), world.monotonic()
            except (StagecoachError, redis.RedisError):
                if world.monotonic() - read > self.config.store.retry_seconds:
                    raise
                new, over = [], False
            for event in new:
                after = event.id
                yield event
            if over:
                return
            world.sleep(_POLL_SECONDS)

    def events(self, after: str = "0-0") -> list[Event]:
        """Returns the events so far: `[event.text for event in run.events()]`.

        Args:
            after: Id of an event; only later events are returned.

        Returns:
            Events, oldest first.
        """
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
        """Returns all rows of a stream, in parts: `for rows in run.metrics(): ...`.

        Args:
            stream: `train`, `evaluations`, `episodes`, `fleet` or `events`.

        Returns:
            Parts with `columns` (metric → array) and `labels`; `Rows.joined(list(run.metrics()))` is all of them.
        """
        store, client = self._at.read(lambda client, found: (found.store, client))
        return all_rows(store, stream, client, self.run_id, instead=self._at.offline_store().store)

    def last_metrics(self, stream: str = "train") -> tuple[str, dict[str, float]]:
        """Returns the newest row of a stream: `run.last_metrics()[1]["rollout/ep_rew_mean"]`.

        Args:
            stream: As in `metrics`.

        Returns:
            Its label and metrics; empty before the first row.
        """
        return self._at.read(lambda client, found: last_row(found.store, stream, client, self.run_id))

    def evidence(self, directory: str | Path, *, replay: bool = False, trust_config: bool = False) -> Evidence:
        """Writes one folder for a reviewer or a safety case: `run.evidence("my-run-evidence").damaged` is empty.

        Args:
            directory: A new or empty folder.
            replay: Also trains again over the archived log, and records whether every object is equal.
            trust_config: Lets a config from another machine name code to import, for `replay`.

        Returns:
            The folder, the content of its evidence.json (`summary`), and what is `damaged`.

        Raises:
            UserError: The folder is not empty, or the run has no archive to replay.
        """
        target = Path(directory)
        check_target(target)
        replayed = self._replayed(trust_config) if replay else None
        plot = import_module("stagecoach.coordinator.cli.curves.plot")  # it draws runs, so no module imports it here
        return write_evidence(target, Sources(
            self.checkpoint_store(), self.config, self.status(), self.verify(), self.metrics,
            lambda path: plot.draw([self], [plot.RETURN], path), replayed, self.folder.remote is None,
        ))  # fmt: skip

    def _replayed(self, trust_config: bool) -> dict[str, Any]:
        """Result of the longest replay to the last checkpoint; one that fails over damage is part of the result."""
        store = self.checkpoint_store()
        try:
            open_archive(store, self.config)
        except ArchiveIncomplete as error:
            raise UserError(f"--replay: {error}") from None
        try:
            goal = store.manifest(store.resolve("final" if store.marked("final") else "latest"))
            start = earliest_start(self.config, goal, store.names())
            if start == goal.name:
                raise UserError(
                    f"--replay: with version {goal.provenance['lineage']} the run went back to an older checkpoint, "
                    f"and of those since then only {goal.name} is kept, so there is nothing to replay"
                )
            found = self.replay(start, goal.name, trust_config=trust_config)
        except (ArchiveIncomplete, CheckpointDamaged) as error:
            return {"equal": False, "error": str(error)}
        return {**vars(found), "equal": found.equal}

    def page(self, port: int = 0) -> PageAddress:
        """Serves the page with the run's curves until this process or handle ends: `print(run.page())`.

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

    if not TYPE_CHECKING:  # a checker reports unknown names by itself

        def __getattr__(self, name: str) -> Any:
            raise missing("a run", name)

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
        """Requests a checkpoint of a live run after its current update, and returns at once: `run.checkpoint()`.

        Raises:
            UserError: the run is not live.
        """
        Flow(self._at.ordering_client(), self.run_id).order_checkpoint()

    def note(self, text: str) -> None:
        """Writes a line into the events of a live run, which are kept with its metrics: `run.note("lower noise")`.

        Args:
            text: One line.

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

        Args:
            workers: Number of workers.
            min_workers: Lower bound of the number that the coordinator finds.
            max_workers: Upper bound.

        Returns:
            The order in words.

        Raises:
            UserError: the order is impossible, more than the cluster has capacity for, or the run is not live.
        """
        check_order(self.run_id, workers, min_workers, max_workers)
        return order_scale(self._at.ordering_client(), self.run_id, workers, min_workers, max_workers)

    def stop(self) -> None:
        """Asks a live run to end with a last checkpoint, and returns at once: `run.stop(); run.wait()`.

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
