"""Replay: train again from one checkpoint over the archived log, and compare what comes out with another checkpoint.

The same intake and the same learner as the trainer's, fed by the archive; nothing is written anywhere. On a CPU with
the same PyTorch every object of the two checkpoints must be equal, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.archive import Archive
from shared.checkpoint import Checkpoint, CheckpointStore, Manifest
from shared.config import Config
from shared.errors import ArchiveIncomplete, UserError
from shared.fragment import Fragment
from shared.ledger import Ledger
from shared.spaces import EnvironmentDescription
from shared.steps import Phase
from trainer_node import snapshot
from trainer_node.intake import Intake
from trainer_node.learner import make_learner, set_up_torch
from trainer_node.local_ranks import local_ranks
from trainer_node.recollection import restore_whole
from trainer_node.schedule import RunSchedule
from trainer_node.snapshot import Line, Progress, Snapshot

BEGINNING = "start"
"""In place of a checkpoint: the untrained policy, which config and seed decide."""


@dataclass(frozen=True)
class Replayed:
    """What a replay found."""

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
    """What was another then than it is here, where something is different: code, PyTorch, device, threads."""

    @property
    def equal(self) -> bool:
        """Whether every object came out the same."""
        return not self.different


class _NoSettlement:
    """A replay settles nothing."""

    def settle(self, position: str, claims: int, ledger: Ledger, decided: str = "") -> bool:
        return False

    def taking(self, first: str = "", last: str = "") -> None:
        pass

    def tell(self, text: str) -> None:
        raise AssertionError("nothing is told twice")


def replay(
    checkpoints: CheckpointStore,
    config: Config,
    description: EnvironmentDescription,
    start: str,
    goal: str,
    progress: Callable[[int, int], None] = lambda version, last: None,
) -> Replayed:
    """Trains from checkpoint `start` (or `start`, the beginning) to the version of checkpoint `goal`.

    `progress` gets the version reached and the last one. Raises `CheckpointNotFound`, `CheckpointDamaged`,
    `ArchiveIncomplete`, and `UserError` where no straight line of learning leads from one to the other.
    """
    set_up_torch(config.trainer)
    if config.trainer.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"trainer.device={config.trainer.device}, but PyTorch finds no CUDA device here, and a CPU comes to other "
            f"bits; replay where the run was trained"
        )
    aim = checkpoints.load(goal)
    line = snapshot.read_state(aim).line
    learner = make_learner(config, description)
    archive = Archive(checkpoints.store, checkpoints.run_id)
    if not archive.segments():
        raise ArchiveIncomplete(
            f"run {checkpoints.run_id} has no archive of its log; train with archive=all to have one"
        )
    intake = Intake(checkpoints.run_id, config, description, archive, _NoSettlement())
    version = 0
    if start != BEGINNING:
        restored = restore_whole(learner, checkpoints.load(start), archive)
        version = restored.version
        intake.restore(restored.books)
    _check_line(start, version, aim.manifest, line, config)
    schedule, begun, fragments = RunSchedule(config), version, 0

    def came_to() -> Snapshot:
        where = Progress(version, schedule.phase(learner.counters), 0, None, "0-0", begun, line)
        return snapshot.take(learner, description, config, checkpoints.run_id, where, intake.committed)

    with local_ranks(config, learner, came_to(), description) as ranks:
        while version < aim.manifest.version:
            phase = schedule.phase(learner.counters)
            taken = _next(intake, config, version, phase, aim.manifest)
            with ranks.turn(taken, phase):
                learner.emulate_acting(taken, phase)
                learner.learn(taken, phase)
            version += 1
            intake.commit()
            fragments += len(taken)
            progress(version, aim.manifest.version)
    steps = fragments * config.rollout.fragment_steps * config.environment.num_envs
    return _compared(start, aim, came_to(), version - begun, fragments, steps)


def _next(intake: Intake, config: Config, version: int, phase: Phase, goal: Manifest) -> list[Fragment]:
    """The fragments of the next update."""
    taken: list[Fragment] = []
    while len(taken) < config.rollout.fragments_per_update:
        item = intake.take(version, phase, 0.0)
        if item is None:
            raise ArchiveIncomplete(
                f"the archive of run {goal.run_id} ends in the middle of version {version + 1}; {goal.name} is version "
                f"{goal.version}. The log follows a checkpoint into the archive: wait, or resume the run where it was "
                f"cut off"
            )
        taken.append(item)
    return taken


def _check_line(start: str, version: int, goal: Manifest, line: Line, config: Config) -> None:
    if start == BEGINNING and config.initialize_from is not None:
        raise UserError(
            f"run {goal.run_id} began with the weights of {config.initialize_from}; replay from one of its checkpoints"
        )
    if version < line.version:
        raise UserError(
            f"{goal.name} does not descend in a straight line from {start}: at version {line.version} the run went on "
            f"from another checkpoint, or Redis had lost what was learnt; replay from a checkpoint of version "
            f"{line.version} or later"
        )
    if version > goal.version:
        raise UserError(f"{start} (version {version}) is newer than {goal.name} (version {goal.version})")


def _compared(
    start: str, aim: Checkpoint, came_out: Snapshot, versions: int, fragments: int, env_steps: int
) -> Replayed:
    found, expected = came_out.manifest.objects, aim.manifest.objects
    different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    hashes = {name: item.sha256 for name, item in found.items()}
    unlike = snapshot.unlike(aim.manifest, snapshot.written_with(came_out.manifest))
    return Replayed(
        start, aim.manifest.name, versions, fragments, env_steps, tuple(different), hashes,
        tuple(unlike if different else ()),
    )  # fmt: skip
