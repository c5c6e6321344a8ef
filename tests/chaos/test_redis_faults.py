"""Faults of Redis and of the way to it: a run rides each out, its books balance, and where no order is lost its weights
are those of the run that nothing disturbed.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from rollout_worker.worker import Worker
from shared import scripts
from shared.config import Config
from shared.errors import RedisUnavailable
from shared.events import emit, read_evaluations, record_evaluation
from shared.experience_log import ExperienceLog
from shared.heartbeat import Heartbeat, read_heartbeats
from shared.ledger import read_books
from shared.redis_keys import RunKeys
from tests.chaos.fault_proxy import FaultProxy
from tests.chaos.own_redis import OwnRedis
from tests.support.speed import stretched
from tests.trainer_node.game import Game, balanced, make_game, small

UPDATES = 6


class Place:
    """A Redis of the test's own, a proxy before it, and the games played through it."""

    def __init__(self, folder: Path, **settings: str | int) -> None:
        self.folder = folder
        self.redis = OwnRedis(folder / "redis", settings=settings)
        self.proxy = FaultProxy(self.redis.port)
        self._games: list[Game] = []

    def game(self, config: Config | None = None) -> Game:
        """A new run, reached through the proxy."""
        server = self.redis.through(self.proxy.port)
        self._games.append(make_game(server, self.folder, config or patient()))
        return self._games[-1]

    def close(self) -> None:
        """Ends all of it; whoever says good-bye shall not wait for a Redis that a test has killed."""
        self.proxy.heal()
        if not self.redis.runs:
            self.redis.start()
        self.proxy.retarget(self.redis.port)
        for game in self._games:
            game.end()
        self.proxy.close()
        self.redis.kill()


def patient(**sections: Any) -> Config:
    """A small run that gives up a silent connection soon, and Redis late."""
    return small(**({"redis": {"timeout_seconds": 2, "retry_seconds": 60}} | sections))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run without any fault."""
    found = Place(tmp_path_factory.mktemp("undisturbed"))
    try:
        return found.game().finish()
    finally:
        found.close()


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """`act` happens in another thread while the body runs; what it raises is raised at the end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    assert not thread.is_alive()
    if failures:
        raise failures[0]


def as_if_nothing_had_been(game: Game, undisturbed: str, incarnation: int = 0) -> None:
    """The goal is reached, the books balance, nothing was lost or learnt twice, and the weights are the same."""
    game.finish()
    lines = balanced(game)
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    assert lines["total"]["consumed"]["fragments"] == 2 * UPDATES
    assert "lost" not in lines["total"]["dropped"] and "duplicate" not in lines["total"]["dropped"]
    assert game.worker.incarnation == incarnation
    assert game.policy_hash() == undisturbed
    state = game.role.flow.read()
    assert 0 <= state.in_flight <= state.window


# The server goes away and comes back with all it had


@pytest.mark.parametrize("version", [0, 3])
def test_redis_is_killed_and_restarted_in_the_middle(place: Place, undisturbed: str, version: int) -> None:
    game = place.game()
    game.play_to(version)
    game.worker.step(0)
    place.redis.kill()

    def come_back() -> None:
        time.sleep(0.5)
        place.redis.start()

    with meanwhile(come_back):
        game.play_to(version + 2)
    as_if_nothing_had_been(game, undisturbed)
    assert "Redis came back" in game.events("trainer")


def test_redis_is_killed_again_and_again_while_the_roles_run(place: Place, undisturbed: str) -> None:
    game = place.game(patient(rollout={"fragment_steps": 8, "fragments_per_update": 2, "wait_deadline_seconds": 60}))

    def kills() -> None:
        for _ in range(4):
            time.sleep(0.15)
            place.redis.restart(0.1)

    def act() -> None:
        while not game.worker.step(0.2).startswith("end:"):
            pass

    with meanwhile(kills), meanwhile(act):
        while game.trainer.step(0.2) != "ended":
            pass
        game.trainer.finish("exhausted")
    assert game.policy_hash() == undisturbed
    assert game.finished()["ledger"] == balanced(game)
    assert balanced(game)["total"]["consumed"]["fragments"] == 2 * UPDATES


def test_a_redis_that_has_forgotten_the_scripts_gets_them_again_in_one_command(place: Place) -> None:
    """Else it could be gone again between being given a script and running it."""
    game = place.game()
    place.redis.command("SCRIPT", "FLUSH")
    before = place.redis.command("INFO", "commandstats").get("cmdstat_script|load", {"calls": 0})["calls"]
    game.finish()
    assert place.redis.command("INFO", "commandstats").get("cmdstat_script|load", {"calls": 0})["calls"] == before
    balanced(game)


