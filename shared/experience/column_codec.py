"""Smaller columns for images: each stacked frame once, and optional compression. Lossless, and driven by the data.

Stacked frames: in `[T, S, k, …]` an observation usually repeats k−1 frames of the previous one. Then only its newest
frame is kept; otherwise (a reset) the whole stack. The last observations of episodes, `final_obs…`, likewise repeat
frames of the observation before them. Encoding verifies each repetition.
"""

import math
from typing import Any, Literal

import lz4.frame
import numpy as np
import zstandard

from stagecoach.shared.experience.spaces import Array, Columns

Compression = Literal["none", "lz4", "zstd"]
Layout = dict[str, dict[str, Any]]

_MAX_STACK = 16
MAX_UNPACKED_BYTES = 1 << 32
_FRAMES, _FIRST, _WHOLE, _WHERE, _NEWEST = "#frames", "#first", "#whole", "#where", "#newest"


def pack(columns: Columns, compression: Compression) -> tuple[Columns, Layout]:
    """Returns the columns to send, and the layout that `unpack` needs; changes only byte images."""
    packed = dict(columns)
    layout: Layout = {}
    for name, array in columns.items():
        if array.dtype == np.uint8 and array.ndim >= 5 and 2 <= array.shape[2] <= _MAX_STACK:
            parts = _split_stack(name, array)
            if len(parts) > 1:
                layout[name] = {"stack": array.shape[2]}
                del packed[name]
                packed |= parts
                _split_finals(name, columns, packed, layout)
    for part, value in packed.items():
        if compression != "none" and value.dtype == np.uint8 and value.ndim >= 3:
            layout.setdefault(part, {}).update(codec=compression, shape=list(value.shape))
            packed[part] = np.frombuffer(_compress(value, compression), np.uint8)
    return packed, layout


def unpack(packed: Columns, layout: Layout, most_bytes: int = MAX_UNPACKED_BYTES) -> Columns:
    """Inverts `pack`; raises `ValueError` or `KeyError` for parts that do not fit, or before unpacking more than
    `most_bytes`."""
    columns = dict(packed)
    shapes = [how["shape"] for how in layout.values() if "codec" in how]
    if any(type(length) is not int or length < 0 for shape in shapes for length in shape):
        raise ValueError(f"columns cannot have the shapes {shapes}")
    if (size := sum(math.prod(shape) for shape in shapes)) > most_bytes:
        raise ValueError(f"columns of {size} bytes unpacked, expected at most {most_bytes}")
    for name, how in layout.items():
        if "codec" in how:
            columns[name] = _decompress(columns[name], how["codec"], tuple(how["shape"]))
    for name, how in layout.items():
        if "stack" in how:
            columns[name] = _join_stack(name, int(how["stack"]), columns, most_bytes)
    for name, how in layout.items():
        if "after" in how:
            columns[name] = _join_finals(name, how["after"], columns)
    return columns


def _split_stack(name: str, array: Array) -> Columns:
    steps, slots, stack = array.shape[:3]
    if steps < 2 or not array.size:
        return {name: array}
    same = (array[1:, :, :-1] == array[:-1, :, 1:]).reshape(steps - 1, slots, -1).all(axis=2)
    if same.mean() < 0.5:
        return {name: array}
    where = np.argwhere(~same).astype(np.int32) + np.array([1, 0], np.int32)
    return {
        name + _FIRST: array[0],
        name + _FRAMES: array[1:, :, stack - 1],
        name + _WHOLE: array[where[:, 0], where[:, 1]],
        name + _WHERE: where,
    }


def _split_finals(name: str, columns: Columns, packed: Columns, layout: Layout) -> None:
    """Keeps only the newest frames of the final observations of `name`, if its stacks have all others."""
    final, index = _finals_of(name)
    if final not in columns or not len(columns[final]):
        return
    step, slot = columns[index].T
    if (columns[final][:, :-1] == columns[name][step, slot, 1:]).all():
        layout[final] = {"after": name}
        packed[final + _NEWEST] = packed.pop(final)[:, -1]


def _join_finals(name: str, stacks: str, columns: Columns) -> Array:
    if _finals_of(stacks)[0] != name:
        raise ValueError(f"{name} does not go with {stacks}")
    newest, earlier, (step, slot) = columns.pop(name + _NEWEST), columns[stacks], columns[_finals_of(stacks)[1]].T
    if newest.dtype != earlier.dtype or newest.shape != step.shape + earlier.shape[3:]:
        raise ValueError(f"{name}: {newest.dtype}{newest.shape} are not the newest frames of {len(step)} stacks")
    return np.concatenate([earlier[step, slot, 1:], newest[:, None]], axis=1)


def _finals_of(name: str) -> tuple[str, str]:
    """Returns the names of the final observations' column for `policy/obs…`, and of their index."""
    policy, _, column = name.partition("/")
    return f"{policy}/final_{column}", f"{policy}/final_index"


def _join_stack(name: str, stack: int, columns: Columns, most_bytes: int) -> Array:
    first, frames, whole, where = (columns.pop(name + part) for part in (_FIRST, _FRAMES, _WHOLE, _WHERE))
    if not 2 <= stack <= _MAX_STACK or any(part.dtype != np.uint8 for part in (first, frames, whole)):
        raise ValueError(f"{name} is not a stack of {stack} byte images")
    if first.shape[1:2] != (stack,) or frames.shape[1:] != first.shape[:1] + first.shape[2:]:
        raise ValueError(f"{name}: frames of shape {frames.shape} do not continue a stack of shape {first.shape}")
    if not first.size or (size := (frames.shape[0] + 1) * first.size) > most_bytes:
        raise ValueError(f"{name}: stacks of {size if first.size else 0} bytes, expected 1 to {most_bytes}")
    array = np.empty((frames.shape[0] + 1, *first.shape), np.uint8)
    array[0] = first
    resets: dict[int, list[int]] = {}
    for index, (step, _) in enumerate(where.tolist()):
        resets.setdefault(step, []).append(index)
    for step in range(1, array.shape[0]):
        array[step, :, : stack - 1] = array[step - 1, :, 1:]
        array[step, :, stack - 1] = frames[step - 1]
        if step in resets:
            array[step, where[resets[step], 1]] = whole[resets[step]]
    return array


def _compress(array: Array, compression: Compression) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    if compression == "lz4":
        return bytes(lz4.frame.compress(data, store_size=True))
    return zstandard.ZstdCompressor(level=3).compress(data)


def _decompress(array: Array, codec: str, shape: tuple[int, ...]) -> Array:
    size = math.prod(shape)
    if codec == "lz4":
        with lz4.frame.LZ4FrameDecompressor() as decompressor:
            data = bytes(decompressor.decompress(array.tobytes(), max_length=size + 1))
    elif codec == "zstd":
        try:  # the size that the frame itself claims is what the library would allocate
            if (claimed := zstandard.frame_content_size(array.tobytes())) != size:
                raise ValueError(f"the compressed column claims {claimed} bytes, its shape {size}")
            data = zstandard.ZstdDecompressor().decompress(array.tobytes(), max_output_size=size)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
    else:
        raise ValueError(f"unknown codec {codec!r}")
    return np.frombuffer(data, np.uint8).reshape(shape)
