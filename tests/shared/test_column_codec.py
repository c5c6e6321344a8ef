"""Columns and blobs: what is packed comes back the same, stacked frames travel once, hostile bytes stay bounded."""

from __future__ import annotations

import re
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import lz4.frame
import numpy as np
import pytest
import safetensors.numpy
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from shared.errors import FragmentError
from shared.experience import column_codec, tensor_blob
from shared.experience.column_codec import Compression
from shared.experience.spaces import Array, Columns
from tests.support.strategies import TEXTS, json_values

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


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    steps=st.integers(1, 12), slots=st.integers(1, 4), stack=st.integers(1, 5), resets=st.floats(0, 1),
    seed=st.integers(0, 2**32), compression=st.sampled_from(COMPRESSIONS), frame=st.sampled_from([(3, 3), (2, 3, 3)]),
)  # fmt: skip
def test_stacked_frames_come_back_whatever_the_resets(
    steps: int, slots: int, stack: int, resets: float, seed: int, compression: Compression, frame: tuple[int, ...]
) -> None:
    assert_lossless({"obs": stacked(steps, slots, stack, resets, seed, frame)}, compression)


def with_finals(steps: int, slots: int, stack: int, seed: int, fresh: bool = False) -> Columns:
    """Stacks, and the last ones of some episodes: gone on with by a frame each, or `fresh` ones."""
    random, array = np.random.default_rng(seed), stacked(steps, slots, stack, 0.1, seed)
    index = np.argwhere(random.random((steps, slots)) < 0.2).astype(np.int32)
    last = random.integers(0, 256, (len(index), stack, 6, 6)).astype(np.uint8)
    if not fresh:
        last[:, :-1] = array[index[:, 0], index[:, 1], 1:]
    return {"p/obs": array, "p/final_obs": last, "p/final_index": index}


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    steps=st.integers(1, 12), slots=st.integers(1, 4), stack=st.integers(1, 5), seed=st.integers(0, 2**32),
    fresh=st.booleans(), compression=st.sampled_from(COMPRESSIONS),
)  # fmt: skip
def test_last_observations_come_back_whatever_they_go_on_with(
    steps: int, slots: int, stack: int, seed: int, fresh: bool, compression: Compression
) -> None:
    assert_lossless(with_finals(steps, slots, stack, seed, fresh), compression)


def test_of_last_observations_only_the_newest_frames_are_sent() -> None:
    columns = with_finals(32, 4, 4, 0)
    packed = assert_lossless(columns, "none")
    assert packed["p/final_obs#newest"].nbytes * 4 == columns["p/final_obs"].nbytes and "p/final_obs" not in packed
    assert "p/final_obs" in assert_lossless(with_finals(32, 4, 4, 0, fresh=True), "none")


@pytest.mark.parametrize("shape", [(3, 6, 6), (10**9, 0, 6), (0,)])
def test_newest_frames_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    packed, layout = column_codec.pack(with_finals(32, 4, 4, 0), "none")
    packed["p/final_obs#newest"] = np.zeros(shape, np.uint8)
    with pytest.raises(ValueError, match="not the newest frames of"):
        column_codec.unpack(packed, layout)
    with pytest.raises(ValueError, match="does not go with"):
        column_codec.unpack(packed, layout | {"p/final_obs": {"after": "p/reward"}})
    del packed["p/final_obs#newest"]
    with pytest.raises(KeyError, match="newest"):
        column_codec.unpack(packed, layout)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    array=st.sampled_from([np.uint8, np.bool_, np.float32, np.int64]).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=3))
    ),
    compression=st.sampled_from(COMPRESSIONS),
)
def test_any_array_comes_back(array: Array, compression: Compression) -> None:
    assert_lossless({"obs": array, "other": np.arange(3)}, compression)


