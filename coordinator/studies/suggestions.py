"""Optuna's suggestions: a generation's parameters, from the results of earlier generations."""

import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stagecoach.coordinator.studies.study_config import DimensionConfig, StudyConfig, label
from stagecoach.coordinator.studies.trial_record import Trial
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.base.user_code import install, with_extra

if TYPE_CHECKING:
    import optuna

_PLOTS = {
    "history": "plot_optimization_history", "slices": "plot_slice", "importances": "plot_param_importances",
}  # fmt: skip
"""Name of a file → Optuna's function that draws it with matplotlib."""


def require_optuna() -> Any:
    """Imports Optuna; raises `UserError` if it is not installed."""
    try:
        found = import_module("optuna")
    except ImportError as error:
        raise UserError(f"stagecoach tune needs Optuna ({error}): {install('tune')}") from None
    found.logging.set_verbosity(found.logging.WARNING)
    return found


def suggest(study: StudyConfig, former: Sequence[Trial], generation: int) -> list[dict[str, Any]]:
    """Returns the parameters of a generation's trials: dotted field → value.

    They depend on the study's seed, the generation's number and the trials of earlier generations, by number.
    """
    seed = int(np.random.SeedSequence([study.seed, generation]).generate_state(1)[0])
    found, space = _optuna_study(study, former, seed), _distributions(study)
    asked = [found.ask(space).params for _ in range(study.generation)]
    return [{field: _value(study.space[field], value) for field, value in each.items()} for each in asked]


def plot_study(study: StudyConfig, trials: Sequence[Trial], folder: Path) -> list[Path]:
    """Draws Optuna's plots into `folder`; without those for which there are too few trials."""
    try:
        plots = import_module("optuna.visualization.matplotlib")
        import_module("matplotlib").use("agg")
    except ImportError as error:
        raise UserError(f"stagecoach tune --plot: {with_extra(str(error))}") from None
    found = _optuna_study(study, trials, 0)
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, function in _PLOTS.items():
        more = {}
        if name == "importances":  # the other evaluators need scikit-learn
            more["evaluator"] = import_module("optuna.importance").PedAnovaImportanceEvaluator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls these functions experimental
            try:
                drawn = getattr(plots, function)(found, **more)
            except (ValueError, RuntimeError):  # importances of too few or equal trials
                continue
        figure = np.ravel(drawn)[0].figure
        figure.savefig(path := folder / f"{name}.png", dpi=144, bbox_inches="tight")
        written.append(path)
    return written


def _optuna_study(study: StudyConfig, former: Sequence[Trial], seed: int) -> "optuna.Study":
    made = require_optuna()
    samplers, states = made.samplers, made.trial.TrialState
    modeled = study.sampler == "tpe" and study.population is None
    sampler = samplers.TPESampler(seed=seed) if modeled else samplers.RandomSampler(seed=seed)
    direction = "maximize" if study.objective.maximize else "minimize"
    found: optuna.Study = made.create_study(sampler=sampler, direction=direction)
    space = _distributions(study)
    for trial in former:
        told = {
            field: value if study.space[field].choice is None else label(value)
            for field, value in trial.parameters.items()
        }
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[trial.state]
        values = trial.scores if trial.state == "pruned" else {}
        frozen = made.trial.create_trial(
            state=state, value=trial.score if trial.state == "complete" else None, params=told, distributions=space,
            intermediate_values=dict(values),
        )  # fmt: skip
        found.add_trial(frozen)
    return found


def _distributions(study: StudyConfig) -> dict[str, Any]:
    """Field → Optuna's distribution, by name: the order in which they are drawn."""
    return {field: _distribution(study.space[field]) for field in sorted(study.space)}


def _distribution(dimension: DimensionConfig) -> Any:
    made = require_optuna().distributions
    if dimension.choice is not None:
        return made.CategoricalDistribution(dimension.labels)
    low, high = dimension.bounds
    if dimension.has_integers:
        step = int(dimension.step or 1)
        return made.IntDistribution(
            int(low), int(low) + (int(high) - int(low)) // step * step, log=dimension.logarithmic, step=step
        )
    return made.FloatDistribution(low, high, log=dimension.logarithmic, step=dimension.step)


def _value(dimension: DimensionConfig, value: Any) -> Any:
    return value if dimension.choice is None else dimension.choice[dimension.labels.index(value)]
