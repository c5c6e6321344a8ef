"""Every algorithm goes on exactly where its run died, with all that it may have at once.

Memories with priorities, noise on actions and weights, target networks, reward signals, normalised rewards, schedules.
Where a memory comes back from is test_remembering.py; workers that die, test_exact_resume.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared import fragment
from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import Config
from shared.fragment import LARGEST, Fragment
from tests.balancing import played, write_played
from tests.trainer_node.game import NewGame, balanced, small
from tests.trainer_node.test_remembering import ends_with

FROM_DATA = ("bc", "cql", "iql")
PENDULUM = {"environment": {"id": "Pendulum-v1", "num_envs": 4, "max_episode_steps": 10}}
"""Episodes that are cut off within the run."""

REMEMBERING = {
    "policies": {
        "default": {
            "hidden_sizes": [8], "core": "lstm", "core_size": 6, "share_encoder": True,
            "normalise_observations": True, "normalise_rewards": True,
        },
    },
}  # fmt: skip
"""A policy with a core, whose episodes are longer than fragments."""


def changing(start: float, end: float, kind: str = "linear") -> dict[str, Any]:
    """Over the run of 256 env steps."""
    return {"kind": kind, "start": start, "end": end, "over": "256 env_steps"}


PRIORITISED = {"kind": "prioritised", "capacity": 5 * 32, "alpha": 0.7, "beta": changing(0.4, 1.0)}
"""Of an odd number of fragments, while an update brings two: it wraps in the middle of one."""
DRAWING: dict[str, Any] = {"minibatch_size": 16, "gradient_steps_per_env_step": 0.1, "memory": PRIORITISED}
RATE = {"learning_rate": changing(3e-3, 1e-4, "cosine")}
SIGNALS = {"extrinsic": {"strength": 0.5}, "rnd": {"strength": 0.3}, "icm": {"strength": 0.2}}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ppo": ("ppo", {"minibatch_size": 20, "epochs": 2, "clip_range": changing(0.3, 0.1)}, {}),
    "ppo with signals": ("ppo", {"minibatch_size": 20, "epochs": 2, "reward_signals": SIGNALS}, {}),
    "ppo with a core": ("ppo", {"minibatch_size": 20, "epochs": 2, "target_kl": 0.05}, REMEMBERING),
    "a2c": ("a2c", {}, {}),
    "impala": ("impala", {"vtrace_lambda": 0.9}, {}),
    "impala with a core": ("impala", {"vtrace_lambda": 0.9}, REMEMBERING),
    "appo": ("appo", {"minibatch_size": 20, "epochs": 2, "target_updates": 3, "clip_against": "target"}, {}),
    "dqn": (
        "dqn",
        {**DRAWING, "n_step": 3, "target_update_steps": 5,
         "exploration": {"kind": "epsilon_greedy", "epsilon": changing(0.9, 0.1, "exponential")}},
        {},
    ),
    "dqn, balanced": ("dqn", {**DRAWING, "memory": {"kind": "balanced", "capacity": 5 * 32}, "tau": 0.1}, {}),
    "dqn, an ensemble": (
        "dqn",
        {**DRAWING, "heads": 3, "prior_scale": 2.0, "bootstrap_share": 0.4,
         "exploration": {"kind": "ucb", "coefficient": changing(3.0, 0.1), "epsilon": 0.1}},
        {},
    ),
    "dqn, boltzmann": (
        "dqn", {**DRAWING, "exploration": {"kind": "boltzmann", "temperature": changing(2.0, 0.1)}}, {},
    ),
    "rainbow": ("rainbow", {**DRAWING, "atoms": 11, "v_max": 100.0, "target_update_steps": 5}, {}),
    "sac": ("sac", {**DRAWING, "exploration": {"kind": "gaussian", "sigma": changing(0.5, 0.1)}}, PENDULUM),
    "discrete sac": ("sac", {**DRAWING, "critic_learning_rate": changing(1e-2, 1e-3)}, {}),
    "td3": ("td3", {**DRAWING, "exploration": {"kind": "parameter_noise", "sigma": changing(0.3, 0.1)}}, PENDULUM),
    "ddpg": ("ddpg", {**DRAWING, "n_step": 2, "exploration": {"kind": "ou", "sigma": changing(0.3, 0.1)}}, PENDULUM),
    "ddpg, truncated": ("ddpg", {**DRAWING, "exploration": {"kind": "truncated_gaussian", "sigma": 0.4}}, PENDULUM),
    "bc": ("bc", {"minibatch_size": 16, "epochs": 2}, {}),
    "cql": ("cql", {**DRAWING, "largest_gap": 1.0, "cloning_steps": 5}, {}),
    "iql": ("iql", DRAWING, {}),
}  # fmt: skip
"""Name → algorithm, its section, and other sections."""


def test_none_is_left_out() -> None:
    assert {name for name, _, _ in CASES.values()} == set(ALGORITHMS)


def run(case: str, folder: Path, **more: Any) -> Config:
    """The config of a case, with further sections."""
    name, fields, others = CASES[case]
    sections = {"algorithm": {"name": name, **RATE, **fields}, "stop_at": {"updates": 7}, "heatup": "40 env_steps"}
    if name in FROM_DATA:
        write_played(folder / "data.csv", played(6, greed=0.5, steps=50))
        sections["dataset"] = {"path": str(folder / "data.csv"), "evaluation": {"every_updates": 0}}
    return small(**{**sections, **others, **more})


@pytest.mark.parametrize("case", CASES)
def test_it_goes_on_exactly_with_all_that_it_has(new_game: NewGame, tmp_path: Path, case: str) -> None:
    goes_on_exactly(new_game, run(case, tmp_path))


def goes_on_exactly(new_game: NewGame, config: Config) -> None:
    """A run that is lost three times ends with the weights of one that is not."""
    first = new_game(config)
    first.play_to(3)
    taken = first.trainer._snapshot()
    first.trainer._taken = None
    at_once = first.trainer._snapshot().objects
    whole = ends_with(first)
    assert taken.objects == at_once  # encoded when training had gone on to the end
    game = new_game(config)
    for version in (3, 4, 6):
        game.play_to(version)
        if version == 4:
            game.durable()  # else the last checkpoint is older, or still on its way
        game.lose()
    assert ends_with(game) == whole
    balanced(game)


@pytest.mark.parametrize("case", [*{name: case for case, (name, _, _) in reversed(CASES.items())}.values()])
def test_numbers_of_the_largest_magnitude_that_is_learnt_from_leave_the_weights_finite(
    new_game: NewGame, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, rng = fragment.encode, np.random.default_rng(3)

    def extreme(made: Fragment, *options: Any) -> bytes:
        for columns in made.columns.values():
            for name, array in columns.items():
                if array.dtype == np.float32 and name != "log_prob":
                    some = rng.random(array.shape) < (0.0 if name.startswith("action") else 0.3)
                    columns[name] = np.where(some, np.float32(LARGEST) * rng.choice([-1, 1], array.shape), array)
                    columns[name] = columns[name].astype(np.float32)
            columns["log_prob"][::2] = -LARGEST
        return encode(made, *options)

    monkeypatch.setattr(fragment, "encode", extreme)
    policy = {"hidden_sizes": [8]} | CASES[case][2].get("policies", {}).get("default", {})
    policy |= {"normalise_observations": False, "normalise_rewards": False}
    game = new_game(run(case, tmp_path, policies={"default": policy}))
    game.finish()
    assert list(balanced(game)["total"]["dropped"]) in ([], ["stale"])
