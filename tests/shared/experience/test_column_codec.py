"""Packed columns: lossless, stacked frames are sent once, hostile bytes stay bounded."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import lz4.frame
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from stagecoach.shared.experience import column_codec
from stagecoach.shared.experience.column_codec import Compression
from stagecoach.shared.experience.spaces import Array, Columns

COMPRESSIONS = ("none", "lz4", "zstd")


def stacked(steps: int, slots: int, stack: int, resets: float, seed: int, frame: tuple[int, ...] = (6, 6)) -> Array:
    """A frame-stacked observation: each step drops the oldest frame and adds one; at a reset all frames are new."""
    random = np.random.default_rng(seed)
    array = np.empty((steps, slots, stack, *frame), np.uint8)
    array[0] = random.integers(0, 256, array[0].shape)
    for step in range(1, steps):
        array[step, :, :-1] = array[step - 1, :, 1:]
        array[step, :, -1] = random.integers(0, 256, (slots, *frame))
        for slot in np.flatnonzero(random.random(slots) < resets):
            array[step, slot] = random.integers(0, 256, (stack, *frame))
    return array


def assert_lossless(columns: Columns, compression: Compression) -> Columns:
    packed, layout = column_codec.pack(columns, compression)
    found = column_codec.unpack(packed, layout)
    assert found.keys() == columns.keys()
    for name, array in columns.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)
    return packed


def size(columns: Columns) -> int:
    return sum(array.nbytes for array in columns.values())


def with_finals(
    steps: int = 32, slots: int = 4, stack: int = 4, resets: float = 0.1, seed: int = 0, fresh: bool = False,
    frame: tuple[int, ...] = (6, 6),
) -> Columns:  # fmt: skip
    """Stacks, and the last ones of some episodes: gone on with by a frame each, or `fresh` ones."""
    random, array = np.random.default_rng(seed), stacked(steps, slots, stack, resets, seed, frame)
    index = np.argwhere(random.random((steps, slots)) < 0.2).astype(np.int32)
    last = random.integers(0, 256, (len(index), stack, *frame)).astype(np.uint8)
    if not fresh:
        last[:, :-1] = array[index[:, 0], index[:, 1], 1:]
    return {"p/obs": array, "p/final_obs": last, "p/final_index": index}


@settings(derandomize=True, max_examples=100)
@given(
    shape=st.fixed_dictionaries({
        "steps": st.integers(1, 12), "slots": st.integers(1, 4), "stack": st.integers(1, 5), "resets": st.floats(0, 1),
        "seed": st.integers(0, 2**32), "fresh": st.booleans(), "frame": st.sampled_from([(3, 3), (2, 3, 3)]),
    }),
    compression=st.sampled_from(COMPRESSIONS),
)  # fmt: skip
def test_stacked_frames_round_trip(shape: dict[str, Any], compression: Compression) -> None:
    assert_lossless(with_finals(**shape), compression)


def test_final_observations_send_newest_frames_only() -> None:
    columns = with_finals()
    packed = assert_lossless(columns, "none")
    assert packed["p/final_obs#newest"].nbytes * 4 == columns["p/final_obs"].nbytes and "p/final_obs" not in packed
    assert "p/final_obs" in assert_lossless(with_finals(fresh=True), "none")


@settings(derandomize=True, max_examples=100)
@given(
    array=st.sampled_from([np.uint8, np.bool_, np.float32, np.int64]).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=3))
    ),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_any_array_round_trips(array: Array, compression: Compression) -> None:
    assert_lossless({"obs": array, "other": np.arange(3)}, compression)


@pytest.mark.parametrize(("stack", "resets", "most"), [(2, 0, 0.54), (4, 0, 0.29), (8, 0, 0.16), (4, 0.02, 0.4)])
def test_repeated_frames_are_sent_once(stack: int, resets: float, most: float) -> None:
    array = stacked(steps=128, slots=4, stack=stack, resets=resets, seed=0)
    assert size(assert_lossless({"obs": array}, "none")) < most * array.nbytes
    fresh = stacked(steps=16, slots=2, stack=4, resets=1.0, seed=0)
    assert assert_lossless({"obs": fresh}, "none").keys() == {"obs"}, "those that do not are left as they are"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_only_byte_images_are_compressed(compression: Compression) -> None:
    image = np.zeros((8, 2, 32, 32, 3), np.uint8)
    image[:, :, 4:9, 5:20] = 200
    columns: Columns = {
        "reward": np.zeros((64, 8), np.float32), "obs": np.zeros((64, 8, 3), np.float32), "k": np.ones((9, 9), np.uint8)
    }  # fmt: skip
    packed = assert_lossless(columns | {"image": image}, compression)
    assert packed["image"].nbytes < image.nbytes / 20 and all(packed[name] is columns[name] for name in columns)


def compressed(data: bytes, codec: str) -> Array:
    made = lz4.frame.compress(data) if codec == "lz4" else zstandard.ZstdCompressor().compress(data)
    return np.frombuffer(made, np.uint8)


Packed = tuple[Columns, dict[str, Any]]
FINALS, FRAMES, NEWEST = with_finals(), {"obs": stacked(8, 2, 4, 0.1, 0)}, "p/final_obs#newest"
TERABYTES = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 44) + b"\x01\0\0"


def spoilt(columns: Columns, parts: dict[str, Array | None], layout: dict[str, Any] | None = None) -> Packed:
    """These columns packed, with some parts replaced (`None` takes one away), and the layout."""
    packed, its = column_codec.pack(columns, "none")
    return {name: part for name, part in (packed | parts).items() if part is not None}, its | (layout or {})


def claiming(data: bytes | Array, codec: str, *shapes: list[Any]) -> Packed:
    """Columns of these bytes, each said to be of one of the shapes."""
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    names = [f"obs{number}" for number in range(len(shapes))]
    return dict.fromkeys(names, array), {
        name: {"codec": codec, "shape": shape} for name, shape in zip(names, shapes, strict=True)
    }


MALFORMED: list[tuple[Packed, str]] = [
    *((spoilt(FINALS, {NEWEST: np.zeros(shape, np.uint8)}), "not the newest frames of")
      for shape in ((3, 6, 6), (10**9, 0, 6), (0,))),
    (spoilt(FINALS, {}, {"p/final_obs": {"after": "p/reward"}}), "does not go with"),
    (spoilt(FINALS, {NEWEST: None}), "newest"),
    *((spoilt(FRAMES, {part: None}), part) for part in ("obs#first", "obs#frames", "obs#whole", "obs#where")),
    (spoilt(FRAMES, {"obs#frames": np.zeros((10**9, 0), np.uint8)}), "do not continue a stack"),
    (spoilt(FRAMES, {"obs#first": np.zeros((2, 4, 6, 6), np.float32)}), "not a stack of 4 byte images"),
    *((spoilt(FRAMES, {}, {"obs": {"stack": stack}}), "obs") for stack in (0, 1, 3, 17, 10**9)),
    (claiming(TERABYTES, "zstd", [4]), f"claims {1 << 44} bytes, its shape 4"),
    *((claiming(compressed(bytes(10), "lz4"), "lz4", *shapes), "expected at most")
      for shapes in ([[1 << 33]], [[1 << 31], [1 << 31], [1]], [[1 << 20] * 5])),
    *((claiming(compressed(bytes(10), codec), codec, shape), "shape|claims")
      for codec in ("lz4", "zstd") for shape in ([-10], [-2, -5], [9], [11], [2.0, 5.0], ["10"], [True] * 3)),
    *((claiming(data, codec, [100]), ".")
      for codec in ("lz4", "zstd") for data in (b"", b"nonsense", bytes(compressed(bytes(100), codec))[:-6])),
    (claiming(bytes(3), "rot13", [3]), "unknown codec 'rot13'"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "told"), MALFORMED, ids=range(len(MALFORMED)))
def test_unpack_rejects_parts_that_do_not_fit_layout(given: Packed, told: str) -> None:
    with pytest.raises((ValueError, KeyError, RuntimeError), match=told):
        column_codec.unpack(*given)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_decompression_bomb_is_bounded_by_claimed_size(codec: str) -> None:
    bomb = compressed(bytes(64 << 20), codec)
    assert bomb.nbytes < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"claims|reshape"):
            column_codec.unpack({"obs": bomb}, {"obs": {"codec": codec, "shape": [4, 4]}})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
