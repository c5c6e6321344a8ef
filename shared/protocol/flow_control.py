"""Flow control: claims, credit, epochs and the run's state.

One rule, counted in fragments: a claim is granted while `claimed − consumed < (L + 1) · K`, where an update consumes
exactly K fragments and L is `max_policy_lag`. `consumed` moves in the step that publishes the next policy version. A
claim that ends in no fragment (lease over, worker gone) or in a dropped one is given again, so the rule cannot
deadlock; the bound on the policy lag itself is kept where fragments are consumed (trainer_node/state/log_consumer.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar, cast

import redis
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import Fenced, UserError, WorkerSuperseded
from stagecoach.shared.base.failure import FailureKind
from stagecoach.shared.base.printable import printable
from stagecoach.shared.config.rollout import window
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.scripts import INCARNATIONS_KEPT, Call, Script, unknown_run, write_small

_PAGE = 1000
"""Arguments of one script; Lua bears only some thousands."""


T = TypeVar("T")


class KeyDamaged(UserError, redis.ResponseError):
    """A key holds what Stagecoach never wrote; code that survives a Redis error survives this, too."""

    def __init__(self, key: str, what: object) -> None:
        super().__init__(
            f"the Redis key {key} is damaged: {printable(str(what), 300)}; another program wrote it. End the run, "
            f"delete all its keys (with redis.url=embedded: the folder `redis` in the run's folder), and "
            f"`stagecoach resume` continues it from its newest checkpoint"
        )


def sound(read: Callable[[], T]) -> T:
    """Calls `read`, once more if it raises `KeyDamaged`, since a reply may be damaged on its way."""
    try:
        return read()
    except KeyDamaged:
        return read()


class RunState(StrEnum):
    RUNNING = "running"
    STOPPING = "stopping"
    FINISHED = "finished"


_MOST = 2**53
"""Lua counts in doubles."""
_Number = Annotated[int, Field(ge=-1, le=_MOST)]
_Position = Annotated[str, Field(pattern=r"^[0-9]{1,20}-[0-9]{1,20}$")]


@dataclass(frozen=True)
class FlowState:
    state: RunState
    epoch: _Number
    version: _Number
    consumed: _Number
    claimed: Annotated[int, Field(ge=-_MOST, le=_MOST)]
    fragments_per_update: Annotated[int, Field(ge=1, le=_MOST)]
    max_policy_lag: _Number
    committed_id: _Position
    trimmed_id: _Position
    pushed_bytes: _Number
    trimmed_bytes: _Number
    lease_ms: _Number
    max_log_bytes: _Number
    desired_workers: _Number
    config_hash: str
    reason: str = ""
    failure: Annotated[FailureKind | None, BeforeValidator(lambda text: text or None)] = None
    published_id: _Position = "0-0"
    history: str = ""
    """Name of the experience that the version comes from."""
    scaling: Literal["fixed", "auto"] = "fixed"
    """`auto`: the coordinator moves `desired_workers` between the next two."""
    min_workers: _Number = 1
    max_workers: Annotated[_Number | None, BeforeValidator(lambda text: text or None)] = None
    memory_full: bool = False
    """True while Redis or a shard has no memory for new claims and bodies."""
    checkpoint_orders: _Number = 0
    """Number of checkpoints ordered by people."""
    shards: Annotated[tuple[str, ...], BeforeValidator(str.split)] = ()
    """Servers of the fragments' bodies, as `host:port/db`; empty if the log holds them."""
    memory: str = ""
    """Token of the shared memory that the trainer reads; empty if it sees none."""

    @property
    def log_bytes(self) -> int:
        return self.pushed_bytes - self.trimmed_bytes

    @property
    def in_flight(self) -> int:
        return self.claimed - self.consumed

    @property
    def window(self) -> int:
        return window(self.max_policy_lag, self.fragments_per_update)


_STATE = TypeAdapter(FlowState)


def parse_flow(raw: Mapping[bytes, bytes]) -> FlowState:
    """Parses the hash from Redis; raises `ValueError` with the field and its value."""
    flow = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in raw.items()}
    try:
        return _STATE.validate_python(flow)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        found = repr(flow[name][:40]) if name in flow else "nothing"
        raise ValueError(f"its field {name} is {found} ({first['msg']})") from None


