"""Claims, credit, registration, epochs and states, one promise at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from shared.errors import RunNotFound, WorkerSuperseded
from shared.experience_log import ExperienceLog
from shared.flow import Claim, Flow
from shared.redis_keys import RunKeys
from shared.role import Role
from tests.conftest import MakeRole, RedisServer, create_flow
from tests.trainer_node.test_intake import SmallWorker, begin, in_redis, small_config

LONG_SECONDS = 60.0
"""A wait that only a wake-up ends in time."""


@pytest.fixture
def role(make_role: MakeRole) -> Role:
    """K = 2, L = 0: two claims for each version."""
    return make_role(small_config())


def test_a_run_is_created_once_and_then_left_alone(role: Role) -> None:
    before = role.flow.read()
    assert (before.state, before.version, before.epoch, before.claimed, before.consumed) == ("running", -1, 0, 0, 0)
    assert (before.window, before.desired_workers, before.config_hash) == (2, 2, role.config.hash())
    role.flow.set_desired_workers(5)
    assert create_flow(role) is False
    assert role.flow.read().desired_workers == 5


def test_orders_stand_in_the_flow_and_a_decision_does_not_undo_one(role: Role) -> None:
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


def test_a_flow_of_before_there_was_scaling_reads_as_fixed(role: Role) -> None:
    role.redis.hdel(RunKeys(role.run_id).flow, "scaling", "min_workers", "max_workers")
    state = role.flow.read()
    assert (state.scaling, state.min_workers, state.max_workers, state.desired_workers) == ("fixed", 1, None, 2)
    assert not role.flow.set_desired_workers(4, "auto")


@pytest.mark.parametrize(
    "ask",
    [
        lambda flow, log: flow.read(),
        lambda flow, log: flow.register("worker-0"),
        lambda flow, log: flow.claim("worker-0", 0, 0),
        lambda flow, log: flow.take_over(),
        lambda flow, log: flow.set_state("stopping", "stopped"),
        lambda flow, log: flow.set_desired_workers(3),
        lambda flow, log: flow.set_scaling("auto", 1, None),
    ],
    ids=["read", "register", "claim", "take over", "set state", "scale", "scale auto"],
)
def test_an_unknown_run_is_named_and_nothing_is_written(
    redis_client: redis.Redis, unique_run_id: str, ask: Callable[[Flow, ExperienceLog], Any]
) -> None:
    with pytest.raises(RunNotFound, match=unique_run_id):
        ask(Flow(redis_client, unique_run_id), ExperienceLog(redis_client, unique_run_id))
    assert list(redis_client.scan_iter(match=RunKeys(unique_run_id).prefix + "*")) == []


def test_a_claim_is_granted_with_the_newest_version_and_the_trainers_epoch(role: Role) -> None:
    trainer = begin(role)
    answer = SmallWorker(role).claim()
    assert answer.granted and not answer.waiting
    assert (answer.word, answer.version, answer.epoch) == ("granted", 0, trainer.epoch)


@pytest.mark.parametrize(("updates_of", "lag"), [(1, 0), (2, 0), (4, 0), (1, 1), (2, 3)])
def test_claims_are_granted_up_to_the_window_and_then_wait_for_credit(
    make_role: MakeRole, updates_of: int, lag: int
) -> None:
    role = make_role(small_config(updates_of, lag))
    begin(role)
    workers = [SmallWorker(role, f"worker-{index}") for index in range((lag + 1) * updates_of + 2)]
    words = [worker.claim().word for worker in workers]
    assert words == ["granted"] * role.flow.read().window + ["wait_credit"] * 2
    assert role.flow.read().in_flight == (lag + 1) * updates_of


def test_lockstep_grants_exactly_k_for_each_version(role: Role) -> None:
    trainer, worker = begin(role), SmallWorker(role)
    for version in range(3):
        granted = []
        while (answer := worker.claim()).granted:
            granted.append(answer.version)
            assert worker.push(version=version) == "pushed"
        assert granted == [version, version]
        assert trainer.take() is not None
        assert worker.claim().waiting
        assert trainer.take() is not None
        assert worker.claim().waiting
        trainer.publish()


def test_asking_again_for_the_same_fragment_is_the_same_claim(role: Role) -> None:
    worker = SmallWorker(role)
    assert [worker.claim().word for _ in range(5)] == ["granted"] * 5
    assert role.flow.read().claimed == 1


def test_asking_again_prolongs_the_lease(role: Role) -> None:
    worker, keys = SmallWorker(role), RunKeys(role.run_id)
    worker.claim()
    client: Any = role.redis
    ((claim, end),) = client.zrange(keys.claims, 0, -1, withscores=True)
    client.zadd(keys.claims, {claim: end - 20_000})
    worker.claim()
    assert client.zscore(keys.claims, claim) >= end
    seconds, micros = client.time()
    assert 0 < end - (seconds * 1000 + micros // 1000) <= role.config.rollout.lease_seconds * 1000


def test_a_claim_whose_lease_has_run_out_goes_to_the_next_who_asks(role: Role) -> None:
    slow, other, third = (SmallWorker(role, f"worker-{index}") for index in range(3))
    assert slow.claim().granted and other.claim().granted and third.claim().word == "wait_credit"
    role.redis.zadd(RunKeys(role.run_id).claims, {"worker-0:0:0": 1})
    assert third.claim().granted and slow.claim().word == "wait_credit"
    assert role.flow.read().claimed == 2


def test_very_many_leases_may_run_out_at_once(role: Role) -> None:
    """As when a whole cluster is cut off; more than Lua can hand to one command."""
    begin(role)
    lapsed = {f"worker-{index}:0:0": 1 for index in range(10_000)}
    role.redis.zadd(RunKeys(role.run_id).claims, lapsed)
    role.redis.hincrby(RunKeys(role.run_id).flow, "claimed", len(lapsed))
    assert SmallWorker(role, "another").claim().granted
    assert role.flow.read().claimed == 1


def test_many_are_drained_with_one_wakeup(role: Role) -> None:
    names = [f"worker-{index}" for index in range(10_000)]
    keys = RunKeys(role.run_id)
    role.flow.drain(*names)
    assert role.redis.scard(keys.draining) == len(names)
    assert role.redis.xlen(keys.wakeups) == 1
    role.flow.drain(*names)
    role.flow.drain()
    assert role.redis.xlen(keys.wakeups) == 1


def test_a_short_lease_runs_out_by_the_servers_clock(make_role: MakeRole) -> None:
    role = make_role(small_config(fragments_per_update=1, lease_seconds=0.05))
    first, second = SmallWorker(role, "worker-0"), SmallWorker(role, "worker-1")
    assert first.claim().granted
    answer = second.claim()
    while answer.waiting:
        role.flow.wait_for_wakeup(answer, 0.02)
        answer = second.claim()
    assert answer.granted and role.flow.read().claimed == 1


def test_claims_wait_while_the_log_is_full_and_go_on_when_it_is_trimmed(make_role: MakeRole) -> None:
    role = make_role(small_config(max_policy_lag=3))
    trainer, worker = begin(role), SmallWorker(role)
    worker.work()
    worker.work()
    state = role.flow.read()
    role.redis.hset(RunKeys(role.run_id).flow, "max_log_bytes", str(state.log_bytes))
    answer = worker.claim()
    assert answer.word == "wait_log" and answer.waiting and not answer.granted
    assert trainer.take() is not None and trainer.take() is not None
    trainer.publish()
    assert worker.claim().word == "wait_log"
    worker.log.trim(trainer.epoch, trainer.intake.committed.position)
    assert worker.claim().granted


def test_a_claim_that_is_held_is_confirmed_even_when_the_log_is_full(make_role: MakeRole) -> None:
    role = make_role(small_config(max_policy_lag=3))
    first, second = SmallWorker(role, "worker-0"), SmallWorker(role, "worker-1")
    assert first.claim().granted
    second.work()
    role.redis.hset(RunKeys(role.run_id).flow, "max_log_bytes", "1")
    assert first.claim().granted and second.claim().word == "wait_log"


def test_an_older_incarnation_is_superseded_and_its_claim_given_back(role: Role) -> None:
    old = SmallWorker(role)
    assert old.claim().granted
    new = SmallWorker(role)
    assert (old.incarnation, new.incarnation) == (0, 1)
    with pytest.raises(WorkerSuperseded, match=r"worker-0.*newer incarnation than 0"):
        old.claim()
    assert role.flow.read().claimed == 0
    assert new.claim().granted


def test_a_worker_that_a_redis_set_back_in_time_does_not_know_works_on_and_is_known_again(role: Role) -> None:
    assert role.flow.claim("worker-9", 3, 7).granted
    with pytest.raises(WorkerSuperseded):
        role.flow.claim("worker-9", 2, 0)
    assert role.flow.register("worker-9") == (4, 0)


def test_a_worker_gets_no_incarnation_again_that_it_had(role: Role) -> None:
    assert [role.flow.register("worker-0")[0], role.flow.register("worker-0", 5)[0]] == [0, 5]
    assert [role.flow.register("worker-0", 2)[0], role.flow.register("worker-0")[0]] == [6, 7]


def test_registering_gives_back_only_the_workers_own_claims(role: Role) -> None:
    one, ten = SmallWorker(role, "worker-1"), SmallWorker(role, "worker-10")
    assert one.claim().granted and ten.claim().granted
    SmallWorker(role, "worker-1")
    assert role.flow.read().claimed == 1
    assert role.flow.release("worker-1") == 0
    assert role.flow.release("worker-10") == 1
    assert role.flow.read().claimed == 0


def test_release_gives_back_all_claims_once(role: Role) -> None:
    for index in range(2):
        assert SmallWorker(role, f"worker-{index}").claim().granted
    assert (role.flow.release(), role.flow.release()) == (2, 0)
    assert role.flow.read().claimed == 0


def test_an_incarnation_gives_back_its_own_claims_and_not_its_successors(role: Role) -> None:
    old = SmallWorker(role)
    new = SmallWorker(role)
    assert new.claim().granted
    assert role.flow.release(f"worker-0:{old.incarnation}") == 0
    assert role.flow.release(f"worker-0:{new.incarnation}") == 1


def test_a_drained_worker_is_told_however_often_it_registers_until_it_is_undrained(role: Role) -> None:
    worker, other = SmallWorker(role), SmallWorker(role, "worker-1")
    assert worker.claim().granted
    role.flow.drain("worker-0")
    assert worker.push() == "pushed"
    assert worker.claim().word == "drain" and not worker.claim().waiting
    assert other.claim().granted
    again = SmallWorker(role)
    assert again.claim().word == "drain"
    role.flow.undrain("worker-0")
    assert again.claim().word == "wait_credit"


@pytest.mark.parametrize("state", ["stopping", "finished"])
def test_no_claim_once_the_run_is_ending(role: Role, state: str) -> None:
    worker = SmallWorker(role)
    assert role.flow.set_state(state, "stopped")
    answer = worker.claim()
    assert answer.word == state and not answer.granted and not answer.waiting
    assert (role.flow.read().state, role.flow.read().reason, role.flow.read().claimed) == (state, "stopped", 0)


def test_a_state_changes_only_from_the_expected_one(role: Role) -> None:
    assert role.flow.set_state("stopping", "solved", expected="running")
    assert not role.flow.set_state("stopping", "stopped", expected="running")
    assert role.flow.read().reason == "solved"


def test_taking_over_fences_every_older_trainer(role: Role) -> None:
    first, second = role.flow.take_over(), role.flow.take_over()
    assert (first, second) == (1, 2)
    assert [role.flow.holds(epoch) for epoch in (0, first, second)] == [False, False, True]


def test_an_epoch_that_a_redis_set_back_in_time_has_forgotten_is_not_given_again(role: Role) -> None:
    """The trainer of epoch 5 lives: it is not fenced, and whoever takes over knows of it from the store's pointer."""
    assert role.flow.take_over() == 1
    assert role.flow.holds(5)
    assert [role.flow.take_over(5), role.flow.take_over(2)] == [6, 7]
    assert not role.flow.holds(5)


