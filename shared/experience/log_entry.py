"""An entry of the experience log, its position, and the place of its body."""

from __future__ import annotations

import re
from dataclasses import dataclass

START = "0-0"
STRANGERS = "strangers"
"""Worker of all entries that no worker pushed; their other fields are not read."""
_MOST_DIGITS = 15
_SIZE = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class BodyPlace:
    """Place of a fragment's body, as its log entry states."""

    shard: str
    field: str
    """`incarnation:seq:digest` in the worker's hash there; different contents never share a place."""
    size: int

    def encode(self) -> bytes:
        return f"{self.shard} {self.field} {self.size}".encode()

    @classmethod
    def decode(cls, text: bytes) -> BodyPlace | None:
        """Returns None for another program's text."""
        parts = text.decode(errors="replace").split(" ")
        return cls(parts[0], parts[1], int(parts[2])) if len(parts) == 3 and _SIZE.fullmatch(parts[2]) else None


@dataclass(frozen=True)
class LogEntry:
    """One entry as stored in Redis; `fragment` is encoded."""

    id: str
    worker: str
    incarnation: int
    seq: int
    transitions: int
    fragment: bytes | None
    """None if no shard has its body (any more)."""
    pushed: bool
    """A worker pushed it by a claim; otherwise its worker is `STRANGERS`."""
    lost: int = 0
    """Number of fragments before it that Redis had lost, with their credit, when it was pushed."""
    pushed_at: int | None = None
    """Policy version on the board when it was pushed; None in an archive, which does not keep it."""
    place: BodyPlace | None = None
    """Place of its body, if it is not in the log itself."""
    lost_body: bool = False
    """Dropped permanently, since its body is lost."""
    quarantined: bool = False
    """Excluded from reading (shared/protocol/quarantine.py)."""


def id_order(position: str) -> tuple[int, int]:
    """Returns a stream id as numbers, by which ids are ordered."""
    milliseconds, _, seq = position.partition("-")
    return int(milliseconds), int(seq)


def before(position: str) -> str:
    """Returns the stream id just before this one."""
    milliseconds, _, seq = position.partition("-")
    return f"{milliseconds}-{int(seq) - 1}" if int(seq) else f"{int(milliseconds) - 1}-{2**53}"


def whole_number(text: bytes) -> int:
    """Returns the number in a field of an entry; 0 for another program's text."""
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0
