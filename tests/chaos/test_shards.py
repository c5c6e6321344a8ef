"""Runs with their fragments' bodies on shards: the same weights as without, whatever dies, and nothing left behind.

The index and each shard are servers of the test's own, killed, stopped, filled up, emptied and set back one by one.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from coordinator.doctor import examine
from coordinator.preparation import check_services, prepare_resume
from coordinator.status import bottleneck, live_status
from rollout_worker.worker import Worker
from shared.bodies import Needed
from shared.checkpoint import FINISHED
from shared.config import Config
from shared.errors import RedisUnavailable, UserError, WaitTimeout
from shared.heartbeat import read_heartbeats
from shared.policies.codec import state_arrays
from shared.redis_keys import RunKeys
from shared.role import Role, open_role
from tests.chaos.own_redis import OwnRedis
from tests.chaos.test_redis_faults import meanwhile, wait_until
from tests.support.speed import stretched
from tests.trainer_node.game import Game, balanced, make_game, small
from trainer_node.replay import replay

UPDATES = 6


def url(server: OwnRedis) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


class Place:
    """An index and some shards, and the games played on them."""

    def __init__(self, folder: Path, shards: int = 2) -> None:
        self.folder = folder
        self.index = OwnRedis(folder / "index")
        self.shards = [OwnRedis(folder / f"shard-{number}", self.index.password) for number in range(shards)]
        self._games: list[Game] = []

    def config(self, deadline: float = 60.0, shards: list[str] | None = None, **sections: Any) -> Config:
        """A small run with its bodies on the shards (or on others)."""
        urls = [url(shard) for shard in self.shards] if shards is None else shards
        rollout = {"fragment_steps": 8, "fragments_per_update": 2, "wait_deadline_seconds": deadline}
        redis = {"url": url(self.index), "timeout_seconds": 2, "retry_seconds": deadline, "shards": urls}
        return small(**({"redis": redis, "rollout": rollout} | sections))

    def game(self, config: Config | None = None) -> Game:
        """A new run."""
        self._games.append(make_game(self.index.through(self.index.port), self.folder, config or self.config()))
        return self._games[-1]

    def bodies(self, game: Game) -> set[str]:
        """Fields of the worker's bodies on all shards."""
        key, found = RunKeys(game.role.run_id).bodies("worker-0"), set()
        for shard in self.shards:
            found |= {field.decode() for field in shard.command("HKEYS", key)}
        return found

    def empty(self) -> None:
        """The shards lose all they have."""
        for shard in self.shards:
            shard.command("FLUSHALL")

    def close(self) -> None:
        """Ends all of it."""
        for server in (self.index, *self.shards):
            if not server.runs:
                server.start()
        for game in self._games:
            game.end()
        for server in (self.index, *self.shards):
            server.kill()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run without any shards, or any fault."""
    found = Place(tmp_path_factory.mktemp("undisturbed"), shards=0)
    try:
        game = found.game()
        assert not game.role.bodies
        return game.finish()
    finally:
        found.close()


def as_if_nothing_had_been(place: Place, game: Game, undisturbed: str) -> None:
    """The goal is reached with the same weights, the books balance, and the shards hold what the log names."""
    assert game.finish() == undisturbed
    total = balanced(game)["total"]
    assert total["consumed"]["fragments"] == 2 * UPDATES and not total["dropped"]
    assert game.finished()["ledger"] == balanced(game)
    nothing_left_behind(place, game)


def nothing_left_behind(place: Place, game: Game) -> None:
    named = Needed.read(game.role.redis, game.role.run_id).named
    assert place.bodies(game) == {field for _, _, field in named}


def end_without_another_fragment(game: Game) -> None:
    """The run has come to its last update; the log is empty then."""
    assert game.trainer.step(0) == "ended"
    game.trainer.finish("exhausted")


def new_worker(game: Game) -> None:
    game.worker.stop("replaced")
    game.worker = Worker(game._open(), 0)
    game.worker.start()


# All goes well


def test_a_run_with_shards_comes_to_the_same_weights_and_leaves_nothing_behind(place: Place, undisturbed: str) -> None:
    game = place.game()
    most = 0

    def look() -> bool:
        nonlocal most
        game.durable()
        most = max(most, len(place.bodies(game)))
        return game.trainer.version == UPDATES

    game.play(until=look)
    end_without_another_fragment(game)
    assert game.policy_hash() == undisturbed
    assert 2 <= most <= 4, "bounded by the checkpoints, each two updates"
    assert len(game.trainer._log) == 0
    assert not any(shard.command("DBSIZE") for shard in place.shards)
    assert all(shard.command("INFO", "commandstats")["cmdstat_hset"]["calls"] >= UPDATES for shard in place.shards)


def test_two_runs_on_the_same_shards_do_not_see_each_other(place: Place, undisturbed: str) -> None:
    one, other = place.game(), place.game()
    one.play_to(2)
    other.finish()
    as_if_nothing_had_been(place, one, undisturbed)


def test_one_shard_may_be_the_index_itself(place: Place, undisturbed: str) -> None:
    game = place.game(place.config(shards=[url(place.index), url(place.shards[0])]))
    game.play_to(UPDATES)
    end_without_another_fragment(game)
    assert game.policy_hash() == undisturbed
    assert not place.index.command("EXISTS", RunKeys(game.role.run_id).bodies("worker-0"))


def test_an_archive_holds_the_bodies_and_a_replay_arrives_at_the_same(place: Place) -> None:
    game = place.game(place.config(archive="all"))
    game.finish()
    goal = game.role.checkpoints.names()[-1]
    found = replay(game.role.checkpoints, game.role.config, game.role.description(), "start", goal)
    assert found.equal and found.fragments == 2 * UPDATES


# Somebody dies


@pytest.mark.parametrize("who", ["trainer", "worker", "both"])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_who_dies_is_followed_by_another(place: Place, undisturbed: str, who: str, version: int) -> None:
    game = place.game()
    game.play_to(version)
    game.worker.step(0)
    if who in ("trainer", "both"):
        game.crash()
        game.restart()
    if who in ("worker", "both"):
        game.worker._sampler.close()
        new_worker(game)
    as_if_nothing_had_been(place, game, undisturbed)


@pytest.mark.parametrize("version", [0, 3])
def test_a_shard_is_killed_and_comes_back_with_its_data(place: Place, undisturbed: str, version: int) -> None:
    game = place.game()
    game.play_to(version)
    game.worker.step(0)
    for shard in place.shards:
        shard.kill()

    def come_back() -> None:
        wait_until(lambda: game.worker._heartbeat.waits)
        time.sleep(0.3)
        for shard in place.shards:
            shard.start()

    with meanwhile(come_back):
        game.play_to(version + 2)
    assert game.worker._heartbeat.waited_seconds["a Redis shard"] > 0
    as_if_nothing_had_been(place, game, undisturbed)


def test_the_trainer_waits_for_a_shard_by_name(place: Place, undisturbed: str) -> None:
    game = place.game()
    game.play_to(2)
    while game.worker.step(0) != "waited":
        pass
    for shard in place.shards:
        shard.kill()

    def see_and_come_back() -> None:
        def waits() -> bool:
            beats = read_heartbeats(game.role.redis, game.role.run_id)
            game.trainer._heartbeat._beat()
            return any(
                beat.role == "trainer" and beat.waiting_for == "a Redis shard" and beat.trouble for beat in beats
            )

        wait_until(waits)
        status = live_status(game.role.redis, game.role.run_id)
        assert "a Redis shard: the Redis shard 127.0.0.1:" in bottleneck(status.roles, status.store)
        for shard in place.shards:
            shard.start()

    with meanwhile(see_and_come_back):
        assert game.trainer.step(0) == "updated"
    as_if_nothing_had_been(place, game, undisturbed)


def test_shards_are_killed_again_and_again_while_the_roles_run(place: Place, undisturbed: str) -> None:
    game = place.game()

    def kills() -> None:
        for turn in range(6):
            time.sleep(0.1)
            place.shards[turn % 2].restart(0.1)

    def act() -> None:
        while not game.worker.step(0.2).startswith("end:"):
            pass

    with meanwhile(kills), meanwhile(act):
        while game.trainer.step(0.2) != "ended":
            pass
        game.trainer.finish("exhausted")
    assert game.policy_hash() == undisturbed
    assert balanced(game)["total"]["consumed"]["fragments"] == 2 * UPDATES


def test_a_shard_that_is_stopped_and_continued(place: Place, undisturbed: str) -> None:
    game = place.game()
    game.play_to(2)
    place.shards[1].stopped(True)

    def later() -> None:
        time.sleep(2.5)
        place.shards[1].stopped(False)

    with meanwhile(later):
        as_if_nothing_had_been(place, game, undisturbed)


def test_beyond_the_deadline_the_error_says_which_shard_it_waited_for(place: Place) -> None:
    game = place.game(place.config(deadline=0.5))
    game.play_to(2)
    for shard in place.shards:
        shard.kill()
    expected = r"for a Redis shard; the deadline is 0\.5 s: the Redis shard 127\.0\.0\.1:\d+/0 cannot be used"
    with pytest.raises(WaitTimeout, match=expected):
        game.worker.step(0)
    for shard in place.shards:
        shard.start()
    assert game.worker.step(0) == "pushed"
    assert game.worker.step(0) == "pushed"
    for shard in place.shards:
        shard.kill()
    with pytest.raises(WaitTimeout, match=expected):
        game.trainer.step(0)


@pytest.mark.parametrize("how", ["stopped", "asked to leave"])
def test_a_trainer_that_waits_for_a_shard_can_be_ended(place: Place, how: str) -> None:
    game = place.game()
    game.play_to(2)
    while game.worker.step(0) != "waited":
        pass
    for shard in place.shards:
        shard.kill()

    def end_it() -> None:
        wait_until(lambda: game.trainer._heartbeat.waits)
        if how == "stopped":
            game.role.flow.set_state("stopping", "stopped", expected="running")
        else:
            game.trainer.ask_to_leave()

    with meanwhile(end_it):
        assert game.trainer.step(0) == "waited"
    if how == "stopped":
        assert game.trainer.step(0) == "ended"
        assert game.trainer.finish("stopped") == "stopped"
        assert game.finished()["reason"] == "stopped"
    else:
        game.trainer.leave()
        assert game.role.checkpoints.marker(FINISHED) is None
    assert int(game.role.checkpoints.names()[-1].partition("_")[0]) == 2


def test_a_worker_that_waits_for_a_shard_ends_when_the_run_does(place: Place) -> None:
    game = place.game()
    game.play_to(2)
    for shard in place.shards:
        shard.kill()

    def finish() -> None:
        wait_until(lambda: game.worker._heartbeat.waits)
        game.role.flow.set_state("finished", "enough")

    with meanwhile(finish):
        assert game.worker.step(0) == "end:finished"


def test_an_archive_waits_for_a_shard_and_nothing_is_trimmed_before(place: Place) -> None:
    """The checkpoint is durable before; what is in the log stays until the archive has it."""
    game = place.game(place.config(archive="all"))
    game.play_to(1)
    while game.worker.step(0) != "waited":
        pass
    game.trainer._gather(0)
    place.shards[0].kill()
    game.trainer.step(0)
    told = partial(live_status, game.role.redis, game.role.run_id)
    wait_until(lambda: told().store.get("waiting_for") == "a Redis shard")
    assert "127.0.0.1" in told().store["error"]
    assert len(game.trainer._log) == 4
    place.shards[0].start()
    game.durable()
    assert len(game.trainer._log) == 0
    assert "a Redis shard is back" in game.events("store")
    game.finish()
    goal = game.role.checkpoints.names()[-1]
    assert replay(game.role.checkpoints, game.role.config, game.role.description(), "start", goal).equal


def test_a_sweep_that_did_not_come_is_made_up_for_by_the_next(place: Place, undisturbed: str) -> None:
    """The shard is away while a checkpoint becomes durable; it comes back with what was trimmed."""
    game = place.game()
    game.play_to(1)
    while game.worker.step(0) != "waited":
        pass
    game.trainer._gather(0)
    for shard in place.shards:
        shard.kill()
    game.trainer.step(0)
    game.durable()
    assert len(game.trainer._log) == 0
    for shard in place.shards:
        shard.start()
    assert len(place.bodies(game)) == 4
    as_if_nothing_had_been(place, game, undisturbed)


# A shard loses what it had


def lose(place: Place, game: Game, *seqs: int) -> list[tuple[OwnRedis, bytes, bytes]]:
    """The bodies of these fragments are gone; answers what was where."""
    key, lost = RunKeys(game.role.run_id).bodies("worker-0"), []
    for shard in place.shards:
        for field in shard.command("HKEYS", key):
            if int(field.split(b":")[1]) in seqs:
                lost.append((shard, field, shard.command("HGET", key, field)))
                shard.command("HDEL", key, field)
    assert len(lost) == len(seqs)
    return lost


def push_two(game: Game) -> tuple[int, int]:
    """And nobody has read them yet."""
    first = int(game.worker._seq)
    assert (game.worker.step(0), game.worker.step(0)) == ("pushed", "pushed")
    return first, first + 1


def weights(game: Game) -> str:
    arrays = state_arrays(game.trainer._learner.policies["default"])
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def test_a_body_that_is_lost_before_it_was_read_is_dropped_and_its_credit_given_again(place: Place) -> None:
    game = place.game(place.config(archive="all"))
    game.play_to(3)
    lose(place, game, *push_two(game))
    game.finish()
    total = balanced(game)["total"]
    assert total["dropped"] == {"lost_body": {"fragments": 2, "transitions": 64}}
    assert total["consumed"]["fragments"] == 2 * UPDATES
    assert "is lost_body: 127.0.0.1:" in game.events("dropped")
    assert game.role.flow.read().in_flight == len(game.trainer._log)
    assert not game.role.redis.exists(RunKeys(game.role.run_id).lost_bodies)
    goal = game.role.checkpoints.names()[-1]
    found = replay(game.role.checkpoints, game.role.config, game.role.description(), "start", goal)
    assert found.equal, found.different


def test_very_many_lost_bodies_do_not_end_the_run(place: Place) -> None:
    """Two hundred bad fragments in a row would: but these are no environment's fault."""
    rollout = {"fragment_steps": 1, "fragments_per_update": 64, "max_policy_lag": 3}
    game = place.game(
        place.config(rollout=rollout, stop_at={"updates": 2}, checkpoint={"every": "1 updates"}, trainer={})
    )
    for _ in range(256):
        assert game.worker.step(0) == "pushed"
    place.empty()
    assert game.trainer.step(0) == "waited"
    total = balanced(game)["total"]
    assert total["dropped"]["lost_body"]["fragments"] == 256
    game.finish()
    assert game.finished()["reason"] == "exhausted"


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("index_too", [True, False])
def test_what_was_dropped_for_its_lost_body_stays_dropped_whatever_comes_back(
    place: Place, comes_back: bool, index_too: bool
) -> None:
    """A trainer that reads the log again must come to the same versions; also when Redis had forgotten the drop."""
    rollout = {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 1}
    game = place.game(place.config(rollout=rollout, checkpoint={"every": "100 updates"}))
    game.play_to(2)
    while game.worker.step(0) != "waited":
        pass
    past = place.index.keep()
    lost = lose(place, game, 4, 6)
    assert game.trainer.step(0) == "updated"
    if index_too:
        place.index.set_back(past)
        game.trainer._redis_came_back()
        assert game.role.checkpoints.names() == ["0_Step-0.ckpt"], "the log has all of it"
    came_to, books = weights(game), game.trainer._intake.committed.ledger
    assert '"lost_body":{"fragments":2' in books
    game.crash()
    if comes_back:
        for shard, field, body in lost:
            with shard.client() as client:
                client.hset(RunKeys(game.role.run_id).bodies("worker-0"), field.decode(), body)
    game.restart()
    assert "reading the log again up to version 3" in game.events("trainer")
    while game.trainer.version < 3:
        game.trainer.step(0)
    assert (weights(game), game.trainer._intake.committed.ledger) == (came_to, books)
    game.finish()
    assert balanced(game)["total"]["dropped"] == {"lost_body": {"fragments": 2, "transitions": 64}}
    nothing_left_behind(place, game)


