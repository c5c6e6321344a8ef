"""What a memory hands out, as NumPy columns: transitions, or sequences. The algorithm moves them to its device."""

from __future__ import annotations

from dataclasses import dataclass

from shared.spaces import Array, Columns


@dataclass(frozen=True)
class Batch:
    """B transitions, each over n steps or fewer."""

    observations: Columns
    """`obs…` `[B, …]`."""
    actions: Columns
    """`action…` `[B, …]`."""
    next_observations: Columns
    """`obs…` `[B, …]`: what is bootstrapped from. Where `discount` is 0, what was observed last, or without meaning if
    that is not known (shared/fragment.py)."""
    reward: Array
    """`[B]`, float32: the discounted sum over the steps."""
    discount: Array
    """`[B]`, float32: gamma to the number of steps; 0 after termination."""
    log_prob: Array
    """`[B]`, float32: of the action, as it was acted; NaN where that is not known."""
    weight: Array
    """`[B]`, float32: of each transition in the loss; 1 unless drawn by priority."""
    row: Array
    """`[B]`, int64: where each lies in the memory, for `update_priorities`."""


@dataclass(frozen=True)
class Sequences:
    """B sequences of L steps, each of one slot within one episode: a shorter one is filled up with invalid steps."""

    observations: Columns
    """`obs…` `[L, B, …]`."""
    actions: Columns
    """`action…` `[L, B, …]`."""
    next_observations: Columns
    """`obs…` `[L, B, …]`; without meaning where a step terminated with an observation that is not known."""
    reward: Array
    """`[L, B]`, float32."""
    terminated: Array
    """`[L, B]`, bool."""
    truncated: Array
    """`[L, B]`, bool."""
    log_prob: Array
    """`[L, B]`, float32; NaN where it is not known."""
    valid: Array
    """`[L, B]`, bool: false after the last step that is known; what stands in the other columns there is no data."""
    row: Array
    """`[L, B]`, int64."""
