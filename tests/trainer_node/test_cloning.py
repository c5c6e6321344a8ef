"""Cloning beside what rewards teach: its loss against torch's distributions, annealing, exact resume, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_worker.environments.description import describe_environment
from shared.config.run_config import Config
from shared.config.sections import DemonstrationsConfig
from shared.datasets.read import read_dataset
from shared.errors import DatasetError
from shared.experience.counters import Counters
from shared.experience.spaces import Columns
from shared.policies.continuous import Actor, Deterministic
from shared.policies.distributions import ActionDistribution
from tests.conftest import minimal_config
from tests.support.cartpole_data import played, write_played
from tests.support.game import NewGame, small
from tests.support.learning.learners import learner_of
from trainer_node.learning.building_blocks.interface import Shard
from trainer_node.learning.learner import Learner

ON_POLICY = ("ppo", "a2c", "appo", "impala")
ANNEALED = {"kind": "linear", "start": 0.5, "end": 0.0, "over": "4 updates"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six short episodes of CartPole."""
    path = tmp_path / "balanced.csv"
    write_played(path, played(6, greed=0.8, steps=50))
    return path


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
    """A transform."""
    return columns | {"obs": columns["obs"] * np.float32(0.5)}


def test_demonstrations_are_filtered_as_experience_is(data: Path) -> None:
    policy = {"hidden_sizes": [8], "transform": "tests.trainer_node.test_cloning:halved"}
    plain, _ = cloning_of(imitating(data))
    filtered, _ = cloning_of(imitating(data, policies={"default": policy}))
    np.testing.assert_array_equal(
        filtered.demonstrations.columns["obs"], plain.demonstrations.columns["obs"] * np.float32(0.5)
    )


# The loss


def box_config(path: Path, name: str, **sections: Any) -> Config:
    chosen = (
        {"minibatch_size": 16}
        if name == "ppo"
        else {"minibatch_size": 16, "replay_buffer": {"kind": "uniform", "capacity": 2000}}
    )
    algorithm = {"name": name, "behavioral_cloning": {"strength": 2.0, "minibatch_size": 40}, **chosen}
    return minimal_config(
        **({
            "environment": {"id": "Pendulum-v1", "num_envs": 4}, "demonstrations": {"path": str(path)},
            "policies": {"default": {"hidden_sizes": [8], "log_std_init": -0.3}}, "algorithm": algorithm,
        } | sections)
    )  # fmt: skip


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


def expected_errors(learner: Learner, observed: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
    """By torch's own distributions."""
    policy = learner.policies["default"]
    params = policy.action_parameters({"obs": observed})
    if isinstance(policy, Deterministic):
        return torch.nn.functional.mse_loss(torch.tanh(params), (done / 2).clamp(-1, 1), reduction="none").mean(dim=1)
    if isinstance(policy, Actor):
        mean, log_std = params.chunk(2, dim=1)
        squashed: Any = torch.distributions.TransformedDistribution(
            torch.distributions.Normal(mean.double(), log_std.double().exp()),
            [torch.distributions.TanhTransform(), torch.distributions.AffineTransform(0.0, 2.0)],
        )
        inside = (done / 2).clamp(-1 + 1e-6, 1 - 1e-6)  # as near to the bounds as float32 gets
        log_prob: torch.Tensor = squashed.log_prob(2 * inside.double())
        return -log_prob.sum(dim=1).to(torch.float32)
    if isinstance(policy.distribution, ActionDistribution) and done.dtype == torch.int64:
        return torch.nn.functional.cross_entropy(params, done, reduction="none")
    normal: Any = torch.distributions.Normal(params[:, :1], params[:, 1:].exp())
    density: torch.Tensor = normal.log_prob(done)
    return -density.sum(dim=1)


@pytest.mark.parametrize("name", ["ppo", "sac", "td3", "ddpg"])
def test_the_loss_of_boxes_is_what_torch_says(torques: Path, name: str) -> None:
    found, learner = cloning_of(box_config(torques, name))
    pairs = found.demonstrations.draw(400, torch.Generator().manual_seed(1), torch.device("cpu"))
    assert pairs.actions["action"].max() > 2
    expected = expected_errors(learner, pairs.observations["obs"], pairs.actions["action"])
    torch.testing.assert_close(found.errors(pairs), expected, rtol=1e-3, atol=1e-4)


def test_the_loss_is_weighed_and_added_to_the_algorithms_own(data: Path) -> None:
    found, learner = cloning_of(imitating(data))
    found.begin(Counters(updates=1))
    assert found.metrics == {"train/cloning_strength": 0.375}
    own = torch.tensor(3.0)
    drawing = torch.Generator()
    drawing.set_state(found.generator.get_state())
    loss, terms = found.beside(Shard(), (own, {"train/loss": own}))
    pairs = found.demonstrations.draw(24, drawing, torch.device("cpu"))
    cloned = expected_errors(learner, pairs.observations["obs"], pairs.actions["action"]).mean()
    torch.testing.assert_close(loss, own + 0.375 * cloned)
    torch.testing.assert_close(terms["train/cloning_loss"], cloned.detach())
    assert terms["train/loss"] == own
    parameter = dict(learner.policies["default"].named_parameters())["head.weight"]
    (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True)
    (expected,) = torch.autograd.grad(0.375 * cloned, parameter)
    torch.testing.assert_close(gradient, expected)


# Annealing


@pytest.mark.parametrize("name", [*ON_POLICY, "sac"])
def test_what_is_cloned_with_strength_0_leaves_every_bit_as_it_is(new_game: NewGame, data: Path, name: str) -> None:
    plain = section(name)
    del plain["behavioral_cloning"]
    expected = new_game(small(algorithm=plain)).finish()
    assert new_game(imitating(data, name, 0.0)).finish() == expected
    assert new_game(imitating(data, name)).finish() != expected


@pytest.mark.parametrize("name", ON_POLICY)
def test_the_strength_is_annealed_to_nothing(
    new_game: NewGame, data: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    game = new_game(imitating(data, name))
    strengths, cloned = [], []
    learn = game.trainer.learner.learn

    def watched(*arguments: Any) -> dict[str, float]:
        metrics = learn(*arguments)
        strengths.append(metrics["train/cloning_strength"])
        cloned.append("train/cloning_loss" in metrics)
        return metrics

    monkeypatch.setattr(game.trainer.learner, "learn", watched)
    game.finish()
    assert strengths == [0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    assert cloned == [True] * 4 + [False] * 2


def test_a_schedule_that_never_reaches_an_ignored_end_is_fine(data: Path) -> None:
    assert imitating(data, strength={"kind": "constant", "start": 0.1, "end": -1.0}).hash()


def test_a_trainer_whose_demonstrations_are_others_refuses_to_begin(new_game: NewGame, data: Path) -> None:
    sha256 = read_dataset(DemonstrationsConfig(path=str(data)), describe_environment(imitating(data))).sha256
    config = imitating(data, demonstrations={"path": str(data), "sha256": sha256})
    game = new_game(config)
    game.play_to(1)
    game.crash()
    lines = data.read_text().splitlines()
    data.write_text("\n".join(lines[:-1]))
    with pytest.raises(DatasetError, match=r"demonstrations.path=.* has the SHA-256 .*\(demonstrations.sha256\)"):
        game.restart()