class ClaimReply(StrEnum):
    GRANTED = "granted"
    WAIT_CREDIT = "wait_credit"
    WAIT_LOG = "wait_log"
    WAIT_MEMORY = "wait_memory"
    DRAIN = "drain"
    SUPERSEDED = "superseded"
    TAKEN = "taken"
    """Redis was rolled back and gave the incarnation twice."""
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(frozen=True)
class Claim:
    reply: ClaimReply
    version: int
    epoch: int
    wakeup: str
    history: str = ""
    """Name of the experience that the version comes from (trainer_node/state/log_consumer.py)."""
    memory: str = ""
    """Token of the shared memory that the trainer reads (shared/protocol/shared_memory.py)."""

    @property
    def granted(self) -> bool:
        """Permission to act one fragment with at least policy `version`."""
        return self.reply is ClaimReply.GRANTED

    @property
    def waiting(self) -> bool:
        return self.reply in (ClaimReply.WAIT_CREDIT, ClaimReply.WAIT_LOG, ClaimReply.WAIT_MEMORY)


class Flow:
    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis, self._keys = client, RunKeys(run_id)
        self._claim = Script(client, self._keys, "claim")
        self.owner = ""
        """Token of the trainer that has taken over with this, if one has."""

    def _run(self, name: str, **arguments: Any) -> Any:
        return Script(self._redis, self._keys, name)(**arguments)

    def create(self, config: Config, shards: Sequence[str] = ()) -> bool:
        """Creates the flow of a new run, in state `running`; returns False and changes nothing if it exists."""
        rollout = config.rollout
        fields: dict[str, Any] = {
            "state": RunState.RUNNING, "reason": "", "epoch": 0, "version": -1, "consumed": 0, "claimed": 0,
            "fragments_per_update": rollout.fragments_per_update, "max_policy_lag": rollout.max_policy_lag,
            "lease_ms": int(rollout.lease_seconds * 1000), "max_log_bytes": rollout.max_log_bytes, "pushed_bytes": 0,
            "trimmed_bytes": 0, "trimmed_id": "0-0", "committed_id": "0-0", "desired_workers": rollout.workers,
            "scaling": rollout.scaling, "min_workers": rollout.min_workers, "max_workers": rollout.max_workers or "",
            "config_hash": config.hash(), "shards": " ".join(shards),
        }  # fmt: skip
        return bool(self._run("create", fields=[part for pair in fields.items() for part in pair]))

    def read(self) -> FlowState:
        """Returns all fields at one instant; raises `RunNotFound`, or `KeyDamaged`."""
        return sound(self._read)

    def _read(self) -> FlowState:
        raw = cast(dict[bytes, bytes], self._redis.hgetall(self._keys.flow))
        try:
            if raw:
                return parse_flow(raw)
        except ValueError as error:
            raise KeyDamaged(self._keys.flow, error) from None
        raise unknown_run(self._redis, self._keys.run_id)

    def register(self, worker: str, at_least: int = 0) -> tuple[int, int]:
        """Returns a new incarnation of `worker` (0 the first time) and the trainer's epoch; releases its old claims.
        `at_least` keeps a Redis that was rolled back from giving an incarnation again."""
        incarnation, epoch = self._run("register", worker=worker, at_least=at_least, kept=INCARNATIONS_KEPT)
        return int(incarnation), self._number(epoch)

    def claim(self, worker: str, incarnation: int, seq: int) -> Claim:
        """Asks once for permission to act fragment `seq`; raises `WorkerSuperseded` for an old incarnation."""
        claim = self.claiming(worker, incarnation, seq).run()
        if claim.reply is ClaimReply.SUPERSEDED:
            raise WorkerSuperseded(f"{worker}: a newer incarnation than {incarnation} has registered")
        return claim

    def claiming(self, worker: str, incarnation: int, seq: int) -> Call[Claim]:
        """Returns the claim as a call, to be sent with another; its reply may be SUPERSEDED."""
        arguments = self._claim.arguments(worker=worker, incarnation=incarnation, seq=seq)
        return Call(self._claim, arguments, self._claimed)

    def _claimed(self, found: list[bytes]) -> Claim:
        said, version, epoch, wakeup, history, memory = found
        try:
            reply = ClaimReply(said.decode())
        except ValueError:  # the state of a damaged flow
            self.read()
            raise
        names = (name.decode(errors="replace") for name in (history, memory))
        return Claim(reply, self._number(version), self._number(epoch), wakeup.decode(), *names)

    def _number(self, text: bytes) -> int:
        if not text.removeprefix(b"-").isdigit():
            self.read()
        return int(text)

    def wait_for_wakeup(self, claim: Claim, seconds: float) -> None:
        """Blocks until credit may have become free after `claim` was refused, at most `seconds`."""
        self._redis.xread({self._keys.wakeups: claim.wakeup}, count=1, block=max(1, int(seconds * 1000)))

    def release(self, worker: str = "*") -> int:
        """Releases the claims of a worker that is gone (of all by default); returns how many."""
        return int(self._run("release", worker=worker))

    def drain(self, *workers: str) -> None:
        """Lets workers end after their fragments; holds until `undrain`, however often a worker restarts. One call for
        many, since a wake-up reaches all workers that wait."""
        added = 0
        for first in range(0, len(workers), _PAGE):
            page = workers[first : first + _PAGE]
            added += int(write_small(self._redis, self._keys, self._keys.draining, "SADD", *page))
        if added:
            write_small(self._redis, self._keys, self._keys.wakeups, "XADD", "MAXLEN", "~", 64, "*", "w", 1)

    def undrain(self, worker: str) -> None:
        self._redis.srem(self._keys.draining, worker)

    def take_over(self, at_least: int = 0, memory: str = "") -> int:
        """Returns a new trainer's epoch, and fences every older trainer.

        Args:
            at_least: the epoch in the store's pointer, which a Redis that was rolled back may have forgotten; the new
                one is greater.
            memory: token of the shared memory that the new trainer reads.
        """
        self.owner = world.token_hex(8)
        while True:  # once more where another trainer has taken over since, or the answer was lost
            seen = self.read().epoch
            if epoch := int(self._run("take_over", seen=seen, at_least=at_least, memory=memory, owner=self.owner)):
                return epoch

    def process(self) -> str:
        """Returns the id of the Redis process, which changes with a restart or a failover."""
        return str(self._redis.info("server")["run_id"])

    def holds(self, epoch: int) -> bool:
        """Checks whether the trainer of `epoch` may still write: no newer one is known, and none that got the same
        epoch from a Redis that was rolled back. Restores the epoch in such a Redis."""
        return bool(self._run("check_epoch", epoch=epoch, owner=self.owner))

    def set_state(
        self, state: RunState, reason: str, expected: RunState | None = None, epoch: int | None = None,
        failure: FailureKind | None = None,
    ) -> bool:  # fmt: skip
        """Moves running → stopping → finished, only from `expected` if given. A `failure` stays until it is running
        again. A trainer passes its `epoch`; raises `Fenced` for an older one."""
        fields = ["failure", failure or ""] if failure or state is RunState.RUNNING else []
        fields += ["memory", ""] if state is RunState.RUNNING else []  # the next trainer announces its own
        begin, fence = expected or "", "" if epoch is None else epoch
        reason = printable(reason, lines=True)
        changed = self._run("set_state", state=state, reason=reason, expected=begin, epoch=fence, fields=fields)
        if changed < 0:
            raise Fenced(f"epoch {epoch} may not set the run {state}; a newer trainer has taken over")
        return bool(changed)

    def set_bounds(self, lease_seconds: float, max_log_bytes: int, shards: Sequence[str] = ()) -> None:
        """Sets the bounds and the shards, which a resume may change; K and L stay."""
        fields = ("lease_ms", int(lease_seconds * 1000), "max_log_bytes", max_log_bytes, "shards", " ".join(shards))
        write_small(self._redis, self._keys, self._keys.flow, "HSET", *fields)

    def order_stop(self) -> None:
        """Orders the end of a live run with a final checkpoint; without effect on one that ends already."""
        self.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)

    def order_checkpoint(self) -> None:
        """Orders a checkpoint after the trainer's current update."""
        write_small(self._redis, self._keys, self._keys.flow, "HINCRBY", "checkpoint_orders", 1)

    def set_desired_workers(self, workers: int, scaling: str = "") -> bool:
        """Sets the coordinator's goal for the fleet; returns False if `scaling` is given and no longer holds."""
        return bool(self._run("scale", expected=scaling, fields=["desired_workers", workers]))

    def set_scaling(self, scaling: str, min_workers: int, max_workers: int | None, workers: int | None = None) -> None:
        """Sets a person's order: a fixed number (`workers`), or automatic between the bounds."""
        fields: list[str | int] = ["scaling", scaling, "min_workers", min_workers, "max_workers", max_workers or ""]
        fields += [] if workers is None else ["desired_workers", workers]
        self._run("scale", expected="", fields=fields)
