"""Spaces as data: every gymnasium space is described, flattened and nested back, and travels through JSON."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.experience.fragment import expected_columns
from stagecoach.shared.experience.spaces import EnvironmentDescription, Leaf, PolicySpaces, SpaceSpec
from tests.support.experience.strategies import boxes, gymnasium_spaces

NOTHING_WITHIN = spaces.Dict({"nothing": spaces.Dict({}), "something": spaces.Discrete(2)})
FUZZ = settings(derandomize=True, max_examples=150)


def same(found: Any, expected: Any) -> bool:
    """Whether two nested values are equal, in structure, dtype and numbers."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, tuple):
        return isinstance(found, tuple) and len(found) == len(expected) and all(map(same, found, expected))
    return np.asarray(found).dtype == np.asarray(expected).dtype and np.array_equal(found, expected)


@FUZZ
@given(space=gymnasium_spaces(), seed=st.integers(0, 99))
@example(NOTHING_WITHIN, 0)
def test_space_spec_round_trips_through_json_and_columns(space: spaces.Space[Any], seed: int) -> None:
    spec, batch = describe_space(space), gym.vector.utils.batch_space(space, 4)
    assert SpaceSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec
    for source, rows in ((space, ()), (batch, (4,))):
        source.seed(seed)
        value = source.sample()
        columns = spec.flatten("obs", value)
        assert tuple(columns) == spec.column_names("obs")
        for leaf in spec.leaves:
            column = columns[leaf.column("obs")]
            assert (column.shape, column.dtype) == ((*rows, *leaf.shape), leaf.column_dtype) or not rows
            if leaf.kind != "box":
                assert (column >= 0).all() and (column < np.reshape(leaf.nvec, leaf.shape)).all(), "counted from zero"
        assert same(spec.nest("obs", columns), value)


@FUZZ
@given(space=boxes())
def test_leaf_bounds_equal_box_bounds(space: spaces.Box) -> None:
    (leaf,) = describe_space(space).leaves
    for found, expected in zip(leaf.bounds(), (space.low, space.high), strict=True):
        np.testing.assert_array_equal(found.reshape(space.shape), expected)


def test_leaf_bound_of_largest_float64_becomes_infinite() -> None:
    largest = float(np.finfo(np.float64).max)
    (leaf,) = describe_space(spaces.Box(np.array([-largest]), np.array([largest]), dtype=np.float64)).leaves
    assert [bound.tolist() for bound in leaf.bounds()] == [[-np.inf], [np.inf]]


def test_environment_description_round_trips_through_json() -> None:
    nested = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(2), spaces.Dict({"b": spaces.Discrete(2)})])})
    policies = {
        policy: PolicySpaces(describe_space(seen), describe_space(spaces.Discrete(4, start=-2)))
        for policy, seen in [("red", nested), ("blue", spaces.Box(-1, 1, (3,), np.float32))]
    }
    description = EnvironmentDescription({"one": "red", "two": "blue", "three": "red"}, policies)
    found = EnvironmentDescription.from_dict(json.loads(json.dumps(description.as_dict())))
    assert found == description
    assert list(found.agents) == ["one", "two", "three"]
    assert (found.slots("red"), found.slots("blue")) == (2, 1)
    assert found.policies["red"].observation.column_names("obs") == ("obs.a.0", "obs.a.1.b")
    assert found.policies["red"].action.column_names("action") == ("action",)


