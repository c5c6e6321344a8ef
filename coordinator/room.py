"""How many rollout workers there is room for, as the coordinator tells it to whoever scales the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shared.errors import UserError
from shared.foreign import left_out
from shared.heartbeat import Beat
from shared.printable import counted

NO_BOUND = 10_000
"""As many workers as a config may ask for."""


@dataclass(frozen=True)
class Room:
    """How many workers fit."""

    now: int
    """On the machines that are there."""
    later: int | None
    """With those that an autoscaler may add; None where it adds, and does not say how many."""
    each: str
    """What a worker asks for, for people."""
    cluster: str
    """What there is and who takes of it, for people."""

    @property
    def most(self) -> int:
        """The bound that a scale has to keep to."""
        return NO_BOUND if self.later is None else self.later

    def refuse(self, workers: int, fewer: str, more: str) -> None:
        """Raises `UserError` where more are asked for than ever fit; to the command `fewer` a number is added."""
        if workers <= self.most:
            return
        remedy = f"{fewer}{self.most}, or {more}" if self.most else more
        raise UserError(
            f"{counted(workers, 'worker')} with {self.each} each asked for; {self.cluster} has room for "
            f"{self.most or 'none'}: {remedy}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a heartbeat."""
        return asdict(self)

    def __str__(self) -> str:
        """`6 workers (with machines that may be added: 12)`."""
        more = "more, on machines that may be added" if self.later is None else f"{self.later} with what may be added"
        now = counted(self.now, "worker")
        return now if self.later == self.now else f"{now} ({more})"


_ROOM = TypeAdapter(Room)


def room_of(beats: Sequence[Beat]) -> Room | None:
    """What the coordinator last said; None where it is silent, or there is no Ray."""
    coordinator = next((beat for beat in beats if beat.role == "coordinator" and beat.alive), None)
    said = coordinator.progress.get("room") if coordinator is not None else None
    try:
        return _ROOM.validate_python(said) if said else None
    except ValidationError as error:
        left_out("the room that the coordinator tells of", error.errors()[0]["msg"])
        return None


def refuse_order(run_id: str, workers: int | None, min_workers: int | None, max_workers: int | None) -> None:
    """Raises `UserError` for an order that nobody can mean."""
    for name, number in (("scale to", workers), ("--min", min_workers), ("--max", max_workers)):
        if number is not None and number < 1:
            end = f"; `stagecoach stop {run_id}` ends the run" if number == workers else ""
            raise UserError(f"{name} {number}: expected at least 1 worker{end}")
        if number is not None and number > NO_BOUND:
            raise UserError(f"{name} {number}: expected at most {NO_BOUND} workers")
    if workers is not None and (min_workers, max_workers) != (None, None):
        raise UserError(
            f"a number or bounds, not both: `stagecoach scale {run_id} {workers}` for just so many, "
            f"`stagecoach scale {run_id} auto --min A --max B` for as many as are needed"
        )
