"""Runs with their fragments' bodies on shards: the same weights as without, whatever dies, and nothing left behind.

The index and each shard are servers of the test's own, killed, stopped, filled up, emptied and rolled back one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import bottleneck, live_status
from stagecoach.coordinator.lifecycle.doctor import examine
from stagecoach.coordinator.lifecycle.preparation import prepare_resume
from stagecoach.coordinator.lifecycle.validation import check_services
from stagecoach.coordinator.services import memory_folder
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import RedisUnavailable, UserError, WaitTimeout
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.shared.protocol import payload_shards
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.payload_shards import named_bodies
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED
from tests.support.processes.waiting import eventually, meanwhile
from tests.support.runs.builders import small_tmpfs
from tests.support.runs.fault_run import UPDATES, FaultRun, as_if_nothing_had_been, run_beside
from tests.support.runs.game import Game, balanced, push_garbage, replayed
from tests.support.services.own_redis import OwnRedis


@pytest.fixture
def place(sharded: FaultRun) -> FaultRun:
    return sharded


def all_is_there(place: FaultRun, game: Game, undisturbed: str) -> None:
    """Checks that the faults left no trace, and that the shards hold exactly what the log names."""
    as_if_nothing_had_been(game, undisturbed)
    assert not balanced(game)["total"]["dropped"]
    assert game.finished()["ledger"] == balanced(game)
    nothing_left_behind(place, game)


def push_all(game: Game) -> None:
    """Pushes as much as the worker has credit for."""
    while game.worker.step(0) != "waited":
        pass


def nothing_left_behind(place: FaultRun, game: Game) -> None:
    named = named_bodies(game.role.redis, game.role.run_id)
    assert place.bodies(game) == {there.field for _, there in named}


def end_without_another_fragment(game: Game) -> None:
    assert game.trainer.step(0) == "ended"
    game.trainer.finish("exhausted")


# All goes well


def test_sharded_run_has_equal_weights_and_leaves_nothing(outside: FaultRun, undisturbed: str) -> None:
    game, held = outside.game(), []
    for version in range(1, UPDATES + 1):
        game.play_to(version, durable=True)
        held.append(len(outside.bodies(game)))
    end_without_another_fragment(game)
    assert game.policy_hash() == undisturbed
    assert max(held) == 2, "bounded by the checkpoints, each two updates"
    assert len(game.role.log()) == 0
    assert outside.bodies(game) == set()
    assert not any(shard.command("DBSIZE") for shard in outside.shards)
    assert all(shard.command("INFO", "commandstats")["cmdstat_hset"]["calls"] >= UPDATES for shard in outside.shards)


def test_two_runs_on_the_same_shards_are_separate(place: FaultRun, undisturbed: str) -> None:
    one, other = place.game(), place.game()
    one.play_to(2)
    other.finish()
    all_is_there(place, one, undisturbed)


def test_index_may_serve_as_a_shard(place: FaultRun, undisturbed: str) -> None:
    game = place.game(place.config(shards=[place.redis.url, place.shards[0].url]))
    game.play_to(UPDATES)
    end_without_another_fragment(game)
    assert game.policy_hash() == undisturbed
    assert not place.redis.command("EXISTS", RunKeys(game.role.run_id).bodies("worker-0"))


# Somebody dies


def test_trainer_waits_for_a_shard_by_name(place: FaultRun, undisturbed: str) -> None:
    game = place.game()
    game.play_to(2)
    push_all(game)
    place.kill_shards()

    def waits() -> bool:
        beats = read_heartbeats(game.role.redis, game.role.run_id)
        (trainer,) = [beat for beat in beats if beat.role == "trainer"]
        return trainer.waiting_for == "a Redis shard" and bool(trainer.last_error)

    def see_and_come_back() -> None:
        eventually(waits)
        status = live_status(game.role.redis, game.role.run_id)
        assert "a Redis shard: the Redis shard 127.0.0.1:" in bottleneck(status.roles, status.store)
        place.start_shards()

    with meanwhile(see_and_come_back):
        assert game.trainer.step(0) == "updated"
    all_is_there(place, game, undisturbed)


def test_error_names_the_shard_after_the_deadline(place: FaultRun) -> None:
    game = place.game(place.config(deadline=0.5))
    game.play_to(2)
    place.kill_shards()
    expected = r"for a Redis shard; the deadline is 0\.5 s: the Redis shard 127\.0\.0\.1:\d+/0 cannot be used"
    with pytest.raises(WaitTimeout, match=expected):
        game.worker.step(0)
    place.start_shards()
    assert game.worker.step(0) == "pushed"
    assert game.worker.step(0) == "pushed"
    place.kill_shards()
    with pytest.raises(WaitTimeout, match=expected):
        game.trainer.step(0)


@pytest.mark.parametrize("how", ["stopped", "asked to leave"])
def test_trainer_that_waits_for_a_shard_can_be_stopped(place: FaultRun, how: str) -> None:
    game = place.game()
    game.play_to(2)
    push_all(game)
    place.kill_shards()

    def end_it() -> None:
        eventually(lambda: game.trainer.incarnation.heartbeat.waits)
        if how == "stopped":
            game.role.flow.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)
        else:
            game.trainer.incarnation.request_shutdown()

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


def test_worker_that_waits_for_a_shard_ends_with_the_run(place: FaultRun) -> None:
    game = place.game()
    game.play_to(2)
    place.kill_shards()

    def finish() -> None:
        eventually(lambda: game.worker.heartbeat.waits)
        game.role.flow.set_state(RunState.FINISHED, "enough")

    with meanwhile(finish):
        assert game.worker.step(0) == "finished"


def test_archive_waits_for_a_shard_before_any_trim(place: FaultRun) -> None:
    """The checkpoint is durable before; what is in the log stays until the archive has it."""
    game = place.game(place.config(archive="all"))
    game.play_to(1)
    push_all(game)
    game.trainer.collect(0)
    place.shards[0].kill()
    game.trainer.step(0)
    told = partial(live_status, game.role.redis, game.role.run_id)
    eventually(lambda: told().store.get("waiting_for") == "a Redis shard")
    assert "127.0.0.1" in told().store["error"]
    assert len(game.role.log()) == 4
    place.shards[0].start()
    game.durable()
    assert len(game.role.log()) == 0
    assert "a Redis shard is back" in game.events("store")
    game.finish()
    assert replayed(game).equal


def test_next_sweep_covers_a_missed_one(place: FaultRun, undisturbed: str) -> None:
    """The shard is away while a checkpoint becomes durable; it comes back with what was trimmed."""
    game = place.game()
    game.play_to(1)
    push_all(game)
    game.trainer.collect(0)
    place.kill_shards()
    game.trainer.step(0)
    game.durable()
    assert len(game.role.log()) == 0
    place.start_shards()
    assert len(place.bodies(game)) == 4
    all_is_there(place, game, undisturbed)


# A shard loses what it had


def weights(game: Game) -> str:
    arrays = state_arrays(game.trainer.learner.policies["default"])
    return hashlib.sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays))).hexdigest()


def test_unread_lost_body_is_dropped_and_credit_returned(outside: FaultRun) -> None:
    game = outside.game(outside.config(archive="all"))
    game.play_to(3)
    first = game.worker.claims.seq
    push_all(game)
    outside.lose(game, first, first + 1)
    game.finish()
    total = balanced(game)["total"]
    assert total["dropped"] == {"lost_body": {"fragments": 2, "transitions": 64}}
    assert total["consumed"]["fragments"] == 2 * UPDATES
    assert "is lost_body: " in game.events("dropped")
    assert game.role.flow.read().in_flight == len(game.role.log())
    assert not game.role.redis.exists(RunKeys(game.role.run_id).lost_bodies)
    found = replayed(game)
    assert found.equal, found.different


def test_very_many_lost_bodies_do_not_end_the_run(place: FaultRun) -> None:
    """Two hundred bad fragments in a row would: but these are no environment's fault."""
    rollout = {"fragment_steps": 1, "fragments_per_update": 64, "max_policy_lag": 3}
    game = place.game(
        place.config(rollout=rollout, stop_at={"updates": 2}, checkpoint={"every": "1 updates"}, trainer={})
    )
    for _ in range(256):
        assert game.worker.step(0) == "pushed"
    place.lose_all()
    assert game.trainer.step(0) == "waited"
    total = balanced(game)["total"]
    assert total["dropped"]["lost_body"]["fragments"] == 256
    game.finish()
    assert game.finished()["reason"] == "exhausted"


