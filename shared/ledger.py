"""The ledger: produced = consumed + dropped(reason) + in flight, per worker, in fragments and transitions.

*Produced* is counted by the push script in the step that appends the fragment. *Consumed* and *dropped* are the
trainer's, from the log alone, and are part of its snapshot. *In flight* is counted from the log itself, so that the
equation can fail and is worth checking. What was put into the log by hand has an account of its own, `strangers`,
and counts there as produced by being there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from shared import scripts
from shared.errors import Fenced
from shared.experience_log import STRANGERS, whole_number
from shared.foreign import left_out
from shared.redis_keys import RunKeys
from shared.script_calls import Step

_NUMBER = re.compile("-?[0-9]{1,18}")


@dataclass
class Count:
    """Fragments and the env steps in them."""

    fragments: int = 0
    transitions: int = 0

    def add(self, transitions: int, fragments: int = 1) -> None:
        """Counts `fragments` more, with `transitions` in them together."""
        self.fragments += fragments
        self.transitions += transitions

    def __add__(self, other: Count) -> Count:
        return Count(self.fragments + other.fragments, self.transitions + other.transitions)


@dataclass
class WorkerAccount:
    """What the trainer did with one worker's fragments."""

    consumed: Count = field(default_factory=Count)
    dropped: dict[str, Count] = field(default_factory=dict)
    high_water: dict[int, int] = field(default_factory=dict)
    """Incarnation → last sequence number seen; a repeat is below it, a gap jumps over it."""

    def gap(self, incarnation: int, seq: int) -> int:
        """How many fragments are missing between what was seen last and this one (0 for a repeat)."""
        return max(0, seq - self.high_water.get(incarnation, -1) - 1)

    def saw(self, incarnation: int, seq: int) -> None:
        """Moves the high-water mark; those of long gone incarnations are forgotten."""
        self.high_water[incarnation] = seq
        while len(self.high_water) > scripts.INCARNATIONS_KEPT:
            del self.high_water[min(self.high_water)]

    def dropped_total(self) -> Count:
        """All reasons together."""
        return sum(self.dropped.values(), Count())


@dataclass
class Ledger:
    """The trainer's side of the books, by worker id.

    It knows what has changed since Redis was told last, so that not the whole of it travels each time.
    """

    accounts: dict[str, WorkerAccount] = field(default_factory=dict)
    _texts: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Of the accounts that have not changed since they were written as JSON."""
    _untold: set[str] | None = field(default=None, repr=False, compare=False)
    """Whose accounts have changed since Redis was told; None where it is to be told everything."""

    def of(self, worker: str) -> WorkerAccount:
        """The account of `worker`, opened when first seen; ask anew for each change, since it counts as one."""
        self._texts.pop(worker, None)
        if self._untold is not None:
            self._untold.add(worker)
        return self.accounts.setdefault(worker, WorkerAccount())

    def news(self) -> list[str]:
        """For the scripts: `1` where it is the whole, then worker, account, … that Redis does not know yet."""
        whole = self._untold is None
        workers = self.accounts if self._untold is None else self._untold
        return ["1" if whole else "", *(text for name in sorted(workers) for text in (name, self._text(name)))]

    def told(self) -> None:
        """Redis has written down all the news; where it knew a position already, it wrote nothing."""
        self._untold = set()

    def _text(self, worker: str) -> str:
        if worker not in self._texts:
            account = self.accounts[worker]
            data = {
                "consumed": vars(account.consumed),
                "dropped": {reason: vars(count) for reason, count in account.dropped.items()},
                "high_water": {str(key): value for key, value in account.high_water.items()},
            }
            self._texts[worker] = json.dumps(data, separators=(",", ":"))
        return self._texts[worker]

    def consume(self, worker: str, transitions: int) -> None:
        """One fragment became part of an update (or was observed in heat-up)."""
        self.of(worker).consumed.add(transitions)

    def drop(self, worker: str, reason: str, transitions: int, fragments: int = 1) -> None:
        """Fragments that will not be learnt from, and why."""
        self.of(worker).dropped.setdefault(reason, Count()).add(transitions, fragments)

    def consumed(self) -> Count:
        """Over all workers."""
        return sum((account.consumed for account in self.accounts.values()), Count())

    def as_json(self) -> str:
        """One line of JSON; the inverse is `from_json`."""
        return "{" + ",".join(f"{json.dumps(worker)}:{self._text(worker)}" for worker in sorted(self.accounts)) + "}"

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The inverse of `as_json`; an empty text is an empty ledger."""
        return cls({worker: _account(data) for worker, data in (json.loads(text) if text else {}).items()})


def _account(data: Any) -> WorkerAccount:
    return WorkerAccount(
        Count(**data["consumed"]),
        {reason: Count(**count) for reason, count in data["dropped"].items()},
        {int(key): value for key, value in data["high_water"].items()},
    )


