"""A league's config and what contradicts it, the draw of a match, and what travels of both."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.league import first_learner
from stagecoach.shared.config.loading import dump_config, parse_config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.fragment import EpisodeRecord, MatchRecord
from stagecoach.shared.league.matchmaking import draw
from stagecoach.shared.league.table import Learner, MatchTable, PlayerRef
from stagecoach.shared.policies.serialization import VersionHeader, decode_board, encode_board
from tests.support.experience.fragments import SIMPLE, zero_fragment
from tests.support.experience.league import league_config, league_of

PAIR = ("main", "exploiter")
RECORD = TypeAdapter(EpisodeRecord)
RESET = {"policy": "exploiter", "plays": ["main"], "reset": {"win_rate": 0.7}}


@pytest.mark.parametrize(
    ("league", "message"),
    [
        ({"opponents": {"latest": 0.5, "past": 0.4, "fixed": 0.2}, "fixed": {"r": "random"}},
         "latest=0.5, past.share=0.4 and fixed.share=0.2 add up to 1.1, expected 1"),
        ({"opponents": {"latest": 0.9, "past": 0, "fixed": 0.1}}, "with no player in league.fixed; add one"),
        ({"sides": [["main-0"], ["main-0", "main-1"]]}, r"sides: \['main-0'\] more than once"),
        ({"sides": [["main-0", "main-1"]]}, "expected two or more"),
        ({"sides": [["main-0"], []]}, "each with an agent"),
        ({"learners": {"a": {"policy": "mian"}}}, r"learners.a.policy='mian' names no policy; policies has \['main'\]"),
        ({"learners": {"a": {"policy": "main", "plays": ["rest"]}}}, "learners.a.plays='rest' names no policy"),
        ({"learners": {"a": {"policy": "main", "plays": ["main", "b"]}}}, "takes the seats of one policy; name one"),
        ({"learners": {"a": {"policy": "main"}, "b": {"policy": "main"}}}, r"\['main'\] learn more than once"),
        ({"learners": {"a": {"policy": "main", "reset": {}}}}, "reset is empty"),
        ({"learners": {"a": {"policy": "main", "reset": {"win_rate": 0.6}}}},
         "a.reset.win_rate counts matches against .* others, and all agents have its own policy 'main'"),
        ({"snapshot": {"every": None}}, "none is ever taken"),
        ({"snapshot": {"every": "5 updates"}}, "snapshot.every: '5 updates' counts a learner's own play"),
        ({"snapshot": {"every": "0 episodes"}}, "snapshot.every: expected at least 1"),
        ({"swap_every": "0 episodes"}, "swap_every: expected at least 1"),
        ({"swap_every": "5 episodes"}, "with one learner, 'main', would change nothing"),
        ({"players": 2, "learners": {"a": {"policy": "main"}, "b": {"policy": "exploiter", "plays": ["main"]}}},
         "players=2 with 2 learners: only the first snapshots of each would be kept; set it to more than 2"),
        ({"learners": {"main": {"policy": "main", "plays": ["main"]}}}, r"plays=\[main\] names its own policy"),
        ({"snapshot": {"every": None, "win_rate": 0.6}, "opponents": {"latest": 1, "past": 0}},
         "each match of 'main' is against itself, so no snapshot of it would ever be taken; give snapshot.every"),
        ({"snapshot": {"at_most_every": "9 episodes"}}, "at_most_every='9 episodes' bounds snapshots by win_rate"),
        ({"opponents": {"latest": 0, "past": 1}, "learners": {"a": {"policy": "main"}, "b": RESET}},
         "learners.b.reset.win_rate counts .* current weights, which league.opponents.latest=0 excludes"),
        ({"fixed": {"main": "random"}}, r"league.fixed: \['main'\] are ids of policies"),
        ({"fixed": {"main-0123456789ab": "random"}}, r"league.fixed: \['main-0123456789ab'\] are ids of"),
        ({"fixed": {"two words": "random"}}, "two words"),
    ],
)  # fmt: skip
def test_contradictory_league_is_rejected_in_one_line(league: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        league_config(league, PAIR if "exploiter" in str(league.get("learners")) else ("main",))
    assert "\n" not in str(caught.value)


def test_league_rejects_replay_with_reset_and_single_agent() -> None:
    learners = {"learners": {"main": {"policy": "main"}, "exploiter": RESET}}
    both = {"learners": {"main": {"policy": "main"}, "exploiter": RESET | {"reset": None}}, "swap_every": "9 env_steps"}
    own = {"policies": {"main": {}, "exploiter": {"algorithm": {"name": "dqn"}}}}
    for sections in ({"algorithm": {"name": "dqn"}}, own):
        with pytest.raises(ConfigError, match=r"exploiter\.reset with the algorithm dqn of 'exploiter': its repl"):
            league_config(learners, PAIR, **sections)
        with pytest.raises(ConfigError, match=r"league\.swap_every with the algorithm dqn of '.*leave swap_every out"):
            league_config(both, PAIR, **sections)
    ppo = {"policies": {"main": {}, "exploiter": {"algorithm": {"name": "ppo"}}}}
    assert league_config(learners, PAIR, algorithm={"name": "dqn"}, **ppo).league is not None
    with pytest.raises(ConfigError, match=r"learners has main, and so policies\.exploiter would not learn: name it in"):
        league_config({"learners": {"main": {"policy": "main"}}}, PAIR)
    frozen = {"policies": {"main": {}, "exploiter": {"trainable": False}}}
    assert league_config({"learners": {"main": {"policy": "main"}}}, PAIR, **frozen).league is not None
    with pytest.raises(
        ConfigError, match=r"best_by: 'exploiter' has no rating, since no learner has this policy; .*main"
    ):
        league_config({}, PAIR, checkpoint={"best_by": "exploiter"}, **frozen)
    with pytest.raises(ConfigError, match=r"best_by=mean_return in a league is measured against its fixed players"):
        league_config({}, checkpoint={"best_by": "mean_return"})
    league_config({"fixed": {"dice": "random"}}, checkpoint={"best_by": "mean_return"})
    with pytest.raises(ConfigError, match="=gymnasium: it needs several agents"):
        league_config({}, environment={"id": "CartPole-v1"})
    assert league_config(learners, PAIR).league_learners["exploiter"].seat == "main"


def test_first_independent_learner_represents_the_run() -> None:
    learners = {"a": {"policy": "exploiter", "plays": ["main"]}, "b": {"policy": "main"}}
    config = league_config({"learners": learners}, PAIR)
    assert first_learner(config.league_learners).policy == "main"
    league, _ = league_of(config)
    assert league.rating("") == league.rating("main")
    assert first_learner(league_config({}, PAIR).league_learners).policy == "exploiter", "by name"


def test_league_config_changes_the_hash() -> None:
    none, some = league_config(None), league_config({})  # type: ignore[arg-type]
    assert none.decides_otherwise(some) == some.decides_otherwise(none) != []
    assert league_config({"players": 7}).hash() != some.hash()
    for config in (none, some):
        assert parse_config(json.loads(json.dumps(config.model_dump(mode="json")))) == config
        assert "league" in dump_config(config)
    assert list(some.league_learners) == ["main"]


def table(**fields: Any) -> MatchTable:
    """Two learners of the seats of `main`, three sides, the last of which is another's."""
    opponents: dict[str, tuple[tuple[str, float], ...]] = {
        "main": (("main", 0.25), ("old", 0.75)),
        "other": (("other", 0.0), ("wall", 1.0)),
    }
    learners = {name: Learner(name, (0, 1), opponents) for name in PAIR}
    players = {"old": PlayerRef("policy", "ab" * 32, "main", ("main",)), "wall": PlayerRef("function", "", "game:wall")}
    given = {"sides": (("a",), ("b", "c"), ("d",)), "seats": ("main", "main", "other"), "learners": learners}
    return MatchTable(**given | {"players": players} | fields)


