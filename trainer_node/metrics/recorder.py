"""Metrics of a run: into the store as records (shared/storage/metric_log.py), to Redis for live views, to writers.

`record` only puts a row into memory; a thread for Redis, and one for each writer, take it from there. None can hold up
training or end it: failures there are counted and reported once. The store's part is called by the checkpoint writer's
thread, before each checkpoint, so that what it covers is there; a trainer that resumes from it records the rest again.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import redis

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import MetricsDamaged
from stagecoach.shared.base.printable import NAME_CHARACTERS, printable
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.checkpoint_name import checkpoint_env_steps
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.events import EVENT_ID, emit, event_row, read_events
from stagecoach.shared.protocol.flow_control import Flow, FlowState
from stagecoach.shared.protocol.heartbeat import Beat, read_heartbeats
from stagecoach.shared.protocol.metric_tail import append_row
from stagecoach.shared.storage.metric_log import (
    ENV_STEPS,
    EVALUATIONS,
    EVENTS,
    FLEET,
    STREAMS,
    TEST_ENV_STEPS,
    TEST_EPISODES,
    TRAIN,
    UNIX_TIME,
    VERSION,
    MetricStream,
    read,
    segments,
)
from stagecoach.shared.storage.object_store import ObjectStore
from stagecoach.trainer_node.metrics.writers import MetricWriter, Orders, WriterThread, WrittenRun, open_writer

_LOGGER = logging.getLogger("stagecoach.trainer")
_MOST_METRICS, _MOST_OF_ENVIRONMENT = 1000, 128
"""Names that one process writes, and those with `environment/` behind a prefix (none, `eval/`, `eval/confirmation/`):
an environment may make up a new one in each episode, and each is a column and a curve for good."""
_QUEUED = 100_000
"""Rows that wait for slow writers; beyond, writers miss rows, which are in the store all the same."""
_FLUSH_SECONDS = 10.0
PAUSE_SECONDS = 5.0
_STORE_SECONDS = 15.0
"""Rows reach the store with each checkpoint, and after so long without one."""


class Recorder:
    """All metrics of one incarnation of the trainer."""

    def __init__(
        self, client: redis.Redis, run_id: str, config: Config, folder: Path | None, store: ObjectStore,
        began: tuple[int, int, int, int], orders: Orders | None = None,
    ) -> None:  # fmt: skip
        """Begins at this epoch, policy version, env steps and parent's version; what older trainers recorded beyond, or
        on another line, is void. Writers may give `orders`."""
        self._redis, self._run_id, self._store = client, run_id, store
        self._streams = {name: MetricStream(store, run_id, name, *began) for name in STREAMS}
        self._evaluated: set[str] | None = None
        self._tested = Counter[str]()
        self._unwritten: list[tuple[dict[str, float], str]] = []
        """Evaluations that are not in the store yet: writers have each once, and after it."""
        self._event: tuple[int, ...] | None = None
        self._names = defaultdict[str, set[str]](set)
        """Names by prefix of an environment's own numbers, '' for all others."""
        self._stored_at = world.monotonic()
        self.failures: Counter[str] = Counter()
        """Number of rows that each writer could not write."""
        self._were_slow: set[str] = set()
        run = WrittenRun(run_id, folder, config.model_dump(mode="json"), began[2], orders)
        tail = SimpleNamespace(append=partial(append_row, client, run_id, began[0]), close=lambda: None)
        self._tail = WriterThread("Redis", lambda: tail, self._failed, self._slow, _QUEUED)
        self._writers = [
            WriterThread(its.path, partial(open_writer, its.path, its.kwargs, run), self._failed, self._slow, _QUEUED)
            for its in config.metrics.writers
            if folder or its.path not in ("csv", "jsonl", "tensorboard")  # else `stagecoach metrics` makes such files
        ]
        self._closed = world.Event()
        self._fleet, self._env_steps = FleetMetrics(), float(began[2])
        world.Thread(target=self._watch_fleet, name="metrics", daemon=True).start()

    def record(self, stream: str, row: Mapping[str, float], label: str = "") -> None:
        """Records a row, which holds its env steps and policy version; never raises."""
        with self.continuing("the metrics"):
            self._env_steps = row[ENV_STEPS] if stream == TRAIN else self._env_steps
            named = self._named(row) | {UNIX_TIME: round(world.unix_time(), 3)}
            number = self._streams[stream].append(named, label)
            if stream == EVALUATIONS:
                self._unwritten.append((named, label))
            else:
                self._write(stream, named, label)
            if stream == TRAIN:
                self._tail.put("append", number, named)

    def histogram(self, name: str, values: Sequence[float], env_steps: int) -> None:
        self._each(MetricWriter.histogram, name, values, env_steps)

    def checkpointed(self, name: str) -> None:
        self._each(MetricWriter.checkpoint, name, checkpoint_env_steps(name))

    @property
    def tested(self) -> dict[str, int]:
        return {"test_env_steps": self._tested[TEST_ENV_STEPS], "test_episodes": self._tested[TEST_EPISODES]}

    def take_evaluations(self, evaluations: Mapping[str, Mapping[str, Any]]) -> set[str]:
        """Records new evaluations; returns the names of all that have a score. Raises as the store does."""
        if self._evaluated is None:
            known = [row for _, rows in read(self._store, EVALUATIONS, damaged=self._damaged) for row in rows.named()]
            for name in (TEST_ENV_STEPS, TEST_EPISODES):
                self._tested[name] = int(max((row.get(name, 0.0) for _, row in known), default=0.0))
            self._evaluated = {label for label, _ in known}
            self._each(MetricWriter.restore, [(row, label) for label, row in known])
        for name, scores in evaluations.items():
            if name not in self._evaluated:
                self._evaluated.add(name)
                for each in (scores, scores.get("confirmation") or {}):
                    self._tested[TEST_ENV_STEPS] += int(each.get("env_steps_played", 0))
                    self._tested[TEST_EPISODES] += int(each.get("episodes", 0))
                self.record(EVALUATIONS, evaluation_row(scores) | dict(self._tested), name)
        return self._evaluated

    def take_events(self) -> None:
        if self._event is None:
            self._event = self._last_event()
        for event in read_events(self._redis, self._run_id, "{}-{}".format(*self._event)):
            self._event = id_order(event.id)
            label, row = event_row(event)
            self._streams[EVENTS].append(row, label)

    def _last_event(self) -> tuple[int, ...]:
        """Returns the id of the last event in the store, from the newest segment: each former trainer has left some."""
        for segment in reversed(segments(self._store, EVENTS)):
            for _, rows in read(self._store, EVENTS, (segment.epoch, segment.last - 1), self._damaged):
                return tuple(int(rows.columns[name][-1]) for name in EVENT_ID)
        return 0, 0

    def store(self) -> None:
        """Puts all rows into the store, after the writers have had them; raises as the store does."""
        self.take_events()
        self._flush()
        self._stored_at = world.monotonic()
        for stream in self._streams.values():
            stream.write()
        for row, label in self._unwritten:
            self._write(EVALUATIONS, row, label)
        self._unwritten = []

    @property
    def due(self) -> bool:
        """Returns whether rows have waited too long for the store."""
        waits = any(stream.pending for stream in self._streams.values())
        return waits and world.monotonic() - self._stored_at >= _STORE_SECONDS

    def close(self, seconds: float = _FLUSH_SECONDS) -> None:
        """Ends the writers, once they have written what they were given, or after `seconds`."""
        if self._closed.is_set():
            return
        self._closed.set()
        until = world.monotonic() + seconds
        for writer in (self._tail, *self._writers):
            writer.put("close")
        for writer in (self._tail, *self._writers):
            writer.join(max(0.0, until - world.monotonic()))

    def _write(self, stream: str, row: Mapping[str, float], label: str) -> None:
        self._each(MetricWriter.write, stream, row, int(row.get(ENV_STEPS, 0)), label)

    def _each(self, method: Callable[..., None], *arguments: Any) -> None:
        for writer in self._writers:
            writer.put(method.__name__, *arguments)

    def _flush(self) -> None:
        """A writer that hangs holds up one checkpoint, not each."""
        if not self._closed.is_set():
            for writer in self._writers:
                writer.flush()
            until = world.monotonic() + _FLUSH_SECONDS / 2
            for writer in self._writers:
                writer.wait_flushed(until)

    def _watch_fleet(self) -> None:
        while not self._closed.wait(PAUSE_SECONDS):
            with self.continuing("the fleet's metrics"):
                flow = Flow(self._redis, self._run_id).read()
                row = self._fleet.row(read_heartbeats(self._redis, self._run_id), flow)
                self.record(FLEET, row | {ENV_STEPS: self._env_steps, VERSION: flow.version})

    def _named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        row = {printable(name, NAME_CHARACTERS): float(value) for name, value in metrics.items()}
        for name in list(row):
            before, own, _ = name.partition("environment/")
            names = self._names[before + own if own else ""]
            if name not in names and len(names) == (most := _MOST_OF_ENVIRONMENT if own else _MOST_METRICS):
                del row[name]
                said = f"there are more than {most} names, {name!r} is left out"
                self._failed(f"some metrics {before}{own}…" if own else "the metrics", said)
            else:
                names.add(name)
        return row

    @contextmanager
    def continuing(self, writer: str) -> Iterator[None]:
        """Counts what the block raises as a failure of `writer`, and reports the first of these in an event."""
        try:
            yield
        except Exception as error:  # whatever it is, no metric is worth a run
            self._failed(writer, f"{type(error).__name__}: {error}")

    def _damaged(self, error: MetricsDamaged) -> None:
        self._failed("a segment of the metrics", f"it is left out: {error}")

    def _failed(self, writer: str, why: str) -> None:
        self.failures[writer] += 1
        if self.failures[writer] == 1:
            self._tell(f"{writer} cannot be written, training continues: {why}")

    def _slow(self, writer: str, why: str) -> None:
        if writer not in self._were_slow or self._closed.is_set():
            self._were_slow.add(writer)
            self._tell(f"{writer} is slow, training continues: {why}")

    def _tell(self, text: str) -> None:
        _LOGGER.warning("%s", text)
        emit(self._redis, self._run_id, "metrics", text)


