"""Claims, credit, registration, epochs and states, one promise at a time; and what the Lua scripts declare."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import redis

from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.shared.base.errors import Fenced, RunNotFound, WorkerSuperseded
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import Claim, Flow, KeyDamaged, RunState
from stagecoach.shared.protocol.keys import BEATING, TYPES, RunKeys, key_type
from stagecoach.shared.protocol.ledger import Ledger, fast_forward
from stagecoach.shared.protocol.scripts import NAMES, Script, source
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole, RedisServer
from tests.support.processes.waiting import Background
from tests.support.runs.small_run import SmallTrainer, SmallWorker, begin, in_redis, small_config

LONG_SECONDS = 60.0
"""A wait that only a wake-up ends in time."""


@pytest.fixture
def role(make_role: MakeRole) -> RunContext:
    """K = 2, L = 0: two claims for each version."""
    return make_role(small_config())


def test_run_is_created_once(role: RunContext) -> None:
    before = role.flow.read()
    assert (before.state, before.version, before.epoch, before.claimed, before.consumed) == ("running", -1, 0, 0, 0)
    assert (before.window, before.desired_workers, before.config_hash) == (2, 2, role.config.hash())
    role.flow.set_desired_workers(5)
    assert create_flow(role) is False
    assert role.flow.read().desired_workers == 5


def test_decision_does_not_undo_a_scaling_order(role: RunContext) -> None:
    def orders() -> tuple[str, int, int | None, int]:
        state = role.flow.read()
        return state.scaling, state.min_workers, state.max_workers, state.desired_workers

    assert orders() == ("fixed", 1, None, 2)
    role.flow.set_scaling("auto", 2, 6)
    assert orders() == ("auto", 2, 6, 2)
    assert role.flow.set_desired_workers(4, "auto")
    role.flow.set_scaling("fixed", 2, None, 3)
    assert not role.flow.set_desired_workers(5, "auto"), "a person has ordered otherwise since"
    assert orders() == ("fixed", 2, None, 3)


@pytest.mark.parametrize(
    "ask",
    [
        lambda flow, log: flow.read(),
        lambda flow, log: flow.register("worker-0"),
        lambda flow, log: flow.claim("worker-0", 0, 0),
        lambda flow, log: flow.take_over(),
        lambda flow, log: flow.set_state(RunState.STOPPING, "stopped"),
        lambda flow, log: flow.set_desired_workers(3),
        lambda flow, log: flow.set_scaling("auto", 1, None),
        lambda flow, log: log.push("worker-0", 0, 0, 0, 4, b"abc"),
    ],
    ids=["read", "register", "claim", "take over", "set state", "scale", "scale auto", "push"],
)
def test_unknown_run_is_named_and_nothing_is_written(
    redis_client: redis.Redis, unique_run_id: str, ask: Callable[[Flow, ExperienceLog], Any]
) -> None:
    with pytest.raises(RunNotFound, match=unique_run_id):
        ask(Flow(redis_client, unique_run_id), ExperienceLog(redis_client, unique_run_id))
    assert list(redis_client.scan_iter(match=RunKeys(unique_run_id).prefix + "*")) == []


def test_damaged_reply_is_read_again(role: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is damaged only where it reads so twice."""
    ask, damaged = role.redis.hgetall, [b"runn\xffng"]

    def hgetall(key: str) -> Any:
        found: Any = ask(key)
        return found | ({b"state": damaged.pop()} if damaged else {})

    monkeypatch.setattr(role.redis, "hgetall", hgetall)
    assert role.flow.read().state == "running" and not damaged
    damaged += [b"x", b"x"]
    with pytest.raises(KeyDamaged, match="its field state"):
        role.flow.read()


def test_asking_again_prolongs_the_lease(role: RunContext) -> None:
    worker, keys = SmallWorker(role), RunKeys(role.run_id)
    worker.claim()
    client: Any = role.redis
    ((claim, end),) = client.zrange(keys.claims, 0, -1, withscores=True)
    client.zadd(keys.claims, {claim: end - 20_000})
    worker.claim()
    assert client.zscore(keys.claims, claim) >= end
    seconds, micros = client.time()
    assert 0 < end - (seconds * 1000 + micros // 1000) <= role.config.rollout.lease_seconds * 1000


def test_very_many_leases_may_run_out_at_once(role: RunContext) -> None:
    """As when a whole cluster is cut off; more than Lua can hand to one command."""
    begin(role)
    lapsed = {f"worker-{index}:0:0": 1 for index in range(10_000)}
    role.redis.zadd(RunKeys(role.run_id).claims, lapsed)
    role.redis.hincrby(RunKeys(role.run_id).flow, "claimed", len(lapsed))
    assert SmallWorker(role, "another").claim().granted
    assert role.flow.read().claimed == 1


def test_many_are_drained_with_one_wakeup(role: RunContext) -> None:
    names = [f"worker-{index}" for index in range(10_000)]
    keys = RunKeys(role.run_id)
    role.flow.drain(*names)
    assert role.redis.scard(keys.draining) == len(names)
    assert role.redis.xlen(keys.wakeups) == 1
    role.flow.drain(*names)
    role.flow.drain()
    assert role.redis.xlen(keys.wakeups) == 1


def test_lease_expires_by_server_clock(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=1, lease_seconds=0.05))
    first, second = SmallWorker(role, "worker-0"), SmallWorker(role, "worker-1")
    assert first.claim().granted
    answer = second.claim()
    while answer.waiting:
        role.flow.wait_for_wakeup(answer, 0.02)
        answer = second.claim()
    assert answer.granted and role.flow.read().claimed == 1


