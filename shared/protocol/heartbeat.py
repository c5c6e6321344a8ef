"""Heartbeats and named waits: the reports of what a run is doing.

Every role writes one heartbeat a second, stamped with the Redis server's clock: who it is, where, what it has done, and
what it waits for since when. Every wait in every process has a name and a deadline and goes through `waiting`.
"""

import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

import redis
from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StoreError, StoreUnavailable, WaitTimeout
from stagecoach.shared.base.failure import FailureKind
from stagecoach.shared.base.printable import JSON_OBJECT, NAME_CHARACTERS, foreign, left_out, printable, printable_data
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.protocol.keys import BEATING, RunKeys
from stagecoach.shared.protocol.redis_client import RetryForSeconds, own_address, retries
from stagecoach.shared.protocol.scripts import Script

_LOGGER = logging.getLogger("stagecoach.wait")
_STAMP = re.compile(rb"\d{1,12}\.\d{6}")
T = TypeVar("T")
BEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 10.0


class _Progress(BaseModel, extra="allow"):
    version: int = -1
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    fragments: int = 0
    incarnation: int = 0
    transitions: int = Field(0, ge=0, lt=1 << 63)
    evaluations: int = 0
    evaluating: str = ""
    phase: str = ""
    reads_again: bool = False
    unplaced: list[str] = []


def _checked(progress: object) -> dict[str, Any]:
    return _Progress.model_validate(progress).model_dump(exclude_unset=True)


@dataclass(frozen=True)
class Beat:
    """The last heartbeat of one role, as read back."""

    role: str
    id: str
    stamp: str
    age_seconds: float
    pid: int
    host: str
    ended: str | None
    waiting_for: str | None
    waiting_seconds: float
    deadline_seconds: float
    """Limit of the wait in seconds; 0 if it waits for nothing."""
    progress: Annotated[dict[str, Any], BeforeValidator(_checked)]
    last_error: str | None = None
    """Error of the last try in the current wait."""
    address: str = ""
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds waited since its process began, the present wait included, by the wait's name."""
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds of its main thread since then, by stage; waits are `wait(NAME)`."""
    process: str = ""
    """Unique id of its process; a `pid` may be reused."""
    outage: bool = False
    """True while it waits for Redis or the store, which are away."""
    failure: FailureKind | None = None

    @property
    def alive(self) -> bool:
        return self.ended is None and self.age_seconds < DEAD_AFTER_SECONDS

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"alive": self.alive}


@dataclass
class Wait:
    """A wait in progress; `check` raises `WaitTimeout` when its deadline has passed. Outages of Redis or the store in
    between do not count, and the deadline starts over while another process (`outage_elsewhere`) waits for one."""

    name: str
    deadline_seconds: float
    outage: bool = False
    """True if it waits for Redis or the store, which may be away: its deadline is the outage's."""
    outage_elsewhere: Callable[[], bool] = lambda: False
    retries: RetryForSeconds | None = None
    """Retries whose abandonment ends the wait at once."""
    last_error: str | None = None

    def __post_init__(self) -> None:
        self._started = self._counted_from = world.monotonic()

    @property
    def seconds(self) -> float:
        return world.monotonic() - self._started

    def leave_out(self, seconds: float) -> None:
        self._started += seconds
        self._counted_from += seconds

    def check(self) -> None:
        if self.retries is not None and self.retries.abandoned:
            raise WaitTimeout(f"it ends at once, while it waited for {self.name}")
        if world.monotonic() - self._counted_from > self.deadline_seconds:
            if not self.outage and self.outage_elsewhere():
                self._counted_from = world.monotonic()
                return
            raise WaitTimeout(
                f"waited {self.seconds:.0f} s for {self.name}; the deadline is {self.deadline_seconds:g} s"
                f"{f': {self.last_error}' if self.last_error else ''}"
            )