@pytest.mark.parametrize("lost_at", ["start", "middle"])
def test_what_was_learnt_and_cannot_be_read_again_is_left_behind_in_a_new_version(place: Place, lost_at: str) -> None:
    """The log names it, the books count it: the replay cannot arrive there, and goes on from where it came to."""
    game = place.game(place.config(checkpoint={"every": "100 updates"}, archive="all"))
    game.play_to(4)
    game.worker.step(0)
    before = balanced(game)["total"]["consumed"]["fragments"]
    game.crash()
    if lost_at == "start":
        place.empty()
    game.restart()
    if lost_at == "middle":
        game.trainer.step(0)
        assert game.trainer.version == 1
        place.empty()
    assert game.trainer.step(0) == "waited"
    version = game.trainer.version
    assert version == 4 + 1 + game.role.config.rollout.max_policy_lag == game.board_version()
    reached = 1 if lost_at == "middle" else 0
    assert f"{reached}_Step-" in game.events("trainer") and "goes on as version 5" in game.events("trainer")
    assert balanced(game)["total"]["consumed"]["fragments"] == before
    state = game.role.flow.read()
    assert 0 <= state.in_flight <= state.window
    game.finish()
    total = balanced(game)["total"]
    assert total["dropped"].get("lost_body", {"fragments": 0})["fragments"] == 1, "the one that nobody had learnt"
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    names = game.role.checkpoints.names()
    first = next(name for name in names if name.startswith("5_"))
    found = replay(game.role.checkpoints, game.role.config, game.role.description(), first, names[-1])
    assert found.equal, found.different