def test_redis_that_loads_its_data_is_waited_for(tmp_path: Path, undisturbed: str) -> None:
    place = Place(tmp_path, **{"key-load-delay": 20000})
    try:
        game = place.game()
        game.play_to(2)
        with place.redis.client() as client:
            noise = random.Random(0)
            client.mset({f"other-{number}": noise.randbytes(40_000) for number in range(400)})
            client.bgrewriteaof()
            wait_until(lambda: client.info("persistence")["aof_rewrite_in_progress"] == 0)
        place.redis.kill()
        place.redis.start(wait=False)
        refusals = []

        def look() -> None:
            deadline = time.monotonic() + stretched(60)
            while time.monotonic() < deadline:
                try:
                    place.redis.command("HGETALL", "x")
                    return
                except (redis.BusyLoadingError, redis.ConnectionError) as error:
                    refusals.append(type(error))
                time.sleep(0.02)

        with meanwhile(look):
            game.play_to(4)
        assert redis.BusyLoadingError in refusals
        as_if_nothing_had_been(game, undisturbed)
    finally:
        place.close()


def replica_of(place: Place, port: int) -> OwnRedis:
    """A replica that has all of the primary that is behind `port`."""
    replica = OwnRedis(place.folder / "replica", place.redis.password, {"replicaof": f"127.0.0.1 {port}"})
    wait_until(lambda: link(replica)["master_link_status"] == "up")
    return replica


def link(server: OwnRedis) -> dict[str, Any]:
    with server.client() as client:
        return dict(client.info("replication"))


