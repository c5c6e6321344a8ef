"""The ledger: produced = consumed + dropped(reason) + in flight, per worker, in fragments and transitions.

*Produced* is counted by the push script, *consumed* and *dropped* by the trainer from the log alone, *in flight* from
the log itself, so that the equation can fail. Entries of other programs have an account of their own, `strangers`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, cast

import redis
from pydantic import TypeAdapter

from stagecoach.shared.base.errors import DropReason, Fenced
from stagecoach.shared.base.printable import foreign, left_out
from stagecoach.shared.experience.log_entry import START, STRANGERS, whole_number
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.scripts import INCARNATIONS_KEPT, Script

_NUMBER = re.compile("-?[0-9]{1,18}")


@dataclass
class Count:
    fragments: int = 0
    transitions: int = 0

    def add(self, transitions: int, fragments: int = 1) -> None:
        self.fragments += fragments
        self.transitions += transitions

    def __add__(self, other: Count) -> Count:
        return Count(self.fragments + other.fragments, self.transitions + other.transitions)


@dataclass
class WorkerAccount:
    consumed: Count = field(default_factory=Count)
    dropped: dict[DropReason, Count] = field(default_factory=dict)
    high_water: dict[int, int] = field(default_factory=dict)
    """Incarnation → last sequence number seen; a repeat is below it, a gap jumps over it."""

    def gap(self, incarnation: int, seq: int) -> int:
        """Returns the number of fragments missing between the last one and this one (0 for a repeat)."""
        return max(0, seq - self.high_water.get(incarnation, -1) - 1)

    def saw(self, incarnation: int, seq: int) -> None:
        """Moves the high-water mark; deletes those of long gone incarnations."""
        self.high_water[incarnation] = seq
        while len(self.high_water) > INCARNATIONS_KEPT:
            del self.high_water[min(self.high_water)]


_ACCOUNT, _ACCOUNTS = TypeAdapter(WorkerAccount), TypeAdapter(dict[str, WorkerAccount])


@dataclass
class Ledger:
    """The trainer's side of the accounting, by worker id; Redis gets only what changed."""

    accounts: dict[str, WorkerAccount] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """JSON of the accounts that have not changed since they were encoded."""
    _untold: set[str] | None = field(default=None, repr=False, compare=False)
    """Workers whose accounts Redis does not have; None for all."""

    def of(self, worker: str) -> WorkerAccount:
        """Returns the account of `worker` for one change; opens it when first seen."""
        self._texts.pop(worker, None)
        if self._untold is not None:
            self._untold.add(worker)
        return self.accounts.setdefault(worker, WorkerAccount())

    def news(self) -> list[str]:
        """Returns for the scripts `1` if it is all of the ledger, then worker, account, … that Redis does not have."""
        everything, workers = ("1", self.accounts) if self._untold is None else ("", self._untold)
        return [everything, *(text for name in sorted(workers) for text in (name, self._text(name)))]

    def told(self) -> None:
        """Marks all news as written to Redis; a Redis that knew a position already wrote nothing."""
        self._untold = set()

    def _text(self, worker: str) -> str:
        if worker not in self._texts:
            self._texts[worker] = json.dumps(vars(self.accounts[worker]), default=vars, separators=(",", ":"))
        return self._texts[worker]

    def consume(self, worker: str, transitions: int) -> None:
        """Counts one fragment that became part of an update (or was observed in warm-up)."""
        self.of(worker).consumed.add(transitions)

    def drop(self, worker: str, reason: DropReason, transitions: int, fragments: int = 1) -> None:
        self.of(worker).dropped.setdefault(reason, Count()).add(transitions, fragments)

    def consumed(self) -> Count:
        return sum((account.consumed for account in self.accounts.values()), Count())

    def as_json(self) -> str:
        return "{" + ",".join(f"{json.dumps(worker)}:{self._text(worker)}" for worker in sorted(self.accounts)) + "}"

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The inverse of `as_json`; an empty text is an empty ledger."""
        return cls(_ACCOUNTS.validate_json(text or "{}"))


@dataclass(frozen=True)
class LedgerLine:
    produced: Count = field(default_factory=Count)
    consumed: Count = field(default_factory=Count)
    dropped: dict[DropReason, Count] = field(default_factory=dict)
    in_flight: Count = field(default_factory=Count)

    @property
    def balances(self) -> bool:
        return self.produced == sum(self.dropped.values(), self.consumed + self.in_flight)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"balances": self.balances}

    def __add__(self, other: LedgerLine) -> LedgerLine:
        dropped = dict(self.dropped)
        for reason, count in other.dropped.items():
            dropped[reason] = dropped.get(reason, Count()) + count
        produced, consumed = self.produced + other.produced, self.consumed + other.consumed
        return LedgerLine(produced, consumed, dropped, self.in_flight + other.in_flight)


def read_accounting(client: redis.Redis, run_id: str) -> dict[str, LedgerLine]:
    """Returns the accounting of a run at one instant: a line per worker, and `total`."""
    accounts, made, entries = Script(client, RunKeys(run_id), "accounting")()
    ledger, (produced, refused) = _sound(accounts, run_id), _produced(made)
    flight = _in_flight(_sound(accounts, run_id), entries)
    lines = {}
    for worker in sorted({*ledger.accounts, *produced, *flight}):
        account, in_flight = ledger.accounts.get(worker, WorkerAccount()), flight.get(worker, Count())
        dropped = account.dropped
        if worker in refused:
            dropped[DropReason.STALE] = dropped.get(DropReason.STALE, Count()) + refused[worker]
        total_made = sum(dropped.values(), in_flight) if worker == STRANGERS else produced.get(worker, Count())
        lines[worker] = LedgerLine(total_made, account.consumed, dropped, in_flight)
    return lines | {"total": sum(lines.values(), LedgerLine())}


@dataclass(frozen=True)
class Taken:
    """Log entries that a trainer has taken since a position, as the scripts compare them with the log."""

    after: str = START
    before: str = ""
    """Digest of all entries taken through it."""
    digest: str = ""
    """Digest of that and the entries (`digest_of`)."""


def digest_of(before: str, *names: str) -> str:
    """Returns the digest of log entries' names, appended to those whose digest is `before`."""
    for name in names:
        before = hashlib.sha1(f"{before} {name}".encode(), usedforsecurity=False).hexdigest()
    return before


