"""Conversion of text from outside to printable text for every log, event, metric and screen.

Environments, workers and servers choose names and error texts, which may hold control characters that a terminal obeys
or lone surrogates. A malformed entry of another process is left out and named in the log once; it ends neither a role
nor a command.
"""

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
JSON_OBJECT: TypeAdapter[dict[str, Any]] = TypeAdapter(dict[str, Any])
NAME_CHARACTERS = 100
_LINE_CHARACTERS, _LINES_CHARACTERS = 2000, 20_000
_DIGITS = re.compile(r"(\d{20})\d{45,}")
"""No number, address or hash of ours has as many."""
_LOGGER = logging.getLogger("stagecoach.foreign")
_MOST_DIGITS = 18
_MOST_NAMED, _MOST_COUNTED = 10, 100_000
_told: set[int] = set()
"""Hashes of the names that were left out so far, since a name may be of any length."""


def printable(text: object, most: int | None = None, lines: bool = False) -> str:
    """`str(text)` in characters that Unicode calls printable; others become `\\x1b`, `\\udce9`. With `lines`, line
    breaks and tabs stay. What is longer than `most` characters (2,000; 20,000 with `lines`) is cut, and says so, and so
    is a number of more than 64 digits. What is printable already is returned as it is."""
    shown = _DIGITS.sub(lambda found: f"{found[1]}… ({len(found[0])} digits)", str(text))
    most = most or (_LINES_CHARACTERS if lines else _LINE_CHARACTERS)
    if len(shown) > most:
        shown = f"{shown[:most]}… ({len(shown) - most} more characters)"
    kept = "\n\t" if lines else ""
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in shown)


def printable_data(data: Any) -> Any:
    """Returns plain data (as JSON has it) with printable texts and names."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(name): printable_data(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [printable_data(value) for value in data]
    return data


_NAMED = 4
"""Number of returns, of agents or policies, that are shown after their sum."""


def counted(number: int | None, noun: str) -> str:
    """`1 episode`, `1,200 episodes`; `– episodes` where the number is unknown."""
    return f"{'–' if number is None else f'{number:,}'} {noun}{'' if number == 1 else 's'}"


def figure(value: float | None) -> str:
    """A score with four significant digits, small or large."""
    return "–" if value is None else f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def score_in_words(scores: Mapping[str, Any], second: bool = True) -> str:
    """Formats a score: `475 ± 3.1 (90 % successful) over 20 episodes`, the result of a `second` evaluation if there was
    one, and the win rates against fixed players."""
    again = scores.get("confirmation") if second else None
    found = f", and {_spread(again)} from as many other starts" if again else ""
    rates = dict[str, list[str]]()
    for pair, rate in scores.get("win_rates", {}).items():
        learner, _, player = pair.partition("/")
        rates.setdefault(learner, []).append(f"{rate:.0%} against {player}")
    won = "".join(f"; win rate of {learner} {', '.join(its)}" for learner, its in rates.items())
    return f"{_spread(scores)} over {counted(scores.get('episodes'), 'episode')}{found}{won}"


def _spread(scores: Mapping[str, Any]) -> str:
    spread = f"{figure(scores['mean_return'])} ± {figure(scores.get('std_return'))}"
    each = each_in_words(scores.get("policies", {}), scores.get("agents", {}))
    return f"{spread}{each}{success_in_words(scores)}"


def each_in_words(policies: Mapping[str, Any], agents: Mapping[str, Any]) -> str:
    """` (cat 4.27, mouse -4.27)`, to stand behind the sum of returns: of policies, else of the two sides of a game."""
    returns = policies if len(policies) > 1 else agents if len(agents) == 2 else {}
    named = [f"{name} {figure(its)}" for name, its in sorted(returns.items())]
    more = ", …" if len(named) > _NAMED else ""
    return f" ({', '.join(named[:_NAMED])}{more})" if len(named) > 1 else ""


def success_in_words(scores: Mapping[str, Any]) -> str:
    """Returns ` (90 % successful)`, to follow a score; empty if the success rate is unknown."""
    rate = scores.get("success_rate")
    return "" if rate is None else f" ({100 * rate:.0f} % successful)"


def complain(error: object) -> None:
    """The last line of a command or a process that failed, on standard error."""
    print(f"Error: {printable(error, lines=True)}", file=sys.stderr, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formats a log record as printable text; all after its first line is indented, so that no text forges a record."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True).replace("\n", "\n    ")


def foreign(adapter: TypeAdapter[T], text: bytes, what: str, **more: Any) -> T | None:
    """Parses a JSON object, with `more` fields, as the adapter's type; None if it is malformed. `what` names it for
    people, such as `the heartbeat of worker:3`. All texts become printable, all numbers are finite."""
    try:
        loaded = json.loads(text.decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
        data = printable_data(loaded)
        if not isinstance(data, dict):
            raise ValueError("it is not a JSON object")
        return adapter.validate_python({**data, **more})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        left_out(what, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    except (ValueError, RecursionError) as error:
        left_out(what, error)
    return None


def left_out(what: str, why: object) -> None:
    """Names something malformed once in this process, and only the first few."""
    if hash(what) in _told or len(_told) == _MOST_COUNTED:
        return
    _told.add(hash(what))
    if len(_told) <= _MOST_NAMED:
        _LOGGER.warning("%s is malformed and left out: %s", printable(what, 200), printable(why, 200))
    elif len(_told).bit_count() == 1:  # 16, 32, 64 …: a long-lived process says how many there are
        _LOGGER.warning("%d malformed entries are left out so far; the first %d are named", len(_told), _MOST_NAMED)


def unnamed() -> int:
    """Returns the number of malformed entries that this process has left out without naming them."""
    return max(0, len(_told) - _MOST_NAMED)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{printable(text, 40)} is not a finite number")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _refuse(text)
