"""Another run, a what-if, learned from the recorded log of a run from one of its checkpoints on, with a change: some of
its experience left out, or fields of the algorithm set to other values. The run itself stays as it is.

The entries are judged as they were then. What is not left out is learned in the log's order, as many fragments to an
update as the config says, so that versions and data move apart: a changed policy would have acted differently, and
recorded experience is off-policy to it. How far is measured in each update (`ratios_outside`).
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import CheckpointDamaged, ConfigError, DropReason, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.ledger import Count, Ledger, LedgerLine
from stagecoach.shared.storage.checkpoint_store import FINISHED, CheckpointStore, Manifest, Pointer
from stagecoach.shared.storage.metric_log import TRAIN, UNIX_TIME, MetricStream
from stagecoach.shared.storage.shared_objects import read_shared_object, write_shared_object
from stagecoach.trainer_node.checkpointing.retention import announce, remove, take_inventory
from stagecoach.trainer_node.distributed.local_followers import local_ranks
from stagecoach.trainer_node.learning.algorithms.on_policy import OnPolicy
from stagecoach.trainer_node.learning.learner import Learner, make_learner
from stagecoach.trainer_node.metrics.update_metrics import UpdateMetrics
from stagecoach.trainer_node.recovery.recovery import held, restore_learner
from stagecoach.trainer_node.replay.rerun import BEGINNING, Rerun, rerun
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.log_consumer import Committed
from stagecoach.trainer_node.state.snapshot import Lineage, Parent, Progress

LOWEST, HIGHEST = 0.5, 2.0
"""Likelihood ratios within these bounds count as what the changed policy might have done itself."""
RATIOS = "what_if/ratios_outside"
"""Metric of each update: the share of its rows whose likelihood ratio is outside."""
_UPDATES_A_WRITE = 256
ENDED = "what-if"
"""Reason in `.finished`."""


@dataclass(frozen=True)
class LeftOut:
    """Experience to leave out: whole workers, or ranges of positions in the log."""

    workers: frozenset[str] = frozenset()
    ranges: tuple[tuple[str, str], ...] = ()
    """First and last position of each."""

    def has(self, item: Fragment) -> bool:
        place = id_order(item.position)
        among = any(id_order(first) <= place <= id_order(last) for first, last in self.ranges)
        return among or item.header.worker_id in self.workers


@dataclass(frozen=True)
class WhatIf:
    run_id: str
    start: str
    final: str
    """Name of the last checkpoint."""
    updates: int
    env_steps: int
    """Number in the updates from `start` on."""
    left_out: dict[str, int]
    """Worker → transitions left out."""
    not_learned: int
    """Transitions at the log's end that are too few for an update."""
    mean_return: float | None
    """Mean over the last episodes learned from, which the run's own policy acted."""
    ratios_outside: float | None
    """Share of rows whose likelihood ratio was outside [0.5, 2] when they were learned; None without probabilities."""
    sha256: dict[str, str]
    """Object of the last checkpoint → hash."""


class _Ratios:
    """Counts the rows of on-policy batches whose likelihood ratio is outside the bounds."""

    def __init__(self, learner: Learner) -> None:
        self.outside = self.rows = 0
        self.last = [0, 0]
        for algorithm in learner.algorithms.values():
            if isinstance(algorithm, OnPolicy):
                algorithm.watch = lambda batch, _, policy=algorithm.policy: self._count(batch, policy)

    @torch.no_grad()
    def _count(self, batch: Any, policy: Any) -> None:
        (params, _), flat = batch.outputs(policy), batch.flat()
        log_ratio: Tensor = policy.distribution.log_prob(params, flat.actions) - flat.log_prob
        ratio = log_ratio.exp()
        self.outside += int(((ratio < LOWEST) | (ratio > HIGHEST)).sum())
        self.rows += len(ratio)

    def of_update(self) -> dict[str, float]:
        outside, rows = self.outside - self.last[0], self.rows - self.last[1]
        self.last = [self.outside, self.rows]
        return {RATIOS: outside / rows} if rows else {}


