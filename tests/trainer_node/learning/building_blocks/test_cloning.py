"""Cloning beside what rewards teach: its loss against torch's distributions, annealing, exact resume, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import DatasetError
from stagecoach.shared.config.recorded import DemonstrationsConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns
from stagecoach.trainer_node.learning.building_blocks.interface import Shard
from stagecoach.trainer_node.learning.learner import Learner
from tests.support.experience.cartpole_data import played
from tests.support.learning.learners import learner_of
from tests.support.runs.game import NewGame, small

ANNEALED = {"kind": "linear", "start": 0.5, "end": 0.0, "over": "4 updates"}


def section(name: str, strength: Any = ANNEALED) -> dict[str, Any]:
    steps = {"minibatch_size": 16} if name in {"ppo", "appo", "sac"} else {}
    return {"name": name, "behavioral_cloning": {"strength": strength, "minibatch_size": 24}, **steps}


def imitating(path: Path, name: str = "ppo", strength: Any = ANNEALED, **sections: Any) -> Config:
    return small(**{"demonstrations": {"path": str(path)}, "algorithm": section(name, strength)} | sections)


def cloning_of(config: Config) -> tuple[Any, Learner]:
    learner = learner_of(config)
    algorithm: Any = learner.algorithms["default"]
    return algorithm.cloning, learner


# What is drawn


def test_all_steps_are_drawn_and_nothing_else(data: Path) -> None:
    recorded = played(6, greed=0.8, steps=50)
    found, _ = cloning_of(imitating(data))
    pairs = found.demonstrations.draw(4000, torch.Generator().manual_seed(1), torch.device("cpu"))
    drawn = {
        (row.tobytes(), int(action))
        for row, action in zip(pairs.observations["obs"].numpy(), pairs.actions["action"], strict=True)
    }
    rows = {
        (row.tobytes(), int(action))
        for episode in recorded
        for row, action in zip(episode.observations["obs"][:-1], episode.actions["action"], strict=True)
    }
    assert len(found.demonstrations) == sum(map(len, recorded)) == len(rows)
    assert drawn <= rows and len(drawn) > 0.9 * len(rows)


def halved(columns: Columns) -> Columns:
    return columns | {"obs": columns["obs"] * np.float32(0.5)}


def test_demonstrations_are_filtered_as_experience_is(data: Path) -> None:
    policy = {"hidden_sizes": [8], "transform": "tests.trainer_node.learning.building_blocks.test_cloning:halved"}
    plain, _ = cloning_of(imitating(data))
    filtered, _ = cloning_of(imitating(data, policies={"default": policy}))
    np.testing.assert_array_equal(
        filtered.demonstrations.columns["obs"], plain.demonstrations.columns["obs"] * np.float32(0.5)
    )


# The loss


@pytest.fixture
def torques(tmp_path: Path) -> Path:
    """Made-up steps of Pendulum, also at and beyond the bounds, as policies without bounds record them."""
    random, path = np.random.default_rng(0), tmp_path / "torques.csv"
    rows = [
        [*random.normal(size=3), torque, -1.0, int(step % 20 == 19)]
        for step, torque in enumerate([2.0, -2.0, 2.5, *random.uniform(-2, 2, 77)])
    ]
    lines = ["obs.0,obs.1,obs.2,action.0,reward,terminated", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_cloning_loss_of_boxes_equals_torch(torques: Path, name: str) -> None:
    """A squashed Gaussian's density is not known at the bounds: there, as near to them as float32 gets."""
    memory = {"kind": "uniform", "capacity": 2000}
    algorithm = section(name, 2.0) | {"minibatch_size": 16, "replay_buffer": memory}
    pendulum, policies = {"id": "Pendulum-v1", "num_envs": 4}, {"default": {"hidden_sizes": [8]}}
    found, learner = cloning_of(imitating(torques, algorithm=algorithm, environment=pendulum, policies=policies))
    pairs = found.demonstrations.draw(400, torch.Generator().manual_seed(1), torch.device("cpu"))
    params, done = learner.policies["default"].action_parameters(pairs.observations), pairs.actions["action"] / 2
    assert done.max() > 1
    if name == "td3":
        expected = torch.nn.functional.mse_loss(torch.tanh(params), done.clamp(-1, 1), reduction="none").mean(dim=1)
    else:
        mean, log_std = params.double().chunk(2, dim=1)
        steps = [torch.distributions.TanhTransform(), torch.distributions.AffineTransform(0.0, 2.0)]
        normal: Any = torch.distributions.Normal(mean, log_std.exp())
        squashed: Any = torch.distributions.TransformedDistribution(normal, steps)
        expected = -squashed.log_prob(2 * done.clamp(-1 + 1e-6, 1 - 1e-6).double()).sum(dim=1).float()
    torch.testing.assert_close(found.errors(pairs), expected, rtol=1e-3, atol=1e-4)


