"""Flow control: claims, credit, epochs and the run's state.

One rule, counted in fragments: a claim is granted while `claimed − consumed < (L + 1) · K`, where an update consumes
exactly K fragments and L is `max_policy_lag`. `consumed` moves in the step that publishes the next policy version. A
claim that ends in no fragment (lease over, worker gone) or in a dropped one is given again, so the rule cannot
deadlock; the bound on the policy lag itself is kept where fragments are consumed (trainer_node/intake.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis

from shared import scripts
from shared.damaged_keys import KeyDamaged
from shared.errors import Fenced, RunNotFound, WorkerSuperseded
from shared.failure import FailureKind
from shared.flow_state import FlowState as FlowState
from shared.flow_state import parse_flow
from shared.printable import printable
from shared.redis_keys import RunKeys
from shared.script_calls import Call, Step

_PAGE = 1000
"""Arguments of one script; Lua bears only some thousands."""


@dataclass(frozen=True)
class Claim:
    """The answer to a claim. `word`: granted, wait_credit, wait_log, wait_memory, drain, taken, or the run's state."""

    word: str
    version: int
    epoch: int
    wakeup: str

    @property
    def granted(self) -> bool:
        """Permission to act one fragment with at least policy `version`."""
        return self.word == "granted"

    @property
    def waiting(self) -> bool:
        """No credit now; more may come."""
        return self.word.startswith("wait_")


