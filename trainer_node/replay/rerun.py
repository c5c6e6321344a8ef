"""A run's learner, moved again by the archived log, version by version; nothing is written anywhere.

The same consumer and the same learner as the trainer's. On a CPU with the same PyTorch it reaches the same bits.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stagecoach.shared.base.errors import ArchiveIncomplete, CheckpointNotFound, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.storage.checkpoint_store import Checkpoint, CheckpointStore, Manifest
from stagecoach.shared.storage.log_archive import EXPERIENCE, Archive
from stagecoach.trainer_node.distributed.leader import Leader, SingleProcess
from stagecoach.trainer_node.distributed.local_followers import local_ranks
from stagecoach.trainer_node.learning.learner import Learner, make_learner, set_up_torch
from stagecoach.trainer_node.recovery.recovery import held, restore_learner
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.fork import beginnings
from stagecoach.trainer_node.state.log_consumer import LogConsumer
from stagecoach.trainer_node.state.snapshot import Lineage, Parent, Progress, Snapshot, phase_at

BEGINNING = "start"
"""Name of the untrained policy, which config and seed decide, in place of a checkpoint's."""


@dataclass
class Rerun:
    config: Config
    learner: Learner
    consumer: LogConsumer
    archive: Archive
    begun: int
    """Version at which it began."""
    version: int
    goal: Manifest
    lineage: Lineage
    ranks: SingleProcess | Leader = SingleProcess()  # noqa: RUF009  (it has no state)

    @property
    def phase(self) -> Phase:
        return phase_at(self.config, self.learner.counters)

    def take(self) -> list[Fragment]:
        """Returns the fragments that the next version was learned from; raises `ArchiveIncomplete` at the end."""
        return next_fragments(self.consumer, self.config, self.version, self.phase, self.goal)

    def learn(self, taken: list[Fragment]) -> dict[str, float]:
        """Makes the next version; returns the update's metrics."""
        phase = self.phase
        with self.ranks.turn(taken, phase):
            self.learner.emulate_acting(taken, phase)
            metrics = self.learner.learn(taken, phase)
        self.passed()
        return metrics

    def passed(self) -> None:
        """Counts a version."""
        self.version += 1
        self.consumer.commit(self.version)

    def snapshot(self) -> Snapshot:
        progress = Progress(self.version, 0, Parent(version=self.begun), self.lineage)
        return snapshot.take(self.learner, self.config, self.goal.run_id, progress, self.consumer.committed)


def next_fragments(
    consumer: LogConsumer, config: Config, version: int, phase: Phase, goal: Manifest
) -> list[Fragment]:  # fmt: skip
    """Returns the fragments of the version after this one; raises `ArchiveIncomplete` at the archive's end."""
    taken: list[Fragment] = []
    while len(taken) < config.rollout.fragments_per_update:
        item = consumer.take(version, phase, 0.0)
        if item is None:
            raise ArchiveIncomplete(
                f"the archive of run {goal.run_id} ends in the middle of version {version + 1}; {goal.name} is version "
                f"{goal.version}. The log follows a checkpoint into the archive: wait, or resume the run where it was "
                f"cut off"
            )
        taken.append(item)
    return taken


def kept_around(checkpoints: CheckpointStore, config: Config, version: int) -> tuple[str, str]:
    """Returns the newest kept checkpoint before a version (or `start`), and the oldest at or behind it. Raises
    `UserError` for a version beyond the last checkpoint, which nothing can be compared with."""
    known = sorted((its, name) for name in checkpoints.names() if (its := checkpoint_version(name)) is not None)
    if not known:
        raise CheckpointNotFound(f"run {checkpoints.run_id} has no checkpoint yet")
    if not 1 <= version <= known[-1][0]:
        raise UserError(f"version {version}: run {checkpoints.run_id} has versions 1 to {known[-1][0]} in checkpoints")
    start = max((each for each in known if each[0] < version), default=(0, start_of(checkpoints, config)))[1]
    return start, min(each for each in known if each[0] >= version)[1]