def events_that_wake() -> dict[str, Callable[[Role], Any]]:
    """Everything after which a waiting worker may get another answer."""
    return {
        "release": lambda role: role.flow.release("holder"),
        "register": lambda role: role.flow.register("holder"),
        "drain": lambda role: role.flow.drain("waiter"),
        "state": lambda role: role.flow.set_state("stopping", "stopped"),
        "publish": consume_and_publish,
        "drop": drop_one,
    }


def consume_and_publish(role: Role) -> None:
    """Another trainer does all there is to do."""
    trainer = begin(role)
    while trainer.take() is not None:
        pass
    trainer.publish()


def drop_one(role: Role) -> None:
    """The bad fragment in the log is found."""
    trainer = begin(role)
    while trainer.take() is not None:
        pass


def refused(role: Role, server: RedisServer) -> tuple[Flow, Claim]:
    """A waiter without credit: one claim is held, one stands behind a bad fragment in the log."""
    begin(role)
    holder, bad, waiter = (SmallWorker(role, name) for name in ("holder", "bad", "waiter"))
    assert holder.claim().granted
    bad.work(blob=b"bad")
    answer = waiter.claim()
    assert answer.word == "wait_credit"
    return Flow(server.client(), role.run_id), answer


@pytest.mark.parametrize("event", sorted(events_that_wake()))
def test_no_wakeup_is_lost_between_the_refusal_and_the_wait(role: Role, redis_server: RedisServer, event: str) -> None:
    """The event comes before the wait begins: the wait must not sleep through it (past this test's time limit)."""
    flow, answer = refused(role, redis_server)
    events_that_wake()[event](role)
    flow.wait_for_wakeup(answer, LONG_SECONDS * 10)
    assert flow.claim("waiter", 0, 0).word != "wait_credit"