class Flow:
    """The scripts of flow control, with types."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis = client
        self._keys = RunKeys(run_id)
        self._script = {
            name: Step(client, getattr(scripts, name))
            for name in ("CREATE", "REGISTER", "RELEASE", "CLAIM", "TAKE_OVER", "CHECK_EPOCH", "SET_STATE", "SCALE")
        }

    def _run(self, name: str, keys: list[str], args: list[Any]) -> Any:
        try:
            return self._script[name](keys=keys, args=args)
        except redis.ResponseError as error:
            if "NORUN" in str(error):
                raise RunNotFound(
                    f"Redis knows no run {self._keys.run_id!r}; is this the Redis it was started on?"
                ) from None
            raise

    def create(
        self,
        *,
        fragments_per_update: int,
        max_policy_lag: int,
        lease_seconds: float,
        max_log_bytes: int,
        workers: int,
        scaling: str,
        min_workers: int,
        max_workers: int | None,
        config_hash: str,
        shards: Sequence[str] = (),
    ) -> bool:
        """The flow of a new run, in state `running`; False where it is there already (nothing is changed)."""
        fields: dict[str, Any] = {
            "state": "running", "reason": "", "epoch": 0, "version": -1, "consumed": 0, "claimed": 0,
            "fragments_per_update": fragments_per_update, "max_policy_lag": max_policy_lag,
            "lease_ms": int(lease_seconds * 1000), "max_log_bytes": max_log_bytes, "pushed_bytes": 0,
            "trimmed_bytes": 0, "trimmed_id": "0-0", "settled_id": "0-0", "desired_workers": workers,
            "scaling": scaling, "min_workers": min_workers, "max_workers": max_workers or "",
            "config_hash": config_hash, "shards": " ".join(shards),
        }  # fmt: skip
        return bool(self._run("CREATE", [self._keys.flow], [x for pair in fields.items() for x in pair]))

    def read(self) -> FlowState:
        """One consistent look; raises `RunNotFound`, or `KeyDamaged`."""
        raw = cast(dict[bytes, bytes], self._redis.hgetall(self._keys.flow))
        if not raw:
            raise RunNotFound(f"Redis knows no run {self._keys.run_id!r}; is this the Redis it was started on?")
        try:
            return parse_flow(raw)
        except ValueError as error:
            raise KeyDamaged(self._keys.flow, error) from None

    def register(self, worker: str, at_least: int = 0) -> tuple[int, int]:
        """A new incarnation of `worker` (0 the first time) and the trainer's epoch; its old claims are given back.

        Never less than `at_least`: a Redis that was set back may not know how often a worker has registered.
        """
        keys = [
            self._keys.flow, self._keys.incarnations, self._keys.claims, self._keys.wakeups, self._keys.pushed
        ]  # fmt: skip
        incarnation, epoch = self._run("REGISTER", keys, [worker, at_least, scripts.INCARNATIONS_KEPT])
        return int(incarnation), self._number(epoch)

    def claim(self, worker: str, incarnation: int, seq: int) -> Claim:
        """Asks once for permission to act fragment `seq`; raises `WorkerSuperseded` for an old incarnation."""
        call = self.claiming(worker, incarnation, seq)
        claim = call.read(self._run("CLAIM", [*call.keys], [*call.args]))
        if claim.word == "superseded":
            raise WorkerSuperseded(f"{worker}: a newer incarnation than {incarnation} has registered")
        return claim

    def claiming(self, worker: str, incarnation: int, seq: int) -> Call[Claim]:
        """The same, to be sent with something else; what it answers may be `superseded`."""
        keys = [
            self._keys.flow, self._keys.claims, self._keys.incarnations, self._keys.draining, self._keys.wakeups,
            self._keys.pushed,
        ]  # fmt: skip
        return Call(self._script["CLAIM"], keys, [worker, incarnation, seq], self._claimed)

    def _claimed(self, answer: list[bytes]) -> Claim:
        word, version, epoch, wakeup = answer
        return Claim(word.decode(errors="replace"), self._number(version), self._number(epoch), wakeup.decode())

    def _number(self, text: bytes) -> int:
        """A number of the flow's, as a script answers it; raises `KeyDamaged`."""
        if not text.removeprefix(b"-").isdigit():
            self.read()
        return int(text)

    def wait_for_wakeup(self, claim: Claim, seconds: float) -> None:
        """Blocks until credit may have become free after `claim` was refused, at most `seconds`."""
        self._redis.xread({self._keys.wakeups: claim.wakeup}, count=1, block=max(1, int(seconds * 1000)))

    def release(self, worker: str = "*") -> int:
        """Gives back the claims of a worker that is gone (of all by default); answers how many."""
        keys = [self._keys.flow, self._keys.claims, self._keys.wakeups]
        return int(self._run("RELEASE", keys, [worker]))

    def drain(self, *workers: str) -> None:
        """Asks them to end after their fragments; holds until `undrain`, however often a worker restarts.

        Many are asked together, since each wake-up is for everybody who waits.
        """
        asked = 0
        for first in range(0, len(workers), _PAGE):
            page = workers[first : first + _PAGE]
            asked += int(scripts.write_small(self._redis, self._keys.flow, self._keys.draining, "SADD", *page))
        if asked:
            scripts.write_small(
                self._redis, self._keys.flow, self._keys.wakeups, "XADD", "MAXLEN", "~", 64, "*", "w", 1
            )

    def undrain(self, worker: str) -> None:
        """Lets a worker of this name work (again)."""
        self._redis.srem(self._keys.draining, worker)

    def take_over(self, at_least: int = 0) -> int:
        """A new trainer's epoch, greater than `at_least`; every older trainer is refused from here on.

        A Redis that was set back may have forgotten an epoch; the store's pointer names the last that wrote there.
        """
        return int(self._run("TAKE_OVER", [self._keys.flow], [at_least]))

    def process(self) -> str:
        """The Redis process that answers: another one after a restart or a failover, perhaps without what came last."""
        return str(self._redis.info("server")["run_id"])

    def holds(self, epoch: int) -> bool:
        """Whether the trainer of `epoch` may still write: no newer one is known.

        A Redis that was set back, and has forgotten this epoch, learns it again.
        """
        return bool(self._run("CHECK_EPOCH", [self._keys.flow], [epoch]))

    def set_state(
        self, state: str, reason: str, expected: str = "", epoch: int | None = None, failure: FailureKind | None = None
    ) -> bool:
        """running → stopping → finished; only from `expected` where that is given.

        A `failure` stays with the run until it is running again, whoever finishes it.

        A trainer gives its `epoch`: an older one may not end the run, and gets `Fenced`.
        """
        arguments = [state, printable(reason, lines=True), expected, "" if epoch is None else epoch]
        arguments += ["failure", failure or ""] if failure or state == "running" else []
        changed = int(self._run("SET_STATE", [self._keys.flow, self._keys.wakeups], arguments))
        if changed < 0:
            raise Fenced(f"epoch {epoch} may not set the run {state}; a newer trainer has taken over")
        return bool(changed)

    def set_bounds(self, lease_seconds: float, max_log_bytes: int, shards: Sequence[str] = ()) -> None:
        """The bounds and the shards, which a resume may change; K and L stay what they were."""
        fields: list[str | int] = [
            "lease_ms", int(lease_seconds * 1000), "max_log_bytes", max_log_bytes, "shards", " ".join(shards)
        ]  # fmt: skip
        scripts.write_small(self._redis, self._keys.flow, self._keys.flow, "HSET", *fields)

    def set_desired_workers(self, workers: int, scaling: str = "") -> bool:
        """What the coordinator shall bring the fleet to; False where `scaling` is given and no longer stands."""
        return bool(self._run("SCALE", [self._keys.flow], [scaling, "desired_workers", workers]))

    def set_scaling(self, scaling: str, min_workers: int, max_workers: int | None, workers: int | None = None) -> None:
        """A person's order: a fixed number (`workers`), or automatic between the bounds, from the present number on."""
        fields: list[str | int] = ["scaling", scaling, "min_workers", min_workers, "max_workers", max_workers or ""]
        fields += [] if workers is None else ["desired_workers", workers]
        self._run("SCALE", [self._keys.flow], ["", *fields])