class Heartbeat:
    """Beats in a thread of its own, so that a long update or episode doesn't look like death."""

    def __init__(self, client: redis.Redis, run_id: str, role: str, id_: str) -> None:
        self._redis, self._keys = client, RunKeys(run_id)
        self._script = Script(client, self._keys, "heartbeat")
        self._role, self._id, self._name = role, id_, f"{role}:{id_}"
        self._address = own_address(client)
        self._process = f"{os.getpid()}-{world.token_hex(4)}"
        self._wait: Wait | None = None
        self._lock = world.Lock()
        """Held while a wait ends, so that a beat counts it once."""
        self._stop = world.Event()
        self._ended: str | None = None
        self._failure: FailureKind | None = None
        self._thread = world.Thread(target=self._run, name=f"heartbeat-{self._name}", daemon=True)
        self._retries = retries(client)
        self._role_thread = 0
        self.progress: dict[str, Any] = {}
        self.waited_seconds: dict[str, float] = {}
        self.stages = StageTimer()

    def start(self) -> None:
        """Sends the first beat, starts the thread of the others, and names this thread's waits for Redis."""
        self._role_thread = world.get_ident()
        self._retries.named.append(self._redis_is_away)
        self._beat()
        self._thread.start()

    def stop(self, reason: str, last_beat: bool = True, failure: FailureKind | None = None) -> None:
        """Sends the last beat, with the reason for the end; a role with a successor of its name sends none."""
        self._stop.set()
        with suppress(ValueError):  # it never started
            self._retries.named.remove(self._redis_is_away)
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        if not last_beat:
            return
        self._ended, self._failure = reason, failure
        try:
            self._beat()
        except redis.RedisError as error:  # a Redis that is gone cannot be told; the silence says enough
            _LOGGER.warning("the last heartbeat of %s is lost: %s", self._name, error)

    @contextmanager
    def waiting(self, name: str, deadline_seconds: float, outage: bool = False) -> Iterator[Wait]:
        """Names a wait while it lasts: shown by `status`, summed in `waited_seconds`. `outage`: it is for Redis or the
        store, which may be away. A wait within another one does not count for that one's deadline."""
        outer = self._wait
        self._wait = wait = Wait(name, deadline_seconds, outage, self._outage_elsewhere, self._retries)
        try:
            with self.stages.during(f"wait({name})"):
                yield wait
        finally:
            with self._lock:
                self._wait = outer
                self.waited_seconds[name] = self.waited_seconds.get(name, 0.0) + wait.seconds
                if outer is not None:
                    outer.leave_out(wait.seconds)

    def outlast(self, call: Callable[[], T], seconds: float) -> T:
        """Returns what `call` does; if the store is away, waits by name until it is back."""
        try:
            return call()
        except (StoreError, StoreUnavailable):
            with self.waiting("the store", seconds, outage=True) as wait:
                return retry_until_deadline(wait, call)

    @contextmanager
    def _redis_is_away(self, last_error: str) -> Iterator[None]:
        if world.get_ident() != self._role_thread:
            yield
            return
        _LOGGER.warning("waiting for Redis: %s", last_error)
        with self.waiting("Redis", self._retries.seconds, outage=True) as wait:
            wait.last_error = last_error
            yield
        _LOGGER.warning("Redis is back after %.0f s", wait.seconds)

    def _outage_elsewhere(self) -> bool:
        acts = self._role in ("worker", "evaluator")  # they may not read who else is there: deploy/users.acl
        return outage(self._redis, self._keys.run_id, beats=not acts) is not None

    @property
    def waits(self) -> bool:
        return self._wait is not None

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            with suppress(redis.RedisError):  # the next beat tries again; the role's own calls report what is wrong
                self._beat()

    def _beat(self) -> None:
        with self._lock:
            wait, waited = self._wait, dict(self.waited_seconds)
            if wait is not None:
                waited[wait.name] = waited.get(wait.name, 0.0) + wait.seconds
        wait = wait or Wait("", 0.0)
        data = {
            "pid": os.getpid(), "process": self._process, "host": socket.gethostname(),
            "address": self._address, "ended": self._ended, "failure": self._failure,
            "waiting_for": wait.name or None, "waiting_seconds": round(wait.seconds, 3) if wait.name else 0.0,
            "deadline_seconds": wait.deadline_seconds, "last_error": wait.last_error,
            "outage": wait.outage and wait.last_error is not None, "progress": dict(self.progress),
            "waited": {name: round(seconds, 3) for name, seconds in waited.items()},
            "stages": {name: round(seconds, 3) for name, seconds in self.stages.seconds().items()},
        }  # fmt: skip
        key = self._keys.heartbeats(self._role)
        self._script(heartbeats=key, id=self._id, beat=json.dumps(printable_data(data)))