class _Writer:
    """Writes checkpoints, metrics and the end of the run that a what-if makes."""

    def __init__(self, target: CheckpointStore, config: Config, told: dict[str, Any], began: tuple[int, int]) -> None:
        self._target, self._config, self._told = target, config, told
        self._stream = MetricStream(target.store, target.run_id, TRAIN, 1, *began)
        self._parent = Parent()

    def row(self, row: dict[str, float]) -> None:
        self._stream.append(row | {UNIX_TIME: round(world.unix_time(), 3)})
        if self._stream.pending >= _UPDATES_A_WRITE:
            self._stream.write()

    def objects(self, learner: Learner) -> None:
        """Stores the new objects of folds, such as players, before anything names them."""
        for fold in learner.folds:
            for data in fold.new_objects().values():
                write_shared_object(self._target.store, data)

    def checkpoint(self, learner: Learner, version: int, committed: Committed, *, final: bool) -> Manifest:
        self._stream.write()
        progress = Progress(version, 1, self._parent, Lineage(version, committed.position))
        taken = snapshot.take(learner, self._config, self._target.run_id, progress, committed).checkpoint
        manifest = taken.manifest.model_copy(update={"provenance": taken.manifest.provenance | {"what_if": self._told}})
        self._target.write(manifest, taken.objects)
        self._parent = Parent(manifest.name, committed.position, version)
        inventory = take_inventory(self._target, {}, manifest.name)
        sha256, last = inventory.entries[manifest.name]["manifest_sha256"], manifest.name if final else None
        pointer = Pointer(latest=manifest.name, final=last, epoch=1, manifest_sha256=sha256)
        self._target.write_pointer(pointer)
        doomed, _ = announce(self._target, inventory, pointer, self._config.checkpoint, ())
        list(remove(self._target, inventory, pointer, doomed))
        return manifest


