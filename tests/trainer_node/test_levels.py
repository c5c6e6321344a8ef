"""Levels that learn: hindsight actions and penalties against the fragments they are of; runs that resume exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagecoach.rollout_worker.exploration.base import RandomActing
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.replay_buffer import HindsightReplay as Section
from stagecoach.shared.experience.spaces import Columns
from stagecoach.trainer_node.learning.algorithms.off_policy import make_replay_buffer
from stagecoach.trainer_node.learning.replay_buffers.hindsight import BELOW, DESIRED
from tests.conftest import minimal_config
from tests.support.environments.levels import CORRIDOR, THREE, corridor, off_policy, with_options
from tests.support.environments.stage import Stage
from tests.support.learning.streams import GOALS
from tests.support.runs.game import KEEP, NewGame, balanced, goes_on_exactly


def transitions(columns: Columns) -> dict[bytes, dict[str, Any]]:
    """Of a level's part of a fragment, by what was observed and done."""
    finals = {(step, at): row for row, (step, at) in enumerate(columns["final_index"].tolist())}
    found = {}
    for step, slot in np.argwhere(columns["mask"]).tolist():
        last, final = step + 1 == len(columns["mask"]), finals.get((step, slot))

        def after(name: str, step: int = step, slot: int = slot, last: bool = last, final: int | None = final) -> Any:
            if final is not None:
                return columns["final_" + name][final]
            return columns["bootstrap_" + name][slot] if last else columns[name][step + 1, slot]

        plain = ("action", "reward", "terminated", "info/subgoal_missed", "obs.desired_goal")
        found[columns["obs.observation"][step, slot].tobytes()] = {
            "below": after(BELOW), "achieved": after("obs.achieved_goal"),
            **{name: columns[name][step, slot] for name in plain},
        }  # fmt: skip
    return found


@pytest.mark.parametrize("level", [0, 1], ids=["top", "middle"])
def test_hindsight_action_and_missed_test_penalty(level: int) -> None:
    name, penalty, threshold = THREE[level]["policy"], 7.0, THREE[level]["threshold"]
    sections = off_policy(test_subgoals=0.6)
    stage = Stage(sections.pop("environment"), **sections)
    section = Section(
        capacity=10_000, threshold=threshold, terminates=True, hindsight_actions=True, missed_penalty=penalty
    )
    memory = make_replay_buffer(section, stage.description.policies[name], 40, 2)
    known: dict[bytes, dict[str, Any]] = {}
    for _ in range(6):
        columns = stage.sample(40, RandomActing()).columns[name]
        memory.add("w0:0.0", columns)
        known |= transitions(columns)
    batch = memory.sample(4000, np.random.default_rng(0), gamma=0.5)
    kinds = set()
    for row, seen in enumerate(batch.observations["obs.observation"]):
        truth = known[seen.tobytes()]
        reward, discount, goal = batch.reward[row], batch.discount[row], batch.observations[DESIRED][row]
        own = np.array_equal(goal, truth["obs.desired_goal"])
        if own and reward == -penalty:
            assert truth["info/subgoal_missed"] == 1 and discount == 0
            assert np.array_equal(batch.actions["action"][row], truth["action"])
            kinds.add("penalty")
            continue
        near = bool(np.linalg.norm(truth["achieved"].astype(float) - goal) <= threshold)
        assert np.array_equal(batch.actions["action"][row], truth["below"]), "it lies within the bounds of goals"
        assert (reward, discount) == (float(near) - 1, 0.0 if near else 0.5)
        kinds |= {"relabeled" if not own else "own", "achieved" if near else "not yet"}
    assert {"penalty", "relabeled", "own", "achieved", "not yet"} == kinds


def test_hindsight_actions_are_for_levels_alone() -> None:
    with pytest.raises(ConfigError, match="hindsight_actions=true needs actions that are goals of a level below"):
        make_replay_buffer(Section(hindsight_actions=True), GOALS, 4, 2)


@pytest.mark.parametrize("name", ["ddpg", "td3", "sac"])
def test_three_levels_resume_exactly(new_game: NewGame, name: str) -> None:
    sections = off_policy(name) | {"heatup": "64 env_steps", "checkpoint": KEEP, "archive": "all"}
    goes_on_exactly(new_game, minimal_config(**sections, stop_at={"updates": 7}))


@pytest.mark.parametrize("name", ["ppo", "appo"])
def test_options_resume_exactly(new_game: NewGame, name: str) -> None:
    acts = {"kwargs": CORRIDOR | {"choices": name == "ppo"}}
    sections = with_options(name, **acts) | {"checkpoint": KEEP, "archive": "all"}
    goes_on_exactly(new_game, minimal_config(**sections, stop_at={"updates": 7}))


def test_two_levels_of_ppo_learn_with_own_metrics(new_game: NewGame) -> None:
    levels: list[dict[str, Any]] = [
        {"policy": "top"},
        {"policy": "bottom", "every": 3, "threshold": 0.4, "reward": "distance"},
    ]
    policies = {"top": {"hidden_sizes": [8]}, "bottom": {"hidden_sizes": [8]}}
    rollout = {"fragment_steps": 32, "fragments_per_update": 1}
    game = new_game(minimal_config(environment=corridor(levels, num_envs=4), policies=policies, rollout=rollout))
    game.finish()
    assert {"top/policy.safetensors", "bottom/policy.safetensors"} <= set(game.latest().objects)
    tallies = game.trainer.learner.tallies
    assert 0 < tallies["top"].env_steps < tallies["bottom"].env_steps
    balanced(game)
