"""Experience as algorithms get it: the fragments of an update, one policy's part of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.spaces import Columns


@dataclass(frozen=True)
class Experience:
    """One fragment's part for one policy."""

    source: str
    """Worker and life: what comes from the same source goes on where its last fragment ended."""
    columns: Columns
    """As in shared/fragment.py: `[T, S, …]`."""


def side_by_side(experience: Sequence[Experience]) -> Columns:
    """K fragments of equal T as one: slots beside each other, `final_index` moved along."""
    fragments = [item.columns for item in experience]
    if len(fragments) == 1:
        return fragments[0]
    columns: Columns = {}
    for name in fragments[0]:
        parts = [fragment[name] for fragment in fragments]
        if name == "final_index":
            offset, moved = 0, []
            for fragment, part in zip(fragments, parts, strict=True):
                moved.append(part + np.array([0, offset], np.int32))
                offset += fragment["reward"].shape[1]
            columns[name] = np.concatenate(moved)
        else:
            along_slots = name.startswith(("bootstrap_", "final_", "state_"))
            columns[name] = np.concatenate(parts, axis=0 if along_slots else 1)
    return columns


def update_seed(seed: int, update: int) -> int:
    """From the run's seed and the update's number (63 bits), so that no random state has to be carried."""
    return int(np.random.SeedSequence([seed, update]).generate_state(1, np.uint64)[0] >> 1)
