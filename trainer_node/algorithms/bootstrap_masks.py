"""Which transitions each head of an ensemble learns from (Osband et al. 2016): a bootstrap sample of its own.

What a head has of a transition follows from the run's seed and from the transition's number among all that ever came
into the memory. So nothing is stored, and it is the same whenever the transition is drawn, and after a resume.
"""

from __future__ import annotations

import numpy as np

from shared.spaces import Array

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def bootstrap_masks(numbers: Array, heads: int, share: float, seed: int) -> Array:
    """`[heads, B]`, float32: 1 with probability `share`, else 0, for the transitions with these numbers `[B]`."""
    key = np.random.SeedSequence([seed, heads]).generate_state(1, np.uint64)[0]
    cells = numbers.astype(np.uint64) * np.uint64(heads) + np.arange(heads, dtype=np.uint64)[:, np.newaxis]
    masks: Array = (_mixed(cells * _GOLDEN + key) >> np.uint64(11)) * 2.0**-53 < share
    return masks.astype(np.float32)


def _mixed(cells: Array) -> Array:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): neighbours come to have nothing in common."""
    cells = (cells ^ (cells >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    cells = (cells ^ (cells >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = cells ^ (cells >> np.uint64(31))
    return mixed
