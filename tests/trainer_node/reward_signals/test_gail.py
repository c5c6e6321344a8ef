"""Adversarial imitation: reward, loss and gradient against slow NumPy, what it rewards, exact resume and replay."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.making import describe_space
from shared.algorithm_configs.ppo import PPOConfig
from shared.config import Config, PolicyConfig
from shared.dataset_config import DemonstrationsConfig
from shared.errors import ConfigError
from shared.policies.codec import state_arrays
from shared.policies.registry import borrowed_random_state, build_policies
from shared.reward_signals_config import GAILConfig
from shared.spaces import Array, Columns, EnvironmentDescription, PolicySpaces
from tests.balancing import played, write_played
from tests.conftest import minimal_config
from tests.shared.datasets import episodes, write_csv
from tests.trainer_node.game import NewGame, balanced
from tests.trainer_node.test_cloning import learner_of
from tests.trainer_node.test_ppo import CPU, DISCRETE
from tests.trainer_node.test_ranks import experience, learn
from tests.trainer_node.test_replay import archived, replayed
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.descent import descend
from trainer_node.demonstrations import Demonstrations
from trainer_node.reward_signals.gail import GAIL
from trainer_node.reward_signals.signal import Rows

LOW, HIGH = np.array([-2.0, 0.0, -np.inf], np.float32), np.array([2.0, 4.0, np.inf], np.float32)
BOXES = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Box(LOW, HIGH)))


def shown(path: Path, described: PolicySpaces) -> Demonstrations:
    write_csv(path, described, episodes(described, (9, 12, 8), "tTc"))
    description = EnvironmentDescription({"agent": "default"}, {"default": described})
    return Demonstrations(DemonstrationsConfig(path=str(path)), description, lambda columns: columns, 8)


def make_gail(tmp_path: Path, described: PolicySpaces = DISCRETE, **config: Any) -> GAIL:
    policy = build_policies({"p": described}, {"p": PolicyConfig()}, PPOConfig(), 1)["p"]
    section = GAILConfig.model_validate({"hidden_sizes": (6, 5), **config})
    with borrowed_random_state(1):
        return GAIL(policy, section, shown(tmp_path / "shown.csv", described))


def rows(described: PolicySpaces = DISCRETE, seed: int = 0, count: int = 7, middle: float = 0.0) -> Rows:
    random = np.random.default_rng(seed)
    seen = torch.from_numpy(random.normal(middle, 1.0, (count, 3)).astype(np.float32))
    done = random.integers(4, size=count) if described is DISCRETE else random.normal(0, 3, (count, 3))
    action = torch.from_numpy(done if described is DISCRETE else done.astype(np.float32))
    return Rows({"obs": seen}, {"action": action}, {"obs": seen})


def slow_features(arrays: Columns, observation: Array, action: Array, use_actions: bool = True) -> Array:
    count, mean, m2 = (arrays[f"normaliser.moments.0.{name}"] for name in ("count", "mean", "m2"))
    seen = np.clip((observation - mean) / np.sqrt(m2 / count + 1e-8), -10.0, 10.0)
    if not use_actions:
        return np.asarray(seen)
    if action.ndim == 0:
        return np.concatenate([seen, np.eye(4)[int(action)]])
    bounded = [np.clip(action[0] / 2, -1, 1), np.clip((action[1] - 2) / 2, -1, 1), action[2]]
    return np.concatenate([seen, bounded])


def slow_logit(arrays: Columns, features: Array) -> float:
    for layer in (0, 2, 4):
        weight, bias = (arrays[f"mlp.{layer}.{part}"].astype(np.float64) for part in ("weight", "bias"))
        features = weight @ features + bias
        features = features if layer == 4 else np.tanh(features)
    return float(features[0])


def slow_loss(gail: GAIL, batch: Rows, seed: int, penalty: float, use_actions: bool = True) -> tuple[float, float]:
    """Cross-entropy, and with the penalty, whose slopes are differences. The same steps are drawn."""
    arrays, generator = state_arrays(gail), torch.Generator().manual_seed(seed)
    drawn = gail._demonstrations.draw(len(batch), generator, CPU)
    mixture = torch.rand(len(batch), 1, generator=generator).numpy().astype(np.float64)
    entropy, slopes = [], []
    for row in range(len(batch)):
        theirs, ours = (
            slow_features(
                arrays, part.observations["obs"][row].numpy().astype(np.float64), part.actions["action"][row].numpy(),
                use_actions,
            )
            for part in (drawn, batch)
        )  # fmt: skip
        probable = [1 / (1 + np.exp(-slow_logit(arrays, features))) for features in (theirs, ours)]
        entropy.append(-np.log(probable[0]) - np.log(1 - probable[1]))
        between = mixture[row] * theirs + (1 - mixture[row]) * ours
        moved = np.eye(len(between)) * 1e-5
        slope = [(slow_logit(arrays, between + d) - slow_logit(arrays, between - d)) / 2e-5 for d in moved]
        slopes.append((np.sqrt(np.sum(np.square(slope))) - 1) ** 2)
    return float(np.mean(entropy)), float(np.mean(entropy) + penalty * np.mean(slopes))


@pytest.mark.parametrize("use_actions", [True, False], ids=["state and action", "state alone"])
@pytest.mark.parametrize("described", [DISCRETE, BOXES], ids=["discrete", "boxes"])
def test_reward_and_loss_are_the_papers(tmp_path: Path, described: PolicySpaces, use_actions: bool) -> None:
    gail, batch = make_gail(tmp_path, described, use_actions=use_actions, gradient_penalty=3.0), rows(described)
    gail.observe(batch.observations)
    arrays = state_arrays(gail)
    logits = [
        slow_logit(arrays, slow_features(arrays, obs.astype(np.float64), action, use_actions))
        for obs, action in zip(batch.observations["obs"].numpy(), batch.actions["action"].numpy(), strict=True)
    ]
    with torch.no_grad():
        found = gail.reward(batch).numpy()
    np.testing.assert_allclose(found, [-np.log(1 - 1 / (1 + np.exp(-logit))) for logit in logits], rtol=1e-4)
    loss, metrics = gail.loss(batch, torch.Generator().manual_seed(7))
    entropy, whole = slow_loss(gail, batch, 7, 3.0, use_actions)
    assert float(metrics["train/gail_loss"]) == pytest.approx(entropy, rel=1e-4)
    assert loss.item() == pytest.approx(whole, rel=1e-4) != pytest.approx(entropy, rel=1e-2)
    assert float(metrics["train/gail_acted"]) == pytest.approx(
        np.mean([1 / (1 + np.exp(-x)) for x in logits]), rel=1e-4
    )


def test_the_gradient_is_that_of_the_slow_loss(tmp_path: Path) -> None:
    gail, batch = make_gail(tmp_path), rows()
    gail.observe(batch.observations)
    gail.loss(batch, torch.Generator().manual_seed(7))[0].backward()
    for name, parameter in gail.named_parameters():
        if not parameter.numel() or name == "mlp.4.bias":
            continue
        where = (0,) * parameter.ndim
        assert parameter.grad is not None
        found, kept, losses = parameter.grad[where].item(), parameter[where].item(), []
        for change in (1e-3, -1e-3):
            with torch.no_grad():
                parameter[where] = kept + change
            losses.append(slow_loss(gail, batch, 7, 10.0)[1])
        with torch.no_grad():
            parameter[where] = kept
        assert found == pytest.approx((losses[0] - losses[1]) / 2e-3, rel=0.02, abs=1e-3), name


def test_statistics_begin_with_what_was_demonstrated(tmp_path: Path) -> None:
    gail, batch = make_gail(tmp_path), rows()
    gail.observe(batch.observations)
    gail.observe(batch.observations)
    seen = np.concatenate([gail._demonstrations.columns["obs"], *[batch.observations["obs"].numpy()] * 2])
    assert state_arrays(gail)["normaliser.moments.0.count"] == len(gail._demonstrations) + 14
    np.testing.assert_allclose(state_arrays(gail)["normaliser.moments.0.mean"], seen.mean(axis=0), rtol=1e-5)


def test_what_looks_like_a_demonstration_is_worth_more(tmp_path: Path) -> None:
    gail, other = make_gail(tmp_path, gradient_penalty=1.0), rows(count=40, middle=3.0)
    gail.observe(other.observations)
    learnt, generator = [parameter for parameter in gail.parameters() if parameter.numel()], torch.Generator()
    optimiser = Adam(learnt, 1e-8)
    for _ in range(200):
        descend(gail.loss(other, generator)[0], learnt, optimiser, 1e-2, None)
    drawn = gail._demonstrations.draw(40, generator, CPU)
    with torch.no_grad():
        like, unlike = (gail.reward(Rows(d.observations, d.actions, {})).mean() for d in (drawn, other))
    assert like > 2 * unlike
    assert gail._demonstrations.draw(40, generator, CPU).observations["obs"].abs().max() <= 1


# In a run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six short episodes of CartPole."""
    path = tmp_path / "balanced.csv"
    write_played(path, played(6, greed=0.8, steps=50))
    return path


