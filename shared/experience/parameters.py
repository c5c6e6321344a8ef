"""An episode's parameters, which a worker draws for its environment from the table of the policy version.

A draw is a pure function of the table and the episode's place in its seed lineage, so that a successor of a dead worker
draws the same. The episode's record has the values, and the table changes only by folding records in log order
(trainer_node/learning/fold.py).
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from stagecoach.shared.experience.spaces import PlainData

Value = bool | int | float | str
SamplerKind = Literal["value", "integers", "uniform", "gaussian", "log_uniform", "choice", "multi_range", "levels"]
_STREAM = 0x706172616D
"""Separates these random numbers from others of the same seed."""


@dataclass(frozen=True)
class Sampler(PlainData):
    """Distribution of one parameter."""

    kind: SamplerKind
    numbers: tuple[float, ...] = ()
    """`integers`, `uniform`, `log_uniform`: the bounds; `gaussian`: mean and standard deviation; `multi_range`: pairs
    of bounds, drawn by width; `levels`: each level's weight."""
    choices: tuple[Value, ...] = ()
    """`value`: a single value; `choice`: equally likely values."""

    def draw(self, random: np.random.Generator) -> Value:
        match self.kind:
            case "value":
                return self.choices[0]
            case "choice":
                return self.choices[int(random.integers(len(self.choices)))]
            case "integers":
                low, high = self.numbers
                return int(random.integers(int(low), int(high), endpoint=True))
            case "gaussian":
                mean, deviation = self.numbers
                return float(random.normal(mean, deviation))
            case "log_uniform":
                low, high = self.numbers
                return min(max(low, math.exp(random.uniform(math.log(low), math.log(high)))), high)
            case "levels":
                edges = np.cumsum(self.numbers)
                return min(int(np.searchsorted(edges, random.random() * edges[-1], "right")), len(edges) - 1)
            case "uniform" | "multi_range":
                bounds = np.reshape(self.numbers, (-1, 2))
                edges = np.cumsum(bounds[:, 1] - bounds[:, 0])
                which = min(int(np.searchsorted(edges, random.random() * edges[-1], "right")), len(edges) - 1)
                return float(random.uniform(*bounds[which].tolist()))


@dataclass(frozen=True)
class ParameterTable(PlainData):
    """Samplers by parameter, published with a policy version."""

    samplers: dict[str, Sampler]
    lessons: dict[str, int] = field(default_factory=dict)
    """Entry of `environment.parameters` with lessons → its current lesson, from 0."""

    def draw(self, seed: int) -> dict[str, Value]:
        """Returns the values by parameter for the episode of this seed; each is independent of the others."""
        return {
            name: sampler.draw(np.random.default_rng([seed, _STREAM, zlib.crc32(name.encode())]))
            for name, sampler in self.samplers.items()
        }


def joined(tables: Sequence[ParameterTable]) -> ParameterTable:
    """Merges tables; a later one takes precedence."""
    samplers = {name: sampler for table in tables for name, sampler in table.samplers.items()}
    return ParameterTable(samplers, {name: lesson for table in tables for name, lesson in table.lessons.items()})


@dataclass(frozen=True)
class Drawn(PlainData):
    """An episode's parameters, and their lessons."""

    values: Mapping[str, Value]
    lessons: Mapping[str, int]
