"""Text that came from outside, made fit to be shown: the one function that every log, event, metric and screen uses.

Environments, workers and servers choose names and error texts. These may hold control characters that a terminal obeys
(ESC, OSC 52, C1), characters that turn the reading direction, or lone surrogates, which no encoder takes.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

NAME_CHARACTERS = 100
"""Of a metric's name."""
_LINE_CHARACTERS, _LINES_CHARACTERS = 2000, 20_000
_LAYOUT = "\n\t"
_DIGITS = re.compile(r"(\d{20})\d{45,}")
"""No number, address or hash of ours has as many."""


def printable(text: object, most: int | None = None, lines: bool = False) -> str:
    """`str(text)` in characters that Unicode calls printable; others become `\\x1b`, `\\udce9`.

    With `lines`, line breaks and tabs stay. What is longer than `most` characters (2,000; 20,000 with `lines`) is cut,
    and says so, and so is a number of more than 64 digits. What is printable already is returned as it is.
    """
    shown = _DIGITS.sub(lambda found: f"{found[1]}… ({len(found[0])} digits)", str(text))
    most = most or (_LINES_CHARACTERS if lines else _LINE_CHARACTERS)
    if len(shown) > most:
        shown = f"{shown[:most]}… ({len(shown) - most} more characters)"
    kept = _LAYOUT if lines else ""
    if shown.isprintable():
        return shown
    return "".join(
        character
        if character.isprintable() or character in kept
        else character.encode("unicode_escape").decode("ascii")
        for character in shown
    )


def printable_data(data: Any) -> Any:
    """Plain data (as JSON has it) with all its texts, names included, made printable."""
    if isinstance(data, str):
        return printable(data)
    if isinstance(data, dict):
        return {printable(name): printable_data(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [printable_data(value) for value in data]
    return data


def counted(number: int | None, noun: str) -> str:
    """`1 episode`, `1,200 episodes`; `– episodes` where nobody has counted."""
    return f"{'–' if number is None else f'{number:,}'} {noun}{'' if number == 1 else 's'}"


def complain(error: object) -> None:
    """The last line of a command or a process that failed, on standard error."""
    print(f"Error: {printable(error, lines=True)}", file=sys.stderr, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formats a log record as printable text; all after its first line is indented, so that no text forges a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, and its traceback below."""
        return printable(super().format(record), lines=True).replace("\n", "\n    ")
