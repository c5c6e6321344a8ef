"""Algorithms with a memory: k updates, a death, and the rest are the same bits, whatever of the log is left where.

The memory comes back from the archive and the log (trainer_node/recollection.py), so this is where both are lost, cut
and deleted.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest

from shared import tensor_blob
from shared.archive import Archive
from shared.config import Config
from shared.errors import ArchiveIncomplete, StoreUnavailable
from shared.experience_log import id_order
from shared.redis_keys import RunKeys
from tests.support.speed import stretched
from tests.trainer_node.game import Game, NewGame, balanced, small
from trainer_node.rebase import rebased
from trainer_node.replay import replay

FRAGMENT = 32
"""Transitions of one: 8 steps × 4 environments."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    "dqn": {"name": "dqn", "memory": {"kind": "uniform", "capacity": 5 * FRAGMENT}},
    "rainbow": {
        "name": "rainbow", "atoms": 11, "v_max": 100,
        "memory": {"kind": "prioritised", "capacity": 5 * FRAGMENT, "beta": 0.6},
    },
    "hindsight": {
        "name": "dqn",
        "memory": {"kind": "hindsight", "capacity": 5 * FRAGMENT, "threshold": 0.5, "terminates": True},
    },
    "ensemble": {
        "name": "dqn", "heads": 3, "prior_scale": 3, "exploration": {"kind": "bootstrapped", "epsilon": 0.1},
        "memory": {"kind": "prioritised", "capacity": 5 * FRAGMENT},
    },
    "qr": {
        "name": "dqn", "head": "qr", "quantiles": 7, "n_step": 3,
        "memory": {"kind": "uniform", "capacity": 3 * FRAGMENT},
    },
}  # fmt: skip
"""Memories of an odd number of fragments, while an update brings two: the ring wraps in the middle of an update."""


def playing(name: str, **sections: Any) -> Config:
    algorithm = {"minibatch_size": 16, "gradient_steps_per_env_step": 0.1, "target_update_steps": 5}
    if name == "hindsight":
        bits = {"id": "benchmarks.learning.environments:BitFlip", "kwargs": {"bits": 4}, "num_envs": 4}
        sections = {"environment": bits} | sections
    return small(**({"algorithm": algorithm | ALGORITHMS[name], "stop_at": {"updates": 8}} | sections))


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, str]]:
    """What the undisturbed runs end with, worked out once."""
    return {}


def ends_with(game: Game) -> dict[str, str]:
    """Plays to the end; SHA-256 of every object of the last checkpoint but the books of who restarted when."""
    game.finish()
    latest = game.role.checkpoints.load_latest()
    assert latest is not None
    names = [name for name in latest.objects if name.endswith((".algorithm.safetensors", "policy.safetensors"))]
    found = {name: hashlib.sha256(latest.objects[name]).hexdigest() for name in names}
    assert len(found) == 2
    return found


def undisturbed(new_game: NewGame, expected: dict[str, dict[str, str]], name: str) -> dict[str, str]:
    if name not in expected:
        expected[name] = ends_with(new_game(playing(name)))
    return expected[name]


def held(game: Game) -> list[str]:
    """The log positions of what the trainer's memory holds."""
    return list(game.trainer._learner.remembered)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_whole_run_dies_at_every_version_and_the_state_is_the_same(
    new_game: NewGame, expected: dict[str, dict[str, str]], name: str
) -> None:
    game = new_game(playing(name))
    for version in range(1, 8):
        game.play_to(version)
        if version % 3 == 0:
            game.durable()  # else the last checkpoint is older, or still on its way
        game.lose()
    assert ends_with(game) == undisturbed(new_game, expected, name)
    balanced(game)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_state_is_compared_with_one_that_differs(
    new_game: NewGame, expected: dict[str, dict[str, str]], name: str
) -> None:
    """So that the tests here cannot pass by comparing what never changes."""
    other = ends_with(new_game(playing(name, seed=2)))
    whole = undisturbed(new_game, expected, name)
    assert all(other[key] != whole[key] for key in whole)


