"""A league in a run: exact over deaths and in a replay, its players in the store before a version that names them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from stagecoach.coordinator.catalog.league import league_of
from stagecoach.coordinator.catalog.run_metrics import last_row
from stagecoach.shared.base.errors import SharedObjectUnusable, StoreUnavailable
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.mixture import decode_mixture
from stagecoach.shared.league.table import MatchTable, player_hash
from stagecoach.shared.protocol.events import read_evaluations
from stagecoach.shared.protocol.policy_board import version_of
from stagecoach.shared.storage.metric_log import TRAIN
from stagecoach.shared.storage.object_store import FileStore
from stagecoach.shared.storage.players import LEAGUE, read_mean
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS, read_shared_object, write_shared_object
from stagecoach.trainer_node.checkpointing.verification import verify
from stagecoach.trainer_node.learning.fold import encode
from stagecoach.trainer_node.learning.league import League
from stagecoach.trainer_node.metrics.recorder import evaluation_row
from stagecoach.trainer_node.state.snapshot import POLICY
from tests.support.environments.small import CHASE, CHASE_POLICIES
from tests.support.runs.game import Game, NewGame, archived, die_in_a_fragment, evaluate_due, replayed

LEAGUE_OF_TWO: dict[str, Any] = {
    "learners": {"cat": {"policy": "hunter", "reset": {"or_after": "20 episodes"}}, "mouse": {"policy": "prey"}},
    "snapshot": {"every": "6 episodes", "min_games": 3}, "players": 5,
    "opponents": {"latest": 0.5, "past": {"share": 0.5, "choose": "pfsp", "window": 3}},
}  # fmt: skip


def chase(league: dict[str, Any] = LEAGUE_OF_TWO, **sections: Any) -> Any:
    environment = CHASE | {"kwargs": {"cat_steps": 3, "mouse_steps": 5, "counts": False}}
    return archived(**({"environment": environment, "league": league} | CHASE_POLICIES | sections))


def league_in(game: Game) -> League:
    (league,) = game.trainer.learner.folds
    assert isinstance(league, League)
    return league


def whole_end(game: Game) -> dict[str, str]:
    """Plays to the end; SHA-256 of the objects of the last checkpoint, without the ledger's."""
    game.play()
    game.trainer.finish("exhausted")
    return {name: item.sha256 for name, item in game.latest().manifest.objects.items() if name != "trainer/state.json"}


def lose_throughout(game: Game) -> None:
    """Loses trainer and worker at each of the first versions, once in the middle of a fragment."""
    for version in range(1, 6):
        game.play_to(version)
        if version == 3:
            die_in_a_fragment(game)
        if version == 4:
            game.durable()
        game.lose()


def scores_of_second_version(game: Game) -> Any:
    """Plays to version 2 and evaluates it."""
    game.play_to(2, durable=True)
    assert evaluate_due(game) == 1
    (scores,) = read_evaluations(game.role.redis, game.role.run_id).values()
    return scores


def test_league_is_exact_after_deaths_and_in_replay(new_game: NewGame) -> None:
    whole = whole_end(new_game(chase()))
    assert LEAGUE in whole
    assert "trainer/hunter.initial.safetensors" in whole
    game = new_game(chase())
    lose_throughout(game)
    assert whole_end(game) == whole
    found = replayed(game)
    assert found.equal, found.different
    assert LEAGUE in found.sha256
    league = league_in(game)
    assert league.now.learners["cat"].resets >= 1, "what a reset does is replayed as well"
    assert len(league.now.snapshots) == 5


def test_league_with_a_mean_strategy_survives_deaths_exactly(new_game: NewGame) -> None:
    """A successor has the snapshot that was drawn for the running episode: it resumes after each fragment."""
    first = new_game(chase())
    first.play_to(4, durable=True)
    store = first.role.checkpoints
    data = read_mean(store, store.names()[-1], "prey-mean")
    assert data is not None and len(decode_mixture(data)) > 2
    rival = {"source": "other#prey-mean", "kind": "mixture", "sha256": player_hash(data), "seats": ["prey"]}
    league = {"fixed": {"rival": rival}, "opponents": {"latest": 0.1, "past": 0, "fixed": 0.9}}
    config = chase(league, environment=CHASE | {"kwargs": {"cat_steps": 11, "mouse_steps": 13, "counts": False}})

    def begun() -> Game:
        game = new_game(config)
        write_shared_object(game.role.checkpoints.store, data)
        return game

    whole, game = whole_end(begun()), begun()
    lose_throughout(game)
    assert whole_end(game) == whole
    assert "begins new episodes" not in game.events("environment")
    assert "rival" in league_of(game.role.checkpoints, game.role.config)["payoff"]["hunter"]


