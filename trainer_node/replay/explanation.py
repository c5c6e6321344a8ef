"""Explanation: what moved the policy from one version to the next, by the fragments and episodes it was learned from.

The learner is moved again from the checkpoint before (`rerun.py`). An algorithm that learns an update's batch has a
gradient for each fragment: that of the whole batch's loss, before the first step, is the sum of its fragments' parts,
as it is the sum of the ranks' parts in a data-parallel trainer. One with a replay buffer draws from many fragments at
each step: there the TD errors of the rows drawn are summed by fragment.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment, decode
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
    """One fragment's or one episode's part in one update of one policy. None where the algorithm does not have it."""

    version: int
    """Version after the update."""
    policy: str
    position: str
    """Position in the log; of an episode, that of the last fragment in which it was learned from."""
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
    slot: int | None = None
    """Slot of an episode in the fragment, `agent × environments + environment`; None for a fragment."""
    last_step: int | None = None
    """Step of the fragment that ended an episode; None if it continued, and for a fragment."""
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
    """Fragments, largest `share` first."""
    episodes: tuple[Influence, ...]
    """Episodes, largest `share` first, as far as they were learned from in each update; () with a recurrent policy."""
    by_worker: dict[str, float]
    """Worker → its fragments' part of all shares, largest first."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class EpisodeLabels:
    """Numbers the episodes of fragments, each policy's fragments given in the log's order."""

    def __init__(self, description: EnvironmentDescription) -> None:
        self._one_agent = len(description.policies) == 1 and not description.in_turns
        self._running: dict[tuple[str, str], tuple[str, int, Array]] = {}
        """Policy and worker → life and number of its last fragment, and the labels of the episodes that run on."""
        self._ends: dict[int, tuple[int, int | None, EpisodeRecord | None]] = {}
        """Label → slot, and step and record of its end, in the last fragment that it is in."""

    def of(self, item: Fragment, policy_id: str) -> Array:
        """Returns `[T, S]`: the label of the episode that each step is of."""
        header, columns = item.header, item.columns[policy_id]
        ended = columns["terminated"] | columns["truncated"]
        life, seq, running = self._running.get((policy_id, header.worker_id), ("", -1, np.zeros(0, np.int64)))
        if life != header.life or header.seq not in (0, seq + 1):
            running = self._begin(range(ended.shape[1]))
        records = header.episodes if self._one_agent and ended.sum() == len(header.episodes) else ()
        labels, ends = np.empty(ended.shape, np.int64), 0
        for step, now in enumerate(ended):
            labels[step] = running
            if now.any():
                running, slots = running.copy(), np.flatnonzero(now)
                for slot in slots.tolist():
                    self._ends[int(running[slot])] = slot, step, records[ends] if records else None
                    ends += 1
                running[slots] = self._begin(slots.tolist())
        for slot, label in enumerate(running.tolist()):
            self._ends[label] = slot, None, None
        self._running[policy_id, header.worker_id] = header.life, header.seq, running
        return labels

    def _begin(self, slots: Iterable[int]) -> Array:
        first = len(self._ends)
        self._ends |= {first + number: (slot, None, None) for number, slot in enumerate(slots)}
        return np.arange(first, len(self._ends))

    def named(self, label: int, told: Influence) -> Influence:
        slot, step, record = self._ends[label]
        told = replace(told, slot=slot, last_step=step, episodes=int(step is not None))
        return told if record is None else replace(told, **_of_records([record]))


class _Part(Shard):
    """Some consecutive rows of a batch as if a rank of their own learned from them."""

    def __init__(self, rows: slice) -> None:
        self._rows = rows

    def rows(self, count: int) -> slice:
        return self._rows

    def mean(self, values: Tensor, count: int) -> Tensor:
        return values.sum() / count


