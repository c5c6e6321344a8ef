"""Named arrays plus a JSON header in one safetensors blob, guarded by a hash: the format of everything that travels.

Fragments, policy versions and checkpoint objects are all this. Layout: a safetensors file whose metadata has the one
key `stagecoach`: 16 hex digits, a space, and the header as JSON. The digits are the XXH3-64 of the whole blob with
zeros in their place, so that an altered name, shape or dtype is found as well. (One key, because safetensors writes
several in random order, and equal contents shall be equal bytes.)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import xxhash

from shared.errors import StagecoachError
from shared.spaces import Array, Columns

_KEY = "stagecoach"
_DIGITS = 16
_NO_HASH = "0" * _DIGITS
_LENGTH = struct.Struct("<Q")


class BlobError(StagecoachError):
    """Bytes that are not a valid blob; `reason` is `undecodable` (not the format) or `corrupt` (altered)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


def encode(arrays: Mapping[str, Array], header: Mapping[str, Any]) -> bytes:
    """One blob; the same arrays and header always give the same bytes."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    blob = safetensors.numpy.save(contiguous, metadata={_KEY: f"{_NO_HASH} {text}"})
    place = _place_of_digits(blob, _LENGTH.size + _LENGTH.unpack_from(blob)[0])
    view = memoryview(blob)
    return b"".join((view[:place], _hash(blob, place).encode(), view[place + _DIGITS :]))  # one copy: it may be large


def decode(blob: bytes) -> tuple[Columns, dict[str, Any]]:
    """The arrays (read-only) and the header; raises `BlobError`."""
    try:
        (length,) = _LENGTH.unpack_from(blob)
        body = _LENGTH.size + length
        expected, _, text = json.loads(blob[_LENGTH.size : body])["__metadata__"][_KEY].partition(" ")
        header = json.loads(text)
        place = _place_of_digits(blob, body)
        arrays = safetensors.numpy.load(blob)
    except (
        struct.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        safetensors.SafetensorError,
    ) as error:
        raise BlobError("undecodable", f"{type(error).__name__}: {error}") from None
    if not isinstance(header, dict):
        raise BlobError("undecodable", "the header is not a JSON object")
    found = _hash(blob, place)
    if found != expected:
        raise BlobError("corrupt", f"xxh3 is {found}, the blob says {expected}")
    return arrays, header


def _place_of_digits(blob: bytes, body: int) -> int:
    opening = f'"{_KEY}":"'.encode()
    return blob.index(opening, 0, body) + len(opening)


def _hash(blob: bytes, place: int) -> str:
    view = memoryview(blob)
    digest = xxhash.xxh3_64(view[:place])
    digest.update(_NO_HASH.encode())
    digest.update(view[place + _DIGITS :])
    return digest.hexdigest()
