"""Population based training (Jaderberg et al. 2017): who continues whom, and with what parameters.

Truncation selection as in the paper: each of the worst copies one of the best, and explores around its parameters.
Other than there, a number whose range is not logarithmic moves by a share of its range: a factor of 1.25 would lead any
`gamma` out of it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from stagecoach.coordinator.studies.study_config import DimensionConfig, PopulationConfig, StudyConfig
from stagecoach.coordinator.studies.suggestions import suggest
from stagecoach.coordinator.studies.trial_record import Trial


def next_trials(study: StudyConfig, ranked: Sequence[Trial], failed: Sequence[Trial]) -> list[Trial]:
    """Returns the next generation, by number: each trial with its parent and parameters.

    They depend on the study's seed and the generation before, nothing else.

    Args:
        study: A study with a population.
        ranked: Complete trials of the generation before, the best first.
        failed: Its failed trials; they are replaced, too.
    """
    population, size = study.population, study.generation
    assert population is not None and ranked
    generation = ranked[0].number // size + 1
    rng = np.random.default_rng([study.seed, generation])
    count = max(1, int(population.replaced * size))
    best = ranked[:count]
    kept = ranked[: max(len(best), min(len(ranked), size - count))]
    fresh = suggest(study, (), generation)  # random values, for parameters that are drawn anew
    made = []
    for trial in sorted([*ranked, *failed], key=lambda trial: trial.number):
        number, parent, parameters = trial.number + size, trial, trial.parameters
        if trial not in kept:
            parent = best[int(rng.integers(len(best)))]
            parameters = _explored(study, population, parent.parameters, fresh[number % size], rng)
        made.append(
            Trial(number=number, state="complete", parameters=parameters, parent=parent.number, copied=parent != trial)
        )
    return made


def _explored(
    study: StudyConfig, population: PopulationConfig, parameters: dict[str, Any], fresh: dict[str, Any],
    rng: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    found = {}
    for field, value in sorted(parameters.items()):
        anew, which = rng.random() < population.resample, int(rng.integers(1 << 30))
        found[field] = fresh[field] if anew else _moved(study.space[field], value, population.factors, which)
    return found


def _moved(dimension: DimensionConfig, value: Any, factors: Sequence[float], which: int) -> Any:
    """Returns a value near another one; `which` chooses among them."""
    if dimension.choice is not None:
        index = [*dimension.choice].index(value) + (-1 if which % 2 else 1)
        return dimension.choice[min(max(index, 0), len(dimension.choice) - 1)]
    (low, high), factor = dimension.bounds, factors[which % len(factors)]
    moved = value * factor if dimension.logarithmic else value + (factor - 1) * (high - low)
    moved = min(max(moved, low), high)
    step = dimension.step or (1 if dimension.has_integers else None)
    if step is not None:
        moved = min(low + round((moved - low) / step) * step, low + (high - low) // step * step)
    return int(moved) if dimension.has_integers else float(moved)
