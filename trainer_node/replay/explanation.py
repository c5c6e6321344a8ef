"""Explanation: what moved the policy from one version to the next, by the fragments that it was learned from.

The learner is moved again from the checkpoint before (`rerun.py`). An algorithm that learns an update's batch has a
gradient for each fragment: that of the whole batch's loss, before the first step, is the sum of its fragments' parts,
as it is the sum of the ranks' parts in a data-parallel trainer. One with a replay buffer draws from many fragments at
each step: there the TD errors of the rows drawn are summed by fragment.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagecoach.shared.base.errors import ArchiveIncomplete, CheckpointError, FragmentError, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment, decode
from stagecoach.shared.experience.log_entry import before
from stagecoach.shared.experience.spaces import Array, EnvironmentDescription
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.learning.algorithms.off_policy import OffPolicy
from stagecoach.trainer_node.learning.algorithms.on_policy import BatchLearner
from stagecoach.trainer_node.learning.building_blocks.batch import Batch, Sequences
from stagecoach.trainer_node.learning.building_blocks.interface import Shard
from stagecoach.trainer_node.learning.learner import Learner
from stagecoach.trainer_node.replay.rerun import BEGINNING, kept_around, rerun
from stagecoach.trainer_node.state.fork import beginnings

_NAMED = 100
"""Fragments of a replay buffer that are looked up in the archive, those with the largest sums first."""


@dataclass(frozen=True)
class Influence:
    """One fragment's part in one update of one policy. None where the algorithm does not have it."""

    version: int
    """Version after the update."""
    policy: str
    position: str
    """Position in the log."""
    worker: str = ""
    acted_by: int | None = None
    """Policy version that acted."""
    transitions: int = 0
    """Number learned from: of the batch, or the rows drawn from the replay buffer."""
    gradient_norm: float | None = None
    """Euclidean norm of its part of the gradient of the update's loss, before the first gradient step."""
    cosine: float | None = None
    """Cosine of the step down that gradient with the change of the policy's parameters by the whole update."""
    kl: float | None = None
    """Mean of the estimate `ratio − 1 − log ratio` over its transitions, before the first gradient step."""
    clip_fraction: float | None = None
    """Share of its transitions whose ratio is beyond the clip range then."""
    advantage: float | None = None
    """Mean advantage, not normalized."""
    largest_advantage: float | None = None
    """Largest magnitude of an advantage, not normalized."""
    td_error: float | None = None
    """Mean magnitude of the TD errors of its rows drawn."""
    share: float = 0.0
    """Part of the sum of gradient norms, or of TD errors, of the same update and policy."""
    episodes: int = 0
    """Episodes that ended in it."""
    mean_return: float | None = None
    """Mean return of these, as the environment gave it."""
    opponents: tuple[str, ...] = ()
    parameters: dict[str, Any] = field(default_factory=dict)
    """Values drawn for the last of these episodes (`environment.parameters`)."""