class Forward(StrEnum):
    """Action of `fast_forward` when the log holds other entries than those that were taken."""

    COMPARE = "compare"
    """Changes nothing in any case."""
    IF_SAME = "if_same"
    ANYWAY = "anyway"
    """Lets the log begin behind them."""


def fast_forward(
    client: redis.Redis, run_id: str, epoch: int, position: str, ledger: Ledger, taken: Taken | None = None,
    mode: Forward = Forward.ANYWAY, *, owner: str = "", number: int = 0,
) -> bool:  # fmt: skip
    """Brings a Redis that may know less than its trainer (lost, or restored from the past) forward to its accounting.

    What the ledger committed must have been produced and pushed, and no claim may stand behind it. Incarnations count
    on, since the ledger would take the first fragments of an old number for repeats. `owner` is the trainer's
    (`Flow.owner`), `number` counts its calls, so that a late one changes nothing. Returns whether the log holds exactly
    what was `taken`. Raises `Fenced`.
    """
    taken = taken or Taken(position)
    reply = Script(client, RunKeys(run_id), "fast_forward")(
        epoch=epoch, owner=owner, number=number, position=position, taken_after=taken.after,
        before=taken.before, digest=taken.digest, mode=mode, accounts=Ledger(ledger.accounts).news(),
    )  # fmt: skip
    if not reply:
        raise Fenced(f"epoch {epoch} may not fast-forward Redis; a newer trainer has taken over")
    return int(reply) == 1


def read_ledger(client: redis.Redis, run_id: str) -> Ledger:
    """Returns the trainer's side alone, through the committed position."""
    pairs = cast(dict[bytes, bytes], client.hgetall(RunKeys(run_id).ledger))
    return _sound([part for pair in pairs.items() for part in pair], run_id)


def _sound(pairs: list[bytes], run_id: str) -> Ledger:
    """Returns the ledger without malformed accounts, so that the accounting shows an imbalance."""
    ledger = Ledger()
    for name, text in zip(pairs[::2], pairs[1::2], strict=True):
        worker = name.decode(errors="replace")
        account = foreign(_ACCOUNT, text, f"the account of {worker} in run {run_id}")
        if account is not None:
            ledger.accounts[worker] = account
    return ledger


def _in_flight(seen: Ledger, entries: list[bytes]) -> dict[str, Count]:
    """Counts by worker the entries that the ledger does not account for yet, and the losses before them."""
    flight = defaultdict[str, Count](Count)
    for name, *fields in zip(*[iter(entries)] * 5, strict=True):
        worker, (incarnation, seq, lost, size) = name.decode(errors="replace") or STRANGERS, map(whole_number, fields)
        fragments = 1
        if worker != STRANGERS:
            account = seen.of(worker)
            fragments += min(account.gap(incarnation, seq), lost)
            account.saw(incarnation, max(seq, account.high_water.get(incarnation, -1)))
        flight[worker].add(fragments * size, fragments)
    return flight


def _produced(made: list[bytes]) -> tuple[dict[str, Count], dict[str, Count]]:
    """Counts by worker what it has produced, and what of that push rejected as stale."""
    produced, refused = defaultdict[str, Count](Count), defaultdict[str, Count](Count)
    pairs = [item.decode(errors="replace") for item in made]
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        worker, _, unit = name.removesuffix(":stale").rpartition(":")
        if unit in vars(Count()) and _NUMBER.fullmatch(value):
            setattr((refused if name.endswith(":stale") else produced)[worker], unit, int(value))
        else:
            left_out(f"what {worker} has produced", f"{name} is {value!r}")
    return produced, refused
