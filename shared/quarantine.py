"""Quarantine: log entries that are dropped unread, since trainers died over them, or since a person said so.

Each trainer says in Redis that it begins, and that it leaves. One that begins where another never left counts a death.
After the first death without a new version since, it writes down which entries it is about to take; when `DEATHS`
trainers died in a row there, the next one puts these entries into quarantine, in the same step that counts. So all that
read the log afterwards agree: later trainers, and a replay of the archive, which keeps the mark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from shared.errors import Fenced, StagecoachError, UserError
from shared.events import emit
from shared.experience_log import id_order
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.script_calls import Step
from shared.scripts import COMMON, write_small

_LOGGER = logging.getLogger("stagecoach.trainer")
DEATHS = 3
"""Trainers that may die in a row over the same entries."""
_FEWEST_ALLOWED = 2 * DEATHS
"""Deaths in a row without a new version; the fleet gives up earlier, but a trainer may be started by other means."""

_QUARANTINE = """
local function quarantine(first, last, why)  -- what no published version has learnt from; answers how many entries
  local published = redis.call('HGET', KEYS[1], 'published_id') or redis.call('HGET', KEYS[1], 'settled_id')
  if not after(first, published) then return -1 end
  local put = 0
  for _, entry in ipairs(redis.call('XRANGE', KEYS[2], first, last)) do
    put = put + redis.call('HSETNX', KEYS[3], entry[1], why)  -- what is dropped already, stays so for its own reason
  end
  return put
end
"""

BEGIN_WORK = (
    COMMON
    + _QUARANTINE
    + """
-- KEYS flow, log, quarantine. ARGV: epoch, deaths that lead into quarantine. A trainer begins its work. Answers {deaths
-- in a row without a new version since, whether the trainer before died, what that was about to take ('first last', or
-- ''), how many died there, how many entries are in quarantine for it now}; {-1} if fenced.
if fenced(ARGV[1]) then return {-1, 0, '', 0, 0} end
begin()
local flow = redis.call('HMGET', KEYS[1], 'at_work', 'version', 'deaths', 'deaths_version', 'taking', 'suspect',
  'suspect_deaths')
local deaths, suspect, there = whole(flow[3]) or 0, flow[6] or '', whole(flow[7]) or 0
local taking, died, put = flow[5] or '', 0, 0
if flow[4] ~= flow[2] then deaths, suspect, there = 0, '', 0 end
if flow[1] and flow[1] ~= ARGV[1] then
  deaths, died = deaths + 1, 1
  if taking == '' then
    there = 0
  elseif taking == suspect then
    there = there + 1
  else
    suspect, there = taking, deaths == 2 and 2 or 1  -- the first one wrote nothing down
  end
  if there >= tonumber(ARGV[2]) then
    local first, last = string.match(taking, '^(%d+%-%d+) (%d+%-%d+)$')
    put = first and quarantine(first, last, there .. ' trainers died in a row over it') or 0
    if put > 0 then suspect = '' end
  end
end
redis.call('HSET', KEYS[1], 'at_work', ARGV[1], 'deaths', deaths, 'deaths_version', flow[2], 'suspect', suspect,
  'suspect_deaths', there, 'taking', '')
return {deaths, died, taking, there, put}
"""
)

DROP_ENTRIES = (
    COMMON
    + _QUARANTINE
    + """
