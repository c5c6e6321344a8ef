"""A league's mean strategy: which snapshots it has, with which weights, and how it acts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.deployment.deployed_policy import DeployedMixture, load_policy
from stagecoach.shared.experience.mixture import decode_mixture, encode_mixture, is_mixture, member
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.storage.players import mean_of
from tests.support.experience.fragments import describe

SPACES = describe({"main": (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(3))}).policies["main"]


def constant(choice: int) -> bytes:
    """A policy that always takes `choice`."""
    policy = ActorCritic(SPACES, PolicyConfig(hidden_sizes=(4,)))
    with torch.no_grad():
        policy.head.weight.zero_()
        policy.head.bias.copy_(torch.eye(3)[choice] * 50)
    return encode_policy(policy, choice)


def league(*taken: tuple[str, str, int]) -> bytes:
    rows = [{"policy": policy, "sha256": sha256, "env_steps": steps} for policy, sha256, steps in taken]
    return json.dumps({"snapshots": rows}).encode()


def test_mean_weighs_snapshots_by_steps_played() -> None:
    found = mean_of("mean", league(("main", "a", 0), ("main", "b", 100), ("main", "c", 300)), str.encode)
    assert found is not None and decode_mixture(found) == [(b"a", 0.0), (b"b", 100.0), (b"c", 300.0)]
    first = mean_of("mean", league(("main", "a", 0)), str.encode)
    assert first is not None and decode_mixture(first) == [(b"a", 1.0)]


def test_mean_names_a_policy_when_several_have_snapshots() -> None:
    both = league(("main", "a", 5), ("exploiter", "b", 7))
    found = mean_of("exploiter-mean", both, str.encode)
    assert found is not None and decode_mixture(found) == [(b"b", 7.0)]
    assert mean_of("other-mean", both, str.encode) is None
    with pytest.raises(CheckpointNotFound, match="choose one: exploiter-mean, main-mean"):
        mean_of("mean", both, str.encode)


def test_mixture_is_told_from_a_policy_and_damage_is_named() -> None:
    data = encode_mixture([(constant(0), 1.0)])
    assert is_mixture(data) and not is_mixture(constant(0)) and not is_mixture(b"onnx")
    with pytest.raises(CheckpointDamaged, match="a mean strategy is damaged"):
        decode_mixture(data[:-1] + b"!")


def test_draw_selects_members_in_proportion() -> None:
    weights = [0.0, 1.0, 3.0]
    drawn = [member(weights, number) for number in np.linspace(0, 1, 4000, endpoint=False)]
    assert np.bincount(drawn).tolist() == [0, 1000, 3000]
    assert member(weights, 1 - 2**-53) == 2


def test_deployed_mean_keeps_one_snapshot_per_episode() -> None:
    policy = load_policy(encode_mixture([(constant(0), 1.0), (constant(2), 3.0)]))
    assert isinstance(policy, DeployedMixture) and policy.version == 2
    seen = np.zeros((4000, 3), np.float32)
    first = policy.act_batch(seen, greedy=False)
    assert np.array_equal(policy.act_batch(seen, greedy=False), first)
    assert np.array_equal(np.asarray(policy.inspect_batch(seen).probabilities).argmax(axis=1), first)
    assert (first == 2).mean() == pytest.approx(0.75, abs=0.03)
    over = np.arange(4000) < 2000
    policy.reset(over)
    again = policy.act_batch(seen, greedy=False)
    assert np.array_equal(again[2000:], first[2000:]) and not np.array_equal(again[:2000], first[:2000])
    found = set[int]()
    for _ in range(50):
        policy.reset()
        found.add(int(policy.act(np.zeros(3, np.float32))))
    assert found == {0, 2}