def imitating(path: Path, name: str = "ppo", gail: dict[str, Any] | None = None, **sections: Any) -> Config:
    clipped = {"minibatch_size": 20, "epochs": 2} if name in {"ppo", "appo"} else {}
    signals = {"extrinsic": {"strength": 0.0}, "gail": {"hidden_sizes": [6], "learning_rate": 1e-2} | (gail or {})}
    algorithm = {"name": name, "reward_signals": signals, **clipped}
    made: Config = archived(**({"demonstrations": {"path": str(path)}, "algorithm": algorithm} | sections))
    return made


@pytest.mark.parametrize("name", ["ppo", "a2c", "appo", "impala"])
def test_a_run_that_dies_goes_on_exactly_and_is_replayed(new_game: NewGame, data: Path, name: str) -> None:
    config = imitating(data, name, heatup="48 env_steps")
    whole = new_game(config).finish()
    game = new_game(config)
    game.lose_at((1, 2, 4))
    assert game.finish() == whole
    found = replayed(game, "start", game.finished()["final"])
    assert found.equal, found.different
    balanced(game)


def test_a_policy_with_a_core_imitates_as_well(data: Path) -> None:
    remembering = {"core": "gru", "core_size": 6, "share_encoder": True, "hidden_sizes": [8]}
    config = imitating(data, policies={"default": remembering})
    learner = learner_of(config)
    figures = [learn(learner, fragments) for fragments in experience(config, 12)]
    told = [row["train/gail_demonstrated"] - row["train/gail_acted"] for row in figures]
    assert told[-1] > told[0], "it comes to tell them apart"
    assert all(row["train/gail_reward"] > 0 for row in figures)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing to imitate": ({}, r"algorithm.reward_signals.gail imitates recorded experience.*demonstrations.path"),
    "no strength": (
        {"gail": {"strength": 0}, "demonstrations": {"path": "d.csv"}}, r"gail.strength: expected a number above 0",
    ),
    "no such network": (
        {"gail": {"hidden_sizes": [0]}, "demonstrations": {"path": "d.csv"}}, r"reward_signals.gail.hidden_sizes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused(case: str) -> None:
    sections, words = REFUSED[case]
    sections = dict(sections)
    signals = {"gail": sections.pop("gail", {})}
    with pytest.raises(ConfigError, match=words):
        minimal_config(**sections, algorithm={"minibatch_size": 8, "reward_signals": signals})
