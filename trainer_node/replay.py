"""Replay: train again from one checkpoint over the archived log, and compare what comes out with another checkpoint.

The same consumer and the same learner as the trainer's, fed by the archive; nothing is written anywhere. On a CPU with
the same PyTorch every object of the two checkpoints must be equal, byte for byte.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stagecoach.shared.base.errors import ArchiveIncomplete, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Manifest
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.distributed.local_followers import local_ranks
from stagecoach.trainer_node.learning.learner import make_learner, set_up_torch
from stagecoach.trainer_node.recovery.recovery import held, restore_learner
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.fork import beginnings
from stagecoach.trainer_node.state.log_consumer import LogConsumer
from stagecoach.trainer_node.state.snapshot import Lineage, Parent, Progress, Snapshot, phase_at

BEGINNING = "start"
"""Name of the untrained policy, which config and seed decide, in place of a checkpoint's."""


@dataclass(frozen=True)
class Replayed:
    start: str
    goal: str
    versions: int
    fragments: int
    env_steps: int
    different: tuple[str, ...]
    """The objects that did not come out as they are in the store."""
    sha256: dict[str, str]
    """Object → what came out."""
    unlike: tuple[str, ...]
    """Differences of code, PyTorch, device and threads, if an object is different."""

    @property
    def equal(self) -> bool:
        """Returns whether every object is equal."""
        return not self.different


def replay(
    checkpoints: CheckpointStore, config: Config, description: EnvironmentDescription, start: str, goal: str,
    progress: Callable[[int, int], None] = lambda version, last: None,
) -> Replayed:  # fmt: skip
    """Trains from checkpoint `start` (or `start`, the beginning) to the version of checkpoint `goal`.

    `progress` gets the version reached and the last one. Raises `CheckpointNotFound`, `CheckpointDamaged`,
    `ArchiveIncomplete`, and `UserError` where they are not of one lineage.
    """
    set_up_torch(config.trainer)
    if config.trainer.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.device={config.trainer.device}, but PyTorch has no CUDA device here, and a CPU gives other "
            f"bits; replay where the run was trained"
        )
    aim = checkpoints.load(goal)
    lineage = snapshot.read_state(aim).lineage
    learner = make_learner(config, description, read_dataset=read_dataset)
    archive = Archive(checkpoints.store, checkpoints.run_id)
    if not archive.segments():
        what = f"run {checkpoints.run_id} has no archive of its log"
        raise ArchiveIncomplete(f"{what}; train with archive=all to have one")
    consumer = LogConsumer(checkpoints.run_id, config, description, archive.read, None)
    version = 0
    if start != BEGINNING:
        restored = restore_learner(learner, checkpoints.load(start), archive)
        version = restored.version
        consumer.restore(restored.committed)
    else:
        consumer.commit(0)
    _check_lineage(start, version, aim.manifest, lineage, config)
    begun, steps_before = version, learner.counters.env_steps

    def came_to() -> Snapshot:
        progress = Progress(version, 0, Parent(version=begun), lineage)
        return snapshot.take(learner, config, checkpoints.run_id, progress, consumer.committed)

    with local_ranks(config, learner, came_to(), description, held(learner, archive)) as ranks:
        while version < aim.manifest.version:
            phase = phase_at(config, learner.counters)
            taken = _next(consumer, config, version, phase, aim.manifest)
            with ranks.turn(taken, phase):
                learner.emulate_acting(taken, phase)
                learner.learn(taken, phase)
            version += 1
            consumer.commit(version)
            progress(version, aim.manifest.version)
    out, fragments = came_to().checkpoint.manifest, (version - begun) * config.rollout.fragments_per_update
    env_steps = learner.counters.env_steps - steps_before
    found, expected = out.objects, aim.manifest.objects
    different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    unlike = snapshot.unlike(aim.manifest, snapshot.written_with(out)) if different else []
    hashes = {name: item.sha256 for name, item in found.items()}
    return Replayed(
        start, aim.manifest.name, version - begun, fragments, env_steps, tuple(different), hashes, tuple(unlike)
    )


def _next(consumer: LogConsumer, config: Config, version: int, phase: Phase, goal: Manifest) -> list[Fragment]:
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


def _check_lineage(start: str, version: int, goal: Manifest, lineage: Lineage, config: Config) -> None:
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
