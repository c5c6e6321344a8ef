"""The ledger: produced = consumed + dropped(reason) + in flight, per worker, in fragments and transitions.

*Produced* is counted by the push script in the step that appends the fragment. *Consumed* and *dropped* are the
trainer's, from the log alone, and are part of its snapshot. *In flight* is counted from the log itself, so that the
equation can fail and is worth checking.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import redis

from shared import scripts
from shared.experience_log import whole_number
from shared.redis_keys import RunKeys

_INCARNATIONS_KEPT = 16
"""Per worker; a fragment cannot be in flight for longer than its worker's last few lives."""


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

    def saw(self, incarnation: int, seq: int) -> None:
        """Moves the high-water mark; those of long gone incarnations are forgotten."""
        self.high_water[incarnation] = seq
        while len(self.high_water) > _INCARNATIONS_KEPT:
            del self.high_water[min(self.high_water)]

    def dropped_total(self) -> Count:
        """All reasons together."""
        return sum(self.dropped.values(), Count())


@dataclass
class Ledger:
    """The trainer's side of the books, by worker id."""

    accounts: dict[str, WorkerAccount] = field(default_factory=dict)

    def of(self, worker: str) -> WorkerAccount:
        """The account of `worker`, opened when first seen."""
        return self.accounts.setdefault(worker, WorkerAccount())

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
        data = {
            worker: {
                "consumed": vars(account.consumed),
                "dropped": {reason: vars(count) for reason, count in account.dropped.items()},
                "high_water": {str(key): value for key, value in account.high_water.items()},
            }
            for worker, account in sorted(self.accounts.items())
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Ledger:
        """The inverse of `as_json`; an empty text is an empty ledger."""
        accounts = {
            worker: WorkerAccount(
                Count(**data["consumed"]),
                {reason: Count(**count) for reason, count in data["dropped"].items()},
                {int(key): value for key, value in data["high_water"].items()},
            )
            for worker, data in (json.loads(text) if text else {}).items()
        }
        return cls(accounts)


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
    script = client.register_script(scripts.IN_FLIGHT)
    answer = cast(list[Any], script([keys.flow, keys.log, keys.produced, keys.ledger], []))
    ledger = Ledger.from_json(answer[1].decode())
    pairs = [item.decode() for item in answer[2]]
    produced, refused = _produced(dict(zip(pairs[::2], pairs[1::2], strict=True)))
    flight: dict[str, Count] = {}
    for worker, transitions in zip(answer[3][::2], answer[3][1::2], strict=True):
        flight.setdefault(worker.decode(errors="replace"), Count()).add(whole_number(transitions))
    lines = {}
    for worker in sorted({*ledger.accounts, *produced, *flight}):
        account = ledger.accounts.get(worker, WorkerAccount())
        dropped = {reason: Count(count.fragments, count.transitions) for reason, count in account.dropped.items()}
        if worker in refused:
            dropped["stale"] = dropped.get("stale", Count()) + refused[worker]
        in_flight = flight.get(worker, Count())
        lines[worker] = LedgerLine(produced.get(worker, Count()), account.consumed, dropped, in_flight)
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
    """Brings a Redis that knows less than a checkpoint (lost, or restored from the past) forward to it.

    What the ledger settled must have been produced, and no claim may stand behind it any more. Incarnations go on
    counting, since the ledger would take the first fragments of an old number for repeats; a worker that registered in
    the meantime is superseded, and registers again.
    """
    keys = RunKeys(run_id)
    settled: list[str | int] = []
    for worker, account in ledger.accounts.items():
        count = account.consumed + account.dropped_total()
        settled += [worker, count.fragments, count.transitions, max(account.high_water, default=-1) + 1]
    script = client.register_script(scripts.SET_FORWARD)
    script([keys.flow, keys.log, keys.claims, keys.produced, keys.incarnations], [epoch, position, *settled])


def _produced(raw: Mapping[str, str]) -> tuple[dict[str, Count], dict[str, Count]]:
    produced: dict[str, Count] = {}
    refused: dict[str, Count] = {}
    for name, value in raw.items():
        stale = name.endswith(":stale")
        worker, _, unit = name.removesuffix(":stale").rpartition(":")
        count = (refused if stale else produced).setdefault(worker, Count())
        setattr(count, unit, int(value))
    return produced, refused