def test_random_acting_is_never_rated(new_game: NewGame) -> None:
    """Fragments of warm-up that are in flight when it ends are trained on, by algorithms that learn from any."""
    game = new_game(chase(rollout={"fragment_steps": 32}))
    game.worker.step(0)
    item, learner = game.trainer.consumer.take(0, Phase.TRAIN, 0.0), game.trainer.learner
    assert item is not None and item.header.episodes
    before = encode(league_in(game))
    for phase, rated in ((Phase.HEATUP, False), (Phase.TRAIN, True)):
        its = replace(item, header=replace(item.header, phase=phase), columns=copy.deepcopy(item.columns))
        learner.emulate_acting([its], Phase.TRAIN)
        assert (encode(league_in(game)) != before) is rated


def test_version_and_checkpoint_list_stored_players(new_game: NewGame) -> None:
    game = new_game(chase())
    store = game.role.checkpoints.store
    for version in range(1, 6):
        game.play_to(version)
        board = game.board()
        table = MatchTable.from_dict(board.header.folds["league"])
        for player in table.players.values():
            read_shared_object(store, player.sha256)
        assert table.sides == (("cat",), ("mouse",))
        assert table.seats == ("hunter", "prey")
    game.trainer.save_last("stopped")
    assert version_of(game.latest()).header == board.header
    first = game.role.checkpoints.load(game.role.checkpoints.names()[0])
    begun = MatchTable.from_dict(first.manifest.provenance["folds"]["league"])
    hashes = {first.manifest.objects[POLICY.format(policy)].sha256 for policy in ("hunter", "prey")}
    assert {player.sha256 for player in begun.players.values()} == hashes, "initial weights are the first snapshots"