def start_of(checkpoints: CheckpointStore, config: Config, start: str = BEGINNING) -> str:
    """Returns the name of a checkpoint to begin at; for `start` itself, unless the run began with what another one had
    learned: that is its version 0."""
    if start != BEGINNING:
        return checkpoints.resolve(start)
    first = (name for name in checkpoints.names() if checkpoint_version(name) == 0 and beginnings(config))
    return next(first, BEGINNING)


def earliest_start(config: Config, goal: Manifest, kept: Iterable[str]) -> str:
    """Returns where the longest replay to `goal` begins: `start`, or the first of the `kept` checkpoints of its lineage
    (at worst itself) if the run went back before it, or began with what another one had learned."""
    lineage: int = goal.provenance["lineage"]
    if not lineage and not beginnings(config):
        return BEGINNING
    known = ((its, name) for name in kept if (its := checkpoint_version(name)) is not None and its >= lineage)
    return min(known, default=(goal.version, goal.name))[1]


def open_archive(checkpoints: CheckpointStore, config: Config) -> Archive:
    """Returns the archive; raises `ArchiveIncomplete` if the run has none."""
    archive = Archive(checkpoints.store, checkpoints.run_id)
    if not archive.segments():
        raise ArchiveIncomplete(
            f"run {checkpoints.run_id} has no archive of its log: its config says archive.keep={config.archive.keep}, "
            f"and its store has nothing in {EXPERIENCE}. What was not kept cannot be had later; train a new run with "
            f"archive=all (archive.keep: all)"
        )
    return archive


@contextmanager
def rerun(
    checkpoints: CheckpointStore, config: Config, description: EnvironmentDescription, start: str | Checkpoint,
    goal: Checkpoint,
) -> Iterator[Rerun]:  # fmt: skip
    """Yields the learner at checkpoint `start` (or `start`, the beginning), which a straight line of versions connects
    with `goal`. Raises `CheckpointNotFound`, `CheckpointDamaged`, `ArchiveIncomplete`, and `UserError` where the two
    are not of one lineage."""
    set_up_torch(config.trainer)
    if config.trainer.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.device={config.trainer.device}, but PyTorch has no CUDA device here, and a CPU gives other "
            f"bits; replay where the run was trained"
        )
    lineage = snapshot.read_state(goal).lineage
    learner = make_learner(config, description, read_dataset=read_dataset)
    archive = open_archive(checkpoints, config)
    consumer = LogConsumer(checkpoints.run_id, config, description, archive.read, None)
    version = 0
    if start != BEGINNING:
        found = start if isinstance(start, Checkpoint) else checkpoints.load(start)
        restored = restore_learner(learner, found, archive)
        version = restored.version
        consumer.restore(restored.committed)
        start = found.manifest.name
    else:
        consumer.commit(0)
    check_lineage(start, version, goal.manifest, lineage, config)
    again = Rerun(config, learner, consumer, archive, version, version, goal.manifest, lineage)
    with local_ranks(config, learner, again.snapshot(), description, held(learner, archive)) as ranks:
        again.ranks = ranks
        yield again


def check_lineage(start: str, version: int, goal: Manifest, lineage: Lineage, config: Config) -> None:
    """Raises `UserError` unless a straight line of versions connects the two."""
    if start == BEGINNING and beginnings(config):
        origins = ", ".join(sorted({*beginnings(config).values()}))
        raise UserError(f"run {goal.run_id} began with the weights of {origins}; replay from one of its checkpoints")
    if version < lineage.version:
        raise UserError(
            f"{goal.name} is not in the lineage of {start}: at version {lineage.version} the run continued "
            f"from another checkpoint, or Redis had lost what was learned; replay from a checkpoint of version "
            f"{lineage.version} or later"
        )
    if version > goal.version:
        raise UserError(f"{start} (version {version}) is newer than {goal.name} (version {goal.version})")
