"""Tensor blobs: fixed bytes, every dtype there and back, and nothing but `BlobError` for bytes that are not one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from shared import tensor_blob
from shared.tensor_blob import BlobError

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
    with pytest.raises(BlobError) as caught:
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


texts = st.text(max_size=12)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda below: st.one_of(st.lists(below, max_size=3), st.dictionaries(texts, below, max_size=3)),
    max_leaves=5,
)
any_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    arrays=st.dictionaries(texts.filter(lambda name: name != "__metadata__"), any_arrays, max_size=3),
    header=st.dictionaries(texts, json_values, max_size=3),
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


@pytest.mark.parametrize("blob", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}"])
def test_bytes_of_no_format_are_undecodable(blob: bytes) -> None:
    assert reason_of(blob) == "undecodable"


@pytest.mark.parametrize("text", ["", "0123 [1]", "0" * 16 + " 3", "0" * 16 + " {", "0" * 16 + " " + "[" * 100_000])
def test_metadata_without_a_header_is_undecodable(text: str) -> None:
    assert reason_of(safetensors.numpy.save({"a": np.arange(3)}, metadata={"stagecoach": text})) == "undecodable"


@pytest.mark.parametrize("metadata", [None, {}, {"other": "x"}])
def test_a_foreign_safetensors_file_is_undecodable(metadata: dict[str, str] | None) -> None:
    assert reason_of(safetensors.numpy.save({"a": np.arange(3)}, metadata=metadata)) == "undecodable"


def test_a_blob_cut_off_anywhere_is_undecodable() -> None:
    blob = tensor_blob.encode({"a": np.arange(3)}, {"x": 1})
    assert {reason_of(blob[:end]) for end in range(len(blob))} == {"undecodable"}


@pytest.mark.parametrize("flip", range(1, 256, 18))
def test_no_altered_byte_goes_unnoticed(flip: int) -> None:
    blob = tensor_blob.encode({"a": np.arange(3), "b": np.zeros(2, np.uint8)}, {"x": "text", "y": [1, 2]})
    for place in range(len(blob)):
        altered = bytearray(blob)
        altered[place] ^= flip
        assert reason_of(bytes(altered)) in {"undecodable", "corrupt"}


def test_swapped_names_are_corrupt() -> None:
    blob = tensor_blob.encode({"a": np.zeros(2), "b": np.ones(2)}, {})
    swapped = blob.replace(b'"a"', b'"?"').replace(b'"b"', b'"a"').replace(b'"?"', b'"b"')
    assert reason_of(swapped) == "corrupt"


def test_altered_numbers_are_corrupt_and_the_message_names_both_hashes() -> None:
    blob = bytearray(tensor_blob.encode({"a": np.zeros(2)}, {}))
    blob[-1] ^= 1
    with pytest.raises(BlobError, match=r"xxh3 is [0-9a-f]{16}, the blob says [0-9a-f]{16}"):
        tensor_blob.decode(bytes(blob))