def test_new_claims_wait_while_log_is_full(make_role: MakeRole) -> None:
    role = make_role(small_config(max_policy_lag=3))
    trainer, worker, holder = begin(role), SmallWorker(role), SmallWorker(role, "worker-1")
    assert holder.claim().granted
    worker.work()
    worker.work()
    state = role.flow.read()
    role.redis.hset(RunKeys(role.run_id).flow, "max_log_bytes", str(state.log_bytes))
    answer = worker.claim()
    assert answer.reply == "wait_log" and answer.waiting and not answer.granted
    assert holder.claim().granted
    assert trainer.take() is not None and trainer.take() is not None
    trainer.publish()
    assert worker.claim().reply == "wait_log"
    worker.log.trim(trainer.epoch, trainer.consumer.committed.position)
    assert worker.claim().granted


def test_incarnations_never_repeat_when_redis_forgets(role: RunContext) -> None:
    assert [role.flow.register("worker-0")[0], role.flow.register("worker-0", 5)[0]] == [0, 5]
    assert [role.flow.register("worker-0", 2)[0], role.flow.register("worker-0")[0]] == [6, 7]
    assert role.flow.claim("worker-9", 3, 7).granted, "it works on, and is known again"
    with pytest.raises(WorkerSuperseded):
        role.flow.claim("worker-9", 2, 0)
    assert role.flow.register("worker-9") == (4, 0)


def test_claims_of_one_incarnation_or_all_are_released_once(role: RunContext) -> None:
    old, new, other = SmallWorker(role), SmallWorker(role), SmallWorker(role, "worker-1")
    assert new.claim().granted and other.claim().granted
    assert role.flow.release(f"worker-0:{old.incarnation}") == 0
    assert role.flow.release(f"worker-0:{new.incarnation}") == 1
    assert (role.flow.release(), role.flow.release(), role.flow.read().claimed) == (1, 0, 0)


def test_drain_holds_across_registrations_until_undrained(role: RunContext) -> None:
    worker, other = SmallWorker(role), SmallWorker(role, "worker-1")
    assert worker.claim().granted
    role.flow.drain("worker-0")
    assert worker.push() == "pushed"
    assert worker.claim().reply == "drain" and not worker.claim().waiting
    assert other.claim().granted
    again = SmallWorker(role)
    assert again.claim().reply == "drain"
    role.flow.undrain("worker-0")
    assert again.claim().reply == "wait_credit"


@pytest.mark.parametrize("state", [RunState.STOPPING, RunState.FINISHED])
def test_no_claim_once_the_run_is_ending_which_it_does_once(role: RunContext, state: RunState) -> None:
    worker = SmallWorker(role)
    assert role.flow.set_state(state, "stopped", expected=RunState.RUNNING)
    assert not role.flow.set_state(RunState.STOPPING, "solved", expected=RunState.RUNNING)
    answer = worker.claim()
    assert str(answer.reply) == str(state) and not answer.granted and not answer.waiting
    assert (role.flow.read().state, role.flow.read().reason, role.flow.read().claimed) == (state, "stopped", 0)


def test_epochs_never_repeat_when_redis_forgets(role: RunContext) -> None:
    """The trainer of epoch 5 lives: it is not fenced, and whoever takes over knows of it from the store's pointer."""
    assert role.flow.take_over() == 1
    assert role.flow.holds(5)
    assert [role.flow.take_over(5), role.flow.take_over(2)] == [6, 7]
    assert not role.flow.holds(5)


def test_late_take_over_fences_nobody(role: RunContext) -> None:
    """A trainer repeats its command over a new connection; the first one arrives after that."""
    late = partial(Script(role.redis, RunKeys(role.run_id), "take_over"), seen=0, at_least=0, memory="", owner="late")
    epoch = role.flow.take_over()
    assert late() == 0
    assert (epoch, role.flow.read().epoch) == (1, 1)


def test_epoch_that_was_given_twice_belongs_to_the_last(role: RunContext) -> None:
    """A Redis that comes back without an epoch gives it again, while the trainer that had it is cut off."""
    old, new = Flow(role.redis, role.run_id), Flow(role.redis, role.run_id)
    assert old.take_over() == 1
    role.redis.hset(RunKeys(role.run_id).flow, mapping={"epoch": 0, "owner": ""})
    assert new.take_over() == 1
    assert (new.holds(1), old.holds(1), role.flow.holds(1)) == (True, False, True)
    with pytest.raises(Fenced):
        fast_forward(role.redis, role.run_id, 1, "0-0", Ledger(), owner=old.owner)
    fast_forward(role.redis, role.run_id, 1, "0-0", Ledger(), owner=new.owner)