@pytest.mark.parametrize("keep", ["off", "memory", "all"])
def test_segments_of_a_few_fragments_are_deleted_behind_the_memory_and_it_comes_back(
    new_game: NewGame, expected: dict[str, dict[str, str]], keep: str
) -> None:
    archive = {"keep": keep, "segment_bytes": 1 << 10, "memory_env_steps": 1}
    game = new_game(playing("dqn", archive=archive, checkpoint={"every": "1 updates", "keep_last": 2}))
    for version in range(1, 8):
        game.play_to(version)
        game.durable()
    segments = Archive(game.role.checkpoints.store, game.role.run_id).segments()
    first = segments[0].after
    assert (first == "0-0") == (keep == "all"), "only the whole archive reaches back to the start"
    assert game.role.redis.xlen(RunKeys(game.role.run_id).log) < 4, "Redis does not hold what the memory held"
    game.crash()
    game.restart()
    assert len(held(game)) == 5
    assert ends_with(game) == undisturbed(new_game, expected, "dqn")


@pytest.mark.parametrize("name", ["dqn", "rainbow"])
def test_what_the_archive_has_not_yet_comes_from_the_log(
    new_game: NewGame, expected: dict[str, dict[str, str]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has the checkpoint, and the trainer dies before the archive has the log up to it."""

    def away(*_: object) -> None:
        raise StoreUnavailable("it went away between two objects")

    game = new_game(playing(name, checkpoint={"every": "1 updates"}))
    game.play_to(2)
    game.durable()
    monkeypatch.setattr(game.trainer._publisher._archiver, "store", away)
    game.play_to(4)
    store = game.role.checkpoints.store
    deadline = time.monotonic() + stretched(30)
    while game.role.checkpoints.names()[-1][:2] != "4_":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    archived = Archive(store, game.role.run_id).segments()[-1].through
    assert id_order(archived) < id_order(held(game)[-1]), "the archive has all of it"
    assert id_order(held(game)[0]) <= id_order(archived), "the archive has none of it"
    game.crash()
    game.restart()
    assert game.trainer.version == 4
    assert ends_with(game) == undisturbed(new_game, expected, name)


def test_a_memory_whose_past_is_lost_is_said_and_not_learnt_without(new_game: NewGame) -> None:
    game = new_game(playing("dqn"))
    game.play_to(6)
    game.durable()
    game.crash()
    archive = Archive(game.role.checkpoints.store, game.role.run_id)
    for segment in archive.segments():
        archive.delete(segment)
    with pytest.raises(ArchiveIncomplete, match="resume from a newer checkpoint, or train with archive=all"):
        game.restart()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_stretch_is_replayed_from_the_archive(new_game: NewGame, name: str) -> None:
    config = playing(
        name, archive="all", checkpoint={"every": "2 updates", "keep_last": 9}, heatup="70 env_steps",
        stop_at={"updates": 6},
    )  # fmt: skip
    game = new_game(config)
    for version in range(1, 9):
        game.play_to(version)
        game.durable()
    game.finish()
    names = game.role.checkpoints.names()
    assert len(names) >= 4
    for start in ["start", *names[:-1]]:
        found = replay(game.role.checkpoints, config, game.role.description(), start, names[-1])
        assert found.equal, (start, found.different)


@pytest.mark.parametrize("name", ["dqn", "rainbow"])
def test_going_back_to_an_older_checkpoint_takes_its_memory_along(new_game: NewGame, name: str) -> None:
    """Nothing fills the memory while a checkpoint is only taken over, and what was known of it must not be lost."""
    game = new_game(playing(name, archive="all", checkpoint={"every": "2 updates", "keep_last": 9}))
    game.play_to(6)
    game.durable()
    older = game.role.checkpoints.load(game.role.checkpoints.names()[-2])
    taken = rebased(game.role, older)
    for file in ("trainer/memory.safetensors", "trainer/default.algorithm.safetensors"):
        was, _ = tensor_blob.decode(older.objects[file])
        found, _ = tensor_blob.decode(taken.objects[file])
        assert was.keys() == found.keys()
        assert all(np.array_equal(was[key], found[key]) for key in was), file