def wait_until(done: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + stretched(seconds)
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_replica_takes_over(place: Place, undisturbed: str) -> None:
    """The way leads to it before it is promoted: until then it refuses to write, and that is waited for."""
    game = place.game()
    game.play_to(2)
    replica = replica_of(place, place.redis.port)
    try:
        game.play_to(3)
        game.worker.step(0)
        wait_until(lambda: link(replica)["slave_repl_offset"] == link(place.redis)["master_repl_offset"])
        place.redis.kill()
        place.proxy.retarget(replica.port)

        def promote() -> None:
            time.sleep(0.5)
            replica.command("REPLICAOF", "NO", "ONE")

        with meanwhile(promote):
            as_if_nothing_had_been(game, undisturbed)
        assert replica.command("ROLE")[0] == b"master"
    finally:
        place.proxy.cut()
        replica.kill()


def test_a_replica_that_was_behind_takes_over_and_what_it_never_had_is_counted_as_lost(place: Place) -> None:
    game = place.game()
    game.play_to(2)
    with FaultProxy(place.redis.port) as between:
        replica = replica_of(place, between.port)
        try:
            wait_until(lambda: link(replica)["slave_repl_offset"] == link(place.redis)["master_repl_offset"])
            between.black_hole()
            game.play_to(4)
            game.worker.step(0)
            place.redis.kill()
            replica.command("REPLICAOF", "NO", "ONE")
            place.proxy.retarget(replica.port)
            game.finish()
            state = game.role.flow.read()
            assert (state.version, game.board_version()) == (UPDATES, UPDATES) and 0 <= state.in_flight <= state.window
            total = balanced(game)["total"]
            assert total["dropped"] == {"lost": {"fragments": 1, "transitions": 32}}
            assert total["consumed"]["fragments"] == 2 * UPDATES
        finally:
            place.proxy.cut()
            replica.kill()


# The way to it fails

STEPS = ["CLAIM", "PUSH", "PUBLISH", "DROP", "TRIM", "HEARTBEAT", "WRITE", "CHECK_EPOCH", "SET_STATE", "RELEASE",
         "TAKE_OVER", "SET_FORWARD", "IN_FLIGHT", "REGISTER"]  # fmt: skip


def sha(step: str) -> bytes:
    return hashlib.sha1(getattr(scripts, step).encode()).hexdigest().encode()


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("step", STEPS)
def test_a_reply_that_is_cut_is_asked_for_again_and_nothing_happens_twice(place: Place, step: str, after: int) -> None:
    """Each step has been done when its answer is lost; then it is sent again."""
    game = place.game()
    game.play_to(1)
    game.crash()
    push_garbage(game)
    place.proxy.cut_reply(after, sha(step))
    if step == "REGISTER":
        game.worker = Worker(game._open(), 0)
        game.worker.start()
    game.restart()
    game.play_to(2)
    if step == "SET_FORWARD":
        game.trainer._redis_came_back()
    game.finish()
    game.worker.stop("the end")
    assert not place.proxy.armed, "it was cut"
    wait_until(lambda: place.proxy.cuts > 0)
    total = balanced(game)["total"]
    assert total["consumed"] == {"fragments": 2 * UPDATES, "transitions": 2 * UPDATES * 32}
    assert total["dropped"] == {"undecodable": {"fragments": 1, "transitions": 32}}
    assert (game.role.flow.read().version, game.board_version()) == (UPDATES, UPDATES)
    assert 0 <= game.role.flow.read().in_flight <= game.role.flow.read().window
    assert game.role.flow.read().epoch <= 3, "a take-over that is sent again is one more, and harmless"


def push_garbage(game: Game) -> None:
    """The worker's next fragment is none: the trainer will drop it."""
    worker = game.worker
    claim = game.role.flow.claim(worker.id, worker.incarnation, worker._seq)
    assert claim.granted
    assert worker._log.push(worker.id, worker.incarnation, worker._seq, claim.epoch, 32, b"garbage") == "pushed"
    worker._seq += 1


@pytest.mark.parametrize("step", ["CLAIM", "PUSH", "PUBLISH", "TRIM"])
@pytest.mark.parametrize("after", [1, 60, 200])
def test_a_request_that_is_cut_before_it_arrives_is_sent_again(
    place: Place, undisturbed: str, step: str, after: int
) -> None:
    game = place.game()
    game.play_to(1)
    place.proxy.cut_request(after, sha(step))
    as_if_nothing_had_been(game, undisturbed)
    assert not place.proxy.armed


def test_connections_that_are_cut_all_the_time(place: Place, undisturbed: str) -> None:
    game = place.game()
    over = threading.Event()

    def cut() -> None:
        while not over.wait(0.05):
            place.proxy.cut()

    with meanwhile(cut):
        try:
            as_if_nothing_had_been(game, undisturbed)
        finally:
            over.set()
    assert place.proxy.cuts > 3


@pytest.mark.parametrize("heals", [True, False])
def test_a_half_open_connection_is_given_up_and_made_anew(place: Place, undisturbed: str, heals: bool) -> None:
    """What was held back arrives late, or never."""
    game = place.game()
    game.play_to(2)
    place.proxy.black_hole()

    def later() -> None:
        time.sleep(2.5)
        if not heals:
            place.proxy.cut()
        place.proxy.heal()

    with meanwhile(later):
        as_if_nothing_had_been(game, undisturbed)


def test_a_server_that_is_stopped_and_continued(place: Place, undisturbed: str) -> None:
    game = place.game()
    game.play_to(2)
    place.redis.stopped(True)

    def later() -> None:
        time.sleep(2.5)
        place.redis.stopped(False)

    with meanwhile(later):
        as_if_nothing_had_been(game, undisturbed)


def test_a_slow_way(place: Place, undisturbed: str) -> None:
    game = place.game()
    place.proxy.delay(0.005, jitter=0.01)
    game.play_to(3)
    place.proxy.throttle(400_000)
    as_if_nothing_had_been(game, undisturbed)


@pytest.mark.parametrize("fault", ["refuse", "black_hole"])
def test_beyond_retry_seconds_the_error_says_what_could_not_be_used_and_for_how_long(place: Place, fault: str) -> None:
    """By the clock, not by the number of tries: a black hole takes a timeout for each of them."""
    game = place.game(patient(redis={"timeout_seconds": 2, "retry_seconds": 3}))
    getattr(place.proxy, fault)()
    where = rf"Redis at 127\.0\.0\.1:{place.proxy.port} could not be used for [2-9]\.\d s, \d+ tries: "
    with pytest.raises((redis.ConnectionError, redis.TimeoutError), match=where):
        game.trainer.step(0)
    with pytest.raises(RedisUnavailable, match=r"does not answer .*could not be used for"):
        game._open()
    place.proxy.heal()
    game.crash()
    game.restart()
    game.finish()
    balanced(game)


# Its memory is full


def fill(place: Place, room: int = 0) -> None:
    """From now on Redis takes no more than so many bytes."""
    used = int(place.redis.command("INFO", "memory")["used_memory"])
    place.redis.command("CONFIG", "SET", "maxmemory", max(1, used + room) if room else 1)


def empty(place: Place) -> None:
    place.redis.command("CONFIG", "SET", "maxmemory", 0)


def test_a_full_memory_makes_claims_wait_and_nothing_else(place: Place) -> None:
    game = place.game()
    game.play_to(2)
    flow, worker = game.role.flow, game.worker
    held = flow.claim(worker.id, worker.incarnation, worker._seq)
    before = flow.read()
    fill(place)
    with pytest.raises(redis.OutOfMemoryError), game.role.redis as client:
        client.set("another", "x")
    assert flow.claim(worker.id, worker.incarnation, worker._seq).granted, "it is held already"
    assert flow.claim("worker-9", 0, 0).word == "wait_memory"
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
    assert flow.set_state("stopping", "stopped", expected="running", epoch=1)
    assert flow.take_over() == 2
    balanced(game)
    empty(place)


@pytest.mark.parametrize("max_policy_lag", [0, 1])
def test_a_run_in_a_small_memory_goes_on_by_checkpoints_that_free_it(tmp_path: Path, max_policy_lag: int) -> None:
    """No checkpoint would be due by the config; nobody dies, and with L = 0 the weights are the undisturbed run's."""
    config = small(
        rollout={"fragment_steps": 128, "fragments_per_update": 2, "max_policy_lag": max_policy_lag},
        checkpoint={"every": "1000 updates"},
        stop_at={"updates": 12},
        redis={"timeout_seconds": 2, "retry_seconds": 60},
    )
    place = Place(tmp_path)
    try:
        hashes = []
        for room in (0, 70_000):
            game = place.game(config)
            game.play_to(1)
            if room:
                fill(place, room)
            words, deadline = [], time.monotonic() + stretched(100)
            while game.trainer.step(0.0) != "ended" and time.monotonic() < deadline:
                words.append(game.worker._claim(0).word)
                game.worker.step(0)
            assert ("wait_memory" in words) == bool(room)
            game.trainer.finish("exhausted")
            assert game.finished()["counters"]["train"]["updates"] == 12
            total = balanced(game)["total"]
            assert total["consumed"]["fragments"] == 24 and "lost" not in total["dropped"]
            hashes.append(game.policy_hash())
            game.worker.stop("the end")
        assert max_policy_lag > 0 or hashes[0] == hashes[1]
    finally:
        empty(place)
        place.close()


# It comes back with less than it had


def no_fragment_twice(game: Game) -> dict[str, Any]:
    """The end of a run whose Redis lost something: the goal, the bound, balanced books, and each version once."""
    game.finish()
    books, state = balanced(game), game.role.flow.read()
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    assert 0 <= state.in_flight <= state.window
    assert state.version == game.board_version() >= UPDATES
    return books["total"]  # type: ignore[no-any-return]


def new_worker(game: Game) -> None:
    game.worker.stop("replaced")
    game.worker = Worker(game._open(), 0)
    game.worker.start()


@pytest.mark.parametrize("who_dies", ["nobody", "trainer", "worker", "both"])
@pytest.mark.parametrize(
    "what_is_lost", ["claim", "push", "pushes of an update", "versions", "checkpoint", "epoch", "life"]
)
def test_redis_comes_back_with_an_older_file(place: Place, what_is_lost: str, who_dies: str) -> None:
    game = place.game()
    game.play_to(3)
    game.durable()
    past = place.redis.keep()
    if what_is_lost == "claim":
        assert game.role.flow.claim(game.worker.id, game.worker.incarnation, game.worker._seq).granted
    elif what_is_lost == "push":
        game.worker.step(0)
    elif what_is_lost == "pushes of an update":
        game.worker.step(0)
        game.worker.step(0)
    elif what_is_lost == "versions":
        game.play_to(5)
        game.worker.step(0)
    elif what_is_lost == "checkpoint":
        game.play_to(4)
        game.durable()
    elif what_is_lost == "epoch":
        game.crash()
        game.restart()
        game.play_to(4)
        game.durable()
    else:
        new_worker(game)
        game.play_to(4)
    if who_dies in ("trainer", "both"):
        game.crash()
    place.redis.set_back(past)
    if who_dies in ("worker", "both"):
        new_worker(game)
    if who_dies in ("trainer", "both"):
        game.restart()
    no_fragment_twice(game)


def test_a_gap_that_a_worker_shows_is_counted_as_lost_in_the_same_step(place: Place) -> None:
    game = place.game()
    game.play_to(3)
    past = place.redis.keep()
    game.worker.step(0)
    game.worker.step(0)
    place.redis.set_back(past)
    assert game.worker.step(0) == "pushed"
    lines = read_books(game.role.redis, game.role.run_id)
    assert lines["total"].balances and lines["total"].in_flight.fragments == 3
    assert game.trainer.step(0) == "waited"
    total = no_fragment_twice(game)
    assert total["dropped"] == {"lost": {"fragments": 2, "transitions": 64}}


@pytest.mark.parametrize("step", ["publish", "drop"])
def test_a_trainer_that_has_learnt_what_redis_lost_meanwhile_writes_nothing_into_its_books(
    place: Place, step: str
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
    write = game.trainer._board._publish if step == "publish" else game.trainer._settlement._drop
    happened: list[bool] = []

    def at_the_worst_moment(keys: list[str], args: list[Any]) -> Any:
        if not happened:
            happened.append(True)
            place.redis.set_back(past)
        return write(keys, args)

    if step == "publish":
        game.trainer._board._publish = at_the_worst_moment  # type: ignore[assignment]
    else:
        game.trainer._settlement._drop = at_the_worst_moment  # type: ignore[assignment]
    assert game.trainer.step(0) == ("updated" if step == "publish" else "waited")
    assert happened
    assert all(line.balances for line in read_books(game.role.redis, game.role.run_id).values())
    new_worker(game)
    no_fragment_twice(game)


def test_a_trainer_that_waits_for_experience_sees_that_redis_lost_its_last_version(place: Place) -> None:
    """Else all claims would stand for fragments that it has learnt, and everybody would wait for ever."""
    game = place.game(patient(stop_at={"updates": 1000}))
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
        wait_until(lambda: game.role.flow.read().version == 3)
        place.redis.set_back(past)
        wait_until(lambda: game.role.flow.read().version == 3)
        for _ in range(4):
            game.worker.step(5.0)
        wait_until(lambda: game.role.flow.read().version >= 5)
        game.role.flow.set_state("stopping", "stopped", expected="running")
    assert reasons[-1] == "stopped"
    balanced(game)


def test_a_redis_that_lost_a_take_over_knows_the_new_trainer_again_and_refuses_the_old(place: Place) -> None:
    game = place.game()
    game.play_to(2)
    game.durable()
    past, old = place.redis.keep(), game.trainer
    game.restart()
    place.redis.set_back(past)
    game.trainer.step(0)
    assert game.role.flow.read().epoch == 2
    with pytest.raises(Exception, match="has taken over"):
        old.step(0)
    old._publisher.close()
    old._heartbeat._stop.set()
    no_fragment_twice(game)


def test_a_new_trainer_gets_no_epoch_that_redis_has_forgotten(place: Place) -> None:
    game = place.game()
    game.play_to(2)
    past = place.redis.keep()
    for _ in range(2):
        game.crash()
        game.restart()
        game.durable()
    game.crash()
    place.redis.set_back(past)
    assert game.role.flow.read().epoch == 1
    game.restart()
    assert game.role.flow.read().epoch == 4
    no_fragment_twice(game)


def test_ids_in_the_log_go_on_behind_what_the_trainer_has_read_whatever_the_clock_says(place: Place) -> None:
    """A new master's clock may be slower: what came before the trainer's position would never be read."""
    game = place.game()
    game.play_to(2)
    game.durable()
    ahead = f"{int(time.time() * 1000) + 3_600_000}-0"
    log, past = RunKeys(game.role.run_id).log, place.redis.keep()
    place.redis.command("XSETID", log, ahead)
    game.play_to(3)
    place.redis.set_back(past)
    before = len(ExperienceLog(game.role.redis, game.role.run_id))
    game.trainer._redis_came_back()
    assert len(ExperienceLog(game.role.redis, game.role.run_id)) == before
    game.worker.step(0)
    ids: Any = game.role.redis.xrevrange(log, count=1)
    assert int(ids[0][0].split(b"-")[0]) >= int(ahead.split("-")[0])
    no_fragment_twice(game)


def test_what_is_kept_of_old_incarnations_stays_bounded(place: Place) -> None:
    game = place.game()
    game.play_to(1)
    first, seq = game.worker, game.worker._seq
    claim = game.role.flow.claim(first.id, first.incarnation, seq)
    for life in range(1, 60):
        incarnation, _ = game.role.flow.register(first.id, at_least=3 * (life // 20) + life)
        assert game.role.flow.claim(first.id, incarnation, 0).granted
        assert first._log.push(first.id, incarnation, 0, claim.epoch, 32, b"garbage") == "pushed"
        game.trainer.step(0)
    kept = game.role.redis.hlen(RunKeys(game.role.run_id).pushed)
    assert kept <= scripts.INCARNATIONS_KEPT
    assert first._log.push(first.id, 0, seq, claim.epoch, 32, b"from a grave") == "superseded"
    assert balanced(game)["total"]["produced"]["fragments"] == 2 + 59