def what_if(
    source: CheckpointStore, config: Config, description: EnvironmentDescription, start: str, goal: str,
    left_out: LeftOut, changed: Config, target: CheckpointStore, cause: dict[str, Any],
    progress: Callable[[int, int], None] = lambda version, last: None,
) -> WhatIf:  # fmt: skip
    """Learns the log of run `source` again from checkpoint `start` (or `start`) to the version of checkpoint `goal`, as
    the run `target` of config `changed`, whose store has config and description already. `cause` is put into its
    provenance. Raises as `rerun` does, and `UserError` where nothing is left to learn."""
    aim = source.load(goal)
    with ExitStack() as stack:
        then = stack.enter_context(rerun(source, _one_rank(config), description, start, aim))
        learner = make_learner(changed, description, read_dataset=read_dataset)
        if start != BEGINNING:
            try:
                restore_learner(learner, source.load(start), then.archive)
            except CheckpointDamaged as error:
                raise ConfigError(
                    f"what-if --set: {start} does not fit the changed config ({error}); network and spaces stay as "
                    f"they are, unless it begins from `start`"
                ) from None
        for sha256 in {its for fold in learner.folds for its in fold.objects()}:
            write_shared_object(target.store, read_shared_object(source.store, sha256))
        ratios, first = _Ratios(learner), learner.counters.env_steps
        writer = _Writer(target, changed, cause, (then.begun, learner.counters.train.env_steps))
        version, skipped, waiting = then.begun, dict[str, Count](), list[Fragment]()
        committed = _committed(then, skipped, waiting, version)
        taken = snapshot.take(learner, changed, target.run_id, Progress(version, 1), committed)
        ranks = stack.enter_context(local_ranks(changed, learner, taken, description, held(learner, then.archive)))
        metrics, every = UpdateMetrics(changed, learner, description), changed.checkpoint.every
        while then.version < aim.manifest.version:
            for item in _passed(then):
                if left_out.has(item):
                    skipped.setdefault(item.header.worker_id, Count()).add(item.header.transitions)
                else:
                    waiting.append(item)
            progress(then.version, aim.manifest.version)
            while len(waiting) >= changed.rollout.fragments_per_update:
                update = waiting[: changed.rollout.fragments_per_update]
                del waiting[: len(update)]
                before = every.index(learner.counters.train)
                phase = snapshot.phase_at(changed, learner.counters)
                metrics.see(update)
                with ranks.turn(update, phase):
                    learner.emulate_acting(update, phase)
                    learned = learner.learn(update, phase)
                version += 1
                metrics.take(update, learned, version)
                if metrics.due(learner):
                    writer.row(metrics.row(learner, version, {}) | ratios.of_update())
                writer.objects(learner)
                if every.index(learner.counters.train) > before:
                    committed = _committed(then, skipped, waiting, version)
                    writer.checkpoint(learner, version, committed, final=False)
        if version == then.begun:
            raise UserError(f"nothing is left to learn from {start} to {goal}: leave out less, or begin earlier")
        committed = _committed(then, skipped, waiting, version)
        manifest = writer.checkpoint(learner, version, committed, final=True)
    target.write_marker(FINISHED, {
        "run_id": target.run_id, "reason": ENDED, "failure": None, "final": manifest.name, "version": version,
        "counters": learner.counters.as_dict(), "ledger": _lines(then, skipped, waiting),
        "time": round(world.unix_time(), 3),
    })  # fmt: skip
    return WhatIf(
        target.run_id, start, manifest.name, version - then.begun, learner.counters.env_steps - first,
        {worker: count.transitions for worker, count in sorted(skipped.items())},
        sum(item.header.transitions for item in waiting), learner.mean_return(),
        ratios.outside / ratios.rows if ratios.rows else None,
        {name: its.sha256 for name, its in manifest.objects.items()},
    )  # fmt: skip


def _one_rank(config: Config) -> Config:
    """Returns a config whose learner needs no other processes: it only counts."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"ranks": 1})})


def _passed(then: Rerun) -> list[Fragment]:
    """Returns the fragments of the run's next version, and counts them as its trainer did, without learning."""
    phase, taken = then.phase, then.take()
    for item in taken:
        then.learner.count(item, phase)
    if phase is Phase.TRAIN:
        then.learner.counters.train.updates += 1
    then.passed()
    return taken


def _account(then: Rerun, skipped: dict[str, Count], waiting: Sequence[Fragment]) -> Ledger:
    """Returns the run's ledger with what was left out, and without what waits for the next update."""
    ledger = Ledger.from_json(then.consumer.ledger.as_json())
    for worker, count in skipped.items():
        ledger.of(worker).consumed.add(-count.transitions, -count.fragments)
        ledger.drop(worker, DropReason.LEFT_OUT, count.transitions, count.fragments)
    for item in waiting:
        ledger.of(item.header.worker_id).consumed.add(-item.header.transitions, -1)
    return ledger


def _committed(then: Rerun, skipped: dict[str, Count], waiting: Sequence[Fragment], version: int) -> Committed:
    return Committed(then.consumer.position, _account(then, skipped, waiting).as_json(), {}, {version: ""})


def _lines(then: Rerun, skipped: dict[str, Count], waiting: Sequence[Fragment]) -> dict[str, Any]:
    lines, accounts = dict[str, LedgerLine](), _account(then, skipped, waiting).accounts
    for worker in sorted(accounts):
        flight = Count()
        for item in waiting:
            if item.header.worker_id == worker:
                flight.add(item.header.transitions)
        its = accounts[worker]
        lines[worker] = LedgerLine(sum(its.dropped.values(), its.consumed + flight), its.consumed, its.dropped, flight)
    lines["total"] = sum(lines.values(), LedgerLine())
    return {name: line.as_dict() for name, line in lines.items()}