_BEAT = TypeAdapter(Beat)


def read_heartbeats(client: redis.Redis, run_id: str) -> list[Beat]:
    """Returns the last beat of each process, the coordinator's and trainer's first; leaves malformed beats out."""
    keys, pipeline = RunKeys(run_id), client.pipeline(transaction=False)
    for role in BEATING:
        pipeline.hgetall(keys.heartbeats(role))
    pipeline.time()
    *replies, time_there = pipeline.execute(raise_on_error=False)
    seconds, micros = client.time() if isinstance(time_there, Exception) else time_there
    found = []
    for role, reply in zip(BEATING, replies, strict=True):
        # asked again by itself, Redis's refusal names the key
        raw: Any = client.hgetall(keys.heartbeats(role)) if isinstance(reply, Exception) else reply
        beats = [_beat(run_id, role, name, value, seconds + micros / 1e6) for name, value in raw.items()]
        found += sorted((beat for beat in beats if beat is not None), key=lambda beat: (len(beat.id), beat.id))
    return found


def _beat(run_id: str, role: str, name: bytes, value: bytes, now: float) -> Beat | None:
    id_ = printable(name.decode(errors="replace"), NAME_CHARACTERS)
    stamp, _, text = value.partition(b" ")
    what, age = f"the heartbeat of {role}:{id_} of run {run_id}", 0.0
    if id_.partition("-")[0] != role:  # whoever may write as one role must not pass for another
        left_out(what, f"no {role} has such a name")
    elif not _STAMP.fullmatch(stamp):
        left_out(what, "it has no time stamp")
    elif (age := now - float(stamp)) < -DEAD_AFTER_SECONDS:  # else its role would seem to be alive until then
        left_out(what, f"its time stamp is {-age:.0f} s in the future")
    else:
        return foreign(_BEAT, text, what, role=role, id=id_, stamp=stamp.decode(), age_seconds=age)
    return None


def outage(client: redis.Redis, run_id: str, beats: bool = True) -> str | None:
    """Returns what the run's uploads or, with `beats`, any role waits for now; None if nothing is away."""
    said = cast(bytes | None, client.get(RunKeys(run_id).store_status))
    uploads = foreign(JSON_OBJECT, said or b"{}", f"the store status of run {run_id}")
    if uploads is not None and uploads.get("waiting_for"):
        return str(uploads["waiting_for"])
    if not beats:
        return None
    away = (beat.waiting_for for beat in read_heartbeats(client, run_id) if beat.alive and beat.outage)
    return next(away, None)


def forget_heartbeat(client: redis.Redis, run_id: str, role: str, id_: str) -> None:
    """Removes the heartbeat of a role that was stopped on purpose."""
    client.hdel(RunKeys(run_id).heartbeats(role), id_)


def poll(wait: Wait, done: Callable[[], bool], pause_seconds: float = 0.1) -> None:
    """Waits until `done()`, polling after each pause; raises `WaitTimeout`."""
    while not done():
        wait.check()
        world.sleep(pause_seconds)


def growing_pauses(first_seconds: float = 0.2, longest_seconds: float = 5.0) -> Iterator[float]:
    """Yields pauses between tries: doubling up to the longest, with up to half taken off at random."""
    pause = first_seconds
    while True:
        yield pause * world.uniform(0.5, 1.0)
        pause = min(2 * pause, longest_seconds)


def retry_until_deadline(
    wait: Wait, call: Callable[[], T], passing: tuple[type[Exception], ...] = (StoreError, StoreUnavailable),
    longest_pause_seconds: float = 5.0,
) -> T:  # fmt: skip
    """Calls `call` until it does not raise `passing` (by default failures of the store), and returns its result. Raises
    `WaitTimeout` with its last error."""
    pauses = growing_pauses(longest_seconds=longest_pause_seconds)
    while True:
        try:
            result = call()
        except passing as error:
            if str(error) != wait.last_error:
                _LOGGER.warning("waiting for %s: %s", wait.name, error)
            wait.last_error = str(error)
            wait.check()
        else:
            wait.last_error = None
            return result
        world.sleep(next(pauses))