@pytest.mark.parametrize(("stack", "resets", "most"), [(2, 0, 0.54), (4, 0, 0.29), (8, 0, 0.16), (4, 0.02, 0.4)])
def test_frames_that_repeat_are_sent_once_and_few_resets_cost_little(stack: int, resets: float, most: float) -> None:
    array = stacked(steps=128, slots=4, stack=stack, resets=resets, seed=0)
    assert size(assert_lossless({"obs": array}, "none")) < most * array.nbytes
    fresh = stacked(steps=16, slots=2, stack=4, resets=1.0, seed=0)
    assert assert_lossless({"obs": fresh}, "none").keys() == {"obs"}, "those that do not are left as they are"


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_byte_images_alone_are_compressed(compression: Compression) -> None:
    image = np.zeros((8, 2, 32, 32, 3), np.uint8)
    image[:, :, 4:9, 5:20] = 200
    columns: Columns = {
        "reward": np.zeros((64, 8), np.float32), "obs": np.zeros((64, 8, 3), np.float32), "k": np.ones((9, 9), np.uint8)
    }  # fmt: skip
    packed = assert_lossless(columns | {"image": image}, compression)
    assert packed["image"].nbytes < image.nbytes / 20 and all(packed[name] is columns[name] for name in columns)


def frames_of(array: Array) -> tuple[Columns, dict[str, Any]]:
    packed, layout = column_codec.pack({"obs": array}, "none")
    assert set(packed) == {"obs#first", "obs#frames", "obs#whole", "obs#where"}
    return packed, layout


BAD_PARTS: dict[str, tuple[Callable[[Columns], object], type[Exception], str]] = {
    **{f"no {part}": (lambda packed, part=part: packed.pop(part), KeyError, part)  # type: ignore[misc]
       for part in ("obs#first", "obs#frames", "obs#whole", "obs#where")},
    "no bytes at all, but a billion steps": (
        lambda packed: packed.update({"obs#frames": np.zeros((10**9, 0), np.uint8)}), ValueError,
        "do not continue a stack"),
    "no byte images": (lambda packed: packed.update({"obs#first": packed["obs#first"].astype(np.float32)}), ValueError,
        "not a stack of 4 byte images"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_that_are_missing_or_do_not_fit_are_refused(name: str) -> None:
    packed, layout = frames_of(stacked(8, 2, 4, 0.1, 0))
    spoil, error, told = BAD_PARTS[name]
    spoil(packed)
    with pytest.raises(error, match=told):
        column_codec.unpack(packed, layout)


@pytest.mark.parametrize("stack", [0, 1, 3, 17, 10**9])
def test_a_stack_that_does_not_fit_is_refused(stack: int) -> None:
    packed, _ = frames_of(stacked(8, 2, 4, 0.1, 0))
    with pytest.raises(ValueError, match="obs"):
        column_codec.unpack(packed, {"obs": {"stack": stack}})


def compressed(data: bytes, codec: str) -> Array:
    made = lz4.frame.compress(data) if codec == "lz4" else zstandard.ZstdCompressor().compress(data)
    return np.frombuffer(made, np.uint8)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_bomb_costs_no_more_than_it_claims(codec: str) -> None:
    bomb = compressed(bytes(64 << 20), codec)
    assert bomb.nbytes < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"claims|reshape"):
            column_codec.unpack({"obs": bomb}, {"obs": {"codec": codec, "shape": [4, 4]}})
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_claims_terabytes_is_refused() -> None:
    frame = bytes.fromhex("28b52ffde0") + struct.pack("<Q", 1 << 44) + b"\x01\0\0"
    with pytest.raises(ValueError, match=f"claims {1 << 44} bytes, its shape 4"):
        column_codec.unpack({"obs": np.frombuffer(frame, np.uint8)}, {"obs": {"codec": "zstd", "shape": [4]}})


@pytest.mark.parametrize("shapes", [[[1 << 33]], [[1 << 31], [1 << 31], [1]], [[1 << 20] * 5]])
def test_claims_beyond_the_bound_are_refused_before_anything_is_unpacked(shapes: list[list[int]]) -> None:
    data = compressed(bytes(10), "lz4")
    names = [f"obs{number}" for number in range(len(shapes))]
    layout = {name: {"codec": "lz4", "shape": shape} for name, shape in zip(names, shapes, strict=True)}
    with pytest.raises(ValueError, match="beyond the bound"):
        column_codec.unpack(dict.fromkeys(names, data), layout)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("shape", [[-10], [-2, -5], [9], [11], [2.0, 5.0], ["10"], [True] * 3])
def test_a_shape_that_does_not_fit_is_refused(codec: str, shape: list[Any]) -> None:
    with pytest.raises(ValueError, match=re.compile("shape|claims")):
        column_codec.unpack({"obs": compressed(bytes(10), codec)}, {"obs": {"codec": codec, "shape": shape}})


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_bytes_that_are_not_compressed_are_refused(codec: str) -> None:
    for data in (b"", b"nonsense", bytes(compressed(bytes(100), codec))[:-6]):
        with pytest.raises((ValueError, RuntimeError)):
            column_codec.unpack({"obs": np.frombuffer(data, np.uint8)}, {"obs": {"codec": codec, "shape": [100]}})


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown codec 'rot13'"):
        column_codec.unpack({"obs": np.zeros(3, np.uint8)}, {"obs": {"codec": "rot13", "shape": [3]}})


DTYPES = (
    np.bool_, np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32,
    np.float64,
)  # fmt: skip
GOLDEN = (
    bytes([184, 0, 0, 0, 0, 0, 0, 0])
    + rb'{"__metadata__":{"stagecoach":"44ba1ba56a8fc79b {\"a\":\"\\u00e4\",\"b\":1}"},'
    + rb'"n":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}'
    + bytes.fromhex("0300000000000000 0000803f 000000c0")
)


def reason_of(blob: bytes) -> str:
    with pytest.raises(FragmentError) as caught:
        tensor_blob.decode(blob)
    return caught.value.reason


def test_the_bytes_are_the_golden_ones() -> None:
    # After a change of the format: put the new bytes here, and raise the versions of
    # what is made of blobs (fragment.WIRE_VERSION, the checkpoint format).
    blob = tensor_blob.encode({"w": np.array([1.0, -2.0], np.float32), "n": np.array(3, np.int64)}, {"b": 1, "a": "ä"})
    assert blob == GOLDEN


def test_the_order_of_arrays_and_header_does_not_show() -> None:
    one, two = np.arange(3), np.arange(4.0)
    assert tensor_blob.encode({"a": one, "b": two}, {"x": 1, "y": 2}) == tensor_blob.encode(
        {"b": two, "a": one}, {"y": 2, "x": 1}
    )


any_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    arrays=st.dictionaries(TEXTS.filter(lambda name: name != "__metadata__"), any_arrays, max_size=3),
    header=st.dictionaries(TEXTS, json_values(allow_nan=False), max_size=3),
)
def test_arrays_and_header_come_back_as_they_were(arrays: dict[str, Any], header: dict[str, Any]) -> None:
    found, found_header = tensor_blob.decode(tensor_blob.encode(arrays, header))
    assert found_header == header
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_arrays_that_are_views_are_written_in_order() -> None:
    array = np.arange(12).reshape(3, 4)
    for view in (array.T, array[:, ::2], array[::-1]):
        np.testing.assert_array_equal(tensor_blob.decode(tensor_blob.encode({"a": view}, {}))[0]["a"], view)