def test_version_waits_until_store_has_new_player(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    game = new_game(chase())
    put, waits = FileStore.put, list[tuple[int, int, bool]]()

    def failing(self: FileStore, key: str, data: bytes) -> None:
        if key.startswith(SHARED_OBJECTS) and len(waits) < 3:
            heartbeat = game.trainer.incarnation.heartbeat
            waits.append((game.board_version(), game.trainer.version, heartbeat.waits))
            raise StoreUnavailable("the store is away")
        put(self, key, data)

    monkeypatch.setattr(FileStore, "put", failing)
    game.play_to(5)
    assert len(waits) == 3
    assert set(waits) == {(waits[0][1] - 1, waits[0][1], True)}


def test_player_stays_in_store_while_a_version_may_need_it(new_game: NewGame) -> None:
    game = new_game(
        chase(
            checkpoint={"every": "1 updates", "keep_last": 1}, stop_at={"updates": 14},
            rollout={"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 3},
        )
    )  # fmt: skip
    named, gone = dict[int, set[str]](), set[str]()
    for version in range(1, 14):
        game.play_to(version)
        board = game.board()
        table = MatchTable.from_dict(board.header.folds["league"])
        named[version] = {player.sha256 for player in table.players.values()}
        game.durable()
        if version in (8, 9):
            game.lose()
        there = {key.removeprefix(SHARED_OBJECTS) for key in game.role.checkpoints.store.keys(SHARED_OBJECTS)}
        assert set().union(*(named.get(version - lag, set()) for lag in range(4))) <= there, version
        gone |= set().union(*named.values()) - there
    assert gone


def test_missing_or_altered_player_is_named_and_verified(new_game: NewGame) -> None:
    checkpoints = new_game(chase()).role.checkpoints
    store = checkpoints.store
    assert [verdict.state for verdict in verify(checkpoints)] == ["ok"]
    one, two = store.keys(SHARED_OBJECTS)
    store.delete(one)
    store.put(two, b"another")
    for key, words in ((one, "does not have"), (two, "was altered")):
        with pytest.raises(SharedObjectUnusable, match=words) as caught:
            read_shared_object(store, key.removeprefix(SHARED_OBJECTS))
        assert key in str(caught.value)
    found = verify(checkpoints)
    assert [(verdict.name, verdict.state) for verdict in found[1:]] == [(one, "damaged"), (two, "damaged")]


def test_ratings_and_payoffs_are_read_from_a_checkpoint(new_game: NewGame) -> None:
    game = new_game(chase())
    whole_end(game)
    found = league_of(game.role.checkpoints, game.role.config)
    assert found["checkpoint"] == game.role.checkpoints.names()[-1]
    rows = {row["player"]: row for row in found["players"]}
    assert {rows[policy]["kind"] for policy in ("hunter", "prey")} == {"current"}
    assert {row["seat"] for row in rows.values()} == {"hunter", "prey"}
    cells = [cell for row in found["payoff"].values() for cell in row.values()]
    assert cells
    assert all(cell["low"] <= cell["rate"] <= cell["high"] and cell["games"] > 0 for cell in cells)
    status = json.loads((game.folder / "training_status.json").read_text())["checkpoints"]
    assert status[-1]["fold_metrics"].keys() >= {"league/rating/hunter", "league/rating/prey"}
    recorded = last_row(game.role.checkpoints.store, TRAIN)[1]
    for policy in ("hunter", "prey"):
        assert recorded[f"league/rating/{policy}"] == rows[policy]["rating"]
        assert recorded[f"league/elo/{policy}"] == rows[policy]["elo"]


def test_league_can_rank_checkpoints_by_mean_return(new_game: NewGame) -> None:
    """Of the first learner against the fixed players, in both evaluations; a rating would count wins alone."""
    fixed = {"dice": {"source": "random", "kind": "random", "seats": ["hunter", "prey"]}}
    best = {"every": "2 updates", "best_by": "mean_return"}
    game = new_game(chase(LEAGUE_OF_TWO | {"fixed": fixed}, checkpoint=best, evaluation={"episodes": 4}))
    scores = scores_of_second_version(game)
    assert scores["ranked_by"] == "mean return of cat against fixed players"
    assert scores["ranking"] == scores["match_returns"]["cat/dice"] >= 3
    assert scores["confirmation"]["ranking"] >= 3
    assert evaluation_row(scores)["eval/match_return/cat/dice"] == scores["ranking"]
    payoff = league_of(game.role.checkpoints, game.role.config)["payoff"]
    cells = [cell for player, row in payoff.items() if player.startswith("hunter") for cell in row.values()]
    assert cells and all(3 <= cell["mean_return"] <= 6 for cell in cells), "1 to 2 for each of a cat's three steps"


def test_evaluator_continues_without_missing_fixed_player(new_game: NewGame) -> None:
    gone = {"source": "elsewhere", "kind": "policy", "sha256": "0" * 64, "seats": ["prey"]}
    script = {"source": "tests.support.environments.games:raises", "kind": "function", "seats": ["hunter"]}
    dice = {"source": "random", "kind": "random", "seats": ["hunter", "prey"]}
    fixed = {"gone": gone, "dice": dice, "script": script}
    game = new_game(chase(league=LEAGUE_OF_TWO | {"fixed": fixed}, evaluation={"episodes": 2, "deadline_seconds": 60}))
    scores = scores_of_second_version(game)
    assert scores["win_rates"].keys() == {"cat/dice", "mouse/dice", "mouse/script"}
    lost = "script lost 2 of 2 evaluated matches by forfeit: ValueError: no move comes to mind"
    assert scores["win_rates"]["mouse/script"] == 1.0 and lost in game.events("evaluation")
    assert evaluation_row(scores)["eval/win_rate/cat/dice"] == scores["win_rates"]["cat/dice"]
    assert "is not played: the store does not have shared_objects/000" in game.events("evaluation")


def test_episode_keeps_opponent_that_left_the_league(new_game: NewGame) -> None:
    """The pool holds one snapshot per policy beside the first ones, and an episode spans several versions."""
    league = {
        "snapshot": {"every": "1 episodes"}, "players": 4,
        "opponents": {"latest": 0.0, "past": {"share": 1.0, "window": 4, "choose": "recent"}},
    }  # fmt: skip
    config = chase(
        league=league, checkpoint={"every": "1 updates", "keep_last": 1}, stop_at={"updates": 18},
        environment=CHASE | {"kwargs": {"cat_steps": 70, "mouse_steps": 75, "counts": False}},
    )  # fmt: skip
    whole = whole_end(new_game(config))
    game = new_game(config)
    for version in range(1, 18):
        game.play_to(version, durable=True)
        game.lose()
    assert whole_end(game) == whole
    assert "begins new episodes" not in game.events("environment")