@given(st.integers(0, 9), st.integers(0, 200), st.integers(0, 2**63 - 1))
def test_match_is_function_of_its_inputs(environment: int, episode: int, seed: int) -> None:
    """The learner sits on its side, others on theirs; who is never drawn has no probability."""
    match = draw(table(), environment, episode, seed)
    travelled = MatchTable.from_dict(json.loads(json.dumps(table().as_dict(), sort_keys=True)))
    assert travelled == table() and draw(travelled, environment, episode, seed) == match
    assert match.players[match.side] == match.learner
    assert match.players[2] == "wall"
    assert match.players[1 - match.side] in ("main", "old")


def test_learners_and_sides_alternate_and_opponents_fit_shares() -> None:
    drawn = [draw(table(), environment, episode, 1000 * environment + episode)
             for environment in range(4) for episode in range(1000)]  # fmt: skip
    turns = Counter((match.learner, match.side) for match in drawn)
    assert turns.keys() == {(name, side) for name in PAIR for side in (0, 1)}
    assert max(turns.values()) - min(turns.values()) <= 4
    old = sum(match.players[1 - match.side] == "old" for match in drawn) / len(drawn)
    assert abs(old - 0.75) < 0.03
    in_order = [draw(table(), 0, episode, 5) for episode in range(4)]
    assert len({(match.learner, match.side) for match in in_order}) == 4
    assert len({match.players for match in in_order if match.side == 0 and match.learner == "main"}) == 1


def test_match_travels_in_its_episode_record() -> None:
    told = MatchRecord("main", 1, ("old", "main"), (0.0, 1.0), "old: ValueError: no move")
    played, alone = EpisodeRecord(1.0, 3, match=told), EpisodeRecord(1.0, 3)
    made = zero_fragment(SIMPLE, episodes=(played, alone))
    assert fragment.decode(fragment.encode(made)).header.episodes == (played, alone)
    assert "match" not in alone.plain()
    for record in (played, alone):
        assert RECORD.validate_python(json.loads(json.dumps(record.plain()))) == record
    for outcome in ((0.0, 1.5), (-1.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(ValueError, match="outcome"):
            RECORD.validate_python(played.plain() | {"match": vars(told) | {"outcome": outcome}})


def test_match_table_travels_with_its_version() -> None:
    state = {"main": {"weight": np.zeros(2, np.float32)}}
    header = VersionHeader(3, Phase.TRAIN, PhaseCounters(), {"league": table().as_dict()})
    assert decode_board(encode_board(state, header))[1] == header
    assert MatchTable.from_dict(decode_board(encode_board(state, header))[1].folds["league"]) == table()
