"""Seeds: a worker's randomness follows from its seed lineage and the numbers of fragment and episode."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

_FRAGMENT, _ENVIRONMENTS, _EPOCH = 0, 1, 2
_MASK = (1 << 64) - 1
SEEDS = 1 << 31  # every environment accepts these: NumPy's RandomState has 32 bits, many simulators an `int`


@dataclass(frozen=True)
class SeedLineage:
    """Source of the seeds of a worker's fragments; a restart of its environments begins a new lineage."""

    seed: int
    worker: int
    incarnation: int
    restarts: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.restarts}"

    def next(self) -> SeedLineage:
        """Returns the lineage that begins after a failure; a successor that gets there begins the same one."""
        return replace(self, restarts=self.restarts + 1)

    def acting(self, number: int) -> int:
        """Returns the seed of the actions in fragment `number`."""
        return self._seeds(_FRAGMENT, number, 1)[0]

    def environments(self, count: int) -> list[int]:
        """Returns the seed of each environment's first episode, 31 bits; `episode_seed` gives later seeds."""
        return [seed % SEEDS for seed in self._seeds(_ENVIRONMENTS, 0, count)]

    def shuffling(self, epoch: int) -> int:
        """Returns the seed of the order of recorded experience in an epoch."""
        return self._seeds(_EPOCH, epoch, 1)[0]

    def _seeds(self, kind: int, number: int, count: int) -> list[int]:
        parts = [self.seed, self.worker, self.incarnation, self.restarts, kind, number]
        return [int(value) for value in np.random.SeedSequence(parts).generate_state(count)]


def episode_seed(first: int, episode: int) -> int:
    """Returns the seed of an environment's episode (0, 1, …), 31 bits, from the seed of its first one, by SplitMix64
    (Steele, Lea and Flood 2014), which is cheap enough for short episodes."""
    if episode == 0:
        return first
    mixed = (first + episode * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) % SEEDS