@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("index_too", [True, False])
def test_fragment_dropped_for_its_body_stays_dropped(outside: FaultRun, comes_back: bool, index_too: bool) -> None:
    """A trainer that reads the log again must come to the same versions; also when Redis had forgotten the drop."""
    rollout = {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 1}
    game = outside.game(outside.config(rollout=rollout, checkpoint={"every": "100 updates"}))
    game.play_to(2)
    push_all(game)
    past = outside.redis.keep()
    come_back = outside.lose(game, 4, 6)
    assert game.trainer.step(0) == "updated"
    if index_too:
        outside.redis.roll_back(past)
        game.trainer.recovery.redis_came_back()
        assert game.role.checkpoints.names() == ["0_Step-0.ckpt"], "the log has all of it"
    came_to, accounting = weights(game), game.trainer.consumer.committed.ledger
    assert '"lost_body":{"fragments":2' in accounting
    game.crash()
    if comes_back:
        come_back()
    game.restart()
    assert "reading the log again up to version 3" in game.events("trainer")
    while game.trainer.version < 3:
        game.trainer.step(0)
    assert (weights(game), game.trainer.consumer.committed.ledger) == (came_to, accounting)
    game.finish()
    assert balanced(game)["total"]["dropped"] == {"lost_body": {"fragments": 2, "transitions": 64}}
    nothing_left_behind(outside, game)


