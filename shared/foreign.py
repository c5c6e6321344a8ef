"""What others wrote into Redis, read as what it is: foreign.

Heartbeats, events, scores and figures come from many processes, some on machines that nobody watches. A malformed one
is left out and named in the log once; it ends neither a role nor a command.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from shared.printable import printable, printable_data

T = TypeVar("T")
_LOGGER = logging.getLogger("stagecoach.foreign")
_MOST_DIGITS = 18
_MOST_NAMED, _MOST_COUNTED = 10, 100_000
_told: set[int] = set()
"""Hashes of what was left out so far; a name may be as long as somebody likes."""


def foreign(adapter: TypeAdapter[T], text: bytes, what: str, **beside: Any) -> T | None:
    """The JSON object `text`, with the fields `beside` it, as the adapter's type; None where it is none.

    `what` names it for people, such as `the heartbeat of worker:3`. All texts in it are made printable, and all its
    numbers are finite.
    """
    try:
        data = printable_data(_loaded(text))
        if not isinstance(data, dict):
            raise ValueError("it is no JSON object")
        return adapter.validate_python({**data, **beside})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        left_out(what, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    except (ValueError, RecursionError) as error:
        left_out(what, error)
    return None


def left_out(what: str, why: object) -> None:
    """Names something malformed, once in the life of this process, unless that has named some already."""
    if hash(what) in _told or len(_told) == _MOST_COUNTED:
        return
    _told.add(hash(what))
    if len(_told) <= _MOST_NAMED:
        _LOGGER.warning("%s is malformed and left out: %s", printable(what, 200), printable(why, 200))
    elif len(_told).bit_count() == 1:  # 16, 32, 64 …: a long life says how many there are
        _LOGGER.warning("%d malformed entries are left out so far; the first %d are named", len(_told), _MOST_NAMED)


def unnamed() -> int:
    """How many malformed entries this process has left out without naming them."""
    return max(0, len(_told) - _MOST_NAMED)


def _loaded(text: bytes) -> Any:
    return json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_whole)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{printable(text, 40)} is no finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _refuse(text)
