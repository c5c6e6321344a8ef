"""Sessions of a gateway: what their clients have sent, which the environment takes, and what they are answered.

The server's thread delivers messages, the worker's thread takes them; both hold `Sessions.changed` meanwhile.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.pettingzoo_env import Episode
from stagecoach.rollout_worker.gateway.messages import Arrival, Refused
from stagecoach.shared.base import world
from stagecoach.shared.experience.parameters import Drawn
from stagecoach.shared.experience.spaces import Columns

Send = Callable[[str], None]
_ROUND_TRIPS = 1000
_KEPT_DRAWS = 4


def _encoded(message: dict[str, Any]) -> str:
    return json.dumps(message, separators=(",", ":"))


@dataclass
class Turn:
    """Turn of an agent, from its observation on."""

    arrival: Arrival
    """Message with its observation."""
    action: Columns
    version: int
    learns: bool
    """True for turns that are recorded: the agent is not an opponent."""
    reward: float = 0.0


@dataclass
class Session:
    """One environment's life with one client, in one slot of the gateway."""

    name: str
    """Client and session, `robot-1/left-arm`."""
    slot: int
    settled: int
    """The first message that is in no fragment so far; the journal of the client begins there."""
    expected: int
    """Number of the next message."""
    send: Send | None = None
    """Sends a text to the client; None while it is away."""
    local: bool = False
    """The client chooses its actions itself."""
    left: bool = False
    """The client has said bye."""
    away_since: float = 0.0
    inbox: deque[Arrival] = field(default_factory=deque)
    received_bytes: int = 0
    taken_bytes: int = 0
    """Part of `received_bytes` that the environment has taken; each is counted by one thread."""
    arrived_at: float = 0.0
    open: bool = False
    """The episode continues after the last message, so that a step may follow."""
    unanswered: int | None = None
    """The last message, while it waits for its action."""
    answer: str = ""
    """The last answer, for a client that has not received it."""

    waiting: Arrival | None = None
    """Message whose observations wait for actions."""
    turns: dict[str, Turn] = field(default_factory=dict)
    """Agent → its turn in the present fragment, whose outcome is due."""
    recorded: bool = False
    """The present fragment has turns of it."""
    full: bool = False
    """A slot of it has all rows of the present fragment."""
    cut: bool = False
    """A turn that is not learned from came after these: what follows waits for the next fragment."""
    drawn: dict[str, Drawn] = field(default_factory=dict)
    """Name → parameters of its newest draws."""
    parameters: Drawn | None = None
    """Parameters of the running episode, if the client named them."""
    episode: Episode | None = None
    """The running episode; None if this process has not seen its beginning."""
    taken: int = 0
    """The number after the last message that the environment has taken."""

    @property
    def client(self) -> str:
        return self.name.partition("/")[0]

    @property
    def empty(self) -> bool:
        """True if nothing that it has sent is still needed."""
        return not self.inbox and not self.turns and self.waiting is None and self.taken == self.settled

    @property
    def first_needed(self) -> int:
        """The first message that is still needed once the present fragment is pushed."""
        pending = [turn.arrival.seq for turn in self.turns.values()]
        return min(pending, default=self.taken if self.waiting is None else self.waiting.seq)

    def take(self) -> Arrival:
        """Returns the next message that waits."""
        arrival = self.inbox.popleft()
        self.taken_bytes += arrival.size
        return arrival

    def post(self, message: dict[str, Any]) -> None:
        if self.send is not None:
            self.send(_encoded(message))


@dataclass
class Counts:
    """Counts of one client's turns."""

    turns: int = 0
    """Turns with an outcome in the fragment that acted them."""
    late: int = 0
    """Turns without one, or of another policy version; they are not learned from."""
    abandoned: int = 0
    """Turns without an outcome: the client began another episode instead."""
    older: int = 0
    """Turns of an earlier policy version that are learned from (`gateway.late`)."""
    metrics: set[str] = field(default_factory=set)
    """Names in its `info` that have become metrics."""
    held: float = 0.0
    """Seconds for which fragments have waited for its outcomes."""

    def shown(self) -> dict[str, int]:
        return {"turns": self.turns, "late": self.late, "abandoned": self.abandoned, "older": self.older}


