"""Faults of Redis and of the way to it: a run rides each out, its ledger balances, and where no order is lost its
weights are those of the run that nothing disturbed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import RedisUnavailable
from stagecoach.shared.protocol.events import emit, read_evaluations, record_evaluation
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Heartbeat, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.protocol.scripts import INCARNATIONS_KEPT, source
from stagecoach.trainer_node.state.log_consumer import RedisAccounting
from tests.support.processes.waiting import eventually, meanwhile
from tests.support.runs.fault_run import (
    UPDATES,
    FaultRun,
    Witness,
    as_if_nothing_had_been,
    new_worker,
    replica_of,
    run_beside,
    wait_until_replicated,
)
from tests.support.runs.game import Game, asks, balanced, push_garbage, small
from tests.support.services.own_redis import OwnRedis
from tests.support.suite.groups import some_quick
from tests.support.suite.speed import stretched

# The server goes away and comes back with all it had


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> tuple[FaultRun, list[OwnRedis]]:
    """A run, and those of its servers that the test's parameter names."""
    run: FaultRun = request.getfixturevalue("place" if request.param == "Redis" else "sharded")
    return run, [run.redis] if request.param == "Redis" else run.shards


each_kind = pytest.mark.parametrize("servers", ["Redis", "shards"], indirect=True)


@each_kind
@pytest.mark.parametrize("version", [0, 3])
def test_killed_server_returns(servers: tuple[FaultRun, list[OwnRedis]], undisturbed: str, version: int) -> None:
    place, failing = servers
    game = place.game()
    game.play_to(version)
    game.worker.step(0)
    for server in failing:
        server.kill()

    def come_back() -> None:
        if failing != [place.redis]:
            eventually(lambda: game.worker.heartbeat.waits)
        time.sleep(0.5)
        for server in failing:
            server.start()

    with meanwhile(come_back):
        game.play_to(version + 2)
    as_if_nothing_had_been(game, undisturbed)
    if failing == [place.redis]:
        assert "Redis came back" in game.events("trainer")
    else:
        assert game.worker.heartbeat.waited_seconds["a Redis shard"] > 0


@each_kind
def test_servers_are_killed_again_and_again(servers: tuple[FaultRun, list[OwnRedis]], undisturbed: str) -> None:
    place, failing = servers
    game = place.game()

    def kills() -> None:
        for turn in range(4 if failing == [place.redis] else 6):
            time.sleep(0.1)
            failing[turn % len(failing)].restart(0.1)

    run_beside(game, kills)
    assert game.policy_hash() == undisturbed
    assert game.finished()["ledger"] == balanced(game)
    assert balanced(game)["total"]["consumed"]["fragments"] == 2 * UPDATES


def test_forgotten_scripts_are_loaded_again_in_one_command(place: FaultRun) -> None:
    """Else it could be gone again between being given a script and running it."""
    game = place.game()
    place.redis.command("SCRIPT", "FLUSH")
    before = place.redis.command("INFO", "commandstats").get("cmdstat_script|load", {"calls": 0})["calls"]
    game.finish()
    assert place.redis.command("INFO", "commandstats").get("cmdstat_script|load", {"calls": 0})["calls"] == before
    balanced(game)


def test_redis_that_loads_its_data_is_waited_for(tmp_path: Path, undisturbed: str) -> None:
    with closing(FaultRun(tmp_path, settings={"key-load-delay": 20000})) as place:
        game = place.game()
        game.play_to(2)
        with place.redis.client() as client:
            noise = random.Random(0)
            client.mset({f"other-{number}": noise.randbytes(40_000) for number in range(400)})
            client.bgrewriteaof()
            eventually(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0)
        place.redis.kill()
        place.redis.start(wait=False)
        refusals = []

        def answers() -> bool:
            try:
                place.redis.command("HGETALL", "x")
                return True
            except (redis.BusyLoadingError, redis.ConnectionError) as error:
                refusals.append(type(error))
                return False

        with meanwhile(lambda: eventually(answers)):
            game.play_to(4)
        assert redis.BusyLoadingError in refusals
        as_if_nothing_had_been(game, undisturbed)


def test_replica_takes_over(place: FaultRun, undisturbed: str) -> None:
    """The way leads to it before it is promoted: until then it refuses to write, and that is waited for."""
    game = place.game()
    game.play_to(2)
    with replica_of(place, place.redis.port) as replica:
        game.play_to(3)
        game.worker.step(0)
        wait_until_replicated(replica, place)
        place.redis.kill()
        place.proxy.retarget(replica.port)

        def promote() -> None:
            time.sleep(0.5)
            replica.command("REPLICAOF", "NO", "ONE")

        with meanwhile(promote):
            as_if_nothing_had_been(game, undisturbed)
        assert replica.command("ROLE")[0] == b"master"