@dataclass
class _Sum:
    """Part of the rows of one fragment or episode in the gradient and the terms of a batch's loss."""

    item: Fragment
    """The fragment; of an episode the last one that it has rows in."""
    transitions: int = 0
    gradient: Tensor | None = None
    terms: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    largest_advantage: float | None = None

    def add(self, other: "_Sum") -> None:
        self.transitions += other.transitions
        if other.gradient is not None:
            self.gradient = other.gradient if self.gradient is None else self.gradient + other.gradient
        self.terms = {name: self.terms.get(name, 0.0) + term for name, term in other.terms.items()}
        if other.advantage is not None and other.largest_advantage is not None:
            self.advantage = (self.advantage or 0.0) + other.advantage
            self.largest_advantage = max(self.largest_advantage or 0.0, other.largest_advantage)


class _BatchWatch:
    """Computes the parts of the gradient of a batch's loss: of each fragment, and of each episode in them."""

    def __init__(
        self, algorithm: BatchLearner, policy_id: str, fragments: Sequence[Fragment], labels: EpisodeLabels
    ) -> None:
        self._algorithm, self._labels = algorithm, labels
        self._fragments, self._policy_id = fragments, policy_id
        self.found: list[_Sum] = []
        """Sum of each fragment that was learned from."""
        self._episodes: list[tuple[float, int, _Sum]] = []
        """Norm, label and sum of the episodes; those with the largest norms keep their gradient."""
        self._parameters = [its for its in algorithm.policy.parameters() if its.requires_grad]
        self._before = self._flat()

    def _flat(self) -> Tensor:
        return torch.cat([its.detach().flatten() for its in self._parameters]).clone()

    def __call__(self, batch: Any, arguments: tuple[Any, ...]) -> None:
        masks = [item.columns[self._policy_id]["mask"] for item in self._fragments]
        owners = np.concatenate([np.full(mask.shape, index) for index, mask in enumerate(masks)], axis=1)
        mask = np.concatenate(masks, axis=1)
        if isinstance(batch, Sequences):  # the steps of a slot share their hidden states, whatever episode they are of
            owner, counts = owners[0][mask.any(axis=0)], mask.sum(axis=0)[mask.any(axis=0)]
            labels = owner
        else:
            labels = np.concatenate([self._labels.of(item, self._policy_id) for item in self._fragments], axis=1)[mask]
            owner, counts = owners[mask], np.ones(int(mask.sum()), np.int64)
        if len(owner) != len(batch):
            return  # a user's own batch
        order = np.lexsort((owner, labels))
        owner, labels, counts = owner[order], labels[order], counts[order]
        ordered = batch.take(torch.from_numpy(order).to(self._before.device))
        begins = np.flatnonzero(np.diff(labels, prepend=-1) | np.diff(owner, prepend=-1))
        shard, fragments = self._algorithm.shard, {index: _Sum(item) for index, item in enumerate(self._fragments)}
        try:
            episode = _Sum(self._fragments[0])
            for first, end in zip(begins, [*begins[1:], len(owner)]):
                if first and labels[first] != labels[first - 1]:
                    self._ended(int(labels[first - 1]), episode)
                    episode = _Sum(self._fragments[0])
                episode.item = self._fragments[owner[first]]
                part = self._measured(ordered, arguments, slice(int(first), int(end)), int(counts[first:end].sum()))
                episode.add(part)
                fragments[owner[first]].add(part)
            self._ended(int(labels[-1]), episode)
        finally:
            self._algorithm.shard = shard
        self.found = [its for its in fragments.values() if its.transitions]
        self._episodes = [] if isinstance(batch, Sequences) else self._episodes
        self._total = int(mask.sum())

    def _ended(self, label: int, episode: _Sum) -> None:
        assert episode.gradient is not None
        self._episodes.append((float(episode.gradient.norm()), label, episode))
        if len(self._episodes) % _NAMED == 0:  # gradients of all episodes may not fit into memory
            for _, _, its in sorted(self._episodes, key=lambda each: -each[0])[_NAMED:]:
                its.gradient = None

    def _measured(self, batch: Any, arguments: tuple[Any, ...], rows: slice, transitions: int) -> _Sum:
        self._algorithm.shard = _Part(rows)
        with torch.enable_grad():
            loss, terms = self._algorithm.loss(batch, *arguments)
            parts = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        filled = (torch.zeros_like(its) if part is None else part for its, part in zip(self._parameters, parts))
        found = _Sum(self._fragments[0], transitions, torch.cat([part.flatten() for part in filled]))
        found.terms = {name: float(term) for name, term in terms.items()}
        part = batch.take(rows)
        if isinstance(part, Batch) and "train/policy_loss" in terms:
            advantage = part.counted(part.advantage)
            found.advantage, found.largest_advantage = float(advantage.sum()), float(advantage.abs().max())
        return found

    def influences(self) -> tuple[list[Influence], list[Influence]]:
        """Returns the influences of fragments and of episodes, after the update."""
        moved = self._flat() - self._before
        fragments = [(float(its.gradient.norm()), its) for its in self.found if its.gradient is not None]
        told = [self._told(norm, its, moved, fragments) for norm, its in fragments]
        episodes = [(norm, its) for norm, _, its in self._episodes]
        ended = [self._labels.named(label, self._told(norm, its, moved, episodes))
                 for norm, label, its in self._episodes]  # fmt: skip
        return [_of(each, its.item) for each, (_, its) in zip(told, fragments)], ended

    def _told(self, norm: float, its: _Sum, moved: Tensor, among: Sequence[tuple[float, _Sum]]) -> Influence:
        total, share = sum(each for each, _ in among), its.transitions / self._total
        known = {name: term / share for name, term in its.terms.items()}
        cosine = None
        if its.gradient is not None:
            cosine = float(torch.nn.functional.cosine_similarity(-its.gradient, moved, dim=0))
        return Influence(
            0, self._policy_id, its.item.position, worker=its.item.header.worker_id, acted_by=its.item.header.version,
            transitions=its.transitions, gradient_norm=norm, cosine=cosine, kl=known.get("train/approx_kl"),
            clip_fraction=known.get("train/clip_fraction"), td_error=known.get("train/td_error"),
            advantage=None if its.advantage is None else its.advantage / its.transitions,
            largest_advantage=its.largest_advantage, share=norm / total if total else 0.0,
        )  # fmt: skip


