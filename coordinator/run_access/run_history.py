"""A run's recorded log: what `Run` does with it. It is learned again, explained, searched, and learned differently."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from operator import ge, gt, le, lt
from pathlib import Path

import numpy as np

from stagecoach.coordinator.catalog.checkpoint_lookup import POLICY_OBJECT, policies_of
from stagecoach.coordinator.catalog.episode_video import EpisodeVideo, play_again
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.run_access.run_checkpoints import RunCheckpoints
from stagecoach.rollout_worker.evaluator import CONFIRMING, evaluation_seed, scores_of
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.shared.base.errors import ConfigError, ObjectMissing, RunExists, StagecoachError, UserError
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.protocol.keys import check_run_id
from stagecoach.shared.protocol.quarantine import drop_ranges
from stagecoach.shared.storage.checkpoint_store import CONFIG, ENVIRONMENT, Checkpoint, CheckpointStore
from stagecoach.shared.storage.log_archive import Archive, experience
from stagecoach.shared.storage.metric_log import TRAIN, VERSION, Rows, read
from stagecoach.trainer_node.replay import what_if as other
from stagecoach.trainer_node.replay.comparison import Replayed, replay
from stagecoach.trainer_node.replay.explanation import Explanation, Influence, explain
from stagecoach.trainer_node.replay.rerun import BEGINNING, kept_around, rerun, start_of
from stagecoach.trainer_node.replay.what_if import LeftOut, WhatIf

_WHEN = re.compile(
    r"\s*(?:return of (?P<games>\d+) games?|(?P<metric>[\w./-]+))\s*(?P<sign>[<>]=?)\s*(?P<bound>\S+)\s*"
)
_SIGNS = {"<": lt, "<=": le, ">": gt, ">=": ge}
_MAY_DIFFER = "algorithm.", "policies.", "rollout.fragments_per_update", "trainer.", "checkpoint.", "metrics."
"""Fields that decide what is learned from experience, not what experience there is."""
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Condition:
    """`train/approx_kl > 0.5`, or `return of 20 games < 100`."""

    text: str
    metric: str
    """'' for the return of games."""
    games: int
    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        return bool(_SIGNS[self.sign](value, self.bound))

    @classmethod
    def parse(cls, text: str) -> "Condition":
        found = _WHEN.fullmatch(text)
        with suppress(ValueError):
            if found is not None and int(found["games"] or 1) > 0:
                bound = float(found["bound"])
                return cls(text, found["metric"] or "", int(found["games"] or 0), found["sign"], bound)
        raise UserError(f"--when {text!r}: expected 'METRIC > NUMBER' or 'return of N games < NUMBER' (also >=, <=)")


@dataclass(frozen=True)
class Bisected:
    """The first version for which a condition holds, after one for which it does not."""

    when: str
    version: int
    value: float
    before: float | None
    """Value at the version before; None without one."""
    after_version: int
    """The last version known not to fulfil it: `version - 1`, or less where a row of metrics is of several updates."""
    replays: int
    """Number of times that a part of the log was learned again."""


class RunHistory(RunCheckpoints):
    """The part of `Run` that reads its recorded log, which `archive: all` keeps. Nothing here changes the run."""

    def replay(
        self, start: str, goal: str, progress: Callable[[int, int], None] = lambda version, last: None, *,
        trust_config: bool = False,
    ) -> Replayed:  # fmt: skip
        """Trains again over the archived log and compares: `run.replay("start", "final").different` is empty.

        Nothing is written, and a live run is not disturbed.

        Args:
            start: A checkpoint to begin with, or `start` for the run's beginning.
            goal: The checkpoint to compare with.
            progress: Called with the version reached and the last one.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            What was trained again, and the objects that differ.

        Raises:
            ArchiveIncomplete: Experience is missing.
            CheckpointNotFound: A checkpoint is missing.
            CheckpointDamaged: A checkpoint is incomplete or damaged.
            UserError: No straight line leads from the one to the other, or the config needs trust.
        """
        self._prepare_imports(trust_config)
        store = self.checkpoint_store()
        begin = start_of(store, self.config, start)
        return replay(store, self.config, store.description(), begin, store.resolve(goal), progress)

    def experience(self, after: str | None = None, through: str | None = None) -> Iterator[Fragment]:
        """Reads the archived experience: `for fragment in run.experience(): ...`; needs `archive: all`.

        Args:
            after: Log position before the first entry.
            through: Log position of the last entry.

        Returns:
            Fragments in the log's order, read lazily.

        Raises:
            ArchiveIncomplete: The archive is missing or has a hole.
        """
        store = self.checkpoint_store()
        return experience(Archive(store.store, store.run_id), self.store_location, after, through)

    def explain(
        self, version: int, last: int = 1, progress: Progress = lambda version, last: None, *,
        trust_config: bool = False,
    ) -> Explanation:  # fmt: skip
        """Ranks what moved the policy, by fragment and episode: `run.explain(120).influences[0].worker`.

        Args:
            version: The policy version in question.
            last: Number of updates to explain, the last of which led to this version.
            progress: Called with the version reached and the last one.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            Gradients, advantages and KL of each fragment (`influences`) and episode (`episodes`), largest first; with
            a replay buffer, TD errors.

        Raises:
            ArchiveIncomplete: Experience is missing.
            UserError: The version does not exist, or the config needs trust.
        """
        self._prepare_imports(trust_config)
        store = self.checkpoint_store()
        return explain(store, self.config, store.description(), version, last, progress)

    def play_again(self, episode: Influence, video: str | Path, *, trust_config: bool = False) -> EpisodeVideo:
        """Films a training episode by its recorded actions: `run.play_again(run.explain(120).episodes[0], "a.mp4")`.

        Args:
            episode: One of the episodes of an explanation.
            video: The MP4 file to write.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            The file, and the seed that the episode was reset with.

        Raises:
            ArchiveIncomplete: Experience is missing.
            EnvironmentUnusable: The environment cannot be drawn, or does something else than was recorded.
            UserError: The run's kind of environment cannot be played again, or the config needs trust.
        """
        self._prepare_imports(trust_config)
        store = self.checkpoint_store()
        archive = Archive(store.store, store.run_id)
        return play_again(archive, self.config, store.description(), episode, Path(video))

    def bisect(
        self, when: str, goal: str = "latest", progress: Callable[[str], None] = lambda text: None, *,
        trust_config: bool = False,
    ) -> Bisected:  # fmt: skip
        """Finds the version from which on something is so: `run.bisect("return of 20 games < 100").version`.

        A metric is looked up in the recorded rows. Returns of games are searched by halving: from the newest kept
        checkpoint at which the condition does not hold, the log is learned again up to the version in the middle.

        Args:
            when: `METRIC > NUMBER`, or `return of N games < NUMBER`, whose games begin alike for all versions.
            goal: Checkpoint up to which to look, where the condition on returns has to hold.
            progress: Called with a line for each version looked at.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            The version, with the value there and before.

        Raises:
            ArchiveIncomplete: Experience is missing.
            UserError: The condition cannot be read, never holds, or always.
        """
        condition = Condition.parse(when)
        store = self.checkpoint_store()
        last = checkpoint_version(store.resolve(goal)) or 0
        if condition.metric:
            return _first_row(store, condition, last)
        self._prepare_imports(trust_config)
        return _Halving(store, self.config, condition, last, progress).found()

    def what_if(
        self, start: str = BEGINNING, goal: str = "latest", *, without: tuple[str, ...] = (),
        overrides: tuple[str, ...] = (), run_id: str | None = None,
        progress: Progress = lambda version, last: None, trust_config: bool = False,
    ) -> WhatIf:  # fmt: skip
        """Learns the log again with something changed, as a run of its own: `run.what_if(without=("worker-3",))`.

        Args:
            start: The checkpoint to begin from, or `start`.
            goal: The checkpoint up to which the log is read.
            without: Workers, or log positions `FIRST..LAST`, whose experience is left out.
            overrides: Changed fields of what is learned, such as `("algorithm.clip_range=0.1",)`.
            run_id: Name of the new run, by default this one's with `-what-if` and a number.
            progress: Called with the version of this run reached and the last one.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            The new run's last checkpoint, what was left out, and how far its data are off-policy.

        Raises:
            ArchiveIncomplete: Experience is missing.
            ConfigError: A field does not exist, or decides what experience there is.
            UserError: Nothing is changed, or nothing is left to learn.
        """
        self._prepare_imports(trust_config)
        store = self.checkpoint_store()
        begin = start_of(store, self.config, start)
        aim = store.resolve(goal)
        left_out = self._left_out(without, store)
        changed = self._changed(overrides)
        if not without and changed == self.config:
            raise UserError("a what-if needs a change: --without WORKER, --without FIRST..LAST, or --set FIELD=VALUE")
        told = {"run_id": self.run_id, "from": begin, "to": aim, "without": list(without), "set": list(overrides)}
        name = run_id or self._free_id()
        if self.folder.path.with_name(check_run_id(name)).exists():
            raise RunExists(f"run {name!r} exists in {self.folder.path.parent} (runs_dir); choose another --run-id")
        hidden = RunFolder(name, self.folder.path.with_name(f".{name}.what-if"))  # it gets its name once it is complete
        hidden.path.mkdir(exist_ok=True)
        hidden.lock()
        shutil.rmtree(hidden.path / "s3", ignore_errors=True)
        target = hidden.offline_store(changed)
        if _has_config(target):
            shutil.rmtree(hidden.path, ignore_errors=True)
            raise RunExists(f"the store already has a run {name!r}; choose another --run-id")
        try:
            _clear(target)
            target.store.put(ENVIRONMENT, store.store.get(ENVIRONMENT))
            description = store.description()
            found = other.what_if(
                store, self.config, description, begin, aim, left_out, changed, target, told, progress
            )
            target.store.put(CONFIG, dump_config(changed).encode())
            embedded = hidden.path / "s3" if changed.store.url == "embedded" else None
            here = changed.model_copy(update={"runs_dir": self.folder.path.parent})
            RunFolder.create(here, name, self.folder.import_path(), embedded).unlock()
        except BaseException:
            with suppress(StagecoachError):
                _clear(target)
            raise
        finally:
            shutil.rmtree(hidden.path, ignore_errors=True)
            hidden.unlock()
        return found

    def _left_out(self, without: tuple[str, ...], store: CheckpointStore) -> LeftOut:
        """Parses workers and ranges; raises `UserError` for a worker that the run never had."""
        workers = [text for text in without if not text[:1].isdigit()]
        if workers:
            _, newest = store.read_manifest(store.resolve("latest"))
            known = sorted(newest.provenance.get("ledger", {}))
            if unknown := [name for name in workers if name not in known]:
                raise UserError(f"--without {unknown[0]}: the run learned from {', '.join(known)}")
        ranges = drop_ranges(tuple(text for text in without if text[:1].isdigit()), "--without")
        return LeftOut(frozenset(workers), tuple(ranges))

    def _changed(self, overrides: tuple[str, ...]) -> Config:
        changed = self.folder.config(overrides)
        if any("initialize_from" in override for override in overrides):
            raise ConfigError("what-if --set initialize_from: a what-if begins with the run's own weights, --from NAME")
        before, after = (leaves(each.model_dump(mode="json")) for each in (self.folder.config(), changed))
        for field in sorted({*before, *after}):
            if before.get(field) != after.get(field) and not field.startswith(_MAY_DIFFER):
                others = ", ".join(name.rstrip(".") for name in _MAY_DIFFER)
                raise ConfigError(
                    f"what-if --set {field}: the experience was recorded with {before.get(field)!r}; a what-if "
                    f"changes fields of {others}; train a new run for others"
                )
        return changed

    def _free_id(self) -> str:
        taken = {path.name for path in self.folder.path.parent.glob(f"{self.run_id}-what-if-*")}
        names = (f"{self.run_id}-what-if-{number}" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)


def _clear(checkpoints: CheckpointStore) -> None:
    """Deletes what a what-if that was killed has left in a store."""
    for key in checkpoints.store.keys(""):
        checkpoints.store.delete(key)


def _has_config(checkpoints: CheckpointStore) -> bool:
    try:
        checkpoints.store.get(CONFIG)
    except ObjectMissing:
        return False
    return True


def _first_row(checkpoints: CheckpointStore, condition: Condition, last: int) -> Bisected:
    rows = Rows.joined([rows for _, rows in read(checkpoints.store, TRAIN)])
    if condition.metric not in rows.columns:
        close = get_close_matches(condition.metric, rows.columns, 3, 0.4)
        there = f"did you mean {', '.join(close)}?" if close else "`stagecoach metrics` lists them"
        raise UserError(f"--when {condition.text}: the run has recorded no metric {condition.metric}; {there}")
    versions, values = rows.columns[VERSION], rows.columns[condition.metric]
    before: float | None = None
    after = 0
    for version, value in zip(versions.astype(int).tolist(), values.tolist(), strict=True):
        if version > last or np.isnan(value):
            continue
        if condition.holds(value):
            return Bisected(condition.text, version, value, before, after, 0)
        before, after = value, version
    raise UserError(f"--when {condition.text}: it does not hold in any recorded row through version {last}")


class _Halving:
    """Finds a version between two checkpoints by the returns of games."""

    def __init__(
        self, store: CheckpointStore, config: Config, condition: Condition, last: int, progress: Callable[[str], None]
    ) -> None:
        self._store, self._condition, self._last, self._progress = store, condition, last, progress
        self._trained = config
        played = config.evaluation.model_copy(update={"episodes": condition.games, "env_steps": None})
        self._config = config.model_copy(update={"evaluation": played})
        self._description = store.description()
        self._seed = evaluation_seed(config, "", CONFIRMING)
        self._known: dict[int, Checkpoint] = {}
        self._replays = 0

    def found(self) -> Bisected:
        names = {version: name for name in self._store.names() if (version := checkpoint_version(name)) is not None}
        high, high_value = self._last, self._value(self._store.load(names[self._last], only=POLICY_OBJECT))
        if not self._condition.holds(high_value):
            raise UserError(
                f"--when {self._condition.text}: it is {high_value:g} at version {high}, so it does not hold"
            )
        for version in sorted((its for its in names if its < self._last), reverse=True):
            value = self._value(self._store.load(names[version], only=POLICY_OBJECT))
            if not self._condition.holds(value):
                low, low_value = version, value
                break
            high, high_value = version, value
        else:
            low, low_value = 0, self._value(self._at(0)) if high else high_value
            if not high or self._condition.holds(low_value):
                raise UserError(
                    f"--when {self._condition.text}: it holds at every kept checkpoint, and at the beginning"
                )
        while high - low > 1:
            middle = (low + high) // 2
            value = self._value(self._at(middle))
            if self._condition.holds(value):
                high, high_value = middle, value
            else:
                low, low_value = middle, value
        return Bisected(self._condition.text, high, high_value, low_value, low, self._replays)

    def _at(self, version: int) -> Checkpoint:
        """Learns the log again from the nearest state before."""
        start, goal = kept_around(self._store, self._config, max(1, version))
        from_memory = max((known for known in self._known if known < version), default=-1)
        near = self._known[from_memory] if from_memory > (checkpoint_version(start) or 0) else start
        with rerun(self._store, self._trained, self._description, near, self._store.load(goal)) as again:
            while again.version < version:
                again.learn(again.take())
            self._known[version] = again.snapshot().checkpoint
        self._replays += 1
        return self._known[version]

    def _value(self, checkpoint: Checkpoint) -> float:
        policies = policies_of(checkpoint)
        scores = scores_of(self._config, evaluate_policies(self._config, self._description, policies, self._seed))
        value = float(scores["mean_return"])
        said = "holds" if self._condition.holds(value) else "does not hold"
        self._progress(f"version {checkpoint.manifest.version}: {value:g}, {said}")
        return value