-- KEYS flow, log, quarantine. ARGV: first id, last id, why. Answers how many entries are in quarantine for it, or -1
-- where a published version has learnt from them.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
begin()
return quarantine(ARGV[1], ARGV[2], ARGV[3])
"""
)


@dataclass(frozen=True)
class _Begun:
    deaths: int
    died: bool
    taking: str
    there: int
    put: int


class WorkRecord:
    """What one trainer (one epoch) says in Redis of its own life."""

    def __init__(self, role: Role, epoch: int) -> None:
        self._role, self._epoch = role, epoch
        self._keys = RunKeys(role.run_id)
        self._marks, self._marked = False, ""

    def begin(self) -> None:
        """Counts the death of the trainer before, where it never left, and tells of it; may quarantine what it was at.

        Raises `Fenced`, and `StagecoachError` where too many have died in a row: the next one would as well.
        """
        begun = self._begun()
        self._marks = begun.deaths > 0
        if not begun.died:
            return
        allowed = max(self._role.config.rollout.restarts_allowed, _FEWEST_ALLOWED)
        where = f" over the log entries {_range(begun.taking)}" if begun.taking else ""
        text = f"the trainer before died{where}; it is number {begun.deaths} in a row without a new policy version"
        self._tell(text)
        if begun.put > 0:
            self._tell(
                f"{begun.there} trainers died in a row over the log entries {_range(begun.taking)}: {begun.put} "
                f"entries are in quarantine, and dropped as poison"
            )
        elif begun.deaths > allowed:
            error = StagecoachError(
                f"{begun.deaths} trainers have died in a row without a new policy version (at most {allowed} may), "
                f"the last one{where or ' before it took anything'}; see their logs. "
                f"`stagecoach resume {self._role.run_id}` tries again"
            )
            if begun.taking:
                error.add_note(_way_out(self._role.run_id, begun.taking))
            raise error

    def taking(self, first: str = "", last: str = "") -> None:
        """These entries are taken next (none: it waits); written down only where trainers have died lately."""
        mark = f"{first} {last}".strip()
        if self._marks and mark != self._marked:
            write_small(self._role.redis, self._keys.flow, self._keys.flow, "HSET", "taking", mark)
            self._marked = mark

    def published(self, word: str) -> None:
        """What a publication was answered: with a new version, whatever trainers died over lies behind."""
        self._marks = self._marks and word != "published"

    def leave(self) -> None:
        """It ends on purpose, and is no death."""
        write_small(self._role.redis, self._keys.flow, self._keys.flow, "HDEL", "at_work")

    def _begun(self) -> _Begun:
        keys = [self._keys.flow, self._keys.log, self._keys.quarantine]
        answer = cast(list[Any], Step(self._role.redis, BEGIN_WORK)(keys, [self._epoch, DEATHS]))
        if int(answer[0]) < 0:
            raise Fenced(f"epoch {self._epoch} may not begin; a newer trainer has taken over")
        deaths, died, taking, there, put = answer
        return _Begun(int(deaths), bool(died), taking.decode(), int(there), int(put))

    def _tell(self, text: str) -> None:
        _LOGGER.warning("%s", text)
        emit(self._role.redis, self._role.run_id, "trainer", text)


@contextmanager
def naming_entries(run_id: str, first: str, last: str) -> Iterator[None]:
    """An error over what is done with these log entries gets a note of how the run continues without them."""
    try:
        yield
    except Exception as error:
        error.add_note(_way_out(run_id, f"{first} {last}"))
        raise


def _way_out(run_id: str, taking: str) -> str:
    return f"`stagecoach resume {run_id} --drop {_range(taking)}` continues without these log entries"


def drop_ranges(positions: tuple[str, ...]) -> list[tuple[str, str]]:
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
                f"--drop {text}: expected a position of the log (1700000000000-0) or FIRST..LAST, as errors name them"
            ) from None
    return ranges


def drop_entries(role: Role, positions: tuple[str, ...]) -> None:
    """Puts log entries into quarantine, each given as `POSITION` or `FIRST..LAST`; raises `UserError`."""
    keys = RunKeys(role.run_id)
    for first, last in drop_ranges(positions):
        shown = first if first == last else f"{first}..{last}"
        names = [keys.flow, keys.log, keys.quarantine]
        put = int(Step(role.redis, DROP_ENTRIES)(names, [first, last, "--drop"]))
        if put < 0:
            raise UserError(
                f"--drop {shown}: a published policy version has learnt from it, or dropped it; `stagecoach resume "
                f"{role.run_id} --from NAME` goes back to a checkpoint, and leaves all behind it that came before now"
            )
        if put == 0:
            raise UserError(
                f"--drop {shown}: the log of run {role.run_id!r} has no entry there that is not dropped yet"
            )
        emit(role.redis, role.run_id, "trainer", f"{put} log entries ({shown}) are dropped as poison, as --drop asked")


def _range(taking: str) -> str:
    first, _, last = taking.partition(" ")
    return first if first == last else f"{first}..{last}"
