"""An entry of the experience log, its position, and where its body is."""

from __future__ import annotations

import re
from dataclasses import dataclass

START = "0-0"
STRANGERS = "strangers"
"""Stands in a worker's place for all that no worker pushed; what else the entry says is not read."""
_MOST_DIGITS = 15
_SIZE = re.compile("[0-9]{1,15}")


@dataclass(frozen=True)
class BodyPlace:
    """Where a fragment's body is, as its log entry says."""

    shard: str
    field: str
    """`incarnation:seq:digest` in the worker's hash there; so other contents never have the same place."""
    size: int

    def encode(self) -> bytes:
        return f"{self.shard} {self.field} {self.size}".encode()

    @classmethod
    def decode(cls, text: bytes) -> BodyPlace | None:
        """None for what another program wrote."""
        parts = text.decode(errors="replace").split(" ")
        return cls(parts[0], parts[1], int(parts[2])) if len(parts) == 3 and _SIZE.fullmatch(parts[2]) else None


@dataclass(frozen=True)
class LogEntry:
    """One entry as Redis holds it; `fragment` is not yet decoded."""

    id: str
    worker: str
    incarnation: int
    seq: int
    transitions: int
    fragment: bytes | None
    """None where no shard has its body (any more)."""
    pushed: bool
    """Whether a worker pushed it, so that a claim stands behind it; else its worker is `STRANGERS`."""
    lost: int = 0
    """Fragments before it that were missing when it was pushed: Redis had lost them, and the credit behind them."""
    pushed_at: int | None = None
    """The policy version that was on the board when it was pushed; None in an archive, which does not keep that."""
    place: BodyPlace | None = None
    """Where its body is to be, if not in the log itself."""
    lost_body: bool = False
    """Whether it was dropped for its lost body, which is then decided for good: `fragment` is None."""
    quarantined: bool = False
    """Whether it is to be dropped unread (shared/protocol/quarantine.py)."""


def id_order(position: str) -> tuple[int, int]:
    """A stream id as numbers, which is how ids compare."""
    milliseconds, _, seq = position.partition("-")
    return int(milliseconds), int(seq)


def before(position: str) -> str:
    """A stream id just before this one."""
    milliseconds, _, seq = position.partition("-")
    return f"{milliseconds}-{int(seq) - 1}" if int(seq) else f"{int(milliseconds) - 1}-{2**53}"


def whole_number(text: bytes) -> int:
    """The number in a field of an entry; 0 where a stranger wrote something else."""
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else 0
