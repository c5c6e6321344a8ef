"""Seeds: all of a worker's randomness follows from its seed lineage, the fragment's number and the episode's number."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

_FRAGMENT, _ENVIRONMENTS, _EPOCH = 0, 1, 2
_MASK = (1 << 64) - 1
SEEDS = 1 << 31  # those that every environment takes: NumPy's older generator has 32 bits, many a simulator an `int`


@dataclass(frozen=True)
class SeedLineage:
    """What the seeds of a worker's fragments follow from; a restart of its environments begins a new one."""

    seed: int
    worker: int
    incarnation: int
    restarts: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.restarts}"

    def next(self) -> SeedLineage:
        """The lineage that begins where an environment has raised; a successor that gets there begins the same one."""
        return replace(self, restarts=self.restarts + 1)

    def acting(self, number: int) -> int:
        """The seed of the actions in fragment `number`."""
        return self._seeds(_FRAGMENT, number, 1)[0]

    def environments(self, count: int) -> list[int]:
        """The seed of each environment's first episode, 31 bits; `episode_seed` has the others."""
        return [seed % SEEDS for seed in self._seeds(_ENVIRONMENTS, 0, count)]

    def shuffling(self, epoch: int) -> int:
        """The seed of the order in which recorded experience is taken in an epoch."""
        return self._seeds(_EPOCH, epoch, 1)[0]

    def _seeds(self, kind: int, number: int, count: int) -> list[int]:
        parts = [self.seed, self.worker, self.incarnation, self.restarts, kind, number]
        return [int(value) for value in np.random.SeedSequence(parts).generate_state(count)]


def episode_seed(first: int, episode: int) -> int:
    """The seed of an environment's episode (0, 1, …), from that of its first one; 31 bits.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): a short episode must not
    pay for more.
    """
    if episode == 0:
        return first
    mixed = (first + episode * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) % SEEDS
