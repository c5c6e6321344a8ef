"""Fragment headers with hostile values, through the real consumer, update and metrics of a trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagecoach.shared.experience import fragment, tensor_blob
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.trainer_node.metrics.update_metrics import UpdateMetrics
from tests.support.experience.fragments import zero_fragment
from tests.support.runs.game import Game, NewGame, balanced, small

HUGE = 10**400
VALUES: list[Any] = [
    HUGE, -HUGE, 2**53 + 1, 2**63, 2**64, -1, 0, True, False, None, 0.5, 1e13, 1e31, -1e308, math.nan, math.inf, "",
    "nan", "7", "\ud800", "x" * 5000, [], [HUGE], {}, {"\ud800": HUGE}, {"x": 1e31}, {"x": "7"}, {"\x1b[2J": 1.0},
]  # fmt: skip
COUNTS = (
    "incarnation", "seq", "steps", "num_envs", "policy_versions", "acting_seconds", "wire_version", "life", "history",
)  # fmt: skip
RECORD: dict[str, Any] = {
    "episode_return": 1.5, "length": 3, "success": True, "agent_returns": {"a": 1.0}, "metrics": {"height": 2.0},
    "parameters": {"gravity": 9.8, "level": 2, "name": "hard", "icy": True}, "lessons": {"gravity": 1}, "match": None,
}  # fmt: skip
MATCH: dict[str, Any] = {
    "learner": "default", "side": 0, "players": ["default", "x"], "outcome": [1.0, 0.0], "forfeit": "",
}  # fmt: skip


def spoiled(data: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = place
    return data | {first: spoiled(data.get(first) or {}, tuple(rest), value) if rest else value}


PLACES = [
    *((name,) for name in RECORD),
    *((name, key) for name in ("agent_returns", "metrics", "parameters", "lessons") for key in ("gravity", "\ud800")),
    *(("match", name) for name in MATCH),
]
EPISODES = st.builds(
    lambda place, value: {"episodes": [spoiled(RECORD | ({"match": MATCH} if "match" in place else {}), place, value)]},
    st.sampled_from(PLACES), st.sampled_from(VALUES),
)  # fmt: skip
HEADERS = st.builds(lambda name, value: {name: value}, st.sampled_from(COUNTS), st.sampled_from(VALUES))


def offer(game: Game, changes: dict[str, Any]) -> None:
    """Pushes a sound fragment whose header has these fields replaced."""
    worker, config = game.worker, game.role.config
    steps, envs, seq = config.rollout.fragment_steps, config.environment.num_envs, worker.claims.seq
    claim = game.role.flow.claim(worker.id, worker.incarnation, seq)
    assert claim.granted
    made = zero_fragment(
        game.role.description(), run_id=game.role.run_id, worker_id=worker.id, incarnation=worker.incarnation, seq=seq,
        policy_versions={"default": game.trainer.version}, steps=steps, num_envs=envs, phase=Phase.TRAIN,
        episodes=(EpisodeRecord(**RECORD),), history=claim.history,
    )  # fmt: skip
    packed, header = tensor_blob.decode(fragment.encode(made))
    blob = tensor_blob.encode(packed, header | changes)
    assert game.role.log().push(worker.id, worker.incarnation, seq, claim.epoch, steps * envs, blob) == "pushed"
    worker.claims.seq += 1


def hostile_game(new_game: NewGame) -> Game:
    rollout = {"fragment_steps": 8, "fragments_per_update": 1}
    return new_game(small(stop_at={"updates": 10_000}, rollout=rollout, metrics={"episodes": True}))


def test_trainer_survives_every_hostile_header(new_game: NewGame) -> None:
    """Bounds hold before a number reaches learning or reporting, so no metric fails either."""
    game = hostile_game(new_game)

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(EPISODES | HEADERS)
    @example({"episodes": [RECORD | {"parameters": {"gravity": HUGE}}]})
    @example({"episodes": [RECORD | {"lessons": {"gravity": HUGE}}]})
    @example({"episodes": [RECORD | {"length": HUGE}]})
    def check(changes: dict[str, Any]) -> None:
        version = game.trainer.version
        offer(game, changes)
        assert game.trainer.step(0) in ("updated", "waited")
        offer(game, {})  # many dropped fragments in a row would end the run
        assert game.trainer.step(0) == "updated"
        assert game.trainer.version > version and not game.trainer.recorder.failures

    check()
    balanced(game)


def test_training_continues_when_update_metrics_raise(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> None:
        raise OverflowError("int too large to convert to float")

    game = hostile_game(new_game)
    monkeypatch.setattr(UpdateMetrics, "take", failing)
    for version in (1, 2):
        offer(game, {})
        assert game.trainer.step(0) == "updated" and game.trainer.version == version
    assert game.trainer.recorder.failures["the metrics of an update"] == 2
    assert game.events("metrics").count("the metrics of an update cannot be written, training continues") == 1