class Sessions:
    """All sessions of one gateway."""

    def __init__(self, slots: int, away_seconds: float) -> None:
        self.by_name: dict[str, Session] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._away_seconds = away_seconds
        self.changed = world.Condition()
        """Notified when a message arrives; held for all changes."""
        self.wanted = False
        """A client was refused for want of a slot, since the last push."""
        self.counts: dict[str, Counts] = {}
        """Client → its counts."""
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)
        self.parameters: EpisodeParameters | None = None
        """Draws the parameters of episodes, if the run has any."""
        self._prefix, self._draws = world.token_hex(4), count()
        self._standing: dict[str, Any] = {"type": "hold"}
        """The last message to all sessions that act locally."""
        self.local = False
        """True once a session has acted locally."""

    # The server's thread

    def require_slot(self, name: str) -> None:
        """Raises `Refused` if the session has no slot and all are taken."""
        with self.changed:
            if name in self.by_name or self._free:
                return
            self._sweep()
            if not self._free:
                self.wanted = True
                raise Refused("full", "all slots of this gateway (environment.num_envs) have a session; try later")

    def connect(self, name: str, settled: int, send: Send, local: bool = False) -> Session:
        """Returns the session with a new connection; raises `Refused` where all slots are taken."""
        with self.changed:
            self.require_slot(name)
            if (session := self.by_name.get(name)) is None:
                session = Session(name, self._free.pop(), settled, settled, taken=settled)
                self.by_name[name] = session
            if session.send is not None:
                session.post({"type": "goodbye", "reason": "another connection has continued this session"})
            session.send, session.left, session.local = send, False, local
            self.local |= local
            return session

    def welcome(self, session: Session, message: dict[str, Any]) -> None:
        """Sends the first message of a connection, and what the client has to know next."""
        with self.changed:
            session.post(message | self._draw(session))
            if session.local:
                session.post(self._standing)
            if session.answer and session.send is not None:
                session.send(session.answer)

    def disconnect(self, session: Session, send: Send, left: bool) -> None:
        with self.changed:
            if session.send is send:  # else another connection has continued it
                session.send, session.left, session.away_since = None, left, world.monotonic()
                self._sweep()

    def draw(self, session: Session) -> None:
        """Draws the parameters of a session's next episode, and sends them."""
        with self.changed:
            if message := self._draw(session):
                session.post({"type": "draw"} | message)

    def _draw(self, session: Session) -> dict[str, Any]:
        if self.parameters is None:
            return {}
        table, name = self.parameters.table, f"{self._prefix}-{next(self._draws)}"
        drawn = session.drawn[name] = Drawn(table.draw(zlib.crc32(name.encode())), table.lessons)
        for former in [*session.drawn][:-_KEPT_DRAWS]:
            del session.drawn[former]
        return {"episode": name, "parameters": drawn.values, "lessons": drawn.lessons}

    def deliver(self, session: Session, arrival: Arrival) -> None:
        """Queues the next message; one that is there already is answered again. Raises `Refused`."""
        with self.changed:
            if arrival.seq < session.expected:
                if arrival.seq == session.expected - 1 and session.answer and session.send is not None:
                    session.send(session.answer)
                return
            if arrival.seq > session.expected:
                raise Refused(
                    "gap", f"message {arrival.seq} follows {session.expected - 1}: send {session.expected} first"
                )
            if session.unanswered is not None and not arrival.begins:
                raise Refused("turn", f"message {arrival.seq} came before message {session.unanswered} was answered")
            resumed = arrival.seq == session.settled > 0
            if not (arrival.begins or session.open or resumed):
                raise Refused("turn", f"message {arrival.seq} is a step, and no episode has begun; send a reset")
            session.expected = arrival.seq + 1
            session.open = not arrival.ends
            session.unanswered = arrival.seq if session.open and arrival.given is None else None
            session.arrived_at, session.answer = world.monotonic(), ""
            session.inbox.append(arrival)
            session.received_bytes += arrival.size
            self.changed.notify_all()

    # The worker's thread

    @property
    def settling(self) -> bool:
        """True if a session's end waits for the next push, and nobody plays or somebody waits for its slot."""
        with self.changed:
            ended = [its.left and not its.inbox for its in self.by_name.values()]
        return any(ended) and (self.wanted or all(ended))

    def wait(self, until: float) -> None:
        """Waits until a message is there, at most until then."""
        with self.changed:
            while not any(its.inbox for its in self.by_name.values()):
                if (left := until - world.monotonic()) <= 0:
                    return
                self.changed.wait(left)

    def post_local(self, message: dict[str, Any]) -> None:
        """Sends a message to all sessions that act locally: a policy version to act by, or to hold."""
        with self.changed:
            if message != self._standing:
                self._standing = message
                for session in self.by_name.values():
                    if session.local:
                        session.post(message)

    def answered(self, session: Session, seq: int, actions: dict[str, Any], version: int) -> None:
        """Sends the actions (`action`, or `actions` by agent) for a message's observations."""
        message = {"type": "action", "seq": seq, **actions, "version": version}
        with self.changed:
            if session.unanswered != seq:  # the client has begun another episode meanwhile
                return
            session.answer, session.unanswered = _encoded(message), None
            self._round_trips.append(world.monotonic() - session.arrived_at)
            if session.send is not None:
                session.send(session.answer)

    def pushed(self, settled: Mapping[str, int]) -> None:
        """Acknowledges what a fragment in the log holds, and forgets sessions whose clients have left or are away for
        long."""
        with self.changed:
            for session in list(self.by_name.values()):
                if (number := settled.get(session.name, session.settled)) > session.settled:
                    session.settled = number
                    session.post({"type": "acknowledged", "seq": number})
            self.wanted = False
            self._sweep()

    def _sweep(self) -> None:
        """Frees the slots of clients that have left or are away for long, once all of them is in the log."""
        for session in list(self.by_name.values()):
            gone = session.left or session.empty or world.monotonic() - session.away_since > self._away_seconds
            if session.send is None and gone and not session.inbox and session.first_needed == session.settled:
                self.count(session).abandoned += len(session.turns)
                del self.by_name[session.name]
                self._free.append(session.slot)

    def count(self, session: Session) -> Counts:
        return self.counts.setdefault(session.client, Counts())

    def summary(self) -> dict[str, Any]:
        """Returns sessions, clients' counts, and round trips in milliseconds, for the heartbeat."""
        with self.changed:
            sessions = [*self.by_name.values()]
            trips = np.array(self._round_trips) * 1000
        held = Counter(its.client for its in sessions)
        counts = self.counts
        clients = {name: {"sessions": held[name]} | counts.get(name, Counts()).shown() for name in {**held, **counts}}
        here = sum(its.send is not None for its in sessions)
        low, high = np.percentile(trips, (50, 99)) if len(trips) else (0.0, 0.0)
        return {
            "sessions": here, "sessions_away": len(sessions) - here, "clients": clients,
            "round_trip_p50_ms": round(float(low), 3), "round_trip_p99_ms": round(float(high), 3),
        }  # fmt: skip