def test_cloning_loss_is_weighted_and_added(data: Path) -> None:
    found, learner = cloning_of(imitating(data))
    found.begin(Counters(updates=1))
    assert found.metrics == {"train/cloning_strength": 0.375}
    own = torch.tensor(3.0)
    drawing = torch.Generator()
    drawing.set_state(found.generator.get_state())
    loss, terms = found.beside(Shard(), (own, {"train/loss": own}))
    pairs = found.demonstrations.draw(24, drawing, torch.device("cpu"))
    cloned = found.errors(pairs).mean()
    torch.testing.assert_close(loss, own + 0.375 * cloned)
    torch.testing.assert_close(terms["train/cloning_loss"], cloned.detach())
    assert terms["train/loss"] == own
    parameter = dict(learner.policies["default"].named_parameters())["head.weight"]
    (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    (expected,) = torch.autograd.grad(0.375 * cloned, parameter)
    torch.testing.assert_close(gradient, expected)


# Annealing


@pytest.mark.parametrize("name", ["ppo", "impala", "sac"])
def test_cloning_strength_anneals_and_zero_changes_no_bit(
    new_game: NewGame, data: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = section(name)
    del plain["behavioral_cloning"]
    expected = new_game(small(algorithm=plain)).finish()
    assert new_game(imitating(data, name, 0.0)).finish() == expected
    game, told = new_game(imitating(data, name)), list[dict[str, float]]()
    learn = game.trainer.learner.learn

    def watched(*given: Any) -> dict[str, float]:
        told.append(learn(*given))
        return told[-1]

    monkeypatch.setattr(game.trainer.learner, "learn", watched)
    assert game.finish() != expected
    assert [metrics["train/cloning_strength"] for metrics in told] == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert ["train/cloning_loss" in metrics for metrics in told] == [True] * 4 + [False] * 2


def test_schedule_may_end_before_ignored_end(data: Path) -> None:
    assert imitating(data, strength={"kind": "constant", "start": 0.1, "end": -1.0}).hash()


def test_other_demonstrations_are_refused(new_game: NewGame, data: Path) -> None:
    sha256 = read_dataset(DemonstrationsConfig(path=str(data)), describe_environment(imitating(data)))["default"].sha256
    config = imitating(data, demonstrations={"path": str(data), "sha256": sha256})
    game = new_game(config)
    game.play_to(1)
    game.crash()
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[:-1]))
    with pytest.raises(DatasetError, match=r"demonstrations.path=.* has the SHA-256 .*\(demonstrations.sha256\)"):
        game.restart()


@pytest.mark.parametrize("fields", [{}, {"dueling": True, "heads": 3}, {"head": "c51", "v_min": 0, "v_max": 50}])
def test_q_learning_clones_by_a_large_margin(data: Path, fields: dict[str, Any]) -> None:
    """Equation 2 of Hester et al. 2018, row by row: 0 only where the demonstrated action is the best by the margin."""
    cloned = {"behavioral_cloning": {"strength": 1.0, "margin": 0.3}}
    found, learner = cloning_of(imitating(data, algorithm={"name": "dqn", **cloned, **fields}))
    pairs = found.demonstrations.draw(60, torch.Generator().manual_seed(1), torch.device("cpu"))
    with torch.no_grad():
        values = learner.policies["default"].action_parameters(pairs.observations).numpy()
        errors = found.errors(pairs)
    chosen = pairs.actions["action"].tolist()
    expected = [
        max(value + 0.3 * (choice != right) for choice, value in enumerate(row)) - row[right]
        for row, right in zip(values, chosen, strict=True)
    ]
    np.testing.assert_allclose(errors, expected, atol=1e-5)
    assert errors.max() > 0