def test_a_waiting_worker_wakes_when_credit_comes(role: Role, redis_server: RedisServer) -> None:
    flow, answer = refused(role, redis_server)
    found: list[str] = []

    def wait() -> None:
        flow.wait_for_wakeup(answer, LONG_SECONDS * 10)
        found.append(flow.claim("waiter", 0, 0).word)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not blocked_clients(role):
        assert thread.is_alive()
    role.flow.release("holder")
    thread.join(LONG_SECONDS)
    assert found == ["granted"]


def blocked_clients(role: Role) -> int:
    """Clients of the server that wait for a stream."""
    info: Any = role.redis.info("clients")
    return int(info["blocked_clients"])


def test_a_wait_without_wakeup_ends(role: Role, redis_server: RedisServer) -> None:
    flow, answer = refused(role, redis_server)
    flow.wait_for_wakeup(answer, 0.01)
    assert flow.claim("waiter", 0, 0).word == "wait_credit"


def test_claims_can_wait_before_anything_ever_woke(role: Role) -> None:
    workers = [SmallWorker(role, f"worker-{index}") for index in range(3)]
    answer = [worker.claim() for worker in workers][-1]
    assert (answer.word, answer.wakeup) == ("wait_credit", "0-0")
    role.flow.release("worker-0")
    role.flow.wait_for_wakeup(answer, LONG_SECONDS * 10)
    assert workers[2].claim().granted


