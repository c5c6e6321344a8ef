"""Numbers of the environment's `info` on their whole way: to an own algorithm, to figures, into the archive, again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stagecoach.shared.config.algorithms.on_policy import PPOConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.protocol.metric_tail import newest_row
from stagecoach.shared.storage.log_archive import read_experience
from stagecoach.trainer_node.learning.algorithms.ppo import PPO
from stagecoach.trainer_node.learning.building_blocks.interface import Experience
from tests.support.environments.small import CHASE, CHASE_POLICIES, MODULE
from tests.support.runs.game import NewGame, archived, goes_on_exactly, small

HERE = "tests.trainer_node.test_info_columns"


class PaysForDepth(PPO):
    """PPO that is paid less the deeper it is."""

    class Config(PPOConfig):
        """PPO's."""

    seen: list[Columns] = []

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        self.seen += [item.columns for item in experience]
        costs = [np.nan_to_num(item.columns["info/depth"]) for item in experience]
        paid = [
            replace(item, columns=item.columns | {"reward": item.columns["reward"] - np.float32(0.1) * cost})
            for item, cost in zip(experience, costs, strict=True)
        ]
        return super().update(paid, counters)


def shallow(columns: Columns) -> Columns:
    """A transform that sees the numbers, and changes them for what learns."""
    assert {"info/depth", "info/absent"} <= set(columns)
    return columns | {"info/depth": columns["info/depth"] / 10}


def counting(**environment: Any) -> dict[str, Any]:
    return {"id": f"{MODULE}:Counting", "kwargs": {"length": 5}, "num_envs": 4} | environment


ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "sync": {"environment": counting()},
    "async": {"environment": counting(vectorization="async", num_envs=2)},
    "native": {
        "environment": counting(id=f"{MODULE}:counting_vector", kwargs={"mode": "NEXT_STEP"}, vectorization="native"),
    },
    "pettingzoo": {"environment": CHASE | {"id": f"{MODULE}:TellsOfTheChase", "num_envs": 2}, **CHASE_POLICIES},
}
PAYS: dict[str, Any] = {"name": f"{HERE}:PaysForDepth", "minibatch_size": 8, "epochs": 1}


def telling(kind: str, **sections: Any) -> Any:
    given = ENVIRONMENTS[kind]
    environment = given["environment"] | {"info_columns": ["depth", "absent"]}
    return small(**{"algorithm": PAYS, "archive": "all"} | given | {"environment": environment} | sections)


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_info_columns_reach_algorithm_metrics_and_archive(
    new_game: NewGame, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these environments tell follows from their rewards, which count the steps, and from the steps themselves."""
    monkeypatch.setattr(PaysForDepth, "seen", [])
    policies = {name: {"hidden_sizes": [8]} for name in ENVIRONMENTS[kind].get("policies", ["default"])}
    game = new_game(telling(kind, policies=policies, stop_at={"updates": 2}))
    game.play()
    game.trainer.finish("exhausted")
    game.trainer.recorder.close()
    fragments = list(read_experience(str(game.folder)))
    assert len(fragments) >= 4 and len(PaysForDepth.seen) == 4 * len(policies)
    for item in fragments:
        for policy_id, columns in item.columns.items():
            assert any(np.array_equal(columns["info/depth"], seen["info/depth"], True) for seen in PaysForDepth.seen)
            known = {
                "hunter": np.where(columns["mask"], 10 * columns["obs"][..., 0] + 10, np.nan),
                "prey": np.where(columns["obs"][..., 0] % 2 == 0, columns["obs"][..., 0] + 1, np.nan),
                "default": np.where(columns["mask"], 10 * columns["reward"], np.nan),
            }
            np.testing.assert_array_equal(columns["info/depth"], known[policy_id])
            assert np.isnan(columns["info/absent"]).all() and columns["info/absent"].dtype == np.float32
    row = {name: value or 0.0 for name, value in newest_row(game.role.redis, game.role.run_id).items()}
    names = {name for name in row if name.startswith("rollout/info/")}
    if kind == "pettingzoo":
        assert names == {"rollout/info/depth_mean/hunter", "rollout/info/depth_mean/prey"}
        assert (row["rollout/info/depth_mean/hunter"], row["environment/cat.depth_sum"]) == (15, 30)
    else:
        assert names == {"rollout/info/depth_mean"} and 10 <= row["rollout/info/depth_mean"] <= 50
        assert 29 < row["environment/depth_sum"] < 151


def test_learning_from_info_columns_resumes_exactly(new_game: NewGame) -> None:
    lean = {"id": "CartPole-v1", "num_envs": 4, "wrappers": [f"{MODULE}:TellsItsLean"]}
    policy = {"hidden_sizes": [8], "transform": f"{HERE}:shallow", "normalize_rewards": True}
    environment = lean | {"info_columns": ["depth", "absent"]}
    goes_on_exactly(new_game, archived(environment=environment, policies={"default": policy}, algorithm=PAYS))


def test_metrics_show_info_before_transform(new_game: NewGame) -> None:
    policies = {"default": {"hidden_sizes": [8], "transform": f"{HERE}:shallow"}}
    game = new_game(telling("sync", policies=policies, stop_at={"updates": 2}))
    game.finish()
    game.trainer.recorder.close()
    assert (newest_row(game.role.redis, game.role.run_id)["rollout/info/depth_mean"] or 0) >= 10
