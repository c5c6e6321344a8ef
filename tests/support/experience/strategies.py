"""Hypothesis strategies: Gymnasium spaces of every kind, and JSON values."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

Space = spaces.Space[Any]

TEXTS = st.text(max_size=20)


def json_values(allow_nan: bool = True) -> st.SearchStrategy[Any]:
    """Values of JSON, and those that only Python's JSON accepts."""
    return st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=allow_nan), TEXTS),
        lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(TEXTS, below, max_size=3)),
        max_leaves=5,
    )


JSON_VALUES = json_values()

_SHAPES = st.lists(st.integers(1, 3), max_size=2).map(tuple)
_IMAGES = [(1, 5, 5), (4, 6, 6), (5, 5, 3), (2, 5, 5, 3), (3, 3)]


@st.composite
def boxes(draw: st.DrawFn) -> Space:
    """Boxes of floats and integers with bounds per element, which may be infinite for floats."""
    shape, dtype = draw(_SHAPES), draw(st.sampled_from([np.float32, np.float64, np.int32]))
    infinite = [] if dtype is np.int32 else [np.inf]
    low, high = (
        draw(arrays_of.arrays(np.float64, shape, elements=st.sampled_from(bounds)))
        for bounds in ([0.0, -1.0, -5.0, *(-bound for bound in infinite)], [1.0, 5.0, *infinite])
    )
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)


def leaf_spaces(images: bool = True) -> st.SearchStrategy[Space]:
    """Spaces that are one array."""
    counts = arrays_of.arrays(np.int64, st.sampled_from([(1,), (3,), (2, 2)]), elements=st.integers(1, 4))
    kinds: list[st.SearchStrategy[Space]] = [
        boxes(),
        st.builds(
            lambda n, start, dtype: spaces.Discrete(n, start=start, dtype=dtype),
            st.integers(1, 5), st.integers(-3, 3), st.sampled_from([np.int64, np.int32]),
        ),
        st.builds(
            lambda counts, start: spaces.MultiDiscrete(counts, start=np.full_like(counts, start)),
            counts, st.integers(-2, 2),
        ),
        st.sampled_from([(1,), (4,), (2, 3)]).map(lambda shape: spaces.MultiBinary(list(shape))),
    ]  # fmt: skip
    if images:
        kinds.append(st.sampled_from(_IMAGES).map(lambda shape: spaces.Box(0, 255, shape, np.uint8)))
        kinds.append(_SHAPES.map(lambda shape: spaces.Box(0, 1, shape, np.bool_)))
    return st.one_of(kinds)


def gymnasium_spaces(images: bool = True) -> st.SearchStrategy[Space]:
    """Spaces of one leaf or nested in dicts and tuples; observations may be `images`, actions are none."""
    keys = st.sampled_from(["a", "camera", "x/y", "ä"])
    return st.recursive(
        leaf_spaces(images),
        lambda below: st.one_of(
            st.dictionaries(keys, below, min_size=1, max_size=3).map(spaces.Dict),
            st.lists(below, min_size=1, max_size=2).map(spaces.Tuple),
        ),
        max_leaves=3,
    )