@dataclass(frozen=True)
class LedgerLine:
    """One worker's line of the books (or the sum)."""

    produced: Count
    consumed: Count
    dropped: dict[str, Count]
    in_flight: Count

    @property
    def balances(self) -> bool:
        """produced = consumed + dropped + in flight, in fragments and in transitions."""
        return self.produced == sum(self.dropped.values(), self.consumed + self.in_flight)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "produced": vars(self.produced),
            "consumed": vars(self.consumed),
            "dropped": {reason: vars(count) for reason, count in self.dropped.items()},
            "in_flight": vars(self.in_flight),
            "balances": self.balances,
        }


def read_books(client: redis.Redis, run_id: str) -> dict[str, LedgerLine]:
    """The books of a run at one instant: a line per worker, and `total`."""
    keys = RunKeys(run_id)
    answer = Step(client, scripts.IN_FLIGHT)([keys.flow, keys.log, keys.produced, keys.ledger, keys.pushes], [])
    ledger = _sound(answer[1], run_id)
    pairs = [item.decode(errors="replace") for item in answer[2]]
    produced, refused = _produced(dict(zip(pairs[::2], pairs[1::2], strict=True)))
    lines = {}
    flight = _in_flight(_sound(answer[1], run_id), answer[3])
    for worker in sorted({*ledger.accounts, *produced, *flight}):
        account = ledger.accounts.get(worker, WorkerAccount())
        dropped = {reason: Count(count.fragments, count.transitions) for reason, count in account.dropped.items()}
        if worker in refused:
            dropped["stale"] = dropped.get("stale", Count()) + refused[worker]
        in_flight = flight.get(worker, Count())
        made = sum(dropped.values(), in_flight) if worker == STRANGERS else produced.get(worker, Count())
        lines[worker] = LedgerLine(made, account.consumed, dropped, in_flight)
    lines["total"] = total(lines)
    return lines


def total(lines: Mapping[str, LedgerLine]) -> LedgerLine:
    """The sum of all workers' lines."""
    dropped: dict[str, Count] = {}
    for line in lines.values():
        for reason, count in line.dropped.items():
            dropped[reason] = dropped.get(reason, Count()) + count
    return LedgerLine(
        sum((line.produced for line in lines.values()), Count()),
        sum((line.consumed for line in lines.values()), Count()),
        dropped,
        sum((line.in_flight for line in lines.values()), Count()),
    )


def set_forward(client: redis.Redis, run_id: str, epoch: int, position: str, ledger: Ledger) -> None:
    """Brings a Redis that may know less than its trainer (lost, or restored from the past) forward to its books.

    What the ledger settled must have been produced and pushed, and no claim may stand behind it any more. Incarnations
    go on counting, since the ledger would take the first fragments of an old number for repeats. Raises `Fenced`.
    """
    keys = RunKeys(run_id)
    names = [
        keys.flow, keys.log, keys.claims, keys.produced, keys.incarnations, keys.pushed, keys.ledger, keys.pushes
    ]  # fmt: skip
    if not Step(client, scripts.SET_FORWARD)(names, [epoch, position, *Ledger(ledger.accounts).news()]):
        raise Fenced(f"epoch {epoch} may not set Redis forward; a newer trainer has taken over")


def read_ledger(client: redis.Redis, run_id: str) -> Ledger:
    """The trainer's side alone, through the position that is settled."""
    pairs = cast(dict[bytes, bytes], client.hgetall(RunKeys(run_id).ledger))
    return _sound([part for pair in pairs.items() for part in pair], run_id)


def _sound(pairs: list[bytes], run_id: str) -> Ledger:
    """The ledger as Redis holds it, without accounts that are none, so that the books show that they do not balance."""
    ledger = Ledger()
    for name, text in zip(pairs[::2], pairs[1::2], strict=True):
        worker = name.decode(errors="replace")
        try:
            ledger.accounts[worker] = _account(json.loads(text))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            left_out(f"the account of {worker} in run {run_id}", f"{type(error).__name__}: {error}")
    return ledger


def _in_flight(seen: Ledger, entries: list[bytes]) -> dict[str, Count]:
    """By worker: the entries that the ledger does not account for yet, and the losses that it will find before them."""
    flight = dict[str, Count]()
    for name, incarnation, seq, lost, transitions in zip(*[iter(entries)] * 5, strict=True):
        worker, size, fragments = name.decode(errors="replace") or STRANGERS, whole_number(transitions), 1
        if worker != STRANGERS:
            account, life = seen.of(worker), whole_number(incarnation)
            fragments += min(account.gap(life, whole_number(seq)), whole_number(lost))
            account.saw(life, max(whole_number(seq), account.high_water.get(life, -1)))
        flight.setdefault(worker, Count()).add(fragments * size, fragments)
    return flight


def _produced(raw: Mapping[str, str]) -> tuple[dict[str, Count], dict[str, Count]]:
    produced: dict[str, Count] = {}
    refused: dict[str, Count] = {}
    for name, value in raw.items():
        stale = name.endswith(":stale")
        worker, _, unit = name.removesuffix(":stale").rpartition(":")
        if unit not in vars(Count()) or not _NUMBER.fullmatch(value):
            left_out(f"what {worker} has produced", f"{name} is {value!r}")
            continue
        count = (refused if stale else produced).setdefault(worker, Count())
        setattr(count, unit, int(value))
    return produced, refused
