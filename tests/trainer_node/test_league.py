"""The league's fold: payoffs and ratings against slow forms, any cut, snapshots, resets, and the table of opponents."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openskill.models import PlackettLuce

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import EpisodeRecord, MatchRecord
from stagecoach.shared.league.table import MatchTable, player_hash
from stagecoach.shared.policies.serialization import decode_policy, finite_weights
from stagecoach.trainer_node.learning.fold import encode
from stagecoach.trainer_node.learning.league import League, Rating, standings, wilson
from tests.support.experience.league import EXPLOITED, acted, change, league_config, league_of, record, season

RESULTS = st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=40)
OFTEN: dict[str, Any] = {
    "snapshot": {"every": "5 episodes", "min_games": 4, "win_rate": 0.6},
    "players": 4,
    "opponents": {"latest": 0.3, "past": {"share": 0.4, "choose": "pfsp", "window": 2}, "fixed": 0.3},
    "fixed": {"random": {"source": "random", "kind": "random", "seats": ["main"]}},
    "swap_every": "50 env_steps",
}  # fmt: skip
PAIR = ("main", "exploiter")


def table_of(league: League, env_steps: int = 0) -> MatchTable:
    return league.table(Counters(env_steps=env_steps))


@settings(max_examples=60)
@given(RESULTS, RESULTS)
def test_league_resumes_exactly_from_any_update(first: list[float], then: list[float]) -> None:
    """What it was is in its bytes: table, ratings, and snapshots that come later."""
    reset = {"exploiter": EXPLOITED["learners"]["exploiter"] | {"reset": {"or_after": "9 episodes"}}}
    config = league_config(OFTEN | {"learners": EXPLOITED["learners"] | reset}, PAIR)
    whole, policies = league_of(config)
    season(whole, policies, first)
    other, again = league_of(config)
    other.load_state(json.loads(encode(whole)))
    for name, policy in again.items():
        policy.load_state_dict(policies[name].state_dict())
    for league, its in ((whole, policies), (other, again)):
        season(league, its, then)
    assert encode(other) == encode(whole)
    assert table_of(other, 60) == table_of(whole, 60)
    assert len(whole.now.snapshots) <= 4


@settings(max_examples=60)
@given(RESULTS)
def test_payoffs_and_ratings_equal_reference_implementations(results: list[float]) -> None:
    league, _ = league_of(league_config({}))
    games = [record(table_of(league), number, result) for number, result in enumerate(results)]
    model = PlackettLuce()
    strength = {player: model.rating() for player in ("main", league.now.snapshots[0].id)}
    elo = dict.fromkeys(strength, 1200.0)
    for game in games:
        league.observe_episode(game, Counters())
        assert game.match is not None
        one, two = game.match.players
        if one != two:
            mine, theirs = game.match.players[game.match.side], game.match.players[1 - game.match.side]
            ranks = [-number for number in game.match.outcome]
            ((strength[one],), (strength[two],)) = model.rate([[strength[one]], [strength[two]]], ranks=ranks)
            change = game.episode_return - 1 / (1 + 10 ** ((elo[theirs] - elo[mine]) / 400))
            elo[mine], elo[theirs] = elo[mine] + change, elo[theirs] - change
    for player, rating in strength.items():
        found = league.now.ratings["main"].get(player, Rating())
        assert (found.mu, found.sigma) == pytest.approx((rating.mu, rating.sigma))
        assert found.elo == pytest.approx(elo[player])
    told = Counter((its.players[1 - its.side], its.side, game.episode_return) for game in games if (its := game.match))
    cells = {
        (player, side): cell
        for player, sides in league.now.payoff.get("main", {}).items() for side, cell in sides.items()
    }  # fmt: skip
    assert cells == {
        (player, side): (
            *(sum(told[player, side, result] for result in kinds) for kinds in ((0, 0.5, 1), (1,), (0.5,))),
            sum(2 * result * told[player, side, result] for result in (0, 0.5, 1)),
        )
        for player, side, _ in told
    }


def test_rating_ignores_self_play_and_snapshot_inherits_it() -> None:
    league, policies = league_of(league_config({"opponents": {"latest": 1, "past": 0}}))
    for number in range(20):
        league.observe_episode(record(table_of(league), number, 1.0), Counters())
    assert league.now.ratings["main"]["main"] == Rating()
    assert league.metrics() | {"matches/main": 20, "elo/main": 1200.0} == league.metrics()
    league, policies = league_of(
        league_config({"opponents": {"latest": 0, "past": 1}, "snapshot": {"every": "8 episodes"}})
    )
    season(league, policies, [1.0] * 8)
    (first, second), ratings = league.now.snapshots, league.now.ratings["main"]
    assert ratings[second.id] == ratings["main"] != Rating() and ratings["main"].ordinal > ratings[first.id].ordinal
    assert set(league.now.payoff) == {second.id}, "the row of what it was becomes the snapshot's"
    league.observe_episode(record(table_of(league), 1, 0.0), Counters())
    assert ratings[second.id] != ratings["main"]


def test_league_ignores_invalid_matches() -> None:
    league, _ = league_of(league_config({}))
    good = record(table_of(league), 1, 1.0).match
    assert good is not None
    before = encode(league)
    changes: list[dict[str, Any]] = [
        {"learner": "nobody"}, {"side": 2}, {"players": ("main",)}, {"outcome": (1.0,)},
        {"players": ("main", "gone-1")}, {"players": ("random", "random")},
    ]  # fmt: skip
    for fields in changes:
        league.observe_episode(EpisodeRecord(1.0, 3, match=MatchRecord(**vars(good) | fields)), Counters())
    league.observe_episode(EpisodeRecord(1.0, 3), Counters())
    assert encode(league) == before
    league.observe_episode(EpisodeRecord(1.0, 3, match=good), Counters())
    assert encode(league) != before


def test_snapshots_become_players_with_bytes() -> None:
    league, policies = league_of(league_config({"snapshot": {"every": "21 env_steps"}, "players": 2}))
    stored = dict(league.new_objects())
    for number in range(8):
        league.observe_episode(record(table_of(league), number, 0.5), Counters())
        if number % 4 == 3:
            change(policies["main"])
            league.after_update(policies, number)
            stored |= league.new_objects()
            assert len(league.new_objects()) == 1
    assert [sha256 for sha256, data in stored.items() if sha256 == player_hash(data)] == list(stored)
    assert len(stored) == 3
    first, last = league.now.snapshots
    assert [first.env_steps, last.env_steps] == [0, 56]
    assert set(league.objects()) == {first.sha256, last.sha256} < stored.keys()
    assert all(finite_weights(decode_policy(data)[0]) for data in stored.values())
    league.load_state(json.loads(encode(league)))
    assert not league.new_objects(), "what is in a checkpoint is in the store"


def test_weights_that_have_not_changed_are_no_other_player() -> None:
    league, policies = league_of(league_config({"snapshot": {"every": "1 episodes"}}))
    league.observe_episode(record(table_of(league), 0, 1.0), Counters())
    league.after_update(policies, 5)
    assert len(league.now.snapshots) == 1
    assert league.now.payoff.keys() == {"main"}


def test_league_snapshots_by_win_rate_within_interval() -> None:
    often = {"every": None, "win_rate": 0.7, "min_games": 4}
    past = {"latest": 0, "past": 1}
    for at_most, taken in (("0 episodes", 4), ("12 episodes", 1)):
        league, policies = league_of(league_config({"snapshot": often | {"at_most_every": at_most}, "opponents": past}))
        season(league, policies, [1.0] * 16)
        assert len(league.now.snapshots) - 1 == taken
    season(league, policies, [0.0] * 16)
    assert len(league.now.snapshots) == 2, "it wins no more"


def test_full_league_drops_oldest_and_keeps_first() -> None:
    league, policies = league_of(league_config({"snapshot": {"every": "4 episodes"}, "players": 3}))
    first = league.now.snapshots[0]
    season(league, policies, [1.0, 0.0] * 20)
    ids = [snapshot.id for snapshot in league.now.snapshots]
    assert len(ids) == 3 and league.now.snapshots[0] == first
    assert [snapshot.env_steps for snapshot in league.now.snapshots[1:]] == [36 * 7, 40 * 7]
    named = set(json.dumps(league.now.as_dict()).replace('"', " ").split())
    assert {name for name in named if name.startswith("main-")} <= {*ids}
    assert league.objects() == sorted(snapshot.sha256 for snapshot in league.now.snapshots)


@pytest.mark.parametrize(
    ("choose", "weights"),
    [
        ({"choose": "uniform"}, [1, 1, 1]),
        ({"choose": "recent"}, [1, 2, 3]),
        ({"choose": "pfsp"}, [(1 - 0.5) ** 2, (1 - 2 / 3) ** 2, (1 - 1 / 3) ** 2]),
    ],
)
def test_past_opponents_are_first_and_newest_by_weight(choose: dict[str, Any], weights: list[float]) -> None:
    """The second of three has been beaten once, the third has won once."""
    opponents = {"latest": 0.25, "past": {"share": 0.75, "window": 2, **choose}}
    league, policies = league_of(league_config({"opponents": opponents, "snapshot": {"every": "1 episodes"}}))
    for number in range(3):
        change(policies["main"])
        league.observe_episode(record(table_of(league), number, 0.5), Counters())
        league.after_update(policies, number)
    ids = [snapshot.id for snapshot in league.now.snapshots]
    assert len(ids) == 4
    standing = league.now.learners["main"]
    standing.form = {ids[2]: (1, 2 / 3), ids[3]: (1, 1 / 3)}
    drawn = dict(table_of(league).learners["main"].opponents["main"])
    assert list(drawn) == ["main", ids[0], ids[2], ids[3]]
    assert drawn["main"] == 0.25 and math.isclose(sum(drawn.values()), 1)
    expected = [0.75 * weight / sum(weights) for weight in weights]
    assert [drawn[id_] for id_ in (ids[0], ids[2], ids[3])] == pytest.approx(expected)


def test_empty_shares_go_to_current_weights() -> None:
    fixed = {"fixed": {"stone": {"source": "m:f", "kind": "function", "seats": ["other"]}}}
    shares = {"opponents": {"latest": 0.2, "past": 0.5, "fixed": 0.3}}
    league, _ = league_of(league_config(EXPLOITED | fixed | shares, PAIR))
    first = {snapshot.policy: snapshot.id for snapshot in league.now.snapshots}
    learners = table_of(league).learners
    assert dict(learners["exploiter"].opponents["main"]) == {"main": 0.5, first["main"]: 0.5}
    assert dict(learners["main"].opponents["main"]) == {"main": 0.5, first["exploiter"]: 0.25, first["main"]: 0.25}
    assert {learner.sides for learner in learners.values()} == {(0, 1)}
    players = table_of(league).players
    assert {id_: (player.kind, player.seats) for id_, player in players.items()} == dict.fromkeys(
        first.values(), ("policy", ("main",))
    )
    assert MatchTable.from_dict(json.loads(json.dumps(table_of(league).as_dict()))) == table_of(league)


def test_fixed_players_are_drawn_by_their_weights() -> None:
    dice = {"source": "random", "kind": "random", "seats": ["main"]}
    players = {"dice": dice, "expert": dice | {"weight": 3}, "other": dice}
    league, _ = league_of(league_config({"fixed": players, "opponents": {"latest": 0, "past": 0.5, "fixed": 0.5}}))
    drawn = dict(table_of(league).learners["main"].opponents["main"])
    assert [drawn[name] for name in players] == pytest.approx([0.1, 0.3, 0.1])


def test_swapping_learners_train_one_at_a_time() -> None:
    league, _ = league_of(league_config(EXPLOITED | {"swap_every": "100 env_steps"}, PAIR))
    turns = [list(table_of(league, steps).learners) for steps in (0, 99, 100, 199, 200)]
    assert turns == [["exploiter"], ["exploiter"], ["main"], ["main"], ["exploiter"]]


def test_exploiter_resets_after_winning_and_joins_league() -> None:
    reset = {"win_rate": 0.7, "or_after": "40 episodes"}
    exploiter = {"policy": "exploiter", "plays": ["main"], "reset": reset}
    settings = {
        "learners": {"exploiter": exploiter},
        "opponents": {"latest": 1, "past": 0},
        "snapshot": {"min_games": 6},
    }
    for result, games in ((1.0, 8), (0.0, 40)):
        still = {"main": {"hidden_sizes": [4], "trainable": False}, "exploiter": {"hidden_sizes": [4]}}
        league, policies = league_of(league_config(settings, PAIR, policies=still))
        begun = [0]
        for number in range(games):
            league.observe_episode(record(table_of(league), number, result), Counters())
            if number % 4 == 3:
                change(policies["exploiter"])
                begun += [number + 1] * len(league.after_update(policies, number))
        assert begun == [0, games]
        told = "".join(league.drain_events())
        assert f"exploiter begins again with its initial weights after {7 * games} env steps (reset 1)" in told
        assert "begins again" not in "".join(league.drain_events())
        standing = league.now.learners["exploiter"]
        assert (standing.resets, standing.form, len(league.now.snapshots)) == (1, {}, 2)
        assert league.now.ratings["main"]["exploiter"] == Rating()


def test_reset_learner_is_not_rated_by_former_weights() -> None:
    """A learner that plays no other is what the others meet as current weights."""
    resets = {"exploiter": {"policy": "exploiter", "reset": {"or_after": "1 episodes"}}, "main": {"policy": "main"}}
    league, policies = league_of(league_config({"learners": resets}, PAIR))
    match = MatchRecord("main", 0, ("main", "exploiter"), (1.0, 0.0))
    league._seats = ("main", "exploiter")
    acted(league, 3)
    league.observe_episode(EpisodeRecord(1.0, 3, match=replace(match, learner="exploiter", side=1)), Counters())
    league.after_update(policies, 4)
    begun, elo = encode(league), league.now.ratings["exploiter"]["exploiter"]
    assert league.now.learners["exploiter"].resets == 1 and elo == Rating()
    league.observe_episode(EpisodeRecord(1.0, 3, match=match), Counters())
    assert league.now.ratings["exploiter"]["exploiter"] == Rating() and not league.now.learners["main"].form
    assert encode(league) != begun, "its own play counts"
    acted(league, 4)
    league.observe_episode(EpisodeRecord(1.0, 3, match=match), Counters())
    assert league.now.ratings["exploiter"]["exploiter"].matches == 1 and league.now.learners["main"].form


@pytest.mark.parametrize("lag", [0, 2])
def test_wins_of_former_weights_reset_learner_once(lag: int) -> None:
    """A version acts on for as many updates as it may lag."""
    exploiter = {"policy": "exploiter", "plays": ["main"], "reset": {"win_rate": 0.7}}
    settings = {"learners": {"exploiter": exploiter}, "opponents": {"latest": 1, "past": 0}}
    still = {"main": {"hidden_sizes": [4], "trainable": False}, "exploiter": {"hidden_sizes": [4]}}
    league, policies = league_of(
        league_config(
            settings | {"snapshot": {"min_games": 6}}, PAIR, policies=still, rollout={"max_policy_lag": lag},
            algorithm={"name": "appo"} if lag else "ppo",
        )
    )  # fmt: skip
    standing, resets, number = league.now.learners["exploiter"], [], 0
    for version in range(8 + lag):
        change(policies["exploiter"])
        acted_by = max(0, version - lag)
        acted(league, acted_by)
        for _ in range(8):
            league.observe_episode(record(table_of(league), number, 1.0 if acted_by <= 0 else 0.0), Counters())
            number += 1
        league.after_update(policies, version)
        resets.append(standing.resets)
    assert resets == [1] * len(resets) and standing.played.episodes == number
    assert standing.form["main"][1] < 0.3, "the new ones are counted"
    assert len(league.now.snapshots) == 2


def test_learner_resets_after_enough_matches_with_all_opponents() -> None:
    """Of three sides, the one that it beats may have been met sooner."""
    learners = {name: {"policy": name} for name in ("main", "b", "c")}
    learners["main"]["reset"] = {"win_rate": 0.7}  # type: ignore[assignment]
    agents = {"main-0": "main", "main-1": "b", "main-2": "c"}
    settings = {"learners": learners, "snapshot": {"min_games": 100}, "opponents": {"latest": 1, "past": 0}}
    league, policies = league_of(league_config(settings, ("main", "b", "c"), agents=agents), agents)
    standing = league.now.learners["main"]
    for games, rate, resets in ((99, 0.05, 0), (100, 0.05, 0), (100, 0.7, 1)):
        standing.form = {"b": (100, 0.9), "c": (games, rate)}
        assert league.after_update(policies, 1) == ["main"] * resets
    assert not league.drain_events()[1:]


def test_unreachable_reset_is_reported_once() -> None:
    learners = {"main": {"policy": "main", "reset": {"win_rate": 0.7}}, "b": {"policy": "b"}}
    settings = {
        "learners": learners, "opponents": {"latest": 0, "past": 0.5, "fixed": 0.5},
        "fixed": {"dice": {"source": "random", "kind": "random", "seats": ["main", "b"]}},
    }  # fmt: skip
    agents = {"main-0": "main", "main-1": "b"}
    league, _ = league_of(league_config(settings, ("main", "b"), agents=agents), agents)
    (line,) = league.drain_events()
    assert line.startswith("league.learners.main.reset.win_rate is never reached: it counts matches against current")
    assert not league.drain_events()


def test_fixed_player_without_matches_is_reported_once() -> None:
    """It fits no seat that a learner plays against, as one may of a run whose policies had other names."""
    stone = {"source": "random", "kind": "random", "seats": ["hero"]}
    fixed = {"stone": stone, "dice": stone | {"seats": ["main"]}}
    league, _ = league_of(league_config({"fixed": fixed, "opponents": {"latest": 0.5, "past": 0, "fixed": 0.5}}))
    (line,) = league.drain_events()
    assert line.startswith("fixed player stone is never drawn: it fits the seats of hero, where no learner meets")
    assert not league.drain_events()


def test_forfeits_are_counted_by_player_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagecoach.trainer_node.learning.league._FORFEITS_ALLOWED", 1)
    league, _ = league_of(league_config({"fixed": {"stone": "m:f"}}))
    assert league.drain_events() == ["fixed players are met in evaluations alone (stone): league.opponents.fixed is 0"]
    for number in range(2):
        assert league.drain_events() == []
        told: dict[str, Any] = {"players": ("main", "stone"), "side": 0, "outcome": (1.0, 0.0)}
        league.observe_episode(
            record(table_of(league), number, 1.0, forfeit="stone: ValueError: no move", **told), Counters()
        )
    (line,) = league.drain_events()
    assert "player stone has forfeited 2 matches" in line
    assert league.drain_events() == [], "once"
    both = MatchRecord("main", 0, ("main", "stone"), (1.0, 0.0), "stone: it fell\nmain: too\nx: y")
    league.observe_episode(EpisodeRecord(0.0, 3, match=both), Counters())
    assert league.now.forfeits == {"stone": 3, "main": 1}
    listed = {row["player"]: row["forfeits"] for row in standings(league.now, ["stone"])["players"]}
    assert listed["stone"] == 3 and listed["main"] == 1


def test_wilson_interval_equals_textbook_values() -> None:
    assert wilson(10, 8, 0) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 0, 0) == (0.0, 1.0)
    assert wilson(4, 0, 8) == wilson(4, 4, 0)