# The way to it fails

STEPS = ["claim", "push", "publish", "drop", "trim", "heartbeat", "write", "check_epoch", "set_state", "release",
         "take_over", "fast_forward", "accounting", "register"]  # fmt: skip


def sha(step: str) -> bytes:
    return source(step).sha.encode()


@pytest.mark.parametrize("after", some_quick([0, 1, 5], 1))
@pytest.mark.parametrize("step", STEPS)
def test_lost_reply_is_requested_without_a_second_effect(place: FaultRun, step: str, after: int) -> None:
    """Each step has been done when its answer is lost; then it is sent again."""
    game = place.game()
    game.play_to(1)
    game.crash()
    push_garbage(game)
    place.proxy.cut_reply(after, sha(step))
    if step == "register":
        game.worker = Worker(game.open(), 0)
        game.worker.start()
    game.restart()
    game.play_to(2)
    if step == "fast_forward":
        game.trainer.recovery.redis_came_back()
    game.finish()
    game.worker.stop("the end")
    assert not place.proxy.armed, "it was cut"
    eventually(lambda: place.proxy.cuts > 0)
    total = balanced(game)["total"]
    assert total["consumed"] == {"fragments": 2 * UPDATES, "transitions": 2 * UPDATES * 32}
    assert total["dropped"] == {"undecodable": {"fragments": 1, "transitions": 32}}
    assert (game.role.flow.read().version, game.board_version()) == (UPDATES, UPDATES)
    assert 0 <= game.role.flow.read().in_flight <= game.role.flow.read().window
    assert game.role.flow.read().epoch <= 3, "a take-over that is sent again is one more, and harmless"


@pytest.mark.parametrize("step", ["claim", "push", "publish", "trim"])
@pytest.mark.parametrize("after", some_quick([1, 60, 200], 60))
def test_cut_request_is_sent_again(place: FaultRun, undisturbed: str, step: str, after: int) -> None:
    game = place.game()
    game.play_to(1)
    place.proxy.cut_request(after, sha(step))
    as_if_nothing_had_been(game, undisturbed)
    assert not place.proxy.armed


@pytest.mark.parametrize("fault", ["refuse", "black_hole"])
def test_error_names_redis_after_retry_seconds(place: FaultRun, fault: str) -> None:
    """The clock decides, not the number of tries: a black hole takes a timeout for each."""
    game = place.game(place.config(redis={"timeout_seconds": 2, "retry_seconds": 3}))
    getattr(place.proxy, fault)()
    where = rf"Redis at 127\.0\.0\.1:{place.proxy.port} could not be used for [2-9]\.\d s, \d+ tries: "
    with pytest.raises((redis.ConnectionError, redis.TimeoutError), match=where):
        game.trainer.step(0)
    with pytest.raises(RedisUnavailable, match=r"does not answer .*could not be used for"):
        game.open()
    place.proxy.heal()
    game.replace_trainer()
    game.finish()
    balanced(game)


# Its memory is full


def fill(place: FaultRun, room: int = 0) -> None:
    used = int(place.redis.command("INFO", "memory")["used_memory"])
    place.redis.command("CONFIG", "SET", "maxmemory", max(1, used + room) if room else 1)


def empty(place: FaultRun) -> None:
    place.redis.command("CONFIG", "SET", "maxmemory", 0)


def test_full_memory_delays_claims_alone(place: FaultRun) -> None:
    game = place.game()
    game.play_to(2)
    flow, worker = game.role.flow, game.worker
    held = flow.claim(worker.id, worker.incarnation, worker.claims.seq)
    before = flow.read()
    fill(place)
    with pytest.raises(redis.OutOfMemoryError), game.role.redis as client:
        client.set("another", "x")
    assert asks(game) == "granted", "it is held already"
    assert flow.claim("worker-9", 0, 0).reply == "wait_memory"
    state = flow.read()
    assert (state.claimed, state.memory_full) == (before.claimed, True)
    assert game.role.redis.zcard(RunKeys(game.role.run_id).claims) == 1
    assert worker.step(0) == "pushed" and held.granted, "what has been granted comes in"
    assert worker.step(0) == "waited"
    assert game.trainer.step(0) == "waited"
    emit(game.role.redis, game.role.run_id, "worker", "an event")
    assert "an event" in game.events("worker")
    record_evaluation(game.role.redis, game.role.run_id, "1_Step-8.ckpt", {"version": 1, "mean_return": 2.0})
    assert read_evaluations(game.role.redis, game.role.run_id)["1_Step-8.ckpt"]["mean_return"] == 2.0
    beat = Heartbeat(game.role.redis, game.role.run_id, "worker", "worker-8")
    beat.start()
    assert "worker-8" in {found.id for found in read_heartbeats(game.role.redis, game.role.run_id)}
    beat.stop("enough")
    flow.set_desired_workers(7)
    flow.drain("worker-5")
    flow.set_bounds(20, 1 << 21)
    assert (flow.read().desired_workers, flow.read().max_log_bytes) == (7, 1 << 21)
    assert flow.register("worker-6") == (0, 1)
    assert flow.release("worker-6") == 0
    assert flow.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING, epoch=1)
    assert flow.take_over() == 2
    balanced(game)
    empty(place)


