"""Algorithms with a memory, which comes back whatever of the log is left where.

It comes back from the archive and the log (trainer_node/recovery/recovery.py), so this is where both are lost, cut
and deleted. That a run which dies at every version is the same is test_resuming_every_algorithm.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stagecoach.shared.base.errors import StoreUnavailable
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.checkpointing.archiver import Archiver
from stagecoach.trainer_node.state.fork import rolled_back
from tests.conftest import RedisServer
from tests.support.processes.waiting import eventually
from tests.support.runs.game import KEEP, Game, NewGame, ends_with, make_game, replayed, small

FRAGMENT = 32
"""Transitions of one: 8 steps × 4 environments."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dqn": {"name": "dqn", "replay_buffer": {"kind": "uniform", "capacity": 5 * FRAGMENT}},
    "rainbow": {
        "name": "rainbow", "atoms": 11, "v_max": 100,
        "replay_buffer": {"kind": "prioritized", "capacity": 5 * FRAGMENT, "beta": 0.6},
    },
}  # fmt: skip
"""Memories of an odd number of fragments, while an update brings two: the ring wraps in the middle of an update."""


def playing(name: str, **sections: Any) -> Config:
    algorithm = {"minibatch_size": 16, "gradient_steps_per_env_step": 0.1, "target_update_steps": 5}
    return small(**({"algorithm": algorithm | ALGORITHMS[name], "stop_at": {"updates": 8}} | sections))


Ends = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def undisturbed(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """`undisturbed(name)` → what that algorithm's run ends with when nothing happens."""

    @functools.cache
    def ends(name: str) -> dict[str, str]:
        with contextlib.ExitStack() as stack:
            game = make_game(redis_server, tmp_path_factory.mktemp("undisturbed"), playing(name))
            stack.callback(game.end)
            return ends_with(game)

    return ends


def held(game: Game) -> list[str]:
    """The log positions of what the trainer's memory holds."""
    return list(game.trainer.learner.remembered)


@pytest.mark.parametrize("keep", ["off", "all"])
def test_small_segments_are_deleted_behind_the_buffer(new_game: NewGame, undisturbed: Ends, keep: str) -> None:
    archive = {"keep": keep, "segment_bytes": 1 << 10}
    game = new_game(playing("dqn", archive=archive, checkpoint={"every": "1 updates", "keep_last": 2}))
    for version in range(1, 8):
        game.play_to(version, durable=True)
    segments = Archive(game.role.checkpoints.store, game.role.run_id).segments()
    first = segments[0].after
    assert (first == "0-0") == (keep == "all"), "only the whole archive reaches back to the start"
    assert game.role.redis.xlen(RunKeys(game.role.run_id).log) < 4, "Redis does not hold what the memory held"
    game.replace_trainer()
    assert len(held(game)) == 5
    assert ends_with(game) == undisturbed("dqn")


@pytest.mark.parametrize("name", ["dqn", "rainbow"])
def test_replay_buffer_refills_from_log_when_not_archived(
    new_game: NewGame, undisturbed: Ends, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the checkpoint, and the trainer dies before the archive has the log up to it."""

    def away(*_: object) -> None:
        raise StoreUnavailable("it went away between two objects")

    game = new_game(playing(name, checkpoint={"every": "1 updates"}))
    game.play_to(2, durable=True)
    monkeypatch.setattr(Archiver, "store", away)
    game.play_to(4)
    store = game.role.checkpoints.store
    eventually(lambda: game.role.checkpoints.names()[-1].startswith("4_"))
    archived = Archive(store, game.role.run_id).segments()[-1].through
    assert id_order(archived) < id_order(held(game)[-1]), "the archive has all of it"
    assert id_order(held(game)[0]) <= id_order(archived), "the archive has none of it"
    game.crash()
    monkeypatch.undo()
    game.restart()
    assert game.trainer.version == 4
    assert ends_with(game) == undisturbed(name)


def test_lost_replay_data_begins_a_new_version(new_game: NewGame) -> None:
    game = new_game(playing("dqn"))
    game.play_to(6, durable=True)
    game.crash()
    archive = Archive(game.role.checkpoints.store, game.role.run_id)
    for segment in archive.segments():
        archive.delete(segment)
    game.restart()
    assert game.trainer.state.lineage.version == game.trainer.version > 6
    assert "neither in the archive nor in Redis any more" in str(game.events("trainer"))
    game.finish()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_stretch_is_replayed_from_the_archive(new_game: NewGame, name: str) -> None:
    game = new_game(playing(name, archive="all", checkpoint=KEEP, heatup="70 env_steps", stop_at={"updates": 6}))
    for version in range(1, 9):
        game.play_to(version, durable=True)
    game.finish()
    names = game.role.checkpoints.names()
    assert len(names) >= 4
    for start in ["start", *names[:-1]]:
        found = replayed(game, start)
        assert found.equal, (start, found.different)


@pytest.mark.parametrize("name", ["dqn", "rainbow"])
def test_rollback_restores_replay_buffer_of_older_checkpoint(new_game: NewGame, name: str) -> None:
    """Nothing fills the memory while a checkpoint is only taken over, and what was known of it must not be lost."""
    game = new_game(playing(name, archive="all", checkpoint=KEEP))
    game.play_to(6, durable=True)
    older = game.role.checkpoints.load(game.role.checkpoints.names()[-2])
    taken = rolled_back(game.role, older, epoch=0)
    for file in ("trainer/memory.safetensors", "trainer/default.algorithm.safetensors"):
        was, _ = tensor_blob.decode(older.objects[file])
        found, _ = tensor_blob.decode(taken.checkpoint.objects[file])
        assert was.keys() == found.keys()
        assert all(np.array_equal(was[key], found[key]) for key in was), file