def test_a_body_lost_between_two_lives_after_a_drop_settled_it_goes_the_same_way(place: Place) -> None:
    """It was read, and counted with a drop behind it, but is behind no version yet."""
    game = place.game()
    game.play_to(3)
    game.worker.step(0)
    worker = game.worker
    claim = game.role.flow.claim(worker.id, worker.incarnation, worker._seq)
    worker._log.push(worker.id, worker.incarnation, worker._seq, claim.epoch, 32, b"garbage")
    worker._seq += 1
    assert game.trainer.step(0) == "waited"
    game.crash()
    place.empty()
    game.restart()
    while game.trainer.version < 4:
        game.trainer.step(0)
    state = game.role.flow.read()
    assert state.version == game.trainer.version == 4 and 0 <= state.in_flight <= state.window
    balanced(game)
    game.finish()
    balanced(game)


def test_index_and_shards_come_back_with_less_together(place: Place) -> None:
    """A machine that held them all."""
    game = place.game()
    game.play_to(3)
    game.durable()
    pasts = [(server, server.keep()) for server in (place.index, *place.shards)]
    game.play_to(5)
    game.worker.step(0)
    for server, past in pasts:
        server.set_back(past)
    game.finish()
    state = game.role.flow.read()
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    assert 0 <= state.in_flight <= state.window
    assert set(balanced(game)["total"]["dropped"]) <= {"lost", "lost_body"}


