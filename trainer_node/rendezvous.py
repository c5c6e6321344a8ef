"""Where the ranks of a run find each other: a short stream in Redis, written by the trainer of the newest epoch alone.

An entry with an invitation opens a group; one without says that the group of that epoch is about to exchange something.
The other ranks block on it and so can be woken, or asked to leave, while rank 0 waits for experience.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import TypeAdapter

from shared import scripts
from shared.errors import Fenced
from shared.experience_log import START, id_order, whole_number
from shared.foreign import foreign
from shared.heartbeat import Wait, read_heartbeats
from shared.policies.registry import torch_device
from shared.redis_keys import RunKeys
from shared.role import Role
from shared.script_calls import Step
from trainer_node.group import Group, Invitation, Opening

_LOOK_SECONDS = 1.0
_POLL_SECONDS = 0.05


_CALL = (
    scripts.COMMON
    + """
-- KEYS flow, ranks. ARGV: epoch, an invitation (JSON), or '' where the group has begun. Calls the other ranks of the
-- newest trainer. Answers 0 if fenced.
if fenced(ARGV[1]) then return 0 end
begin()
redis.call('XADD', KEYS[2], 'MAXLEN', '~', '64', '*', 'epoch', ARGV[1], 'invitation', ARGV[2])
return 1
"""
)


@dataclass(frozen=True)
class Call:
    """One entry: the group of `epoch` is open (`invitation`), or has something to exchange."""

    epoch: int
    invitation: Invitation | None


_INVITATION = TypeAdapter(Invitation)


class Rendezvous:
    """One role's end of the stream."""

    def __init__(self, role: Role) -> None:
        self._redis, self._keys = role.redis, RunKeys(role.run_id)
        self._call = Step(role.redis, _CALL)
        self._url = role.address.redis_url
        self._after = START

    def call(self, epoch: int, invitation: Invitation | None = None) -> None:
        """Calls the other ranks; raises `Fenced` where another trainer has taken over."""
        text = json.dumps(asdict(invitation)) if invitation else ""
        if not self._call([self._keys.flow, self._keys.ranks], [epoch, text]):
            raise Fenced(f"epoch {epoch} may not call the ranks; a newer trainer has taken over")

    def next(self, seconds: float) -> Call | None:
        """The next entry; waits for it, at most `seconds`."""
        found: Any = self._redis.xread({self._keys.ranks: self._after}, count=1, block=max(1, int(seconds * 1000)))
        if not found:
            last: Any = self._redis.xrevrange(self._keys.ranks, count=1)
            if last and id_order(last[0][0].decode()) < id_order(self._after):
                self._after = START  # another Redis, whose clock is behind
            return None
        id_, fields = found[0][1][0]
        self._after = id_.decode()
        text, epoch = fields.get(b"invitation", b""), whole_number(fields.get(b"epoch", b""))
        what = f"the call {self._after} to the ranks of run {self._keys.run_id}"
        invitation = foreign(_INVITATION, text, what) if text else None
        return Call(epoch, invitation) if epoch and (invitation or not text) else None

    def own_address(self) -> str:
        """The address with which this machine reaches Redis: loopback where all of the run is on one machine."""
        url = urlsplit(self._url)
        host, port = url.hostname or "localhost", url.port or 6379
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])


def rank_id(rank: int) -> str:
    """The name of a rank's heartbeat, log file and place in the fleet."""
    return f"rank-{rank}"


def meet(role: Role, epoch: int, wait: Wait, needless: Callable[[], bool]) -> Group | None:
    """Opens the group of this epoch and waits for all other ranks; None once it is needless.

    Raises `Fenced`, `GroupBroken`, and `WaitTimeout`, which names who is missing.
    """
    trainer = role.config.trainer
    rendezvous = Rendezvous(role)
    opening = Opening(rendezvous.own_address(), trainer.ranks, trainer.rank_timeout_seconds)
    rendezvous.call(epoch, opening.invitation)
    looked = time.monotonic()
    while missing := opening.missing():
        if time.monotonic() - looked > _LOOK_SECONDS:
            looked = time.monotonic()
            if needless():
                return None
            wait.trouble = _whereabouts(role, missing)
            wait.check()
        time.sleep(_POLL_SECONDS)
    wait.trouble = None
    return opening.close(torch_device(trainer.device))


def _whereabouts(role: Role, missing: Sequence[int]) -> str:
    """What is known of ranks that have not come."""
    beats = {beat.id: beat for beat in read_heartbeats(role.redis, role.run_id) if beat.role == "rank"}
    said = []
    for rank in missing:
        beat = beats.get(rank_id(rank))
        state = "has not started" if beat is None else beat.ended
        if beat is not None and not beat.ended:
            state = f"on {beat.host}, {'on its way' if beat.alive else f'silent for {beat.age_seconds:.0f} s'}"
        said.append(f"{rank_id(rank)} ({state})")
    return ", ".join(said)
