"""Replay: what is trained again over the archive is, object by object, what the trainer stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagecoach.shared.base.errors import ArchiveIncomplete, UserError
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.log_archive import Archive, read_experience
from stagecoach.trainer_node.replay.comparison import replay
from stagecoach.trainer_node.replay.drops import dropped_entries
from stagecoach.trainer_node.state import snapshot
from tests.support.runs.game import STEPS_PER_UPDATE, Game, NewGame, archived, push_garbage, replayed, small


def play_durably(game: Game) -> None:
    """To the end, and each checkpoint that is due becomes durable before a newer one takes its place."""
    for version in range(1, 7):
        game.play_to(version, durable=True)
    game.finish()


@pytest.mark.parametrize("sections", [{}, {"heatup": f"{2 * STEPS_PER_UPDATE} env_steps"}])
def test_replay_between_any_two_checkpoints_is_equal(new_game: NewGame, sections: dict[str, Any]) -> None:
    game = new_game(archived(**sections))
    play_durably(game)
    names = game.role.checkpoints.names()
    assert len(names) >= 4
    for start in ["start", *names]:
        for goal in names[names.index(start) if start in names else 0 :]:
            found = replayed(game, start, goal)
            assert found.equal, (start, goal, found.different)
    assert found.versions == 0
    whole = replayed(game, "start", names[-1])
    assert (whole.versions, whole.fragments) == (game.trainer.version, 2 * game.trainer.version)
    manifest = game.role.checkpoints.manifest(names[-1])
    assert whole.sha256 == {name: item.sha256 for name, item in manifest.objects.items()}


def test_replayed_drops_and_crashes_change_no_weight(new_game: NewGame) -> None:
    game = new_game(archived(rollout={"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 1}))
    other = game.another_worker(1)
    flow, log = game.role.flow, RunKeys(game.role.run_id).log
    for version in range(1, 6):
        other.step(0)
        game.play_to(version)
        entry: Any = {"worker": "stranger", "seq": "1", "fragment": "garbage"}
        game.role.redis.xadd(log, entry)
        if version in (2, 3):
            game.replace_trainer()
    game.finish()
    finished = game.finished()
    assert finished["ledger"]["strangers"]["dropped"]["foreign"]["fragments"] >= 3
    assert flow.read().state == "finished"
    assert replayed(game, "start", finished["final"]).equal


@pytest.mark.parametrize("heatup", ["0 env_steps", f"{2 * STEPS_PER_UPDATE} env_steps"])
def test_dropped_entries_add_up_to_the_ledger(new_game: NewGame, heatup: str) -> None:
    game = new_game(archived(heatup=heatup))
    positions = set[str]()
    for version in range(1, 6):
        push_garbage(game)
        game.play_to(version)
        entry = {"worker": "stranger", "seq": "1", "fragment": "garbage"}
        untyped: Any = game.role.redis
        positions.add(untyped.xadd(RunKeys(game.role.run_id).log, entry).decode())
        if version == 3:
            game.replace_trainer()
    play_durably(game)
    names = game.role.checkpoints.names()
    manifest = game.role.checkpoints.manifest(names[-1])
    for start in ("start", names[1]):
        found = dropped_entries(game.role.checkpoints, game.role.config, start, names[-1])
        before: Any = {} if start == "start" else game.role.checkpoints.manifest(start).provenance["ledger"]
        for worker, account in manifest.provenance["ledger"].items():
            for reason, count in account["dropped"].items():
                known = before.get(worker, {}).get("dropped", {}).get(reason, {"fragments": 0, "transitions": 0})
                its = [entry for entry in found if (entry.worker, entry.reason) == (worker, reason)]
                assert sum(entry.fragments for entry in its) == count["fragments"] - known["fragments"]
                assert sum(entry.transitions for entry in its) == count["transitions"] - known["transitions"]
        assert {entry.position for entry in found if entry.reason == "foreign"} <= positions
        assert {"foreign", "undecodable"} == {entry.reason.value for entry in found}
    assert len(dropped_entries(game.role.checkpoints, game.role.config, "start", names[-1])) == 10


def test_replay_names_objects_that_differ(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    game, other = new_game(archived()), new_game(archived(seed=5))
    game.finish()
    other.finish()
    final = game.finished()["final"]
    foreign = replay(
        game.role.checkpoints, other.role.config, game.role.description(), "start", final
    )  # another seed begins with other weights
    assert not foreign.equal and foreign.unlike == ()
    assert "default/policy.safetensors" in foreign.different and "trainer/state.json" in foreign.different
    monkeypatch.setattr(snapshot, "code_version", lambda: "9.9")
    elsewhere = replay(game.role.checkpoints, other.role.config, game.role.description(), "start", final)
    assert len(elsewhere.unlike) == 1 and elsewhere.unlike[0].endswith(" then, 9.9 now"), elsewhere.unlike
    assert replayed(game, "start", final).unlike == (), "another code that comes to the same is none"


def test_replay_of_gpu_run_is_refused_without_gpu(new_game: NewGame) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    game = new_game(archived())
    game.finish()
    trainer = game.role.config.trainer.model_copy(update={"device": "cuda:1"})
    config = game.role.config.model_copy(update={"trainer": trainer})
    with pytest.raises(UserError, match=r"trainer.device=cuda:1.* replay where the run was trained"):
        replay(game.role.checkpoints, config, game.role.description(), "start", game.finished()["final"])


def test_replay_names_missing_archive(new_game: NewGame) -> None:
    off, holed = new_game(small()), new_game(archived())
    off.finish()
    with pytest.raises(ArchiveIncomplete, match="archive=all"):
        replayed(off, "start", off.finished()["final"])
    play_durably(holed)
    archive = Archive(holed.role.checkpoints.store, holed.role.run_id)
    segments = archive.segments()
    assert len(segments) >= 3
    archive.delete(segments[1])
    lacking = f"lacks the log after {segments[0].through} through {segments[2].after}"
    with pytest.raises(ArchiveIncomplete, match=lacking):
        replayed(holed, "start", holed.finished()["final"])
    holed.role.checkpoints.store.put(segments[2].key, b"garbage")
    with pytest.raises(ArchiveIncomplete, match="cannot be read"):
        replayed(holed, holed.role.checkpoints.names()[2], holed.finished()["final"])


def test_archive_is_a_dataset_of_consumed_fragments(new_game: NewGame) -> None:
    game = new_game(archived())
    game.finish()
    fragments = list(read_experience(game.folder))
    consumed = game.finished()["ledger"]["total"]["consumed"]
    assert len(fragments) == consumed["fragments"]
    assert sum(item.header.transitions for item in fragments) == consumed["transitions"] == 6 * STEPS_PER_UPDATE
    assert [item.header.seq for item in fragments] == list(range(12))
    assert fragments[0].columns["default"]["obs"].shape == (8, 4, 4)
    assert next(read_experience(str(game.folder))).header == fragments[0].header, "lazily, by a path as text too"