@pytest.mark.parametrize("max_policy_lag", [0, 1])
def test_checkpoints_free_a_small_memory(place: FaultRun, max_policy_lag: int) -> None:
    """No checkpoint would be due by the config; nobody dies, and with L = 0 the weights are the undisturbed run's."""
    config = small(
        rollout={"fragment_steps": 128, "fragments_per_update": 2, "max_policy_lag": max_policy_lag},
        checkpoint={"every": "1000 updates"},
        stop_at={"updates": 8},
        redis={"timeout_seconds": 2, "retry_seconds": 60},
    )
    hashes = []
    for room in (0, 70_000):
        game = place.game(config)
        game.play_to(1)
        if room:
            fill(place, room)
        words, deadline = [], time.monotonic() + stretched(100)
        while game.trainer.step(0.0) != "ended" and time.monotonic() < deadline:
            words.append(asks(game))
            game.worker.step(0)
        assert ("wait_memory" in words) == bool(room)
        game.trainer.finish("exhausted")
        assert game.finished()["counters"]["train"]["updates"] == 8
        total = balanced(game)["total"]
        assert total["consumed"]["fragments"] == 16 and "lost" not in total["dropped"]
        hashes.append(game.policy_hash())
        game.worker.stop("the end")
    assert max_policy_lag > 0 or hashes[0] == hashes[1]
    empty(place)


# It comes back with less than it had


def no_fragment_twice(game: Game) -> dict[str, Any]:
    """The end of a run whose Redis lost something: the goal, the bound, balanced accounting, and each version once."""
    game.finish()
    accounting, state = balanced(game), game.role.flow.read()
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    assert 0 <= state.in_flight <= state.window
    assert state.version == game.board_version() >= UPDATES
    return accounting["total"]  # type: ignore[no-any-return]


LOSSES: dict[str, list[Callable[[Game], object]]] = {
    "claim": [asks],
    "push": [lambda game: game.worker.step(0)],
    "pushes of an update": [lambda game: game.worker.step(0)] * 2,
    "versions": [lambda game: game.play_to(5), lambda game: game.worker.step(0)],
    "checkpoint": [lambda game: game.play_to(4), Game.durable],
    "epoch": [Game.crash, Game.restart, lambda game: game.play_to(4), Game.durable],
    "life": [new_worker, lambda game: game.play_to(4)],
}
"""Steps since the file was written with which Redis comes back."""


