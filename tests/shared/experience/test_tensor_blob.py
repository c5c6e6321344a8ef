"""Tensor blobs: fixed bytes, lossless round trips, and a named reason for what is malformed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from stagecoach.shared.base.errors import FragmentError
from stagecoach.shared.experience import tensor_blob
from tests.support.experience.strategies import TEXTS, json_values

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


def test_blob_bytes_equal_golden_bytes() -> None:
    # After a change of the format: put the new bytes here, and raise the versions of
    # what is made of blobs (fragment.WIRE_VERSION, the checkpoint format).
    blob = tensor_blob.encode({"w": np.array([1.0, -2.0], np.float32), "n": np.array(3, np.int64)}, {"b": 1, "a": "ä"})
    assert blob == GOLDEN


LIKE_A_HASH = {'"stagecoach":"': '"stagecoach":"0000000000000000 {}', "stagecoach": "0" * 16}
any_arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)


@settings(derandomize=True, max_examples=100)
@given(
    arrays=st.dictionaries(TEXTS.filter(lambda name: name != "__metadata__"), any_arrays, max_size=3),
    header=st.dictionaries(TEXTS, json_values(allow_nan=False), max_size=3),
)
@example({"stagecoach": np.arange(2)}, LIKE_A_HASH)
@example({"a": np.arange(12).reshape(3, 4).T, "b": np.arange(12).reshape(3, 4)[:, ::2], "c": np.arange(3)[::-1]}, {})
def test_blob_round_trips_in_any_order(arrays: dict[str, Any], header: dict[str, Any]) -> None:
    blob = tensor_blob.encode(arrays, header)
    assert blob == tensor_blob.encode(*(dict(reversed(given.items())) for given in (arrays, header)))
    found, found_header = tensor_blob.decode(blob)
    assert found_header == header
    assert found.keys() == arrays.keys() == safetensors.numpy.load(blob).keys(), "a safetensors file for everybody"
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("text", ["", "0123 [1]", f"{0:016} 3", f"{0:016} {{", f"{0:016} " + "[" * 100_000, None])
def test_metadata_without_header_is_undecodable(text: str | None) -> None:
    metadata = {"other": "x"} if text is None else {"stagecoach": text}
    assert reason_of(safetensors.numpy.save({"a": np.arange(3)}, metadata=metadata)) == "undecodable"
    assert reason_of(safetensors.numpy.save({"a": np.arange(3)})) == "undecodable"


def test_altered_blob_error_names_both_hashes() -> None:
    blob = bytearray(tensor_blob.encode({"a": np.zeros(2)}, {}))
    blob[-1] ^= 1
    with pytest.raises(FragmentError, match=r"xxh3 is [0-9a-f]{16}, the blob says [0-9a-f]{16}"):
        tensor_blob.decode(bytes(blob))
