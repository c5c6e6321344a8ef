"""Trainers that die over log entries: counted per position, told, and after three the entries are dropped as poison."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from stagecoach.coordinator.lifecycle.preparation import prepare_resume
from stagecoach.shared.base.errors import ConfigError, StagecoachError, UserError, WeightsNotFinite
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.quarantine import DEATHS
from stagecoach.trainer_node.learning.learner import Learner
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer
from tests.support.runs.game import Death, Game, NewGame, archived, balanced, replayed, small

LAGGING = {"rollout": {"fragment_steps": 8, "fragments_per_update": 2, "max_policy_lag": 1}}


def nth_entry(game: Game, number: int) -> str:
    """The id of the log's entry of that sequence number, once it is there."""
    while True:
        game.worker.step(0)
        for entry in game.role.log().read("0-0", 1000, 0.0):
            if entry.seq == number:
                return entry.id


def deaths_until(game: Game, ends: Callable[[], object]) -> int:
    """Plays on with a new trainer after each death."""
    for deaths in range(100):
        try:
            ends()
            return deaths
        except Death:
            game.replace_trainer()
    raise AssertionError("it dies for ever")


def poison(monkeypatch: pytest.MonkeyPatch, place: str, id_: str, blob: bytes, error: BaseException) -> None:
    """A trainer that decodes this entry, or does `place` of the learner with it, fails."""
    decode = fragment.decode

    def dying_decode(found: bytes, *most: int) -> Fragment:
        if found == blob:
            raise error
        return decode(found, *most)

    if place == "decode":
        monkeypatch.setattr(fragment, "decode", dying_decode)
        return
    method = getattr(Learner, place)

    def dying(self: Learner, fragments: list[Fragment], phase: Any) -> Any:
        if id_ in [item.position for item in fragments]:
            raise error
        return method(self, fragments, phase)

    monkeypatch.setattr(Learner, place, dying)


def dropped_of(total: dict[str, Any]) -> dict[str, int]:
    return {reason: count["fragments"] for reason, count in total["dropped"].items()}


def claims(game: Game) -> int:
    return len(game.role.redis.zrange(RunKeys(game.role.run_id).claims, 0, -1))


@pytest.mark.parametrize(("place", "dropped"), [("decode", 1), ("learn", 2)])
def test_entry_is_dropped_after_three_deaths(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch, place: str, dropped: int
) -> None:
    game = new_game(archived(**LAGGING))
    game.play_to(2)
    id_ = nth_entry(game, 5)
    (body,) = (entry.fragment or b"" for entry in game.role.log().read("0-0", 1000, 0.0) if entry.id == id_)
    poison(monkeypatch, place, id_, body, Death())
    assert deaths_until(game, game.finish) == DEATHS
    total = balanced(game)["total"]
    assert dropped_of(total) == {"poison": dropped}
    assert game.role.flow.read().in_flight == claims(game) + total["in_flight"]["fragments"]
    told = game.events("trainer")
    assert told.count("the trainer before died") == DEATHS and "number 3 in a row" in told
    assert "entries are in quarantine, and dropped as poison" in told
    found = replayed(game)
    assert found.equal, found.different
    if place == "learn":
        return
    monkeypatch.undo()
    assert replayed(game).equal


def test_committed_entry_returns_its_credit_once(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    game = new_game(archived(**LAGGING))
    game.play_to(2)
    first = nth_entry(game, 4)
    with monkeypatch.context() as patch:
        patch.setattr(fragment, "encode", lambda made, *options: b"no fragment")
        nth_entry(game, 5)
    poison(monkeypatch, "learn", first, b"", Death())
    assert deaths_until(game, game.finish) == DEATHS
    total = balanced(game)["total"]
    assert dropped_of(total) == {"poison": 2, "undecodable": 1}
    assert game.role.flow.read().in_flight == claims(game) + total["in_flight"]["fragments"]


def test_deaths_unrelated_to_entries_quarantine_nothing(new_game: NewGame) -> None:
    game = new_game(small())
    game.play_to(2)
    for _ in range(6):
        game.replace_trainer()
    game.crash()
    incarnation = Incarnation(game.open())
    with pytest.raises(StagecoachError, match="7 trainers have died in a row without a new policy version") as caught:
        Trainer.start(incarnation)
    incarnation.fail(caught.value)
    assert "died in a row" in game.role.flow.read().reason
    prepare_resume(game.role)
    game.restart()
    game.finish()
    assert not balanced(game)["total"]["dropped"]


def test_leaving_or_progressing_trainer_is_not_a_death(new_game: NewGame) -> None:
    game = new_game(small(stop_at={"updates": 20}))
    for version in range(1, 15):
        game.trainer.leave()
        game.restart()
        game.lose_at([version])
    game.finish()
    assert "number 2 in a row" not in game.events("trainer")


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("learn", WeightsNotFinite("update 3 made the weights infinite")),
        ("emulate_acting", ConfigError("policies.default.transform=a:b failed: ValueError: beyond the table")),
    ],
)
def test_entries_that_fail_an_update_are_named_and_dropped(
    new_game: NewGame, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception
) -> None:
    config = archived(**LAGGING)
    game = new_game(config)
    game.play_to(2)
    id_ = nth_entry(game, 5)
    poison(monkeypatch, place, id_, b"", error)
    named = ""
    for _ in range(2):  # and a mere resume fails in the same way
        error.__notes__ = []
        with pytest.raises(type(error)) as caught:
            game.play()
        game.trainer.incarnation.fail(caught.value)
        game.crash()
        assert game.finished()["counters"]["train"]["updates"] == game.finished()["version"] == 2
        assert game.finished()["counters"]["train"]["env_steps"] == 2 * config.transitions_per_update
        way = re.search(rf"`stagecoach resume {game.role.run_id} --drop (\S+)` continues", game.role.flow.read().reason)
        assert way is not None
        named = way[1]
        if _ == 0:
            prepare_resume(game.role)
            game.restart()
    for wrong, why in (
        ("seven", "expected a position of the log"), ("7-0..5-0", "expected a position"),
        ("1-0", "a policy version has learned from it"), ("99999999999999-0", "has no entry there"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=why):
            prepare_resume(game.role, drop=(wrong,))
    assert game.role.flow.read().state == "finished"
    prepare_resume(game.role, drop=(named,))
    game.restart()
    game.finish()
    total = balanced(game)["total"]
    assert dropped_of(total) == {"poison": 2}
    assert replayed(game).equal
