"""Replay of sequences, for policies with a recurrent core (R2D2, Kapturowski et al. 2019, section 3).

A sequence is one slot's part of a fragment, with the hidden state that it was acted from. Before it come the fragments
that the network goes through again without learning (burn-in), as far as they are still held. With priorities, a
sequence's stands at the row of its first step.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecoach.shared.experience.fragment import STATE
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.trainer_node.learning.replay_buffers.observation_column import NOTHING
from stagecoach.trainer_node.learning.replay_buffers.prioritized import PrioritizedReplayBuffer
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer, Rewards, discounted


@dataclass(frozen=True)
class Span:
    """T steps of B slots as NumPy columns, row by row `[T · B, …]`."""

    observations: Columns
    over: Array
    """`[T, B]`: after which steps the hidden state begins at zero."""
    state_in: Array
    """`[B, state size]`, float32: as it was stored."""
    goes_on: Array
    """`[B]`: whether the state begins as the span before this one leaves it; otherwise with `state_in`."""


@dataclass(frozen=True)
class SequenceBatch:
    """B sequences of T steps. What has no further axis is `[T · B]`, step by step."""

    spans: tuple[Span, ...]
    """The fragments to go through first, the oldest first, then the sequences. What stands for one that is no longer
    held is ignored: the next one starts from its stored state."""
    actions: Columns
    next_observations: Columns
    """Next observation of each step; undefined if `discount` is 0."""
    reward: Array
    """The discounted sum over n steps, fewer where the sequence or the episode ends."""
    discount: Array
    """gamma to their number; 0 after termination."""
    last: Array
    """`[T, B]`, int64: the last one of these steps, whose next observation is bootstrapped from."""
    mask: Array
    """`[T, B]`: the steps that count."""
    weight: Array
    """`[B]`."""
    row: Array
    """`[B]`: where each lies in the buffer, for `update_priorities`."""


class SequenceReplayBuffer(ReplayBuffer):
    """Draws sequences uniformly; `len` counts them."""

    def __init__(self, *size: Any, state_size: int, burn_in: int, **more: Any) -> None:
        super().__init__(*size, **more)
        self._states = np.zeros((self.fragments * self.ring.slots, state_size), np.float32)
        self._burn_in = burn_in

    def add(self, source: str, columns: Columns) -> None:
        slots, place = self.ring.slots, self.ring.added % self.fragments
        self._states[place * slots : (place + 1) * slots] = columns[STATE]
        super().add(source, columns)

    def _drawable(self, place: int) -> Array:
        """A sequence stands where its first step does."""
        there = self.ring.held("mask", place).reshape(self.ring.steps, -1)
        first = np.zeros_like(there)
        first[0] = there.any(axis=0)
        return first.reshape(-1)

    def sample(  # type: ignore[override]
        self, count: int, generator: np.random.Generator, *, gamma: float, n_step: int = 1, beta: float = 1.0,
        as_now: Rewards | None = None,
    ) -> SequenceBatch:  # fmt: skip
        """Draws the sequences of `count` transitions, at least one."""
        ring, (first, weight) = self.ring, self.draw(max(1, count // self.ring.steps), generator, beta)
        place, slot = first // ring.rows_each, first % ring.rows_each
        rows = self._rows(place, slot)
        path, valid = self._paths(rows.reshape(-1), n_step)
        valid &= path // ring.rows_each == path[0] // ring.rows_each
        last = path[valid.sum(axis=0) - 1, np.arange(rows.size)]
        reward, over = ring.column("reward", path), ring.column("terminated", last)
        reward, discount = discounted(reward if as_now is None else as_now(reward), valid, over, gamma)
        names = ring.spaces.action.column_names("action")
        return SequenceBatch(
            self._spans(place, slot),
            {name: ring.column(name, rows.reshape(-1)) for name in names},
            ring.next_observations(rows.reshape(-1)),
            reward, discount, (last % ring.rows_each // ring.slots).reshape(rows.shape), ring.column("mask", rows),
            weight, first,
        )  # fmt: skip

    def _rows(self, place: Array, slot: Array) -> Array:
        """`[T, B]`."""
        steps = np.arange(self.ring.steps)[:, np.newaxis] * self.ring.slots
        return place * self.ring.rows_each + slot + steps

    def _spans(self, place: Array, slot: Array) -> tuple[Span, ...]:
        ring, spans = self.ring, list[Span]()
        before, there = place, np.ones(len(place), np.bool_)
        for _ in range(self._burn_in + 1):
            rows, states = self._rows(before, slot), self._states[before * ring.slots + slot]
            earlier = np.where(there, ring.preceding[before], NOTHING)
            known = earlier != NOTHING
            before = np.where(known, earlier, before)
            known &= ring.column("mask", self._rows(before, slot)[-1])  # after an absence the state is another
            over = ring.column("terminated", rows) | ring.column("truncated", rows) | ~ring.column("mask", rows)
            spans.append(Span(ring.observations(rows.reshape(-1)), over, states, known))
            there = known
        return tuple(reversed(spans))


class PrioritizedSequences(SequenceReplayBuffer, PrioritizedReplayBuffer):
    """Draws sequences by priority."""