class _ReplayWatch:
    """Sums the TD errors of the rows drawn from a replay buffer, by the fragment and the episode that each is of."""

    def __init__(
        self, algorithm: OffPolicy, policy_id: str, learner: Learner, archive: Archive, labels: EpisodeLabels
    ) -> None:
        self._algorithm, self._policy_id, self._learner, self._archive = algorithm, policy_id, learner, archive
        self._labels = labels
        self._sums: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        """Number of a fragment → row in it, and its TD error, for each row drawn."""

    def __call__(self, rows: Array, td_error: Tensor) -> None:
        ring = self._algorithm.replay_buffer.ring
        places = zip(*np.divmod(ring.numbers(rows.reshape(-1)), ring.rows_each))
        for (number, row), error in zip(places, td_error.reshape(-1).abs().tolist()):
            self._sums[int(number)].append((int(row), error))

    def influences(self) -> tuple[list[Influence], list[Influence]]:
        """Returns the influences of fragments, and of the episodes in those that were looked up."""
        ring, remembered = self._algorithm.replay_buffer.ring, list(self._learner.remembered)
        total = sum(error for drawn in self._sums.values() for _, error in drawn)
        found, looked_up = list[Influence](), dict[int, Fragment]()
        for number, drawn in sorted(self._sums.items(), key=lambda each: -sum(error for _, error in each[1])):
            told = self._told(remembered[number - ring.added], [error for _, error in drawn], total)
            item = self._read(told.position) if len(found) < _NAMED else None
            if item is not None:
                told, looked_up[number] = _of(told, item), item
            found.append(told)
        errors, last = defaultdict[int, list[float]](list), dict[int, Fragment]()
        for number, item in sorted(looked_up.items()):
            labels = self._labels.of(item, self._policy_id).reshape(-1)
            for row, error in self._sums[number]:
                errors[int(labels[row])].append(error)
                last[int(labels[row])] = item
        episodes = [
            self._labels.named(label, replace(self._told(last[label].position, each, total), worker=(
                its := last[label].header).worker_id, acted_by=its.version))
            for label, each in errors.items()
        ]  # fmt: skip
        return found, episodes

    def _told(self, position: str, errors: Sequence[float], total: float) -> Influence:
        return Influence(
            0, self._policy_id, position, transitions=len(errors), td_error=fmean(errors),
            share=sum(errors) / total if total else 0.0,
        )  # fmt: skip

    def _read(self, position: str) -> Fragment | None:
        with suppress(ArchiveIncomplete, FragmentError):
            for entry in self._archive.entries(before(position), position):
                if entry.id == position and entry.fragment is not None:
                    return replace(decode(entry.fragment), position=position)
        return None