# A shard is full


@pytest.mark.parametrize("mode", ["one thread", "threads"])
def test_a_full_shard_makes_a_worker_wait_until_a_checkpoint_has_freed_it(place: Place, mode: str) -> None:
    """No checkpoint would be due by the config."""
    config = place.config(
        rollout={"fragment_steps": 128, "fragments_per_update": 2, "wait_deadline_seconds": 60},
        algorithm={"minibatch_size": 512, "epochs": 1},
        checkpoint={"every": "1000 updates"},
        stop_at={"updates": 12},
    )
    hashes = []
    for room in (0, 50_000):
        game = place.game(config)
        game.play_to(1)
        for shard in place.shards if room else []:
            used = int(shard.command("INFO", "memory")["used_memory"])
            shard.command("CONFIG", "SET", "maxmemory", used + room)
        over = threading.Event()

        def act(game: Game = game, over: threading.Event = over) -> None:
            while not over.is_set() and not game.worker.step(0.2).startswith("end:"):
                pass

        full, deadline = False, time.monotonic() + stretched(100)
        if mode == "threads":
            with meanwhile(act):
                while game.trainer.step(0.2) != "ended" and time.monotonic() < deadline:
                    pass
                game.trainer.finish("exhausted")
                over.set()
            full = "a Redis shard" in game.worker._heartbeat.waited_seconds
        else:
            while game.trainer.step(0.0) != "ended" and time.monotonic() < deadline:
                game.worker.step(0)
                full = full or game.worker._held is not None
            game.trainer.finish("exhausted")
        assert full == bool(room)
        assert game.finished()["counters"]["train"]["updates"] == 12
        assert not balanced(game)["total"]["dropped"]
        hashes.append(game.policy_hash())
        game.worker.stop("the end")
        for shard in place.shards:
            shard.command("CONFIG", "SET", "maxmemory", 0)
    assert hashes[0] == hashes[1]