@dataclass(frozen=True)
class Explanation:
    run_id: str
    start: str
    """The checkpoint from which it was learned again."""
    versions: tuple[int, int]
    """First and last version explained."""
    metrics: dict[int, dict[str, float]]
    """Version → metrics of the update that led to it."""
    influences: tuple[Influence, ...]
    """Largest `share` first."""
    by_worker: dict[str, float]
    """Worker → its fragments' part of all shares, largest first."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Part(Shard):
    """Some consecutive rows of a batch as if a rank of their own learned from them."""

    def __init__(self, rows: slice) -> None:
        self._rows = rows

    def rows(self, count: int) -> slice:
        return self._rows

    def mean(self, values: Tensor, count: int) -> Tensor:
        return values.sum() / count


class _BatchWatch:
    """Computes each fragment's part of the gradient of a batch's loss."""

    def __init__(self, algorithm: BatchLearner, policy_id: str, fragments: Sequence[Fragment]) -> None:
        self._algorithm = algorithm
        self._fragments, self._policy_id = fragments, policy_id
        self.found: list[tuple[Influence, Tensor]] = []
        self._parameters = [its for its in algorithm.policy.parameters() if its.requires_grad]
        self._before = self._flat()

    def _flat(self) -> Tensor:
        return torch.cat([its.detach().flatten() for its in self._parameters]).clone()

    def __call__(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        masks = [item.columns[self._policy_id]["mask"] for item in self._fragments]
        owners = np.concatenate([np.full(mask.shape, index) for index, mask in enumerate(masks)], axis=1)
        mask = np.concatenate(masks, axis=1)
        owner = owners[0][mask.any(axis=0)] if isinstance(batch, Sequences) else owners[mask]
        if len(owner) != len(batch):
            return  # a user's own batch
        order = np.argsort(owner, kind="stable")
        ordered = batch.take(torch.from_numpy(order).to(self._before.device))
        bounds = np.searchsorted(owner[order], np.arange(len(masks) + 1))
        shard = self._algorithm.shard
        try:
            for index in range(len(masks)):
                rows = slice(int(bounds[index]), int(bounds[index + 1]))
                if rows.start < rows.stop:
                    self._measure(ordered, arguments, rows, index, int(masks[index].sum()) / int(mask.sum()))
        finally:
            self._algorithm.shard = shard

    def _measure(self, batch: Any, arguments: tuple[Any, ...], rows: slice, index: int, share: float) -> None:
        self._algorithm.shard = _Part(rows)
        with torch.enable_grad():
            loss, terms = self._algorithm.loss(batch, *arguments)
            parts = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        filled = (torch.zeros_like(its) if part is None else part for its, part in zip(self._parameters, parts))
        gradient = torch.cat([part.flatten() for part in filled])
        known = {name: float(term) / share for name, term in terms.items()}
        item = self._fragments[index]
        told = Influence(
            0, self._policy_id, item.position, transitions=int(item.columns[self._policy_id]["mask"].sum()),
            gradient_norm=float(gradient.norm()), kl=known.get("train/approx_kl"),
            clip_fraction=known.get("train/clip_fraction"), td_error=known.get("train/td_error"),
        )  # fmt: skip
        part = batch.take(rows)
        if isinstance(part, Batch) and "train/policy_loss" in terms:
            advantage = part.counted(part.advantage)
            told = replace(told, advantage=float(advantage.mean()), largest_advantage=float(advantage.abs().max()))
        self.found.append((_of(told, item), gradient))

    def influences(self) -> list[Influence]:
        """Returns the influences, after the update."""
        moved = self._flat() - self._before
        total = sum(told.gradient_norm or 0.0 for told, _ in self.found)
        return [
            replace(
                told, share=(told.gradient_norm or 0.0) / total if total else 0.0,
                cosine=float(torch.nn.functional.cosine_similarity(-gradient, moved, dim=0)),
            )
            for told, gradient in self.found
        ]  # fmt: skip


class _ReplayWatch:
    """Sums the TD errors of the rows drawn from a replay buffer by the fragment that each is of."""

    def __init__(self, algorithm: OffPolicy, policy_id: str, learner: Learner, archive: Archive) -> None:
        self._algorithm, self._policy_id, self._learner, self._archive = algorithm, policy_id, learner, archive
        self._sums: defaultdict[int, list[float]] = defaultdict(list)

    def __call__(self, rows: Array, td_error: Tensor) -> None:
        ring = self._algorithm.replay_buffer.ring
        for number, error in zip(ring.numbers(rows.reshape(-1)) // ring.rows_each, td_error.reshape(-1).abs().tolist()):
            self._sums[int(number)].append(error)

    def influences(self) -> list[Influence]:
        ring, remembered = self._algorithm.replay_buffer.ring, list(self._learner.remembered)
        total, found = sum(sum(errors) for errors in self._sums.values()), list[Influence]()
        for number, errors in sorted(self._sums.items(), key=lambda each: -sum(each[1])):
            position = remembered[number - ring.added]
            told = Influence(
                0, self._policy_id, position, transitions=len(errors), td_error=fmean(errors),
                share=sum(errors) / total if total else 0.0,
            )  # fmt: skip
            found.append(self._named(told) if len(found) < _NAMED else told)
        return found

    def _named(self, told: Influence) -> Influence:
        with suppress(ArchiveIncomplete, FragmentError):
            for entry in self._archive.entries(before(told.position), told.position):
                if entry.id == told.position and entry.fragment is not None:
                    return _of(told, decode(entry.fragment))
        return told


def _of(told: Influence, item: Fragment) -> Influence:
    """Adds what the fragment's header says."""
    header, returns = item.header, [record.episode_return for record in item.header.episodes]
    matches = [record.match for record in header.episodes if record.match is not None]
    others = {player for match in matches for side, player in enumerate(match.players) if side != match.side}
    return replace(
        told, worker=header.worker_id, acted_by=header.version, episodes=len(returns),
        mean_return=fmean(returns) if returns else None, opponents=tuple(sorted(others)),
        parameters=header.episodes[-1].parameters if returns else {},
    )  # fmt: skip


