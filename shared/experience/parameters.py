"""An episode's parameters: what a worker draws for its environment from the table that came with the policy version.

A draw is a pure function of the table and the episode's place in its seed lineage: a successor of a dead worker draws
the same again. What was drawn stands in the episode's record, and the table changes only by folding those in log order
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
"""Sets these random numbers apart from all others that follow from the same seed."""


@dataclass(frozen=True)
class Sampler(PlainData):
    """How one parameter is drawn."""

    kind: SamplerKind
    numbers: tuple[float, ...] = ()
    """`integers`, `uniform`, `log_uniform`: the bounds; `gaussian`: mean and standard deviation; `multi_range`: bounds
    in pairs, of which one is drawn by its width; `levels`: each level's weight."""
    choices: tuple[Value, ...] = ()
    """`value`: the only one; `choice`: each alike."""

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
    """What is drawn from, by parameter, as it is published with a policy version."""

    samplers: dict[str, Sampler]
    lessons: dict[str, int] = field(default_factory=dict)
    """Entry of `environment.parameters` that has lessons → which of them it is in, from 0."""

    def draw(self, seed: int) -> dict[str, Value]:
        """Parameter → value for the episode of this seed. Each is drawn for itself: another one changes nothing."""
        return {
            name: sampler.draw(np.random.default_rng([seed, _STREAM, zlib.crc32(name.encode())]))
            for name, sampler in self.samplers.items()
        }


def joined(tables: Sequence[ParameterTable]) -> ParameterTable:
    """Returns all of them as one; of a parameter that several have, the last one counts."""
    samplers = {name: sampler for table in tables for name, sampler in table.samplers.items()}
    return ParameterTable(samplers, {name: lesson for table in tables for name, lesson in table.lessons.items()})


@dataclass(frozen=True)
class Drawn(PlainData):
    """An episode's parameters, and the lessons that they were drawn in."""

    values: Mapping[str, Value]
    lessons: Mapping[str, int]