def test_refusals_change_nothing(role: Role) -> None:
    for index in range(2):
        assert SmallWorker(role, f"worker-{index}").claim().granted
    waiter = SmallWorker(role, "worker-2")
    before = in_redis(role)
    assert waiter.claim().waiting and waiter.claim().waiting
    assert in_redis(role) == before


def test_a_run_has_the_documented_keys_and_no_others(role: Role, redis_server: RedisServer) -> None:
    """What `redis-cli --scan` shows of a run: each key is a property of `RunKeys`, on the run's own prefix."""
    refused(role, redis_server)
    role.flow.drain("waiter")
    consume_and_publish(role)
    client: Any = role.redis
    found = {key.decode() for key in client.scan_iter(match="*") if role.run_id in key.decode()}
    keys = RunKeys(role.run_id)
    names = [name for name, item in vars(RunKeys).items() if isinstance(item, property) and name != "prefix"]
    documented = {getattr(keys, name) for name in names}
    assert found <= documented and all(key.startswith(f"stagecoach:{{{role.run_id}}}:") for key in documented)
    assert {keys.flow, keys.log, keys.claims, keys.board, keys.ledger, keys.wakeups, keys.produced} <= found
    assert len(documented) == len(names)
    kinds = {key: client.type(key).decode() for key in found}
    assert (kinds[keys.log], kinds[keys.flow], kinds[keys.claims], kinds[keys.ledger]) == (
        "stream",
        "hash",
        "zset",
        "hash",
    )