@pytest.mark.parametrize("who_dies", some_quick(["nobody", "trainer", "worker", "both"], "both"))
@pytest.mark.parametrize("what_is_lost", LOSSES)
def test_redis_comes_back_with_an_older_file(
    place: FaultRun, what_is_lost: str, who_dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = place.game()
    witness = Witness(game, monkeypatch)
    game.play_to(3, durable=True)
    past = place.redis.keep()
    for happens in LOSSES[what_is_lost]:
        happens(game)
        if happens == Game.restart:
            witness.restarted()
    if who_dies in ("trainer", "both"):
        game.crash()
    place.redis.roll_back(past)
    if who_dies in ("worker", "both"):
        new_worker(game)
    if who_dies in ("trainer", "both"):
        game.restart()
        witness.restarted()
    no_fragment_twice(game)
    assert len(witness.learned) == 2 * UPDATES


def test_gap_of_a_worker_is_counted_as_lost_at_once(place: FaultRun) -> None:
    game = place.game()
    game.play_to(3)
    past = place.redis.keep()
    game.worker.step(0)
    game.worker.step(0)
    place.redis.roll_back(past)
    assert game.worker.step(0) == "pushed"
    lines = read_accounting(game.role.redis, game.role.run_id)
    assert lines["total"].balances and lines["total"].in_flight.fragments == 3
    assert game.trainer.step(0) == "waited"
    total = no_fragment_twice(game)
    assert total["dropped"] == {"lost": {"fragments": 2, "transitions": 64}}


@pytest.mark.parametrize("step", ["publish", "drop"])
def test_fragments_lost_during_an_outage_are_unaccounted(
    place: FaultRun, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis goes between the trainer's look and its write; the worker has died too, so no gap will ever show."""
    game = place.game()
    game.play_to(3)
    past = place.redis.keep()
    game.worker.step(0)
    if step == "publish":
        game.worker.step(0)
    else:
        push_garbage(game)
    happened: list[bool] = []
    of, name = {"publish": (PolicyBoard, "publish"), "drop": (RedisAccounting, "commit_drop")}[step]
    write = getattr(of, name)

    def at_the_worst_moment(*arguments: Any, **options: Any) -> Any:
        if not happened:
            happened.append(True)
            place.redis.roll_back(past)
        return write(*arguments, **options)

    monkeypatch.setattr(of, name, at_the_worst_moment)
    assert game.trainer.step(0) == ("updated" if step == "publish" else "waited")
    assert happened
    assert all(line.balances for line in read_accounting(game.role.redis, game.role.run_id).values())
    new_worker(game)
    no_fragment_twice(game)


def test_waiting_trainer_detects_a_lost_version(place: FaultRun) -> None:
    """Else all claims would stand for fragments that it has learned, and everybody would wait for ever."""
    game = place.game(place.config(stop_at={"updates": 1000}))
    game.play_to(2)
    game.worker.step(0)
    game.worker.step(0)
    past = place.redis.keep()
    reasons: list[str] = []

    def train() -> None:
        while (word := game.trainer.step(1.0)) != "ended":
            reasons.append(word)
        reasons.append(game.trainer.finish("stopped"))

    with meanwhile(train):
        eventually(lambda: game.role.flow.read().version == 3)
        place.redis.roll_back(past)
        eventually(lambda: game.role.flow.read().version == 3)
        for _ in range(4):
            game.worker.step(5.0)
        eventually(lambda: game.role.flow.read().version >= 5)
        game.role.flow.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)
    assert reasons[-1] == "stopped"
    balanced(game)


def test_lost_takeover_is_restored_and_old_trainer_refused(place: FaultRun) -> None:
    game = place.game()
    game.play_to(2, durable=True)
    past, old = place.redis.keep(), game.trainer
    game.restart()
    place.redis.roll_back(past)
    game.trainer.step(0)
    assert game.role.flow.read().epoch == 2
    with pytest.raises(Exception, match="has taken over"):
        old.step(0)
    old.incarnation.closing.close()
    old.incarnation.heartbeat.stop("", last_beat=False)
    no_fragment_twice(game)


def test_new_trainer_skips_epochs_that_redis_forgot(place: FaultRun) -> None:
    game = place.game()
    game.play_to(2)
    past = place.redis.keep()
    for _ in range(2):
        game.replace_trainer()
        game.durable()
    game.crash()
    place.redis.roll_back(past)
    assert game.role.flow.read().epoch == 1
    game.restart()
    assert game.role.flow.read().epoch == 4
    no_fragment_twice(game)


def test_log_ids_grow_past_what_was_read_when_clock_steps_back(place: FaultRun) -> None:
    """A new master's clock may be slower: what came before the trainer's position would never be read."""
    game = place.game()
    game.play_to(2, durable=True)
    ahead = f"{int(time.time() * 1000) + 3_600_000}-0"
    log, past = RunKeys(game.role.run_id).log, place.redis.keep()
    place.redis.command("XSETID", log, ahead)
    game.play_to(3)
    place.redis.roll_back(past)
    before = len(ExperienceLog(game.role.redis, game.role.run_id))
    game.trainer.recovery.redis_came_back()
    assert len(ExperienceLog(game.role.redis, game.role.run_id)) == before
    game.worker.step(0)
    ids: Any = game.role.redis.xrevrange(log, count=1)
    assert int(ids[0][0].split(b"-")[0]) >= int(ahead.split("-")[0])
    no_fragment_twice(game)


def test_state_of_old_incarnations_stays_bounded(place: FaultRun) -> None:
    game = place.game()
    game.play_to(1)
    first, seq = game.worker, game.worker.claims.seq
    claim = game.role.flow.claim(first.id, first.incarnation, seq)
    for life in range(1, 60):
        incarnation, _ = game.role.flow.register(first.id, at_least=3 * (life // 20) + life)
        assert game.role.flow.claim(first.id, incarnation, 0).granted
        assert game.role.log().push(first.id, incarnation, 0, claim.epoch, 32, b"garbage") == "pushed"
        game.trainer.step(0)
    kept = game.role.redis.hlen(RunKeys(game.role.run_id).pushed)
    assert kept <= INCARNATIONS_KEPT
    assert game.role.log().push(first.id, 0, seq, claim.epoch, 32, b"from a grave") == "superseded"
    assert balanced(game)["total"]["produced"]["fragments"] == 2 + 59