def consume(role: RunContext) -> SmallTrainer:
    """Another trainer takes all there is, and finds the bad fragment in the log."""
    trainer = begin(role)
    while trainer.take() is not None:
        pass
    return trainer


EVENTS_THAT_WAKE: dict[str, Callable[[RunContext], Any]] = {
    "release": lambda role: role.flow.release("holder"),
    "register": lambda role: role.flow.register("holder"),
    "drain": lambda role: role.flow.drain("waiter"),
    "state": lambda role: role.flow.set_state(RunState.STOPPING, "stopped"),
    "publish": lambda role: consume(role).publish(),
    "drop": consume,
}
"""Everything after which a waiting worker may get another answer."""


def refused(role: RunContext, server: RedisServer) -> tuple[Flow, Claim]:
    """A waiter without credit: one claim is held, one stands behind a bad fragment in the log."""
    begin(role)
    holder, bad, waiter = (SmallWorker(role, name) for name in ("holder", "bad", "waiter"))
    assert holder.claim().granted
    bad.work(blob=b"bad")
    answer = waiter.claim()
    assert answer.reply == "wait_credit"
    return Flow(server.client(), role.run_id), answer


@pytest.mark.parametrize("event", EVENTS_THAT_WAKE)
def test_no_wakeup_is_lost_between_the_refusal_and_the_wait(
    role: RunContext, redis_server: RedisServer, event: str
) -> None:
    """The event comes before the wait begins: the wait must not sleep through it (past this test's time limit)."""
    flow, answer = refused(role, redis_server)
    EVENTS_THAT_WAKE[event](role)
    flow.wait_for_wakeup(answer, LONG_SECONDS * 10)
    assert flow.claim("waiter", 0, 0).reply != "wait_credit"


def test_waiting_worker_wakes_for_credit_or_timeout(role: RunContext, redis_server: RedisServer) -> None:
    flow, answer = refused(role, redis_server)
    before = in_redis(role)
    flow.wait_for_wakeup(answer, 0.01)
    assert flow.claim("waiter", 0, 0).reply == "wait_credit"
    assert in_redis(role) == before, "a refusal changes nothing"
    client: Any = role.redis
    waiting = Background(lambda: flow.wait_for_wakeup(answer, LONG_SECONDS * 10))
    while not client.info("clients")["blocked_clients"]:
        assert waiting.runs
    role.flow.release("holder")
    waiting.result()
    assert flow.claim("waiter", 0, 0).granted


def test_claims_can_wait_before_anything_ever_woke(role: RunContext) -> None:
    workers = [SmallWorker(role, f"worker-{index}") for index in range(3)]
    answer = [worker.claim() for worker in workers][-1]
    assert (answer.reply, answer.wakeup) == ("wait_credit", "0-0")
    role.flow.release("worker-0")
    role.flow.wait_for_wakeup(answer, LONG_SECONDS * 10)
    assert workers[2].claim().granted


def test_run_has_exactly_the_documented_keys(role: RunContext, redis_server: RedisServer) -> None:
    """What `redis-cli --scan` shows of a run: keys of `RunKeys` and of its types, on the run's own prefix."""
    refused(role, redis_server)
    role.flow.drain("waiter")
    consume(role).publish()
    client: Any = role.redis
    found = {key.decode() for key in client.scan_iter(match="*") if role.run_id in key.decode()}
    keys = RunKeys(role.run_id)
    documented = {getattr(keys, name) for name in TYPES.keys() - {"bodies", "action_trace", "heartbeats"}}
    documented |= {*map(keys.heartbeats, BEATING)}
    assert found <= documented and all(key.startswith(f"stagecoach:{{{role.run_id}}}:") for key in documented)
    assert {keys.flow, keys.log, keys.claims, keys.board, keys.ledger, keys.wakeups, keys.produced} <= found
    assert {key: client.type(key).decode() for key in found} == {key: key_type(key) for key in found}


@pytest.mark.parametrize("name", NAMES)
def test_scripts_read_what_they_declare_and_set_no_globals(name: str, redis_client: redis.Redis) -> None:
    """With what it includes; another name would be nil in Lua, without an error."""
    found = source(name)
    arguments = {*found.args, *([found.many] if found.many else [])}
    assert set(re.findall(r"\bkeys\.(\w+)", found.text)) == set(found.keys)
    assert set(re.findall(r"\bargs\.(\w+)", found.text)) == arguments
    assert not arguments & set(found.keys), "a name could be either"
    assert redis_client.script_load(found.text) == found.sha
    assert not re.search(r"^function|KEYS\[|ARGV\[", found.text.partition("\n--")[2], re.MULTILINE)


def test_script_rejects_missing_and_extra_arguments(redis_client: redis.Redis) -> None:
    take_over = Script(redis_client, RunKeys("run"), "take_over")
    with pytest.raises(TypeError, match="lacks its argument 'owner'"):
        take_over(seen=0, at_least=0, memory="")
    with pytest.raises(TypeError, match="no argument epoch"):
        take_over(seen=0, at_least=0, memory="", owner="", epoch=1)