def test_a_blob_is_a_safetensors_file_for_everybody() -> None:
    found = safetensors.numpy.load(tensor_blob.encode({"a": np.arange(3)}, {"text": '"stagecoach":"00'}))
    np.testing.assert_array_equal(found["a"], np.arange(3))


def test_a_header_that_looks_like_the_hash_does_no_harm() -> None:
    header = {'"stagecoach":"': '"stagecoach":"0000000000000000 {}', "stagecoach": "0" * 16}
    assert tensor_blob.decode(tensor_blob.encode({"stagecoach": np.arange(2)}, header))[1] == header


@pytest.mark.parametrize("text", ["", "0123 [1]", f"{0:016} 3", f"{0:016} {{", f"{0:016} " + "[" * 100_000, None])
def test_metadata_without_a_header_is_undecodable(text: str | None) -> None:
    metadata = {"other": "x"} if text is None else {"stagecoach": text}
    assert reason_of(safetensors.numpy.save({"a": np.arange(3)}, metadata=metadata)) == "undecodable"
    assert reason_of(safetensors.numpy.save({"a": np.arange(3)})) == "undecodable"


def test_altered_numbers_are_corrupt_and_the_message_names_both_hashes() -> None:
    blob = bytearray(tensor_blob.encode({"a": np.zeros(2)}, {}))
    blob[-1] ^= 1
    with pytest.raises(FragmentError, match=r"xxh3 is [0-9a-f]{16}, the blob says [0-9a-f]{16}"):
        tensor_blob.decode(bytes(blob))
