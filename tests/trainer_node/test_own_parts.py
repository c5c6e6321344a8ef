"""The parts of one's own in examples/: trained for real, lost at each version, resumed and replayed bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import minimal_config
from tests.support.runs.game import KEEP, NewGame, goes_on_exactly

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DQN: dict[str, Any] = {"name": "dqn", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1}
PPO: dict[str, Any] = {"name": "ppo", "minibatch_size": 32, "epochs": 2}
SAC: dict[str, Any] = {"name": "sac", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1}
BOUNDS = {"low": [-2.4, -3.0, -0.21, -3.0], "high": [2.4, 3.0, 0.21, 3.0], "cells": 4}
NOVELTY = {"reward_signals": {"novelty": {"kind": "own_reward_signal:CountNovelty", "kwargs": BOUNDS}}}
PENDULUM = {"id": "Pendulum-v1", "num_envs": 2}


def network(name: str) -> dict[str, Any]:
    return {"default": {"hidden_sizes": [8], "network": {"path": f"own_network:{name}", "kwargs": {"blocks": 1}}}}


CASES: dict[str, dict[str, Any]] = {
    "network-ppo": {"algorithm": PPO, "policies": network("ResidualActorCritic")},
    "network-dqn": {"algorithm": DQN, "policies": network("ResidualQNetwork")},
    "network-sac": {"algorithm": SAC, "policies": network("ResidualActor"), "environment": PENDULUM},
    "loss-ppo": {"algorithm": PPO | {"name": "own_loss:SimplePolicyOptimization"}},
    "loss-dqn": {"algorithm": DQN | {"name": "own_loss:SoftDQN", "temperature": 0.5}},
    "loss-sac": {"algorithm": SAC | {"name": "own_loss:GentleSAC"}, "environment": PENDULUM},
    "replay-buffer": {
        "algorithm": DQN | {"replay_buffer": {"kind": "own_replay_buffer:RankBased", "capacity": 200}}
    },
    "reward-signal-ppo": {"algorithm": PPO | NOVELTY},
    "reward-signal-dqn": {"algorithm": DQN | NOVELTY},
    "wrapper": {"algorithm": PPO, "environment": {"id": "CartPole-v1", "wrappers": ["own_wrapper:StickyActions"]}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.parametrize("part", CASES)
def test_own_part_resumes_and_replays_exactly(new_game: NewGame, part: str) -> None:
    case = {"heatup": "0 env_steps"} | CASES[part]
    goes_on_exactly(new_game, minimal_config(**case, checkpoint=KEEP, archive="all", stop_at={"updates": 7}))
