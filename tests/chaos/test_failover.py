"""A Redis that comes back without some that was learned: what was learned stays accounted for, in log, archive or a
named hole, versions keep their weights, and the next trainer continues.
"""

from __future__ import annotations

import contextlib
import itertools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from stagecoach.shared.base.errors import ArchiveIncomplete, UserError
from stagecoach.shared.protocol.experience_log import PushReply
from stagecoach.shared.storage.log_archive import Archive
from tests.support.runs.fault_run import FaultRun, Witness, replica_of
from tests.support.runs.game import Game, archived, balanced, replayed
from tests.support.services import own_redis
from tests.support.services.fault_proxy import FaultProxy
from tests.support.services.own_redis import OwnRedis

_K = 3


def config(place: FaultRun, lag: int = 0, **sections: Any) -> Any:
    """Batches of three fragments, of which one or two are held by the trainer when Redis goes."""
    given = place.config()
    rollout = {"fragment_steps": 8, "fragments_per_update": _K, "max_policy_lag": lag, "wait_deadline_seconds": 60.0}
    return archived(**{"redis": given.redis.model_dump(exclude_unset=True), "rollout": rollout} | sections)


def covered(game: Game, learned: set[str]) -> None:
    """Log, archive and the holes that the archive names have all that was learned."""
    archive = Archive(game.role.checkpoints.store, game.role.run_id)
    there = {entry.id for entry in game.role.log().between("0-0", "+")}
    there |= {entry.id for entry in archive.entries(holes=True)}
    for position in learned - there:
        with pytest.raises(ArchiveIncomplete, match="lacks the log after"):
            list(archive.entries(_before(position), position))


def _before(position: str) -> str:
    milliseconds, _, number = position.partition("-")
    return f"{int(milliseconds) - 1}-{number}"


def replays(game: Game) -> None:
    """Replays from each checkpoint to the next one, or expects the named hole between them."""
    names = game.role.checkpoints.names()
    found = []
    for start, goal in itertools.pairwise(names):
        with contextlib.suppress(ArchiveIncomplete, UserError):  # a hole, or another lineage
            result = replayed(game, start, goal)
            assert result.equal, (start, goal, result.different)
            found.append(goal)
    assert names[-1] in found


def ends(game: Game, witness: Witness) -> None:
    for _ in range(300):
        for worker in (game.worker, *game.others):
            worker.step(0)
        if game.trainer.step(0) == "ended":
            break
    game.trainer.finish("exhausted")
    balanced(game)
    state = game.role.flow.read()
    assert 0 <= state.in_flight <= state.window
    assert state.version == game.trainer.version
    covered(game, witness.learned)
    replays(game)


class DebianRedis(OwnRedis):
    """Debian's redis-server, whatever binary the other tests use."""

    binary = "/usr/bin/redis-server"


@pytest.mark.skipif(not Path(DebianRedis.binary).exists(), reason="needs Debian's redis-server: apt-get install it")
def test_replica_promoted_behind_its_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers push, the trainer holds an incomplete batch, and the replica has less than was learned."""
    monkeypatch.setattr(own_redis, "redis_binary", lambda: DebianRedis.binary)
    with closing(FaultRun(tmp_path)) as place, closing(FaultProxy(place.redis.port)) as between:
        game = place.game(config(place, stop_at={"updates": 8}))
        other, witness = game.another_worker(1), Witness(game, monkeypatch)

        def play(turns: int) -> None:
            for _ in range(turns):
                for worker in (other, game.worker, other):
                    worker.step(0)
                game.trainer.step(0)

        play(2)
        game.durable()
        with replica_of(place, between.port) as replica:
            between.black_hole()
            play(1)
            game.worker.step(0)
            assert game.trainer.step(0) == "waited"
            place.redis.kill()
            replica.command("REPLICAOF", "NO", "ONE")
            place.proxy.retarget(replica.port)
            ends(game, witness)
            assert game.role.flow.read().version == 8
            assert "without some that was learned" in game.events("trainer")


def test_batch_begins_anew_when_redis_comes_back(place: FaultRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of one Redis process are not learned from together with those of another."""
    game = place.game(config(place, stop_at={"updates": 6}))
    other, witness = game.another_worker(1), Witness(game, monkeypatch)
    game.durable()
    past = place.redis.keep()
    game.worker.step(0)
    assert game.trainer.step(0) == "waited", "it holds one of three"
    place.redis.roll_back(past)
    for _ in range(2):
        other.step(0)
    assert game.trainer.step(0) == "waited"
    other.step(0)
    while game.trainer.version == 0:
        other.step(0)
        game.trainer.step(0)
    assert game.role.checkpoints.newest_good()[0].manifest.version == 0, "nothing learned was lost"
    lines = balanced(game)
    assert lines["total"]["consumed"]["fragments"] == 3
    ends(game, witness)


@pytest.mark.parametrize("who_dies", ["nobody", "trainer"])
@pytest.mark.parametrize("lag", [0, 1])
def test_lost_fragment_behind_a_later_one_is_noticed(
    place: FaultRun, lag: int, who_dies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer holds a fragment of an incomplete batch, which Redis then lacks; another worker's comes first."""
    game = place.game(config(place, lag, stop_at={"updates": 8}))
    other, witness = game.another_worker(1), Witness(game, monkeypatch)
    for _ in range(2):
        for worker in (other, game.worker, other):
            worker.step(0)
        game.trainer.step(0)
    game.durable()
    past = place.redis.keep()
    game.worker.step(0)
    assert game.trainer.step(0) == "waited", "it holds that fragment now"
    place.redis.roll_back(past)
    game.trainer.recovery.redis_checked = 1e18  # it does not look before the batch is complete
    for _ in range(3):
        other.step(0)
        game.trainer.step(0)
    if who_dies == "trainer":
        game.replace_trainer()
        witness.restarted()
    ends(game, witness)


@pytest.mark.parametrize("lag", [0, 1])
def test_next_trainer_starts_after_versions_are_lost(
    place: FaultRun, lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that no checkpoint covers were acted with and are lost; their numbers come again."""
    game = place.game(config(place, lag, stop_at={"updates": 8}, checkpoint={"every": "100 updates"}))
    other, witness = game.another_worker(1), Witness(game, monkeypatch)
    game.durable()
    past = place.redis.keep()
    for _ in range(4):
        for worker in (other, game.worker, other):
            worker.step(0)
        game.trainer.step(0)
    push, held = other.claims.push, list[tuple[Any, ...]]()

    def keeps(*given: Any) -> PushReply:
        held.append(given)
        return PushReply.STALE

    other.claims.push = keeps  # type: ignore[method-assign,assignment]
    other.step(0)  # by a version that is lost next
    game.crash()
    place.redis.roll_back(past)
    game.restart()
    witness.restarted()
    while lag and game.trainer.version < 4:  # there is another version of that number now
        game.worker.step(0)
        game.trainer.step(0)
    other.claims.push = push  # type: ignore[method-assign]
    assert push(*held[0]) == "pushed"
    ends(game, witness)
    dropped = balanced(game)["worker-1"]["dropped"]
    assert "schema" not in dropped and dropped["stale"]["fragments"] >= 1
