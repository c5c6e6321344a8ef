"""Acting without PyTorch: the same draws from the same random numbers, and parameters that the trainer recomputes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.rollout_worker.exploration.base import Exploration, Greedy, RandomActing, Sampling
from stagecoach.rollout_worker.sampling.small_networks import SmallNetwork
from stagecoach.shared.experience.spaces import Array, Columns
from stagecoach.shared.policies.actor_critic import ActorCritic
from tests.support.environments.small import CHASE, CHASE_POLICIES, MODULE
from tests.support.environments.stage import Stage, same
from tests.support.learning.threads import one_thread

ROWS = 8


def stage(observation: str, action: str, **network: Any) -> Stage:
    kwargs = {"observation": observation, "action": action}
    return Stage({"id": f"{MODULE}:AnySpaces", "kwargs": kwargs, "num_envs": ROWS}, policies={"default": network})


def learned(policy: ActorCritic, seen: Columns) -> None:
    """Gives a policy weights of the size that learning gives them, and observations' moments."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        policy.head.weight.copy_(torch.randn_like(policy.head.weight) / 4)
        policy.log_std.copy_(torch.linspace(-1.5, 2.5, len(policy.log_std)))
    if policy.normalizer is not None:
        policy.normalizer.update({name: torch.from_numpy(array) for name, array in seen.items()})


@pytest.fixture(autouse=True)
def _threads_of_a_worker() -> Iterator[None]:
    """Compares with PyTorch as a worker runs it (`rollout.torch_threads`): more threads round sums otherwise."""
    with one_thread():
        yield


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary", "box", "dict"])
@pytest.mark.parametrize(
    ("observation", "network"),
    [
        ("box", {}),
        ("box", {"normalize_observations": True, "clip_observations": 1.0}),
        ("matrix", {"activation": "relu", "hidden_sizes": [96, 32]}),
        ("matrix", {"normalize_observations": True, "share_encoder": True}),
        ("bytes", {"hidden_sizes": [], "normalize_observations": True}),
    ],
    ids=str,
)
def test_small_network_draws_as_pytorch(observation: str, action: str, network: dict[str, Any]) -> None:
    its = stage(observation, action, **network)
    policy = its.policies["default"]
    assert isinstance(policy, ActorCritic)
    space, generator = its.sampler._environment._env.observation_space, torch.Generator()  # type: ignore[attr-defined]
    space.seed(1)
    learned(policy, policy.spaces.observation.flatten("obs", space.sample()))
    for seed in range(20):
        seen = policy.spaces.observation.flatten("obs", space.sample())
        small = SmallNetwork.of(policy, Sampling(), ROWS, 1, generator.manual_seed(seed))
        assert small is not None
        drawn = small.act(seen)
        with torch.no_grad():
            same_params = policy.distribution.sample(small.params, generator.manual_seed(seed))
            tensors = {name: torch.from_numpy(array) for name, array in seen.items()}
            chosen, params = Sampling().act(policy, tensors, generator.manual_seed(seed))
            ours, theirs = (policy.distribution.log_prob(its, same_params) for its in (small.params, params))
        for name, array in drawn.items():
            assert array.dtype == chosen[name].numpy().dtype and bits(array) == bits(same_params[name].numpy())
            if array.dtype == np.int64:
                assert bits(array) == bits(chosen[name].numpy())
            else:
                np.testing.assert_allclose(array, chosen[name].numpy(), rtol=1e-6, atol=1e-6)
        # the smallest standard deviation is 0.22: of an action 3 deviations off, 1e-6 of its mean are 1.4e-5
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6, atol=2e-5)


def bits(array: Array) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


class Own(ActorCritic):
    """A network of a user's."""


@pytest.mark.parametrize(
    ("environment", "network", "exploration", "small"),
    [
        ({}, {}, Sampling(), True),
        ({}, {}, Greedy(), False),
        ({}, {}, RandomActing(), False),
        ({}, {"activation": "silu"}, Sampling(), False),
        ({}, {"layer_norm": True}, Sampling(), False),
        ({"num_envs": 64}, {}, Sampling(), True),
        ({"num_envs": 65}, {}, Sampling(), False),
        ({"num_envs": 1}, {"hidden_sizes": [96, 95]}, Sampling(), True),
        ({"num_envs": 1}, {"hidden_sizes": [96, 96]}, Sampling(), False),
        ({"id": "FrozenLake-v1"}, {}, Sampling(), False),
        ({"id": f"{MODULE}:AnySpaces", "kwargs": {"observation": "image", "action": "box"}}, {}, Sampling(), False),
    ],
)
def test_other_networks_act_with_pytorch(
    environment: dict[str, Any], network: dict[str, Any], exploration: Exploration, small: bool
) -> None:
    its = Stage({"id": "CartPole-v1"} | environment, policies={"default": {"cnn": "small"} | network})
    policy, rows = its.policies["default"], its.sampler._environment.num_envs
    assert (SmallNetwork.of(policy, exploration, rows, 4, torch.Generator()) is not None) == small
    policy.__class__ = Own
    assert SmallNetwork.of(policy, exploration, rows, 4, torch.Generator()) is None


def test_policies_of_both_kinds_act_in_one_fragment() -> None:
    """The policies share a generator: each draws the same whenever the fragment is acted again."""
    sections = CHASE_POLICIES | {"policies": {"hunter": {"layer_norm": True}, "prey": {}}}
    first, again = (Stage(CHASE, **sections) for _ in range(2))
    for _ in range(2):
        assert same(first.sample(9), again.sample(9))