_EVALUATED = {
    "mean_return": "ep_rew_mean", "std_return": "ep_rew_std", "min_return": "ep_rew_min", "max_return": "ep_rew_max",
    "mean_length": "ep_len_mean", "success_rate": "success_rate", "episodes": "episodes",
}  # fmt: skip
"""Field of an evaluation → the metric's name after `eval/`."""


def evaluation_row(scores: Mapping[str, Any]) -> dict[str, float]:
    """One evaluation as metrics: `eval/…`, and `eval/confirmation/…` where a second one followed."""
    row = {ENV_STEPS: float(scores.get("env_steps", 0)), VERSION: float(scores["version"])}
    for prefix, one in (("eval/", scores), ("eval/confirmation/", scores.get("confirmation") or {})):
        row |= {prefix + name: float(one[key]) for key, name in _EVALUATED.items() if one.get(key) is not None}
        for kind in ("agents", "policies"):
            row |= {f"{prefix}ep_rew_mean/{name}": float(value) for name, value in one.get(kind, {}).items()}
        for metric, told in (("win_rate", "win_rates"), ("match_return", "match_returns")):
            row |= {f"{prefix}{metric}/{name}": float(value) for name, value in one.get(told, {}).items()}
        row |= {f"{prefix}environment/{name}": float(value) for name, value in one.get("metrics", {}).items()}
    return row


