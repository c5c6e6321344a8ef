"""Behavioural cloning: its loss against torch's own distributions, and that it comes to play what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.evaluation import evaluate_policies
from rollout_worker.making import describe_space
from shared.algorithm_configs.bc import BCConfig
from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.fragment import expected_columns
from shared.policies.actor_critic import ActorCritic
from shared.policies.codec import state_arrays
from shared.spaces import Columns, PolicySpaces
from shared.steps import Counters
from tests.balancing import played, write_played
from tests.conftest import minimal_config
from tests.trainer_node.game import NewGame
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.bc import BC
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.pairs import Pairs

SEEN = describe_space(spaces.Box(-5.0, 5.0, (3,)))
CHOICES = PolicySpaces(SEEN, describe_space(spaces.MultiDiscrete([4, 2])))
BOX = PolicySpaces(SEEN, describe_space(spaces.Box(-1.0, 1.0, (2,))))
both = pytest.mark.parametrize("described", [CHOICES, BOX], ids=["choices", "box"])


def make_bc(described: PolicySpaces, **config: Any) -> BC:
    torch.manual_seed(0)
    policy = ActorCritic(described, PolicyConfig(hidden_sizes=(16,), log_std_init=-0.3, normalise_observations=True))
    return BC(policy, BCConfig(name="bc", **{"minibatch_size": 8} | config), Setting(torch.device("cpu"), 3, 8, 4))


def recorded(described: PolicySpaces, seed: int = 0) -> Columns:
    """A fragment of random content, a quarter of it padding."""
    generator, columns = np.random.default_rng(seed), {}
    for name, (shape, dtype) in expected_columns(described, 8, 4).items():
        size = tuple(max(length, 0) for length in shape)
        drawn = generator.normal(size=size) if dtype.kind == "f" else generator.integers(0, 2, size)
        columns[name] = drawn.astype(dtype)
    columns["mask"] = np.arange(8)[:, None] < np.array([8, 8, 6, 2])[None]
    return columns


def expected_terms(policy: ActorCritic, batch: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Negative log-likelihood and entropy, by torch's distributions."""
    with torch.no_grad():
        params = policy.action_parameters(batch.observations)
    action = batch.actions["action"]
    if action.dtype == torch.int64:
        parts: list[Any] = [torch.distributions.Categorical(logits=part) for part in (params[:, :4], params[:, 4:])]
        log_prob = sum(part.log_prob(action[:, n]) for n, part in enumerate(parts))
        return -torch.as_tensor(log_prob).mean(), torch.stack([part.entropy() for part in parts]).sum(dim=0).mean()
    normal: Any = torch.distributions.Normal(params[:, :2], params[:, 2:].exp())
    return -normal.log_prob(action).sum(dim=1).mean(), normal.entropy().sum(dim=1).mean()


@both
def test_the_loss_is_what_torchs_own_distributions_say(described: PolicySpaces) -> None:
    algorithm = make_bc(described, entropy_coefficient=0.3)
    batch = algorithm._batch(recorded(described))
    assert len(batch) == 24
    loss, terms = algorithm.loss(batch)
    unlikelihood, entropy = expected_terms(algorithm.policy, batch)
    torch.testing.assert_close(terms["train/negative_log_likelihood"], unlikelihood)
    torch.testing.assert_close(terms["train/entropy"], entropy)
    torch.testing.assert_close(loss.detach(), unlikelihood - 0.3 * entropy)


@both
def test_only_the_actor_moves_and_it_moves_towards_the_data(described: PolicySpaces) -> None:
    algorithm = make_bc(described, learning_rate=0.02, epochs=10)
    before = state_arrays(algorithm.policy)
    item = Experience("w:0.0", recorded(described))
    first = algorithm.update([item], Counters())
    for update in range(1, 12):
        last = algorithm.update([item], Counters(updates=update))
    assert last["train/negative_log_likelihood"] < first["train/negative_log_likelihood"] - 0.3
    assert last["train/gradient_steps"] == 30 and last["train/action_error"] < first["train/action_error"]
    moved = {name for name, array in state_arrays(algorithm.policy).items() if not np.array_equal(array, before[name])}
    assert any(name.startswith("head") for name in moved)
    assert not any(name.startswith(("critic", "value_head")) for name in moved)


@both
def test_a_restored_one_goes_on_bit_for_bit(described: PolicySpaces) -> None:
    whole, half = make_bc(described), make_bc(described)
    for update in range(4):
        whole.update([Experience("w:0.0", recorded(described, update))], Counters(updates=update))
        if update < 2:
            half.update([Experience("w:0.0", recorded(described, update))], Counters(updates=update))
    resumed = make_bc(described)
    resumed.policy.load_state_dict(half.policy.state_dict())
    resumed.load_state(half.state())
    for update in (2, 3):
        resumed.update([Experience("w:0.0", recorded(described, update))], Counters(updates=update))
    assert all(
        np.array_equal(array, state_arrays(resumed.policy)[n]) for n, array in state_arrays(whole.policy).items()
    )


def test_nothing_but_padding_is_no_step() -> None:
    algorithm = make_bc(CHOICES)
    columns = recorded(CHOICES) | {"mask": np.zeros((8, 4), np.bool_)}
    assert algorithm.update([Experience("w:0.0", columns)], Counters())["train/gradient_steps"] == 0


def test_it_is_refused_without_a_dataset_as_ppo_is_with_one() -> None:
    with pytest.raises(ConfigError, match="bc clones recorded experience"):
        minimal_config(algorithm={"name": "bc", "minibatch_size": 8})
    with pytest.raises(ConfigError, match=r"ppo learns only from what its own policy acts, and dataset.path=data.csv"):
        minimal_config(dataset={"path": "data.csv"})


def test_it_comes_to_play_what_was_recorded(new_game: NewGame, tmp_path: Path) -> None:
    listed = played(12, steps=500)
    assert np.mean([len(episode) for episode in listed]) > 450
    write_played(tmp_path / "balanced.csv", listed)
    config = minimal_config(
        algorithm={"name": "bc", "learning_rate": 3e-3, "minibatch_size": 64, "epochs": 2},
        dataset={"path": str(tmp_path / "balanced.csv"), "evaluation": {"every_updates": 0}},
        rollout={"fragment_steps": 32, "fragments_per_update": 2},
        environment={"id": "CartPole-v1", "num_envs": 8},
        policies={"default": {"normalise_observations": True, "hidden_sizes": [32]}},
        stop_at={"updates": 60},
    )
    game = new_game(config)
    game.finish()
    scores = evaluate_policies(config, game.role.description(), game.trainer._learner.policies, 0, 8).as_dict()
    assert scores["mean_return"] >= 400
