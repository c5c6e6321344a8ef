"""Parameters of episodes: how they are drawn, and what a config may say of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.environments.parameters import evaluated_table, table_at
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.parameters import ParameterTable
from tests.conftest import minimal_config

LESSONS: list[Any] = [{"value": 0, "until": {"return": 1.0}}, {"value": 1}]


def config_of(environment: Any, **sections: Any) -> Config:
    return minimal_config(environment={"id": "CartPole-v1"} | environment, **sections)


def parameters(**entries: Any) -> Any:
    return config_of({"parameters": entries}).environment.parameters


@given(
    st.sampled_from(
        [
            ({"integers": [-1, 2]}, lambda value: value in range(-1, 3) and isinstance(value, int)),
            ({"integers": [-(2**53), 2**53]}, lambda value: abs(value) <= 2**53 and isinstance(value, int)),
            ({"uniform": [-1, 2]}, lambda value: -1 <= value <= 2),
            ({"log_uniform": [1e-3, 10]}, lambda value: 1e-3 <= value <= 10),
            ({"choice": [1, "a", True]}, lambda value: value in (1, "a", True)),
            ({"multi_range": [[0, 1], [5, 6]]}, lambda value: 0 <= value <= 1 or 5 <= value <= 6),
            ({"replay": {"of": 7}}, lambda value: value in range(7)),
            ("a word", lambda value: value == "a word"),
            ({"uniform": [3, 3]}, lambda value: value == 3),
        ]
    ),
    st.integers(0, 2**64 - 1),
)
def test_samplers_depend_on_seed_and_name_only(its: Any, seed: int) -> None:
    sampler, fits = its
    alone, beside = (table_at(parameters(**each), {}) for each in ({"x": sampler}, {"x": sampler, "a": 1, "z": 2}))
    assert fits(alone.draw(seed)["x"])
    assert alone.draw(seed)["x"] == beside.draw(seed)["x"]
    assert ParameterTable.from_dict(alone.as_dict()) == alone


def test_samplers_have_their_distribution() -> None:
    entries = {"g": {"gaussian": [3, 2]}, "m": {"multi_range": [[0, 1], [5, 8]]}, "l": {"log_uniform": [0.01, 100]}}
    entries |= {"i": {"integers": [1, 4]}}
    drawn = [table_at(parameters(**entries), {}).draw(seed) for seed in range(4000)]
    found = {name: np.array([each[name] for each in drawn], float) for name in entries}
    assert found["g"].mean() == pytest.approx(3, abs=0.15) and found["g"].std() == pytest.approx(2, abs=0.1)
    assert (found["m"] > 4).mean() == pytest.approx(0.75, abs=0.03), "each value of the ranges alike"
    assert (found["l"] > 1).mean() == pytest.approx(0.5, abs=0.03)
    assert [(found["i"] == number).mean() for number in (1, 2, 3, 4)] == [pytest.approx(0.25, abs=0.03)] * 4
    assert abs(np.corrcoef(found["g"], found["m"])[0, 1]) < 0.06, "each is drawn for itself"


def test_lessons_set_several_parameters_and_last_is_evaluated() -> None:
    stage = {"lessons": [{"values": {"a": 1, "b": 2}, "until": {"success": 0.5}}, {"values": {"a": 3, "b": 4}}]}
    config = config_of({"parameters": {"stage": stage, "c": 5}}, evaluation={"parameters": {"b": 9}})
    entries = config.environment.parameters
    assert table_at(entries, {}).draw(0) == {"a": 1, "b": 2, "c": 5}
    table = evaluated_table(entries, config.evaluation.parameters)
    assert table is not None and table.draw(0) == {"a": 3, "b": 9, "c": 5} and table.lessons == {"stage": 1}


def test_ml_agents_keys_are_accepted() -> None:
    criteria = {
        "measure": "reward", "behavior": "default", "signal_smoothing": True, "min_lesson_length": 50,
        "threshold": 0.2, "require_reset": True,
    }  # fmt: skip
    uniform = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 4.0, "max_value": 7.0}}
    theirs = {
        "wall": {"curriculum": [{"name": "low", "completion_criteria": criteria, "value": 0.0}, {"value": uniform}]},
        "mass": {"sampler_type": "gaussian", "sampler_parameters": {"mean": 1.0, "st_dev": 0.1}},
        "size": {"sampler_type": "multirangeuniform", "sampler_parameters": {"intervals": [[7, 10], [15, 20]]}},
    }
    until = {"return": 0.2, "episodes": 50, "smoothing": True, "policy": "default"}
    ours = {
        "wall": {"lessons": [{"name": "low", "value": 0.0, "until": until}, {"uniform": [4, 7]}]},
        "mass": {"gaussian": [1.0, 0.1]},
        "size": {"multi_range": [[7, 10], [15, 20]]},
    }
    assert parameters(**theirs) == parameters(**ours)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"uniform": [2, 1]}, r"the range \[2.0, 1.0\] is empty"),
        ({"integers": [2, 1]}, r"the range \[2, 1\] is empty"),
        ({"integers": [0.5, 3]}, "expected a whole number, found 0.5"),
        ({"integers": [0, 2**60]}, "9007199254740992 or less"),
        ({"log_uniform": [0, 1]}, "expected bounds above 0"),
        ({"choice": []}, "choice is empty"),
        ({"uniform": [0, 1], "value": 3}, "found value and uniform, expected one of"),
        ({}, "found nothing, expected one of"),
        ({"lessons": [{"value": 0}, {"value": 1}]}, "lesson 0 has no `until`"),
        ({"lessons": [*LESSONS[:1]]}, "lesson 0 is the last one, and has an `until`"),
        ({"lessons": [LESSONS[0] | {"back": {"return": 0}}, LESSONS[1]]}, "lesson 0 has a `back`"),
        ({"lessons": [LESSONS[0], {"values": {"a": 1}}]}, r"lesson 1 sets \['a'\], expected one value"),
        ({"lessons": [{"value": 0, "until": {"luck": 1}}, LESSONS[1]]}, "expected one of return, success"),
        (float("nan"), "x: expected a finite number, found nan$"),
        ({"lessons": [{"value": 0, "until": {"return": 1, "success": 1}}, LESSONS[1]]}, "has one measure"),
        (
            {"lessons": [LESSONS[0], {"value": 1, "until": {"return": 1}, "back": {"return": 2}}, LESSONS[1]]},
            "`back` has to be the smaller one",
        ),
        (
            {"lessons": [{"value": 0, "until": {"success": 1.5}}, LESSONS[1]]},
            "success=1.5 decides nothing; expected 0 to 1",
        ),
        (
            {"lessons": [{"value": 0, "until": {"progress": 2}}, LESSONS[1]]},
            "progress=2 decides nothing; expected 0 to 1",
        ),
        (
            {"lessons": [*({"value": at, "until": {"progress": at}} for at in (0.5, 0.3)), LESSONS[1]]},
            "lessons end at progress 0.5, 0.3; each has to be later",
        ),
        (
            {"lessons": [LESSONS[0], {"value": 1, "back": {"progress": 0.5}}]},
            "lesson 1: `back` cannot use progress, which never decreases",
        ),
        (
            {"lessons": [{"value": 0, "until": {"length": -5}}, LESSONS[1]]},
            "length=-5 decides nothing; expected 0 or more",
        ),
        ({"uniform": [-1.7e308, 1.7e308]}, "wider than the largest number"),
        ({"multi_range": [[0, 1], [-1.7e308, 1.7e308]]}, "wider than the largest number"),
        ({"lessons": [{"value": 0, "until": {"rating": 1}}, LESSONS[1]]}, "rating needs a league"),
        ({"lessons": [{"value": 0, "until": {"progress": 0.5}}, LESSONS[1]]}, "set that"),
        ({"lessons": [{"value": 0, "until": {"return": 1, "policy": "x"}}, LESSONS[1]]}, "'x' names no policy"),
        ({"sampler_type": "normal", "sampler_parameters": {}}, "expected uniform, gaussian or multirangeuniform"),
        ({"sampler_type": "uniform", "sampler_parameters": {"min_value": 1}}, "sampler_parameters has no max_value"),
        ({"replay": {"of": 1}}, "expected 2 or more, found 1"),
    ],
)
def test_invalid_parameters_are_rejected(entry: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parameters(x=entry)


LEVELS = {"parameters": {"x": {"replay": {"of": 3}}}}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"environment": {"parameters": {"x": 1}, "vectorization": "native", "parameters_by": "rebuild"}}, "native"),
        ({"environment": {"parameters": {"x": 1}, "id": "envpool:Pong-v5"}}, "not supported by EnvPool"),
        ({"environment": {"parameters": {"x": 1}}, "evaluation": {"parameters": {"y": 1}}}, "names y; .* draws .'x'"),
        ({"environment": LEVELS, "algorithm": {"name": "dqn"}}, "found algorithm.name=dqn"),
        ({"environment": LEVELS | {"api": "pettingzoo", "id": "m:f"}}, "environment.api=pettingzoo; use choice"),
        (
            {"environment": {"parameters": {"a": 1, "s": {"lessons": [{"values": {"a": 1}}]}}}},
            "s sets a, which another",
        ),
    ],
)
def test_parameters_of_unfit_runs_are_rejected(sections: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_of(**sections)


def test_hash_covers_parameters_and_length_of_progress() -> None:
    def hash_of(steps: int, **environment: Any) -> str:
        return config_of(environment, stop_at={"env_steps": steps}).hash()

    assert hash_of(10) == hash_of(10, parameters={}, parameters_by="options") != hash_of(10, parameters={"x": 1})
    by_return, by_progress = ({"x": {"lessons": [{"value": 0, "until": its}, {"value": 1}]}} for its in (
        {"return": 1}, {"progress": 0.5},
    ))  # fmt: skip
    assert hash_of(10, parameters=by_return) == hash_of(20, parameters=by_return)
    assert hash_of(10, parameters=by_progress) != hash_of(20, parameters=by_progress)
