"""Optuna's suggestions: a function of the study's seed and of earlier generations."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stagecoach.coordinator.studies.population import next_trials
from stagecoach.coordinator.studies.study_config import StudyConfig
from stagecoach.coordinator.studies.suggestions import require_optuna, suggest
from stagecoach.coordinator.studies.trial_record import Trial
from stagecoach.shared.base.errors import UserError

SPACE = {
    "algorithm.learning_rate": {"log_uniform": [1e-4, 1e-2]},
    "algorithm.gamma": {"uniform": [0.9, 1.0], "step": 0.01},
    "algorithm.epochs": {"integers": [2, 12], "step": 3},
    "algorithm.minibatch_size": {"log_integers": [16, 256]},
    "policies.default.hidden_sizes": {"choice": [[64, 64], [256], None]},
}
WITHOUT_NETWORK = {name: its for name, its in SPACE.items() if not name.startswith("policies")} | {
    "rollout.fragment_steps": {"choice": [16, 32, 64]}
}


def study(**changes: Any) -> StudyConfig:
    return StudyConfig.model_validate({"config": "cartpole", "trials": 24, "space": SPACE} | changes)


def trials(found: StudyConfig, generations: int) -> list[Trial]:
    """Trials whose score follows from their learning rate; some are pruned or failed."""
    made: list[Trial] = []
    for generation in range(generations):
        for parameters in suggest(found, made, generation):
            score = 1000 * parameters["algorithm.learning_rate"]
            state = {3: "pruned", 5: "failed"}.get(len(made), "complete")
            scores = {} if state == "failed" else {1000: score}
            more: dict[str, Any] = {"state": state, "score": None if state == "failed" else score, "scores": scores}
            made.append(Trial(number=len(made), parameters=parameters, **more))
    return made


def test_suggestions_stay_in_the_space() -> None:
    for trial in trials(study(), 6):
        rate, gamma, epochs, batch, sizes = (trial.parameters[field] for field in SPACE)
        assert 1e-4 <= rate <= 1e-2 and 0.9 <= gamma <= 1.0 and abs(gamma * 100 - round(gamma * 100)) < 1e-9
        assert epochs in (2, 5, 8, 11) and 16 <= batch <= 256 and sizes in ([64, 64], [256], None)


def test_suggestions_repeat_and_ignore_the_order_of_the_space() -> None:
    other = study(space=dict(reversed(SPACE.items())))
    assert trials(study(), 6) == trials(study(), 6) == trials(other, 6)


def test_suggestions_survive_their_records() -> None:
    made = trials(study(), 4)
    read = [Trial.model_validate_json(trial.model_dump_json()) for trial in made]
    assert suggest(study(), read, 4) == suggest(study(), made, 4)


def test_suggestions_follow_seed_generation_and_results() -> None:
    made = trials(study(), 5)
    found = suggest(study(), made, 5)
    assert found != suggest(study(seed=2), made, 5)
    assert found != suggest(study(), made, 6)
    worse = [trial.model_copy(update={"score": -(trial.score or 0.0)}) for trial in made]
    assert found != suggest(study(), worse, 5)


def test_tpe_concentrates_on_good_values_and_random_does_not() -> None:
    """The score grows with the learning rate, which is drawn on a logarithmic scale with a mean of 1e-3."""
    found = {sampler: trials(study(sampler=sampler), 12)[24:] for sampler in ("tpe", "random")}
    rates = {
        name: sum(its.parameters["algorithm.learning_rate"] > 3e-3 for its in last) for name, last in found.items()
    }
    assert rates["tpe"] > 1.5 * rates["random"]


def test_missing_optuna_is_an_error_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"stagecoach tune needs Optuna .*: pip install 'stagecoach-rl\[tune\]'"):
        require_optuna()


def population(**changes: Any) -> StudyConfig:
    return study(**{"generation": 4, "trials": 12, "space": WITHOUT_NETWORK, "population": {}} | changes)


def first_trials(found: StudyConfig) -> list[Trial]:
    return [Trial(number=n, state="complete", parameters=its) for n, its in enumerate(suggest(found, (), 0))]


def generation_of(found: StudyConfig, scores: list[float | None]) -> list[Trial]:
    """A first generation with these scores; None failed."""
    return [
        trial.model_copy(update={"score": score} if score is not None else {"state": "failed"})
        for trial, score in zip(first_trials(found), scores, strict=True)
    ]


def born(found: StudyConfig, trials: list[Trial]) -> list[Trial]:
    ranked = sorted((its for its in trials if its.state == "complete"), key=lambda its: -(its.score or 0.0))
    return next_trials(found, ranked, [its for its in trials if its.state == "failed"])


def test_worst_of_a_population_copies_the_best() -> None:
    found = population()
    made = born(found, generation_of(found, [3.0, 9.0, 1.0, 5.0]))
    assert [(its.number, its.parent, its.copied) for its in made] == [
        (4, 0, False), (5, 1, False), (6, 1, True), (7, 3, False),
    ]  # fmt: skip
    assert made == born(found, generation_of(found, [3.0, 9.0, 1.0, 5.0]))
    assert made[2].parameters != made[1].parameters


@pytest.mark.parametrize(
    ("scores", "copied"), [([None, 9.0, 1.0, 5.0], [4]), ([None, None, 1.0, None], [4, 5, 7]), ([2.0] * 4, [7])]
)
def test_failed_members_are_replaced(scores: list[float | None], copied: list[int]) -> None:
    found = population()
    made = born(found, generation_of(found, scores))
    assert [its.number for its in made if its.copied] == copied
    assert not any(scores[its.parent or 0] is None for its in made)


def test_copies_explore_within_the_space() -> None:
    found = population(population={"replaced": 0.5, "resample": 0.0}, generation=40, trials=80)
    trials = [its.model_copy(update={"score": float(its.number)}) for its in first_trials(found)]
    for trial in (copies := [its for its in born(found, trials) if its.copied]):
        parent = trials[trial.parent or 0].parameters
        rate, gamma, epochs, batch, depth = (trial.parameters[field] for field in WITHOUT_NETWORK)
        before = parent["algorithm.learning_rate"]
        assert any(rate == pytest.approx(min(max(before * its, 1e-4), 1e-2)) for its in (0.8, 1.25))
        assert 0.9 <= gamma <= 1.0 and abs(gamma * 100 - round(gamma * 100)) < 1e-9
        assert abs(gamma - parent["algorithm.gamma"]) < 0.031
        assert epochs in (2, 5, 8, 11) and isinstance(batch, int) and 16 <= batch <= 256
        places = [16, 32, 64].index(depth), [16, 32, 64].index(parent["rollout.fragment_steps"])
        assert abs(places[0] - places[1]) <= 1
    assert len(copies) == 20 and len({its.parent for its in copies}) > 5