def _of(told: Influence, item: Fragment) -> Influence:
    """Adds what the fragment's header says."""
    header = item.header
    return replace(told, worker=header.worker_id, acted_by=header.version, **_of_records(header.episodes))


def _of_records(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    matches = [record.match for record in records if record.match is not None]
    others = {player for match in matches for side, player in enumerate(match.players) if side != match.side}
    return {
        "episodes": len(records), "mean_return": fmean(its.episode_return for its in records) if records else None,
        "opponents": tuple(sorted(others)), "parameters": records[-1].parameters if records else {},
    }  # fmt: skip


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
                        how = f"continued from {manifest.parent}, and Redis had lost the log between the two"
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
    found, episodes, metrics = list[Influence](), list[Influence](), dict[int, dict[str, float]]()
    aim = checkpoints.load(goal)
    if (checkpoint_version(start) or 0) < (lineage := aim.manifest.provenance["lineage"]):
        raise UserError(_gone_back(checkpoints, config, (version - last + 1, version), lineage))
    with rerun(checkpoints, config, description, start, aim) as again:
        while again.version < version:
            taken, learner = again.take(), again.learner
            watches, labels = dict[str, _BatchWatch | _ReplayWatch](), EpisodeLabels(description)
            if again.version >= version - last and again.phase is Phase.TRAIN:
                for policy_id, algorithm in learner.algorithms.items():
                    if isinstance(algorithm, BatchLearner):
                        watches[policy_id] = algorithm.watch = _BatchWatch(algorithm, policy_id, taken, labels)
                    elif isinstance(algorithm, OffPolicy):
                        watches[policy_id] = algorithm.watch = _ReplayWatch(
                            algorithm, policy_id, learner, again.archive, labels
                        )
            told = again.learn(taken)
            if again.version > version - last:
                metrics[again.version] = told
            for policy_id, watch in watches.items():
                learner.algorithms[policy_id].watch = None  # type: ignore[attr-defined]
                for kind, its in zip((found, episodes), watch.influences()):
                    kind += [replace(each, version=again.version) for each in its]
            progress(again.version, version)
    for kind in (found, episodes):
        kind.sort(key=lambda each: (-each.share, each.version, each.position, each.slot or 0))
    by_worker: defaultdict[str, float] = defaultdict(float)
    for each in found:
        by_worker[each.worker] += each.share
    total = sum(by_worker.values()) or 1.0
    ranked = sorted(((name, value / total) for name, value in by_worker.items()), key=lambda item: -item[1])
    return Explanation(
        checkpoints.run_id, start if start == BEGINNING else checkpoints.resolve(start), (version - last + 1, version),
        metrics, tuple(found), tuple(episodes), dict(ranked),
    )  # fmt: skip
