"""Lessons and levels as a fold over the log: against slow forms of the same, and exact through every end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Counters, Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment, FragmentHeader, MatchRecord
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.storage.metric_log import TRAIN
from stagecoach.trainer_node.learning.curriculum import Curriculum
from stagecoach.trainer_node.learning.fold import encode
from stagecoach.trainer_node.metrics.update_metrics import of_policies
from stagecoach.trainer_node.state.snapshot import read_state
from tests.conftest import minimal_config
from tests.support.environments.lessons import MODULE
from tests.support.runs.game import KEEP, NewGame, goes_on_exactly
from tests.support.runs.metric_rows import recorded

NONE = Counters()
LESSONS: list[dict[str, Any]] = [
    {"value": 2, "until": {"success": 0.75, "episodes": 4}},
    {"value": 3, "until": {"return": 0.5, "episodes": 3}, "back": {"success": 0.0, "episodes": 2}},
    {"uniform": [4, 6], "back": {"length": 1, "episodes": 2}},
]


def config_of(parameters: dict[str, Any], **sections: Any) -> Config:
    environment = {"id": f"{MODULE}:Corridor", "num_envs": 2, "parameters": parameters}
    return minimal_config(environment=environment, **sections)


def curriculum(parameters: dict[str, Any], **sections: Any) -> Curriculum:
    config = config_of(parameters, **sections)
    return Curriculum(config, describe_environment(config))


def told(made: Curriculum, lesson: int, total: float, success: bool | None = None, length: int = 2) -> None:
    record = EpisodeRecord(total, length, success, parameters={"length": 2}, lessons={"length": lesson})
    made.observe_episode(record, NONE)


def test_lessons_go_forward_and_back_by_their_own_episodes() -> None:
    made = curriculum({"length": {"lessons": LESSONS}})
    for success in (True, False, True, True):
        assert made.table(NONE).lessons == {"length": 0}
        told(made, 0, 0.0, success)
    assert made.table(NONE).lessons == {"length": 1} and made.table(NONE).draw(0) == {"length": 3}
    told(made, 0, 9.0, True)  # it began in the lesson before
    assert made.metrics() == {"lesson/length": 1}
    told(made, 1, 0.0, False)
    told(made, 1, 0.0, False)
    assert made.table(NONE).lessons == {"length": 0}, "two failures"
    for success in (True, True, True, True):
        told(made, 0, 0.0, success)
    for total in (1.0, 0.0, 1.0):
        told(made, 1, total, True)
    assert made.table(NONE).lessons == {"length": 2}
    (first, *_, last) = made.drain_events()
    assert first == "length: lesson 0 → 1 at 0 env steps (success 0.75, until 0.75)"
    assert last == "length: lesson 1 → 2 at 0 env steps (return 0.6667, until 0.5)"
    assert made.drain_events() == []


def test_lesson_by_progress_or_rating_needs_enough_episodes() -> None:
    lessons = [{"value": 1, "until": {"progress": 0.5, "episodes": 3}}, {"value": 2}]
    made = curriculum({"length": {"lessons": lessons}}, stop_at={"env_steps": 100})
    for env_steps in (60, 60):
        made.observe_episode(EpisodeRecord(0.0, 1, lessons={"length": 0}), Counters(env_steps=env_steps))
    assert made.table(NONE).lessons == {"length": 0}, "too few episodes"
    made.observe_episode(EpisodeRecord(0.0, 1, lessons={"length": 0}), Counters(env_steps=49))
    assert made.table(NONE).lessons == {"length": 0}, "too early"
    made.observe_episode(EpisodeRecord(0.0, 1, lessons={"length": 0}), Counters(env_steps=50))
    assert made.table(NONE).lessons == {"length": 1}


@pytest.mark.parametrize(
    ("bound", "totals"), [(2.0, [1.0, 1.0, 2.4, 2.4, 2.4]), (-80.0, [-100.0, -100.0, -100.0, -60.0, -60.0])]
)
def test_measure_is_smoothed_as_in_ml_agents(bound: float, totals: list[float]) -> None:
    """The smoothed value starts at the first mean, not at 0."""
    lessons = [{"value": 1, "until": {"return": bound, "episodes": 2, "smoothing": True}}, {"value": 2}]
    made, smoothed = curriculum({"length": {"lessons": lessons}}), totals[0]
    for number, total in enumerate(totals):
        told(made, 0, total)
        if number:
            smoothed = 0.25 * smoothed + 0.75 * (total + totals[number - 1]) / 2
        assert made.table(NONE).lessons == {"length": int(smoothed >= bound)}
    assert smoothed >= bound


def test_policy_return_counts_only_seats_it_played() -> None:
    lessons = [{"value": 1, "until": {"return": 5.0, "episodes": 2, "policy": "hunter"}}, {"value": 2}]
    environment = {"id": "tests.none:made", "api": "pettingzoo", "parameters": {"length": {"lessons": lessons}}}
    agents = {"cat": "hunter", "mouse": "prey"}
    config = minimal_config(
        environment=environment, policies={"hunter": {}, "prey": {}}, agents=agents, league={"fixed": {"expert": "m:f"}}
    )
    description = EnvironmentDescription(agents, {}, sides=(("cat",), ("mouse",)))
    made, records = Curriculum(config, description), []
    for players, paid in (
        (("expert", "prey"), 50.0),
        (("hunter", "prey-0123456789ab"), -10.0),
        (("hunter", "prey"), 0.0),
    ):
        match = MatchRecord("prey", 1, players, (1.0, 0.0))
        returns = {"cat": paid, "mouse": -paid}
        records.append(EpisodeRecord(0.0, 2, agent_returns=returns, lessons={"length": 0}, match=match))
    for record in records * 3:
        made.observe_episode(record, NONE)
    assert made.table(NONE).lessons == {"length": 0}, "the expert's 50 are not the hunter's"
    assert of_policies(records, {"hunter", "prey"}, description) == {
        "rollout/ep_rew_mean/hunter": -5.0, "rollout/ep_rew_mean/prey": -25.0
    }  # fmt: skip
    plain = [replace(record, match=None) for record in records]
    assert of_policies(plain, {"hunter"}, description) == {"rollout/ep_rew_mean/hunter": pytest.approx(40 / 3)}


def test_missing_success_is_reported_once() -> None:
    sometimes = curriculum({"length": {"lessons": LESSONS}})
    for success in (False, None, None, None, None, None):
        told(sometimes, 0, 1.0, success)
    assert sometimes.drain_events() == []
    made = curriculum({"length": {"lessons": LESSONS}})
    for _ in range(9):
        told(made, 0, 1.0)
    (line,) = made.drain_events()
    assert line.startswith(
        "environment.parameters.length: lesson 0 is measured by success, and the environment reported none"
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), max_size=60), st.data())
@settings(max_examples=60)
def test_curriculum_resumes_from_its_state_at_any_cut(episodes: list[Any], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(episodes)))
    whole, first, second = (curriculum({"length": {"lessons": LESSONS}}) for _ in range(3))
    for number, (lesson, total, success) in enumerate(episodes):
        told(whole, lesson, total, success)
        if number == cut:
            second.load_state(json.loads(encode(first)))
        told(first if number < cut else second, lesson, total, success)
    assert encode(second if cut < len(episodes) else first) == encode(whole)


# Levels.


def fragments_of(random: np.random.Generator, count: int, steps: int, levels: int) -> tuple[list[Fragment], Any, Any]:
    """`count` fragments of one worker with two environments, their advantages, and per episode level and its parts."""
    running: list[tuple[int, list[float]]] = [(int(random.integers(levels)), []) for _ in range(2)]
    fragments, advantages, ended = [], [], []
    for seq in range(count):
        over = random.random((steps, 2)) < 0.3
        scores = random.normal(size=(steps, 2)).astype(np.float32)
        records = []
        for step in range(steps):
            for slot in range(2):
                level, parts = running[slot]
                parts.append(float(scores[step, slot]))
                if over[step, slot]:
                    records.append(EpisodeRecord(0.0, len(parts), parameters={"level": level}))
                    ended.append((level, parts))
                    running[slot] = int(random.integers(levels)), []
        header = FragmentHeader("run", "worker-0", 0, seq, Phase.TRAIN, {"default": 0}, steps, 2, tuple(records))
        flags = {"terminated": over, "truncated": np.zeros_like(over), "mask": np.ones_like(over)}
        fragments.append(Fragment(header, {"default": flags}))
        advantages.append(scores)
    return fragments, advantages, ended


def slow_weights(scores: dict[int, float], played: dict[int, int], now: int, total: int, config: Any) -> list[float]:
    """Section 3 of the paper, level by level."""
    known = sorted(scores)
    ranked = sorted(known, key=lambda level: (-scores[level], level))
    by_score, by_staleness = {}, {}
    for level in known:
        if config.prioritization == "rank":
            by_score[level] = (1 / (1 + ranked.index(level))) ** (1 / config.temperature)
        else:
            by_score[level] = max(scores[level], 0.0) ** (1 / config.temperature)
        by_staleness[level] = now - played[level]
    found = []
    for level in range(total):
        if level not in scores:
            found.append((1 - len(known) / total if config.new is None else config.new) / (total - len(known)))
            continue
        share = (1 - config.staleness) * by_score[level] / sum(by_score.values())
        share += config.staleness * by_staleness[level] / sum(by_staleness.values())
        unseen = 0.0 if len(known) == total else 1 - len(known) / total if config.new is None else config.new
        found.append(share * (1 - unseen))
    return found


@pytest.mark.parametrize(
    "config",
    [
        {"score": "value_loss"},
        {"score": "gae", "temperature": 0.5},
        {"score": "positive_value_loss", "prioritization": "proportional", "temperature": 1.0, "staleness": 0.3},
        {"score": "value_loss", "new": 0.5},
    ],
)
def test_levels_are_scored_by_episode_and_drawn_by_staleness(config: dict[str, Any]) -> None:
    made = levels(config)
    assert made.table(NONE).samplers["level"].numbers == pytest.approx([1 / 9] * 9)
    fragments, advantages, ended = fragments_of(np.random.default_rng(3), 6, 7, 8)
    for first in range(0, 6, 2):  # two fragments an update
        made.observe_update(fragments[first : first + 2], np.concatenate(advantages[first : first + 2], axis=1))
    changes: dict[str, Callable[[float], float]]
    changes = {"value_loss": abs, "gae": float, "positive_value_loss": lambda number: max(number, 0.0)}
    change = changes[config["score"]]
    scores, played = {}, {}
    for number, (level, parts) in enumerate(ended, 1):
        scores[level], played[level] = sum(map(change, parts)) / len(parts), number
    state = made.levels["level"]
    assert {level: score for level, score in enumerate(state.scores) if state.played[level] >= 0} == pytest.approx(
        scores
    )
    asked = made._replayed["level"]
    assert made.table(NONE).samplers["level"].numbers == pytest.approx(
        slow_weights(scores, played, len(ended), 9, asked)
    )
    again = levels(config)
    again.load_state(json.loads(encode(made)))
    assert again.table(NONE) == made.table(NONE) and json.loads(encode(again)) == json.loads(encode(made))


def test_learnability_scores_successes_of_about_ten_episodes() -> None:
    """p (1 - p) of a success and a failure assumed beforehand, and of all episodes since, each weighing 0.9 as much as
    the next; and an environment that reports no success is told so."""
    made = levels({"score": "learnability"})
    fragments, advantages, ended = fragments_of(np.random.default_rng(3), 8, 9, 3)
    results: dict[int, list[bool]] = {0: [], 1: [], 2: []}
    for item, scores in zip(fragments, advantages, strict=True):
        opened = []
        for its in item.header.episodes:
            successes = results[int(its.parameters["level"])]
            successes.append(len(successes) % 3 == 1)
            opened.append(replace(its, success=successes[-1]))
        made.observe_update([replace(item, header=replace(item.header, episodes=tuple(opened)))], scores)
    assert sum(map(len, results.values())) == len(ended) > 20 and made.drain_events() == []
    for level, successes in results.items():
        weights = [0.9**age for age in range(len(successes))][::-1]
        share = (1 + sum(weight for weight, won in zip(weights, successes, strict=True) if won)) / (2 + sum(weights))
        assert made.levels["level"].scores[level] == pytest.approx(share * (1 - share))
    again = levels({"score": "learnability"})
    again.load_state(json.loads(encode(made)))
    made.observe_update(fragments[:1], advantages[0])
    again.observe_update(fragments[:1], advantages[0])
    assert json.loads(encode(again)) == json.loads(encode(made))
    (event,) = made.drain_events()
    assert event.startswith("environment.parameters.level: levels are scored by success, and an episode reported none")


def levels(config: dict[str, Any]) -> Curriculum:
    environment = {"id": f"{MODULE}:Slot", "num_envs": 2, "parameters": {"level": {"replay": {"of": 9, **config}}}}
    made = minimal_config(environment=environment)
    return Curriculum(made, describe_environment(made))


def test_episode_with_missing_fragment_is_scored_by_the_rest() -> None:
    made = levels({"score": "gae", "of": 9999})
    fragments, advantages, _ = fragments_of(np.random.default_rng(1), 3, 9, 9999)
    for index in (0, 2):
        made.observe_update([fragments[index]], advantages[index])
    over = fragments[2].columns["default"]["terminated"]
    step, slot = next((step, slot) for step in range(9) for slot in range(2) if over[step, slot])
    (level, *later) = [int(record.parameters["level"]) for record in fragments[2].header.episodes]
    assert level not in later
    assert made.levels["level"].scores[level] == pytest.approx(float(advantages[2][: step + 1, slot].mean()))


# Whole runs.

PPO = {"name": "ppo", "minibatch_size": 16, "epochs": 2}
EASY = [
    {"value": 1, "until": {"success": 0.5, "episodes": 4}},
    {"choice": [1, 2], "until": {"return": 0.3, "episodes": 6}, "back": {"success": 0.05, "episodes": 8}},
    {"uniform": [2, 3]},
]


@pytest.mark.parametrize("kind", ["lessons", "levels"])
def test_curriculum_resumes_and_replays_exactly(new_game: NewGame, kind: str) -> None:
    """Trainer and worker are lost at each version and in mid-fragment; resume and replay come to the same lessons."""
    entry = {"length": {"lessons": EASY}, "wind": {"uniform": [0, 1]}} if kind == "lessons" else {
        "length": {"replay": {"of": 4, "temperature": 0.5}}
    }  # fmt: skip
    goes_on_exactly(new_game, config_of(entry, algorithm=PPO, checkpoint=KEEP, archive="all", stop_at={"updates": 7}))


def test_lessons_are_reported_and_recorded(new_game: NewGame) -> None:
    game = new_game(config_of({"length": {"lessons": EASY}}, algorithm=PPO, checkpoint=KEEP, stop_at={"updates": 7}))
    game.finish()
    assert "length: lesson 0 → 1 at" in game.events("curriculum")
    latest = game.latest()
    assert read_state(latest).version == 7
    lesson = latest.manifest.provenance["fold_metrics"]["curriculum/lesson/length"]
    assert lesson >= 1 and latest.manifest.provenance["folds"]["curriculum"]["lessons"] == {"length": lesson}
    row = recorded(game.role.checkpoints.store, TRAIN)[-1][1]
    assert row["curriculum/lesson/length"] == lesson and row["parameter/length"] >= 1
