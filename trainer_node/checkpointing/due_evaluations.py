"""Policies that are due to be evaluated, whether or not a checkpoint of that version is kept."""

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, cast

from stagecoach.shared.base.errors import CheckpointDamaged, ObjectMissing
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.due_evaluations import (
    delete_due_evaluation,
    due_evaluations,
    read_due_evaluation,
    write_due_evaluation,
)
from stagecoach.trainer_node.checkpointing import retention
from stagecoach.trainer_node.checkpointing.fenced_store import LateDeletions
from stagecoach.trainer_node.state.snapshot import Snapshot


class DueEvaluations:
    """Policies due by `evaluation.every`, as checkpoints that stay in the store until their score is recorded. The
    trainer's thread submits; all other methods are the checkpoint writer's."""

    def __init__(self, store: LateDeletions, checkpoints: CheckpointStore, keep_best: int) -> None:
        self._store, self._checkpoints, self._keep_best = store, checkpoints, keep_best
        self._submitted: dict[str, Snapshot] = {}
        self._stored: dict[str, Collection[str]] | None = None
        """Name → the shared objects that it lists; None when the store has to be listed."""

    def submit(self, due: Snapshot) -> None:
        self._submitted[due.name] = due

    @property
    def names(self) -> set[str]:
        return {*self._submitted, *(self._stored or ())}

    @property
    def submitted(self) -> int:
        return len(self._submitted)

    @property
    def shared_objects(self) -> set[str]:
        return {sha256 for listed in (self._stored or {}).values() for sha256 in listed}

    def write(self, evaluated: Collection[str], evaluations: Mapping[str, dict[str, Any]]) -> None:
        """Stores submitted policies; keeps the best of those with a score as checkpoints. Raises as the store does."""
        if self._stored is None:
            self._stored = {name: self._shared_objects_of(name) for name in due_evaluations(self._store)}
        for name in list(self._submitted):
            if name not in evaluated:  # a trainer that learns the log again passes it again
                due = self._submitted[name].checkpoint
                write_due_evaluation(self._store, due)
                self._stored[name] = due.manifest.provenance.get("shared_objects", ())
            del self._submitted[name]
        done = sorted(self._stored.keys() & set(evaluated))
        for name in self._best(done, evaluations):
            with contextlib.suppress(CheckpointDamaged, ObjectMissing):
                due = read_due_evaluation(self._store, name)
                self._checkpoints.write(due.manifest, due.objects)
        for name in done:
            delete_due_evaluation(self._store, name)
            del self._stored[name]

    def _shared_objects_of(self, name: str) -> Collection[str]:
        with contextlib.suppress(CheckpointDamaged, ObjectMissing):
            manifest = read_due_evaluation(self._store, name).manifest
            return cast(Collection[str], manifest.provenance.get("shared_objects", ()))
        return ()

    def _best(self, done: Collection[str], evaluations: Mapping[str, dict[str, Any]]) -> list[str]:
        if not done:
            return []
        there = retention.take_inventory(self._checkpoints, evaluations)
        scored = {**retention.confirmed_returns(evaluations), **there.scores}
        best = retention.best_checkpoints(scored, {*there.entries, *done})[: self._keep_best]
        return [name for name in best if name not in there.entries]
