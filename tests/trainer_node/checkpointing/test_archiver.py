"""The archiver: whatever is cut off or lost on the way, the archive holds the log and says what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.lifecycle.preparation import create_flow
from stagecoach.shared.base.errors import ArchiveIncomplete, StoreError
from stagecoach.shared.config.sections import ArchiveConfig
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.log_archive import Archive, read_experience
from stagecoach.shared.storage.object_store import FileStore
from stagecoach.trainer_node.checkpointing.archiver import Archiver
from stagecoach.trainer_node.checkpointing.write_stages import ArchiveStage, TrimStage
from tests.conftest import MakeRole
from tests.support.runs.game import NewGame, archived, balanced, dumped_redis, replayed, restore_redis

ALL = ArchiveConfig(keep="all")


class Breaks(FileStore):
    """Some of its requests break off; of an upload it keeps the first half then, as the embedded S3 server does."""

    broken: tuple[str, ...] = ()
    """Which of `put` and `delete` break off, one after another."""

    def put(self, key: str, data: bytes) -> None:
        if self._breaks("put"):
            super().put(key, data[: len(data) // 2])
            raise StoreError("the connection broke off")
        super().put(key, data)

    def delete(self, key: str) -> None:
        if self._breaks("delete"):
            raise StoreError("the connection broke off")
        super().delete(key)

    def _breaks(self, what: str) -> bool:
        breaks = self.broken[:1] == (what,)
        self.broken = self.broken[1:] if breaks else self.broken
        return breaks


class Pushed:
    def __init__(self, make_role: MakeRole, folder: Path) -> None:
        self.role = make_role()
        self.log = ExperienceLog(self.role.redis, self.role.run_id)
        self.store = Breaks(folder / "store", self.role.run_id)
        self.archive = Archive(self.store, self.role.run_id)

    def push(self, count: int) -> list[str]:
        client: Any = self.role.redis
        keys = RunKeys(self.role.run_id)
        fields = {"worker": "worker-0", "seq": "0", "transitions": "4", "fragment": "x" * 600}
        positions = [client.xadd(keys.log, fields) for _ in range(count)]
        return [client.xadd(keys.pushes, {"x": ""}, id=position).decode() for position in positions]

    def archiver(self, config: ArchiveConfig = ALL) -> Archiver:
        return Archiver(self.archive, self.log, config)

    def archived(self) -> list[str]:
        return [entry.id for entry in self.archive.entries()]


@pytest.fixture
def pushed(make_role: MakeRole, tmp_path: Path) -> Pushed:
    return Pushed(make_role, tmp_path)


@pytest.mark.parametrize("successor", [False, True])
def test_cut_off_segment_is_written_again(pushed: Pushed, successor: bool) -> None:
    positions, archiver = pushed.push(3), pushed.archiver()
    archiver.store(positions[0], "0-0")
    pushed.store.broken = ("put",)
    with pytest.raises(StoreError):
        archiver.store(positions[1], "0-0")
    if successor:
        archiver = pushed.archiver()
    archiver.store(positions[2], "0-0")  # for another checkpoint: under another name
    assert pushed.archived() == positions


def test_archiver_deletes_from_the_end_without_leaving_holes(pushed: Pushed) -> None:
    archiver = pushed.archiver()
    positions = pushed.push(5)
    for position in positions:
        archiver.store(position, "0-0")
    assert pushed.archived() == positions
    archiver = pushed.archiver(ArchiveConfig(keep="off"))
    pushed.store.broken = ("delete",)
    with pytest.raises(StoreError):
        archiver.store(positions[-1], "0-0", positions[-2])
    assert pushed.archived() == positions
    archiver.store(positions[-1], "0-0", positions[-2])
    assert pushed.archived() == positions[-2:]


@pytest.mark.parametrize("segment_bytes", [1 << 10, 1 << 20])
def test_archive_switched_on_again_starts_at_the_log(pushed: Pushed, segment_bytes: int) -> None:
    keep = ArchiveConfig(keep="all", segment_bytes=segment_bytes)
    first, unarchived = pushed.push(5), pushed.push(2)
    pushed.archiver(keep).store(first[-1], "0-0")
    assert pushed.archived() == first
    assert len(pushed.archive.segments()) == (3 if segment_bytes == 1 << 10 else 1)
    pushed.archiver(ArchiveConfig(keep="off")).store(unarchived[-1], first[-1])
    last = pushed.push(5)
    pushed.archiver(keep).store(last[-1], unarchived[-1])
    with pytest.raises(ArchiveIncomplete, match=f"lacks the log after {first[-1]} through {unarchived[-1]}"):
        pushed.archived()
    assert [entry.id for entry in pushed.archive.entries(unarchived[-1])] == last


def test_archive_names_entries_lost_before_archiving(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    game = new_game(archived())
    game.play_to(2, durable=True)
    begun = game.role.checkpoints.resolve("latest")
    with monkeypatch.context() as patch:
        patch.setattr(Archiver, "store", lambda *_: None)
        game.play_to(4)
        game.durable()  # and dies before it archives; then Redis is lost with all that it held
        lost = game.role.checkpoints.resolve("latest")
        game.crash()
    game.worker.stop("the machine is gone")
    restore_redis(game, {})
    create_flow(game.role)
    game.restart()
    game.worker = game.another_worker(0)
    game.finish()
    final = game.finished()["final"]
    with pytest.raises(ArchiveIncomplete, match="lacks the log after"):
        list(read_experience(game.folder))
    with pytest.raises(ArchiveIncomplete, match="lacks the log after"):
        replayed(game, begun, final)
    assert replayed(game, lost, final).equal
    balanced(game)


def test_archive_has_what_a_trainer_died_before_archiving(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has lost the last policy version as well, but none of the experience."""
    game = new_game(archived())
    game.play_to(2, durable=True)
    begun = game.role.checkpoints.resolve("latest")
    with monkeypatch.context() as patch:
        patch.setattr(ArchiveStage, "run", lambda *_: None)
        patch.setattr(TrimStage, "run", lambda *_: None)
        game.play_to(3)
        for _ in range(game.role.config.rollout.fragments_per_update):
            game.worker.step(0)
        past = dumped_redis(game)
        game.play_to(4, durable=True)
        game.crash()
    restore_redis(game, past)
    game.restart()
    assert game.board_version() == 4
    game.finish()
    assert replayed(game, begun, game.finished()["final"]).equal
    balanced(game)