def test_describe_space_of_each_kind() -> None:
    def leaf(space: spaces.Space[Any]) -> Leaf:
        (only,) = describe_space(space).leaves
        return only

    assert leaf(spaces.Discrete(4, start=-2)) == Leaf("", "discrete", (), "int64", (4,), (-2,))
    assert leaf(spaces.MultiDiscrete([3, 4], start=[1, 0])) == Leaf("", "multi_discrete", (2,), "int64", (3, 4), (1, 0))
    assert leaf(spaces.MultiBinary(2)) == Leaf("", "multi_binary", (2,), "int8", (2, 2), (0, 0))
    assert leaf(spaces.Box(-1, 2, (2,), np.float32)) == Leaf("", "box", (2,), "float32", low=(-1.0,), high=(2.0,))
    uneven = leaf(spaces.Box(np.array([0.0, -np.inf]), np.array([1.0, 2.0]), dtype=np.float64))
    assert (uneven.low, uneven.high) == ((0.0, -np.inf), (1.0, 2.0))
    shapes: list[tuple[int, ...]] = [(8, 8, 3), (4, 8, 8, 3), (8, 8)]
    assert [leaf(spaces.Box(0, 255, shape, np.uint8)).is_image for shape in shapes] == [True, True, False]
    assert not leaf(spaces.Box(0, 1, (8, 8, 3), np.float32)).is_image
    assert not leaf(spaces.MultiBinary([8, 8, 3])).is_image


@pytest.mark.parametrize(
    ("space", "word"),
    [
        (spaces.Text(5), "Text"),
        (spaces.Sequence(spaces.Discrete(2)), "Sequence"),
        (spaces.Graph(spaces.Discrete(2), None), "Graph"),
        (spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))), "OneOf"),
        (spaces.Box(-1, 1, (0,)), "expected"),
        (spaces.Dict({"talk": spaces.Tuple((spaces.Discrete(2), spaces.Text(5)))}), "^talk.1: Text spaces are not"),
        (spaces.Dict({}), "nothing"),
        (spaces.Tuple([]), "nothing"),
        (spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}), "same column"),
        (spaces.Dict({1: spaces.Discrete(2)}), r"keys \[1\]"),  # type: ignore[dict-item]
    ],
    ids=str,
)
def test_describe_space_rejects_unsupported_spaces(space: spaces.Space[Any], word: str) -> None:
    with pytest.raises(UnsupportedSpace, match=word):
        describe_space(space)


def test_actions_for_environment_are_clipped_and_shifted() -> None:
    space = spaces.Dict({"go": spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 5.0]), dtype=np.float64),
                         "which": spaces.Discrete(3, start=5)})  # fmt: skip
    spec = describe_space(space)
    columns = {"action.go": np.array([[-3.0, 3.0], [0.5, 9.0]], np.float32), "action.which": np.array([0, 2])}
    found = spec.to_environment(columns)
    np.testing.assert_array_equal(found["go"], [[-1.0, 3.0], [0.5, 5.0]])
    np.testing.assert_array_equal(found["which"], [5, 7])
    np.testing.assert_array_equal(columns["action.go"][0], [-3.0, 3.0])


def test_fragment_bytes_equal_size_of_columns() -> None:
    its = PolicySpaces(describe_space(spaces.Box(0, 255, (8, 8, 3), np.uint8)), describe_space(spaces.Discrete(3)))
    description = EnvironmentDescription({"a": "default", "b": "default"}, {"default": its})
    columns = expected_columns(its, steps=10, slots=2 * 4)
    traveling = sum(
        int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in columns.items() if name in {"obs", "action"}
    )
    assert traveling < description.fragment_bytes(steps=10, num_envs=4) < traveling + 20 * 10 * 8
    state = expected_columns(its, steps=10, slots=2 * 4, state_size=6)["state_in"]
    assert state == ((8, 6), np.dtype(np.float32))
    with_state = description.fragment_bytes(steps=10, num_envs=4, state_sizes={"default": 6})
    assert with_state == description.fragment_bytes(steps=10, num_envs=4) + 8 * 6 * 4


@pytest.mark.parametrize("space", [spaces.Discrete(9), spaces.MultiDiscrete([9]), spaces.Box(0, 9, (1,))])
@pytest.mark.parametrize("value", ["7", b"7", ["7"]])
def test_flatten_rejects_text(space: gym.Space[Any], value: Any) -> None:
    with pytest.raises(ValueError, match="is text, expected numbers of a"):
        describe_space(space).flatten("action", value)
