"""What a trainer does when Redis or the store lost something, or a crash left something undone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from stagecoach.shared.base.errors import ArchiveIncomplete, VersionsDiverged
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.checkpoint_store import MANIFEST
from tests.support.runs.game import (
    KEEP,
    POLICY,
    Game,
    NewGame,
    archived,
    balanced,
    damage,
    die,
    dumped_redis,
    push_garbage,
    replace_worker,
    restore_redis,
    small,
)


@pytest.mark.parametrize("trainer_lives", [False, True])
@pytest.mark.parametrize("fragments_after", [0, 1, 2])
def test_rolled_back_redis_does_not_stop_the_run(new_game: NewGame, fragments_after: int, trainer_lives: bool) -> None:
    game = new_game(small())
    game.play_to(3)
    for _ in range(fragments_after):
        game.worker.step(0)
    past = dumped_redis(game)
    game.play_to(4, durable=True)
    if not trainer_lives:
        game.crash()
    restore_redis(game, past)
    if not trainer_lives:
        game.restart()
        assert game.board_version() == 4
    game.finish()
    assert game.finished()["counters"]["train"]["updates"] == 6
    balanced(game)


@pytest.mark.parametrize("where", [POLICY, MANIFEST])
def test_late_upload_leaves_newer_checkpoint_intact(
    new_game: NewGame, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = new_game(small())
    store = type(game.role.checkpoints.store)
    put, held, go_on, done = store.put, threading.Event(), threading.Event(), threading.Event()

    def stalls(store: Any, key: str, data: bytes) -> None:
        """The first put of this name stands still until it is let go."""
        stalled = where in key and not held.is_set()
        if stalled:
            held.set()
            assert go_on.wait(100)
        put(store, key, data)
        if stalled:
            done.set()

    game.play_to(3, durable=True)
    past = dumped_redis(game)
    old = game.trainer.state.writer
    monkeypatch.setattr(store, "put", stalls)
    game.play_to(4)
    assert held.wait(100)
    game.trainer.incarnation.heartbeat.stop("", last_beat=False)
    die(game)
    restore_redis(game, past)
    game.role.log().forget_action_trace("worker-0")  # so that it acts something else
    game.restart()
    replace_worker(game)
    game.play_to(5, durable=True)
    newer = game.role.checkpoints.load("4_Step-256.ckpt")
    go_on.set()
    assert done.wait(100)
    old.close()
    assert newer.manifest.epoch == 2
    assert game.role.checkpoints.load("4_Step-256.ckpt") == newer == game.role.checkpoints.load_latest()
    game.replace_trainer()
    assert "restored 4_Step-256.ckpt; reading the log again up to version 5" in game.events("trainer")
    game.finish()
    balanced(game)


def test_roll_back_frees_credit_of_unlearned_fragments(new_game: NewGame) -> None:
    """A fragment was taken, the next one dropped and committed, then the trainer crashed and its checkpoint broke."""
    game = new_game(small())
    game.play_to(4, durable=True)
    game.worker.step(0)
    assert game.trainer.step(0) == "waited"
    push_garbage(game)
    assert game.trainer.step(0) == "waited"
    game.crash()
    damage(game, "4_Step-256.ckpt")
    game.restart()
    assert game.trainer.version == 5
    game.finish()
    assert game.role.flow.read().in_flight >= 0
    balanced(game)


def another_redis(game: Game) -> None:
    """To the trainer, Redis is another process than the one that it knows; then it takes a turn."""
    game.trainer.recovery.accounting.redis_process = "another"
    game.trainer.recovery.redis_checked = -1e9
    game.trainer.step(0)


def test_restored_trainer_does_not_miss_what_is_trimmed(new_game: NewGame) -> None:
    """Redis restarts with all its data, while the trainer reads the log again behind its checkpoint."""
    game = new_game(archived())
    game.play_to(4, durable=True)
    game.play_to(5, durable=True)
    game.replace_trainer()
    another_redis(game)
    assert (game.trainer.version, game.trainer.state.lineage.version) == (5, 0)


def test_archive_names_what_a_replay_buffer_forgets(new_game: NewGame) -> None:
    algorithm = {"name": "dqn", "minibatch_size": 8}
    game = new_game(small(algorithm=algorithm, heatup="0 env_steps", archive="all", checkpoint=KEEP))
    game.play_to(2, durable=True)
    game.worker.step(0)
    past = dumped_redis(game)
    game.play_to(3)
    lost = game.trainer.consumer.committed.position
    restore_redis(game, past)
    another_redis(game)
    game.durable()
    assert game.trainer.state.lineage.version == game.trainer.version > 3
    with pytest.raises(ArchiveIncomplete, match=f"lacks the log after .* through {lost}"):
        list(game.role.archive().entries("0-0", lost))


def test_ranks_begin_again_where_replay_buffers_shrink(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that a buffer holds is neither in the log nor in the archive, and the log leads elsewhere: the leader
    continues without it, and so do the others."""
    algorithm = {"name": "dqn", "minibatch_size": 8}
    game = new_game(small(algorithm=algorithm, heatup="0 env_steps", checkpoint=KEEP))
    game.play_to(3)
    began: list[int] = []

    def begin(taken: Any, description: Any, held: Any) -> None:
        began.append(len(list(held)))

    monkeypatch.setattr(game.trainer.incarnation.ranks, "begin", begin)
    *others, last = game.trainer.learner.remembered
    game.role.redis.xdel(RunKeys(game.role.run_id).log, last)
    game.trainer.recovery.continue_without(VersionsDiverged("the log leads elsewhere"))
    assert game.trainer.version > 3 and [*game.trainer.learner.remembered] == others
    assert began == [len(others)]
    game.finish()