# What a person asks for


def test_a_resume_may_add_a_shard_but_not_leave_out_one_that_the_log_names(place: Place) -> None:
    game = place.game()
    game.play_to(3)
    game.worker.step(0)
    game.worker.step(0)
    game.crash()
    game.worker.stop("the end")
    kept = list(game.role.config.redis.shards)
    for shards in ([], kept[:1]):
        config = place.config(shards=shards)
        with pytest.raises(UserError, match=r"leaves out 127\.0\.0\.1:\d+/0.*, where the log of run"):
            prepare_resume(game_role(game, config))
    third = OwnRedis(place.folder / "third", place.index.password)
    place.shards.append(third)
    config = place.config(shards=[url(third), *reversed(kept)])
    role = game_role(game, config)
    prepare_resume(role)
    assert role.flow.read().shards == role.bodies.names
    game._open = lambda: game_role(game, config)
    game.restart()
    game.worker = Worker(game._open(), 0)
    game.worker.start()
    game.play_to(UPDATES)
    end_without_another_fragment(game)
    assert not balanced(game)["total"]["dropped"]
    assert third.command("INFO", "commandstats")["cmdstat_hset"]["calls"] > 0
    prepare_resume(game_role(game, place.config(shards=[], stop_at={"updates": 99})))
    assert game.role.flow.read().shards == ()


def game_role(game: Game, config: Config) -> Role:
    return open_role(config, game.role.address)


def test_shards_are_looked_at_before_a_run_starts_and_by_the_doctor(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", place.index.password)
    (tmp_path / "files").mkdir()
    config = place.config(store={"url": f"file://{tmp_path / 'files'}"})
    check_services(config)
    place.shards[0].command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    place.shards[1].kill()
    findings = {finding.name: finding for finding in takewhile(lambda found: found.name != "store", examine(config))}
    assert findings["Redis"].ok
    first, second = (findings[f"Redis shard 127.0.0.1:{shard.port}/0"] for shard in place.shards)
    assert not first.ok and "maxmemory-policy is allkeys-lru" in first.text
    assert not second.ok and "does not answer" in second.text
    with pytest.raises(RedisUnavailable, match=r"does not answer .*correct redis\.shards"):
        check_services(config)


def test_status_tells_the_bytes_on_each_shard(place: Place) -> None:
    game = place.game()
    game.play_to(1)
    game.worker.step(0)
    game.worker.step(0)
    status = live_status(game.role.redis, game.role.run_id)
    assert set(status.shards) == set(game.role.bodies.names)
    assert sum(status.shards.values()) == status.log["bytes"] > 0