class FleetMetrics:
    """Rows of the fleet: speed of the workers, where each role's time goes, depth of the log. They compare two readings
    of the heartbeats, by the clock: nothing learned depends on them."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Beat] = {}
        self._time = world.monotonic()

    def row(self, beats: Sequence[Beat], flow: FlowState) -> dict[str, float]:
        now = world.monotonic()
        seconds, self._time = max(now - self._time, 1e-9), now
        alive = {(beat.role, beat.id): beat for beat in beats if beat.alive}
        both = [(its, beat) for key, beat in alive.items() if (its := self._before.get(key)) is not None]
        both = [(its, beat) for its, beat in both if its.process == beat.process]
        self._before = alive
        workers = [beat for beat in alive.values() if beat.role == "worker"]
        row: dict[str, float] = {
            "fleet/workers": len(workers),
            "fleet/workers_wanted": flow.desired_workers,
            "fleet/worker_restarts": sum(int(beat.progress.get("incarnation", 0)) for beat in workers),
            "log/bytes": flow.log_bytes,
            "log/in_flight": flow.in_flight,
            "log/window": flow.window,
        }
        acted = [_transitions(beat) - _transitions(its) for its, beat in both if beat.role == "worker"]
        if acted:
            row |= {"fleet/fps": sum(acted) / seconds, "fleet/worker_fps_mean": fmean(acted) / seconds}
            row["fleet/worker_fps_min"] = min(acted) / seconds
            row["fleet/heartbeat_age_max"] = max(beat.age_seconds for beat in workers)
        for role in ("trainer", "worker", "evaluator"):
            row |= _time_shares(role, [(its, beat) for its, beat in both if beat.role == role])
        return row


def _time_shares(role: str, both: Sequence[tuple[Beat, Beat]]) -> dict[str, float]:
    spent = defaultdict[str, float](float)
    for before, beat in both:
        for stage, seconds in beat.stages.items():
            spent[stage] += max(0.0, seconds - before.stages.get(stage, 0.0))
    total = sum(spent.values())
    return {f"time_share/{role}/{stage}": seconds / total for stage, seconds in spent.items()} if total else {}


def _transitions(beat: Beat) -> int:
    return int(str(beat.progress.get("transitions", 0)))
