"""Named arrays plus a JSON header in one safetensors blob, guarded by a hash: the format of everything that travels.

Fragments, policy versions and checkpoint objects are all this. Layout: a safetensors file whose metadata has the one
key `stagecoach`: 16 hex digits, a space, and the header as JSON. The digits are the XXH3-64 of the whole blob with
zeros in their place, so that it covers names, shapes and dtypes as well. (One key, since safetensors writes several in
random order, and equal contents must be equal bytes.)
"""

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash
from safetensors import SafetensorError

from stagecoach.shared.base.errors import DropReason, FragmentError
from stagecoach.shared.experience.spaces import Array, Columns

_KEY = "stagecoach"
_DIGITS = 16
_NO_HASH = "0" * _DIGITS
_LENGTH = struct.Struct("<Q")
_MALFORMED = (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)


def encode(arrays: Mapping[str, Array], header: Mapping[str, Any]) -> bytes:
    """Returns one blob; the same arrays and header always give the same bytes."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    blob = safetensors.numpy.save(contiguous, metadata={_KEY: f"{_NO_HASH} {text}"})
    place = _place_of_digits(blob, _LENGTH.size + _LENGTH.unpack_from(blob)[0])
    view = memoryview(blob)
    return b"".join((view[:place], _hash(blob, place).encode(), view[place + _DIGITS :]))  # one copy: it may be large


def header(blob: bytes) -> dict[str, Any]:
    """Returns the header without verifying the hash; raises `FragmentError` (`undecodable`)."""
    return _opening(blob)[2]


def _opening(blob: bytes) -> tuple[str, int, dict[str, Any]]:
    """Returns the blob's hash, the offset of its arrays, and the header."""
    try:
        (length,) = _LENGTH.unpack_from(blob)
        body = _LENGTH.size + length
        expected, _, text = json.loads(blob[_LENGTH.size : body])["__metadata__"][_KEY].partition(" ")
        found = json.loads(text)
    except _MALFORMED as error:
        raise FragmentError(DropReason.UNDECODABLE, f"{type(error).__name__}: {error}") from None
    if not isinstance(found, dict):
        raise FragmentError(DropReason.UNDECODABLE, "the header is not a JSON object")
    return expected, body, found


def decode(blob: bytes) -> tuple[Columns, dict[str, Any]]:
    """Returns the arrays (read-only) and the header; raises `FragmentError` (`undecodable`, `corrupt`)."""
    expected, body, header = _opening(blob)
    try:
        place = _place_of_digits(blob, body)
        arrays = safetensors.numpy.load(blob)
    except _MALFORMED as error:
        raise FragmentError(DropReason.UNDECODABLE, f"{type(error).__name__}: {error}") from None
    if (found := _hash(blob, place)) != expected:
        raise FragmentError(DropReason.CORRUPT, f"xxh3 is {found}, the blob says {expected}")
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