@pytest.mark.parametrize("lost_at", ["start", "middle"])
def test_lost_learned_body_starts_a_new_version(outside: FaultRun, lost_at: str) -> None:
    """The log names it, the accounting count it: the replay cannot arrive there, and goes on from where it came to."""
    game = outside.game(outside.config(checkpoint={"every": "100 updates"}, archive="all"))
    game.play_to(4)
    game.worker.step(0)
    before = balanced(game)["total"]["consumed"]["fragments"]
    game.crash()
    if lost_at == "start":
        outside.lose_all()
    game.restart()
    if lost_at == "middle":
        game.trainer.step(0)
        assert game.trainer.version == 1
        outside.lose_all()
    assert game.trainer.step(0) == "waited"
    version = game.trainer.version
    assert version == 4 + 1 + game.role.config.rollout.max_policy_lag == game.board_version()
    reached = 1 if lost_at == "middle" else 0
    assert f"{reached}_Step-" in game.events("trainer") and "continues as version 5" in game.events("trainer")
    assert balanced(game)["total"]["consumed"]["fragments"] == before
    state = game.role.flow.read()
    assert 0 <= state.in_flight <= state.window
    game.finish()
    total = balanced(game)["total"]
    assert total["dropped"].get("lost_body", {"fragments": 0})["fragments"] == 1, "the one that nobody had learned"
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    found = replayed(game, next(name for name in game.role.checkpoints.names() if name.startswith("5_")))
    assert found.equal, found.different


def test_body_lost_between_trainers_starts_a_new_version(outside: FaultRun) -> None:
    """The fragment was read, and counted with a drop behind it, but no version covers it yet."""
    game = outside.game()
    game.play_to(3)
    game.worker.step(0)
    push_garbage(game)
    assert game.trainer.step(0) == "waited"
    game.crash()
    outside.lose_all()
    game.restart()
    while game.trainer.version < 4:
        game.trainer.step(0)
    state = game.role.flow.read()
    assert state.version == game.trainer.version == 4 and 0 <= state.in_flight <= state.window
    balanced(game)
    game.finish()
    balanced(game)


def test_index_and_shards_come_back_with_less_together(place: FaultRun) -> None:
    """A machine that held them all."""
    game = place.game()
    game.play_to(3, durable=True)
    pasts = [(server, server.keep()) for server in (place.redis, *place.shards)]
    game.play_to(5)
    game.worker.step(0)
    for server, past in pasts:
        server.roll_back(past)
    game.finish()
    state = game.role.flow.read()
    assert game.finished()["counters"]["train"]["updates"] == UPDATES
    assert 0 <= state.in_flight <= state.window
    assert set(balanced(game)["total"]["dropped"]) <= {"lost", "lost_body"}


# A shard is full


