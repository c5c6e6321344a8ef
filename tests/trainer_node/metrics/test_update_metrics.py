"""The rows of training metrics, against slow forms of what they tell; a row for each `metrics.every`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

import numpy as np
import pytest

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, Fragment
from stagecoach.shared.storage.metric_log import EPISODES, TRAIN, VERSION, read
from stagecoach.trainer_node.learning.building_blocks.reward_normalization import ShapedReturns
from stagecoach.trainer_node.learning.learner import Learner, make_learner
from stagecoach.trainer_node.metrics.update_metrics import (
    LAG_BUCKETS,
    UpdateMetrics,
    episode_rows,
    lag_buckets,
    of_episodes,
    spread,
)
from tests.conftest import minimal_config
from tests.support.environments.games import MODULE
from tests.support.environments.stage import Stage
from tests.support.experience.fragments import RECORD, SIMPLE, random_fragment
from tests.support.runs.game import STEPS_PER_UPDATE, NewGame


def acted(
    version: int, pushed_at: int | None, seconds: float = 0.25, episodes: Any = (), worker: str = "w0"
) -> Fragment:
    header = {"policy_versions": {"default": version}, "acting_seconds": seconds, "worker_id": worker}
    made = random_fragment(SIMPLE, 0, **header, episodes=list(episodes))
    return dataclasses.replace(made, pushed_at=pushed_at)


def metrics_of(config: Config) -> tuple[UpdateMetrics, Learner]:
    learner = make_learner(config, SIMPLE)
    return UpdateMetrics(config, learner, SIMPLE), learner


def test_row_averages_updates_since_the_last_row() -> None:
    metrics, learner = metrics_of(minimal_config())
    learner.counters.train.env_steps, learner.counters.train.gradient_steps = 640, 12
    metrics.take([acted(3, 4, 1.0), acted(2, 3, 2.0)], {"train/loss": 1.0, "train/once": 5.0}, 5)
    metrics.take([acted(5, 5, 3.0)], {"train/loss": 4.0}, 6)
    row = metrics.row(learner, 6, {"experience": 1.5, "the other ranks": 2.5})
    assert (row["train/loss"], row["train/once"]) == (2.5, 5.0)
    assert (row["time/env_steps"], row["time/gradient_steps"], row[VERSION]) == (640, 12, 6)
    assert row["policy/lag_mean"] == pytest.approx((1 + 2 + 0) / 3) and row["policy/lag_max"] == 2
    assert row["policy/lag_acting_mean"] == pytest.approx((1 + 1 + 0) / 3)
    assert row["policy/lag_queue_mean"] == pytest.approx((0 + 1 + 0) / 3)
    assert row["rollout/acting_seconds"] == 2.0 and row["time/fps"] > 0
    assert (row["wait/experience_seconds"], row["wait/the_other_ranks_seconds"]) == (1.5, 2.5)
    metrics.take([acted(6, 6)], {"train/loss": 9.0}, 7)
    row = metrics.row(learner, 7, {})
    assert row["train/loss"] == 9.0 and "train/once" not in row and row["policy/lag_max"] == 0


def test_lag_is_split_only_where_it_is_known_of_each_fragment() -> None:
    metrics, learner = metrics_of(minimal_config())
    metrics.take([acted(3, 4), acted(3, None)], {}, 6)
    row = metrics.row(learner, 6, {})
    assert row["policy/lag_mean"] == 2.0 and not {"policy/lag_acting_mean", "policy/lag_queue_mean"} & {*row}


@pytest.mark.parametrize(
    ("every", "due"),
    [("1 updates", [1, 2, 3, 4, 5, 6]), ("3 updates", [3, 6]), ("100 env_steps", [2, 4, 5]), ("7 episodes", [4])],
)
def test_row_is_due_when_multiple_is_passed(every: str, due: list[int]) -> None:
    metrics, learner = metrics_of(minimal_config(metrics={"every": every}))
    found = []
    for update in range(1, 7):
        train = learner.counters.train
        train.updates, train.env_steps, train.episodes = update, [0, 60, 120, 180, 240, 330, 350][update], 2 * update
        if metrics.due(learner):
            found.append(update)
    assert found == due


def test_each_warm_up_update_has_a_row() -> None:
    metrics, learner = metrics_of(minimal_config(metrics={"every": "1000 updates"}))
    assert [metrics.due(learner) for _ in range(3)] == [True] * 3


def test_spread_equals_standard_library() -> None:
    random = np.random.default_rng(1)
    for size in (2, 11, 100):
        values = random.normal(size=size).tolist()
        low, *_, high = statistics.quantiles(values, n=10, method="inclusive")
        assert spread("x", values) == pytest.approx({
            "x_mean": statistics.fmean(values), "x_std": statistics.pstdev(values), "x_min": min(values),
            "x_max": max(values), "x_p10": low, "x_p90": high,
        })  # fmt: skip
    assert spread("x", []) == {}


def test_episode_figures_have_spread_success_and_agents() -> None:
    records = [
        EpisodeRecord(10.0, 20, True, {"a": 8.0, "b": 2.0}, {"height": 1.0}),
        EpisodeRecord(4.0, 10, False, {"a": 3.0}, {}),
        EpisodeRecord(1.0, 30, None, {}, {"height": 4.0, "cost": 0.5}),
    ]
    row = of_episodes(records)
    assert (row["rollout/success_rate"], row["environment/height"], row["environment/cost"]) == (0.5, 2.5, 0.5)
    assert (row["rollout/ep_rew_mean"], row["rollout/ep_rew_min"], row["rollout/ep_len_max"]) == (5.0, 1.0, 30.0)
    assert (row["rollout/ep_rew_mean/a"], row["rollout/ep_rew_mean/b"]) == (5.5, 2.0)
    assert of_episodes([]) == {}


def test_episode_rows_name_worker_and_version() -> None:
    plain = EpisodeRecord(3.0, 5)
    fragments = [acted(3, 4, episodes=[RECORD, plain], worker="w1"), acted(2, 3), acted(4, 4, episodes=[plain])]
    rows = list(episode_rows(fragments, 640, 6))
    assert [worker for worker, _ in rows] == ["w1", "w1", "w0"]
    assert rows[0][1] == {
        "time/env_steps": 640.0, VERSION: 6.0, "episode/return": 12.5, "episode/length": 30,
        "episode/acted_by_version": 3, "episode/success": 1.0, "episode/return/a": 10.0, "episode/return/b": 2.5,
        "environment/height": 1.5,
    }  # fmt: skip
    assert rows[2][1]["episode/acted_by_version"] == 4 and "episode/success" not in rows[2][1]


def test_buckets_of_lag_are_cumulative_counts() -> None:
    lags = {0: 5, 1: 2, 3: 1, 64: 1, 100: 2}
    every = [lag for lag, count in lags.items() for _ in range(count)]
    counts = [sum(lag <= bound for lag in every) for bound in LAG_BUCKETS]
    assert lag_buckets(lags) == [*counts, len(every), sum(every)]
    assert lag_buckets({}) == [0] * (len(LAG_BUCKETS) + 2)


@pytest.mark.parametrize("from_the_start", [True, False])
def test_shaped_returns_are_those_of_a_slow_loop(from_the_start: bool) -> None:
    random, slots, window = np.random.default_rng(3), 3, 40
    shaped, slow = ShapedReturns(window), list[float]()
    sums: dict[str, list[float]] = {}
    for number in range(30):
        source, steps = f"w{number % 2}:0", int(random.integers(1, 9))
        columns = {
            "reward": random.integers(-4, 5, (steps, slots)).astype(np.float32) / 4,
            "mask": random.random((steps, slots)) < 0.8,
            "terminated": random.random((steps, slots)) < 0.15,
            "truncated": random.random((steps, slots)) < 0.1,
        }
        first = from_the_start and number < 2
        shaped.take(source, first, columns)
        totals = sums.setdefault(source, [0.0 if first else math.nan] * slots)
        for step in range(steps):
            for slot in range(slots):
                totals[slot] += float(columns["reward"][step, slot]) if columns["mask"][step, slot] else 0.0
                if columns["terminated"][step, slot] or columns["truncated"][step, slot]:
                    if not math.isnan(totals[slot]):
                        slow.append(totals[slot])
                    totals[slot] = 0.0
    assert len(slow) > window and list(shaped.returns) == slow[-window:]


def test_shaped_returns_in_turns_cover_whole_episodes() -> None:
    shaped = ShapedReturns(40, in_turns=True)
    columns = {
        "reward": np.ones((6, 1), np.float32),
        "mask": np.array([[True]] * 5 + [[False]]),
        "terminated": np.array([[False, True, False, True, False, False]]).T,
        "truncated": np.zeros((6, 1), np.bool_),
    }
    shaped.take("w0:0", True, columns)
    assert list(shaped.returns) == [2.0, 2.0]
    shaped.take("w0:0", False, columns)  # its first episode began before, and a turn of it is missing
    assert list(shaped.returns) == [2.0, 2.0, 2.0]


def test_first_fragment_of_successor_resumes_episodes() -> None:
    config = minimal_config(policies={"default": {"reward_scale": 2.0}})
    learner = make_learner(config, SIMPLE)
    for life, known in (("3.0", True), ("2.1", False)):
        header = {"policy_versions": {"default": 0}, "worker_id": f"w{life}", "incarnation": 3, "seq": 0, "life": life}
        item = random_fragment(SIMPLE, 0, **header, episodes=[])
        item.columns["default"]["terminated"][:] = False
        item.columns["default"]["truncated"][:] = False
        item.columns["default"]["truncated"][0] = True
        before = len(learner.shaped["default"].returns)
        learner.emulate_acting([item], Phase.TRAIN)
        assert (len(learner.shaped["default"].returns) > before) is known


def test_info_figures_average_acted_rows() -> None:
    stage = Stage({"api": "pettingzoo", "id": f"{MODULE}:Telling", "info_columns": ["score"]})
    sample = stage.sample(20)
    columns, learner = sample.columns["default"], make_learner(stage.config, stage.description)
    metrics = UpdateMetrics(stage.config, learner, stage.description)
    sent = Fragment(stage.header(sample, 20), sample.columns)
    metrics.see([sent])
    metrics.take([sent], {}, 1)
    acted = columns["info/score"][columns["mask"]]
    assert metrics.row(learner, 1, {})["rollout/info/score_mean"] == pytest.approx(float(acted.mean()))
    assert not columns["mask"].all() and acted.mean() > 3


def rows_of(game: Any, stream: str) -> list[tuple[str, dict[str, float]]]:
    game.trainer.recorder.store()
    return [item for _, rows in read(game.role.checkpoints.store, stream) for item in rows.named()]


def test_run_records_row_per_interval_and_episode(new_game: NewGame) -> None:
    game = new_game(minimal_config(metrics={"every": "2 updates", "episodes": True}, stop_at={"updates": 7}))
    game.play()
    rows = [row for _, row in rows_of(game, TRAIN)]
    assert [row["train/updates"] for row in rows] == [2, 4, 6]
    assert [row["time/env_steps"] for row in rows] == [2 * STEPS_PER_UPDATE * number for number in (1, 2, 3)]
    assert all(row["policy/lag_queue_mean"] >= 0 and row["policy/lag_acting_mean"] >= 0 for row in rows)
    episodes = rows_of(game, EPISODES)
    assert len(episodes) == game.trainer.learner.counters.train.episodes > 3
    assert {worker for worker, _ in episodes} == {"worker-0"}
    returns = [row["episode/return"] for _, row in episodes]
    assert returns == [record.episode_return for record in game.trainer.learner.episodes][-len(returns) :]


def test_rewards_that_are_changed_have_returns_of_their_own(new_game: NewGame) -> None:
    game = new_game(minimal_config(policies={"default": {"reward_scale": 0.5}}, stop_at={"updates": 6}))
    game.play()
    row = rows_of(game, TRAIN)[-1][1]
    assert row["rollout/ep_shaped_rew_mean"] == pytest.approx(row["rollout/ep_rew_mean"] / 2)
