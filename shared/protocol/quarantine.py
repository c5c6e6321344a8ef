"""Quarantine: log entries that are dropped unread, since trainers died over them, or since a person said so.

Trainers and a replay agree on it, since the step that counts deaths decides it (docs/internals/protocol.md).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from stagecoach.shared.base.errors import Fenced, StagecoachError, UserCodeError, UserError, place
from stagecoach.shared.base.failure import Failure, FailureKind
from stagecoach.shared.experience.log_entry import START, id_order
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.policy_board import PublishReply
from stagecoach.shared.protocol.scripts import Script, write_small

_LOGGER = logging.getLogger("stagecoach.trainer")
DEATHS = 3
"""Trainers that may die in a row over the same entries."""
_FEWEST_ALLOWED = 2 * DEATHS
"""Deaths in a row without a new version; the fleet gives up earlier, but a trainer may be started by other means."""


class WorkRecord:
    """Records in Redis which entries one trainer (one epoch) takes, and how it leaves."""

    def __init__(self, client: redis.Redis, run_id: str, epoch: int) -> None:
        self._client, self._run_id, self._epoch = client, run_id, epoch
        self._keys = RunKeys(run_id)
        self._marks, self._marked = False, ""

    def begin(self, restarts_allowed: int, durable: str = START) -> None:
        """Counts the death of the trainer before, if it never left, with an event; may quarantine what it was taking,
        if the newest checkpoint, at position `durable`, has not learned from it.

        Raises `Fenced`, and `StagecoachError` where too many have died in a row: the next one would as well.
        """
        found = Script(self._client, self._keys, "begin_work")(
            epoch=self._epoch, deaths_allowed=DEATHS, durable=durable
        )
        deaths, died, there, put = (int(found[place]) for place in (0, 1, 3, 4))
        if deaths < 0:
            raise Fenced(f"epoch {self._epoch} may not begin; a newer trainer has taken over")
        self._marks = deaths > 0
        if not died:
            return
        run_id, entries = self._run_id, _range(found[2].decode())
        allowed = max(restarts_allowed, _FEWEST_ALLOWED)
        where = f" over the log entries {entries}" if entries else ""
        self._tell(f"the trainer before died{where}; it is number {deaths} in a row without a new policy version")
        if put > 0:
            self._tell(f"{there} trainers died in a row{where}: {put} entries are in quarantine, and dropped as poison")
        elif deaths > allowed:
            error = StagecoachError(
                f"{deaths} trainers have died in a row without a new policy version (at most {allowed} may), the last "
                f"one{where or ' before it took anything'}; see their logs. `stagecoach resume {run_id}` tries again"
            )
            if entries:
                error.add_note(_way_out(run_id, entries))
            raise error

    def taking(self, first: str = "", last: str = "") -> None:
        """Records the entries that are taken next (none: it waits), if trainers have died lately."""
        mark = f"{first} {last}".strip()
        if self._marks and mark != self._marked:
            write_small(self._client, self._keys, self._keys.flow, "HSET", "taking", mark)
            self._marked = mark

    def published(self, reply: PublishReply) -> None:
        """Stops marking: the entries that trainers died over lie behind the new version."""
        self._marks = self._marks and reply is not PublishReply.PUBLISHED

    def leave(self) -> None:
        write_small(self._client, self._keys, self._keys.flow, "HDEL", "at_work")

    def _tell(self, text: str) -> None:
        _LOGGER.warning("%s", text)
        emit(self._client, self._run_id, "trainer", text)


@contextmanager
def naming_entries(run_id: str, first: str, last: str) -> Iterator[None]:
    """An error over what is done with these log entries gets notes: where the user's code raised it (the traceback does
    not reach the coordinator), and how the run continues: with that code corrected, since a bug would meet the next
    entries as well, else without these."""
    try:
        yield
    except Exception as error:
        where = place(error)
        if where:
            error.add_note(where.strip(" ()"))
        if isinstance(error, UserCodeError) or (where and not isinstance(error, StagecoachError)):
            error.add_note(f"correct that code; then `stagecoach resume {run_id}` continues")
        elif Failure.of(error).kind is not FailureKind.RESOURCES:
            error.add_note(_way_out(run_id, _range(f"{first} {last}")))
        raise


def _way_out(run_id: str, entries: str) -> str:
    return f"`stagecoach resume {run_id} --drop {entries}` continues without these log entries"


def drop_ranges(positions: tuple[str, ...], option: str = "--drop") -> list[tuple[str, str]]:
    """First and last position of each `POSITION` or `FIRST..LAST`; raises `UserError` for what is neither."""
    ranges = []
    for text in positions:
        first, _, last = text.partition("..")
        try:
            ranges.append((first, last or first))
            if not id_order(first) <= id_order(last or first):
                raise ValueError
        except ValueError:
            raise UserError(
                f"{option} {text}: expected a position of the log (1700000000000-0) or FIRST..LAST, as errors name them"
            ) from None
    return ranges


def drop_entries(client: redis.Redis, run_id: str, positions: tuple[str, ...], durable: str = START) -> None:
    """Puts log entries into quarantine, each given as `POSITION` or `FIRST..LAST`; raises `UserError`. `durable` is the
    position of the newest checkpoint."""
    keys = RunKeys(run_id)
    for first, last in drop_ranges(positions):
        shown = _range(f"{first} {last}")
        put = int(Script(client, keys, "drop_entries")(first=first, last=last, why="--drop", durable=durable))
        if put < 0:
            raise UserError(
                f"--drop {shown}: a policy version has learned from it, or dropped it; `stagecoach resume "
                f"{run_id} --from NAME` goes back to a checkpoint, and leaves all behind it that came before now"
            )
        if put == 0:
            raise UserError(f"--drop {shown}: the log of run {run_id!r} has no entry there that is not dropped yet")
        emit(client, run_id, "trainer", f"{put} log entries ({shown}) are dropped as poison, by --drop")


def _range(taking: str) -> str:
    first, _, last = taking.partition(" ")
    return first if first == last else f"{first}..{last}"
