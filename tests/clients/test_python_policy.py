"""The client's networks in NumPy act as those of PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.policies.serialization import encode_policy
from tests.support.experience.policies import SIGHT, batch_of, built_policy, generator
from tests.support.runs.external_run import client_module

Policy = client_module("stagecoach_policy").Policy


@pytest.mark.parametrize(
    ("action", "algorithm", "settings"),
    [
        (spaces.Discrete(3, start=2), "ppo", {"normalize_observations": True}),
        (spaces.Box(-2, np.array([1.0, 3.0], np.float32), (2,)), "ppo", {"activation": "elu", "hidden_sizes": [8]}),
        (spaces.Box(-2, np.array([1.0, 3.0], np.float32), (2,)), "sac", {}),
        (spaces.MultiDiscrete([2, 4]), "ppo", {"activation": "silu"}), (spaces.Discrete(3), "dqn", {}),
    ],
    ids=["choice", "normal", "squashed", "choices", "values"],
)  # fmt: skip
def test_policy_in_numpy_acts_as_in_pytorch(action: Any, algorithm: str, settings: dict[str, Any]) -> None:
    """Its best actions are the same; drawn ones have the same mean and spread."""
    policy = built_policy(SIGHT, action, algorithm, **settings)
    if settings.get("normalize_observations"):
        policy.normalizer.update(batch_of(spaces.Box(-9, 9, (3,)), 50))
    read, described = Policy(encode_policy(policy, 7), seed=1), describe_space(action)
    batch = batch_of(SIGHT, 40)
    with torch.no_grad():
        params = policy.action_parameters(batch)
        best = policy.distribution.mode(params)
        drawn = [policy.distribution.sample(params[:1], generator(seed)) for seed in range(2000)]
    assert read.version == 7
    for row, seen in enumerate(batch["obs"].numpy()):
        expected = described.to_environment({name: its[row].numpy() for name, its in best.items()})
        np.testing.assert_allclose(read.act(seen, {"kind": "greedy"})[1], expected, atol=1e-5)
    if algorithm != "dqn":
        ours = [read.act(batch["obs"][0].numpy(), {"kind": "sampling"})[0] for _ in range(2000)]
        theirs = [described.nest("action", {name: its[0].numpy() for name, its in one.items()}) for one in drawn]
        for moment in (np.mean, np.std):
            np.testing.assert_allclose(moment(ours, axis=0), moment(theirs, axis=0), atol=0.1)


def test_policy_in_numpy_refuses_other_networks() -> None:
    policy = built_policy(SIGHT, spaces.Discrete(3), "dqn", fields={"dueling": True})
    with pytest.raises(ValueError, match="not a plain network"):
        Policy(encode_policy(policy, 1))
