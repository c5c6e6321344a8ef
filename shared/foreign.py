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
_MOST_TOLD = 1000
_told: set[str] = set()


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
    """Names something malformed, once in the life of this process."""
    if what not in _told and len(_told) < _MOST_TOLD:
        _told.add(what)
        _LOGGER.warning("%s is malformed and left out: %s", printable(what), printable(why, 200))


def _loaded(text: bytes) -> Any:
    return json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_whole)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{printable(text, 40)} is no finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _refuse(text)