def _gone_back(checkpoints: CheckpointStore, config: Config, wanted: tuple[int, int], lineage: int) -> str:
    """Says how the run continued as version `lineage`, which no log leads to, and which versions can be explained."""
    known = [(its, name) for name in checkpoints.names() if (its := checkpoint_version(name)) is not None]
    ranges, before = list[list[int]](), -1 if beginnings(config) else 0
    how = "went back to an older checkpoint, or Redis had lost what was learned (the run's events say which)"
    for version, name in sorted(known):
        with suppress(CheckpointError):
            manifest = checkpoints.manifest(name)
            first, counters = manifest.provenance["lineage"], manifest.provenance["counters"]
            if version == lineage and manifest.parent is not None:
                how = f"went back to {manifest.parent} and abandoned what it had learned since"
                with suppress(CheckpointError):
                    if checkpoints.manifest(manifest.parent).provenance["counters"] != counters:
                        how = f"went on from {manifest.parent}, and Redis had lost the log between the two"
            if first <= before < version:
                ranges += [[before + 1, version]] if not ranges or ranges[-1][1] != before else []
                ranges[-1][1] = version
            before = version
    asked = f"version {wanted[1]}" if wanted[0] == wanted[1] else f"versions {wanted[0]} to {wanted[1]}"
    there = ", ".join(f"{first} to {last}" for first, last in ranges) or "none"
    return (
        f"the log does not lead to {asked}: with version {lineage} the run {how}. Versions that can be explained: "
        f"{there}; checkpoint.keep_last and keep_every keep more"
    )


def explain(
    checkpoints: CheckpointStore, config: Config, description: EnvironmentDescription, version: int, last: int = 1,
    progress: Callable[[int, int], None] = lambda version, last: None,
) -> Explanation:  # fmt: skip
    """Learns again from the kept checkpoint before, and explains the `last` updates that end in `version`. Raises as
    `rerun` does, and `UserError` for versions that there are not."""
    if not 1 <= last <= version:
        raise UserError(f"last={last}: expected 1 to {version}, the updates up to version {version}")
    start, _ = kept_around(checkpoints, config, version - last + 1)
    _, goal = kept_around(checkpoints, config, version)
    found, metrics = list[Influence](), dict[int, dict[str, float]]()
    aim = checkpoints.load(goal)
    if (checkpoint_version(start) or 0) < (lineage := aim.manifest.provenance["lineage"]):
        raise UserError(_gone_back(checkpoints, config, (version - last + 1, version), lineage))
    with rerun(checkpoints, config, description, start, aim) as again:
        while again.version < version:
            taken, learner = again.take(), again.learner
            watches = dict[str, _BatchWatch | _ReplayWatch]()
            if again.version >= version - last and again.phase is Phase.TRAIN:
                for policy_id, algorithm in learner.algorithms.items():
                    if isinstance(algorithm, BatchLearner):
                        watches[policy_id] = algorithm.watch = _BatchWatch(algorithm, policy_id, taken)
                    elif isinstance(algorithm, OffPolicy):
                        watches[policy_id] = algorithm.watch = _ReplayWatch(
                            algorithm, policy_id, learner, again.archive
                        )
            told = again.learn(taken)
            if again.version > version - last:
                metrics[again.version] = told
            for policy_id, watch in watches.items():
                learner.algorithms[policy_id].watch = None  # type: ignore[attr-defined]
                found += [replace(each, version=again.version) for each in watch.influences()]
            progress(again.version, version)
    found.sort(key=lambda each: (-each.share, each.version, each.position))
    by_worker: defaultdict[str, float] = defaultdict(float)
    for each in found:
        by_worker[each.worker] += each.share
    total = sum(by_worker.values()) or 1.0
    ranked = sorted(((name, value / total) for name, value in by_worker.items()), key=lambda item: -item[1])
    return Explanation(
        checkpoints.run_id, start if start == BEGINNING else checkpoints.resolve(start), (version - last + 1, version),
        metrics, tuple(found), dict(ranked),
    )  # fmt: skip
