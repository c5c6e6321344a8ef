"""What a trainer does when Redis or the store lost something, or a crash left something undone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rollout_worker.evaluator import Evaluator
from rollout_worker.worker import Worker
from shared.checkpoint import MANIFEST, POINTER, READY, STATUS, StoredObject
from shared.events import record_evaluation
from shared.object_store import ObjectStore
from shared.redis_keys import RunKeys
from tests.conftest import create_flow
from tests.support.checkpoints import key_of
from tests.trainer_node.game import POLICY, Game, NewGame, balanced, die, replace_worker, small


@pytest.mark.parametrize("published", [False, True])
def test_a_first_checkpoint_whose_sync_files_a_crash_kept_back_is_completed(new_game: NewGame, published: bool) -> None:
    game = new_game(small())
    game.crash()
    for key in (READY, POINTER, STATUS):
        game.role.checkpoints.store.delete(key)
    if not published:
        game.role.redis.hset(RunKeys(game.role.run_id).flow, "version", "-1")
    game.restart()
    game.durable()
    pointer = game.role.checkpoints.pointer()
    assert pointer is not None and pointer.latest == "0_Step-0.ckpt"
    assert game.role.checkpoints.marker(READY) is not None
    game.finish()
    balanced(game)


def test_the_best_survives_a_new_trainer_a_new_evaluator_and_a_redis_without_scores(new_game: NewGame) -> None:
    """With one checkpoint kept of each kind; the scores are far above what can be reached here."""
    game = new_game(small(checkpoint={"every": "1 updates", "keep_last": 1, "keep_best": 1}, stop_at={"updates": 12}))
    role = game.role
    game.play_to(2)
    game.durable()
    best = role.checkpoints.resolve("latest")
    scores = {"version": 2, "mean_return": 1e6, "episodes": 4, "confirmation": {"mean_return": 1e6}}
    record_evaluation(role.redis, role.run_id, best, scores)
    hashes = hash_of(game, best)
    game.play_to(4)
    game.crash()
    game.restart()
    game.play_to(6)
    role.redis.delete(RunKeys(role.run_id).evaluations)
    game.durable()
    evaluator = Evaluator(role)
    evaluator.start()
    assert evaluator.step(0.0) == "evaluated"
    evaluator.stop("end of test")
    game.crash()
    game.restart()
    game.finish()
    assert role.checkpoints.resolve("best") == best
    assert hash_of(game, best) == hashes
    assert len(role.checkpoints.names()) == 2


def hash_of(game: Game, name: str) -> dict[str, StoredObject]:
    """Size and SHA-256 of each object, after all were read and compared with the manifest."""
    return game.role.checkpoints.load(name).manifest.objects


def restore_redis(game: Game, keys: dict[bytes, bytes]) -> None:
    """Redis as it was when these keys were dumped."""
    prefix = RunKeys(game.role.run_id).prefix
    for key in game.role.redis.scan_iter(f"{prefix}*"):
        game.role.redis.delete(key)
    for key, value in keys.items():
        game.role.redis.restore(key, 0, value, replace=True)  # a heartbeat may have come meanwhile


@pytest.mark.parametrize("trainer_lives", [False, True])
@pytest.mark.parametrize("fragments_after", [0, 1, 2])
def test_a_redis_set_back_in_time_does_not_stop_the_run(
    new_game: NewGame, fragments_after: int, trainer_lives: bool
) -> None:
    game = new_game(small())
    game.play_to(3)
    for _ in range(fragments_after):
        game.worker.step(0)
    redis = game.role.redis
    past: dict[bytes, Any] = {key: redis.dump(key) for key in redis.scan_iter(f"{RunKeys(game.role.run_id).prefix}*")}
    game.play_to(4)
    game.durable()
    if not trainer_lives:
        game.crash()
    restore_redis(game, past)
    if not trainer_lives:
        game.restart()
        assert game.board_version() == 4
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 6
    balanced(game)


class Stalls:
    """A store in which one put stands still until it is let go."""

    def __init__(self, store: ObjectStore, where: str) -> None:
        self._store, self._where = store, where
        self.held, self.go_on, self.done = threading.Event(), threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        if self._where not in key or self.held.is_set():
            self._store.put(key, data)
            return
        self.held.set()
        assert self.go_on.wait(100)
        self._store.put(key, data)
        self.done.set()


@pytest.mark.parametrize("where", [POLICY, MANIFEST])
def test_a_late_upload_from_before_a_redis_that_lost_log_touches_no_newer_checkpoint(
    new_game: NewGame, where: str
) -> None:
    game = new_game(small())
    game.play_to(3)
    game.durable()
    redis = game.role.redis
    past: dict[bytes, Any] = {key: redis.dump(key) for key in redis.scan_iter(f"{RunKeys(game.role.run_id).prefix}*")}
    old = game.trainer._publisher
    old._store._store = stalls = Stalls(old._store._store, where)
    game.play_to(4)
    assert stalls.held.wait(100)
    game.trainer._heartbeat._stop.set()
    die(game)
    restore_redis(game, past)
    game.role.log().forget_trail("worker-0")  # so that it acts something else
    game.restart()
    replace_worker(game)
    game.play_to(5)
    game.durable()
    newer = game.role.checkpoints.load("4_Step-256.ckpt")
    stalls.go_on.set()
    assert stalls.done.wait(100)
    old.close()
    assert newer.manifest.epoch == 2
    assert game.role.checkpoints.load("4_Step-256.ckpt") == newer == game.role.checkpoints.load_latest()
    game.crash()
    game.restart()
    assert "restored 4_Step-256.ckpt; reading the log again up to version 5" in game.events("trainer")
    game.finish()
    balanced(game)


def test_a_redis_that_has_lost_the_whole_run_goes_on_from_the_checkpoint(new_game: NewGame) -> None:
    game = new_game(small())
    game.play_to(4)
    game.durable()
    game.crash()
    game.worker.stop("Redis is gone")
    restore_redis(game, {})
    create_flow(game.role)
    game.restart()
    game.worker = Worker(game._open(), 0)
    game.worker.start()
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 6
    balanced(game)


def test_going_back_behind_the_log_frees_the_credit_of_what_was_never_learnt(new_game: NewGame) -> None:
    """A fragment was taken, the next one dropped and settled, then the trainer crashed and its checkpoint broke."""
    game = new_game(small())
    game.play_to(4)
    game.durable()
    game.worker.step(0)
    assert game.trainer.step(0) == "waited"
    worker = game.worker
    claim = game.role.flow.claim(worker.id, worker.incarnation, worker._seq)
    assert claim.granted
    assert worker._log.push(worker.id, worker.incarnation, worker._seq, claim.epoch, 32, b"garbage") == "pushed"
    worker._seq += 1
    assert game.trainer.step(0) == "waited"
    game.crash()
    checkpoints = game.role.checkpoints
    checkpoints.store.put(key_of(checkpoints, "4_Step-256.ckpt", "default/policy.safetensors"), b"broken")
    game.restart()
    assert game.trainer.version == 5
    game.finish()
    assert game.role.flow.read().in_flight >= 0
    balanced(game)