def test_worker_waits_for_a_full_shard_until_a_checkpoint(place: FaultRun) -> None:
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
        run_beside(game)
        full = "a Redis shard" in game.worker.heartbeat.waited_seconds
        assert full == bool(room)
        assert game.finished()["counters"]["train"]["updates"] == 12
        assert not balanced(game)["total"]["dropped"]
        hashes.append(game.policy_hash())
        game.worker.stop("the end")
        for shard in place.shards:
            shard.command("CONFIG", "SET", "maxmemory", 0)
    assert hashes[0] == hashes[1]


# Shared memory


@pytest.fixture
def remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultRun]:
    """With all bodies in a shared memory that holds a few."""
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    monkeypatch.setattr(memory_folder, "ROOT", tmp_path / "shm")
    with small_tmpfs(tmp_path / "shm", "64k"):
        found = FaultRun(tmp_path, memory=True)
        try:
            yield found
        finally:
            found.close()


def test_bodies_that_find_no_room_stay_in_redis(remembered: FaultRun, undisturbed: str) -> None:
    game = remembered.game(remembered.config(checkpoint={"every": "100 updates"}))
    game.play_to(UPDATES)
    log: Any = game.role.redis.xrange(RunKeys(game.role.run_id).log)
    assert {name for _, entry in log for name in entry} > {b"body", b"fragment"}
    end_without_another_fragment(game)
    assert game.policy_hash() == undisturbed
    assert not balanced(game)["total"]["dropped"]


@pytest.mark.parametrize("tidied", ["by another run", "by its own"])
def test_bodies_survive_a_kill_of_everything(remembered: FaultRun, undisturbed: str, tidied: str) -> None:
    """Memory holds nothing of the dead run after the next start; the trainer learns the same from the disk."""
    game = remembered.game(remembered.config(checkpoint={"every": "3 updates"}))
    game.play_to(2)
    game.worker.step(0)
    held = remembered.bodies(game)
    assert len(held) == 5
    game.lose()
    remembered.forsake_memory()
    if tidied == "by another run":
        memory_folder.clear_abandoned_memory()
        assert list((remembered.folder / "shm").iterdir()) == []
    remembered.renew_memory(game)
    assert len(list((remembered.folder / "shm").iterdir())) == 1
    game.lose()
    game.play_to(4, durable=True)
    assert not remembered.bodies(game) & held, "also swept from the disk"
    as_if_nothing_had_been(game, undisturbed, incarnation=2)
    assert not balanced(game)["total"]["dropped"]
    nothing_left_behind(remembered, game)


def test_end_of_a_run_moves_unread_bodies_to_the_disk(remembered: FaultRun) -> None:
    game = remembered.game()
    game.play_to(2)
    game.worker.step(0)
    before = remembered.bodies(game)
    assert remembered.memory is not None and before
    remembered.memory.close()
    assert list((remembered.folder / "shm").iterdir()) == []
    assert remembered.bodies(game) == before
    remembered.renew_memory(game)
    game.lose()
    game.finish()
    assert not balanced(game)["total"]["dropped"]


# What a person asks for


def test_resume_may_add_shards_but_drop_none_in_use(place: FaultRun) -> None:
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
    third = OwnRedis(place.folder / "third", place.redis.password)
    place.shards.append(third)
    config = place.config(shards=[third.url, *reversed(kept)])
    role = game_role(game, config)
    prepare_resume(role)
    assert role.flow.read().shards == role.bodies.names
    game.open = lambda: game_role(game, config)
    game.restart()
    game.worker = Worker(game.open(), 0)
    game.worker.start()
    game.play_to(UPDATES)
    end_without_another_fragment(game)
    assert not balanced(game)["total"]["dropped"]
    assert third.command("INFO", "commandstats")["cmdstat_hset"]["calls"] > 0
    prepare_resume(game_role(game, place.config(shards=[], stop_at={"updates": 99})))
    assert game.role.flow.read().shards == ()


def game_role(game: Game, config: Config) -> RunContext:
    return open_run_context(config, game.role.address)


def test_shards_are_checked_before_a_run_starts(
    place: FaultRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", place.redis.password)
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
    with pytest.raises(RedisUnavailable, match="maxmemory-policy is allkeys-lru"):
        check_services(config)
    place.shards[0].command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    with pytest.raises(RedisUnavailable, match=r"does not answer .*correct redis\.shards"):
        check_services(config)
