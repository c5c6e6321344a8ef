"""Spaces as JSON: there and back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from stagecoach.rollout_worker.environments.space_data import data_of, space_of
from stagecoach.shared.base.errors import UnsupportedSpace


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Discrete(3, start=2),
        spaces.Box(np.array([-1.0, -2.0], np.float32), np.array([1.0, 2.5], np.float32)),
        spaces.MultiDiscrete([2, 5], start=[1, 0]), spaces.MultiBinary(4), spaces.MultiBinary([2, 2]),
        spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple((spaces.Box(0, 1, (1,), np.float64),))}),
    ],
)  # fmt: skip
def test_space_is_the_same_after_json(space: spaces.Space[Any]) -> None:
    assert space_of(json.loads(json.dumps(data_of(space))), "it") == space


def test_infinite_bounds_become_the_largest_numbers() -> None:
    data = json.loads(json.dumps(data_of(spaces.Box(-np.inf, np.inf, (2,)))))
    assert data["high"] == float(np.finfo(np.float32).max)
    assert space_of(data, "it").shape == (2,)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "it is None; expected an object with a type"), ({"type": "Text"}, "expected an object with a type"),
        ({"type": ["Box"]}, "expected an object with a type"),
        ({"type": "Discrete", "n": 0}, "describes no Discrete"), ({"type": "Discrete"}, "describes no Discrete"),
        ({"type": "Discrete", "n": 2, "seed": 1}, "it has seed; a Discrete takes n, start"),
        ({"type": "Box", "low": "a", "high": 1, "shape": [1]}, "describes no Box"),
        ({"type": "Box", "low": 0, "high": 1, "dtype": "object", "shape": [1]}, "describes no Box"),
        ({"type": "Dict", "spaces": {"x": {"type": "?"}}}, "it.x is"),
        ({"type": "Tuple", "spaces": [{"type": "MultiDiscrete", "nvec": "x"}]}, "it.0 describes no MultiDiscrete"),
    ],
)  # fmt: skip
def test_data_that_is_no_space_is_refused_by_name(data: Any, why: str) -> None:
    with pytest.raises(UnsupportedSpace, match=why):
        space_of(data, "it")
