"""Policies as bytes: both forms come back as they were, and foreign, damaged or newer bytes are refused by name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.base.errors import CheckpointDamaged
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.counters import Counters, Phase, PhaseCounters
from stagecoach.shared.experience.spaces import Columns, PolicySpaces
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.serialization import (
    VersionHeader,
    decode_board,
    decode_policy,
    encode_board,
    encode_policy,
    finite_weights,
    load_state_arrays,
    state_arrays,
)
from tests.support.experience.policies import Q_NETWORKS, SIGHT, built_policy, generator

CONFIGS = {
    "plain": PolicyConfig(hidden_sizes=(8,)),
    "normalized": PolicyConfig(hidden_sizes=(8,), normalize_observations=True),
    "shared encoder": PolicyConfig(hidden_sizes=(8, 4), share_encoder=True, activation="relu"),
}
BOX, CHOICE = spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(4, start=2)
HEADER = VersionHeader(7, Phase.HEATUP, PhaseCounters(Counters(10, 2, 0), Counters(300, 4, 5)))


def policy_of(config: PolicyConfig) -> ActorCritic:
    """A policy whose normalizer has seen something."""
    policy = ActorCritic(PolicySpaces(describe_space(SIGHT), describe_space(CHOICE)), config)
    if policy.normalizer is not None:
        policy.normalizer.update({"obs": torch.randn(9, 3)})
    return policy


def same(a: Columns, b: Columns) -> bool:
    """Same names, dtypes, shapes and bits."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


KINDS: list[tuple[spaces.Space[Any], str, dict[str, Any], dict[str, Any]]] = [
    (BOX, "sac", {}, {"normalize_observations": True}),
    (BOX, "td3", {}, {"normalize_observations": True}),
    *((BOX, "ppo", {}, {"core": core, "core_size": 7, "share_encoder": True}) for core in ("lstm", "gru")),
    *((CHOICE, "dqn", fields, {"hidden_sizes": (8, 6)}) for fields in Q_NETWORKS),
    *((action, "ppo", {}, config.model_dump()) for action in (BOX, CHOICE) for config in CONFIGS.values()),
]


@pytest.mark.parametrize(("action", "algorithm", "fields", "config"), KINDS, ids=str)
@torch.no_grad()
def test_policy_file_of_every_kind_round_trips(
    action: spaces.Space[Any], algorithm: str, fields: dict[str, Any], config: dict[str, Any]
) -> None:
    policy = built_policy(SIGHT, action, algorithm, fields=fields, **config)
    if policy.normalizer is not None:
        policy.normalizer.update({"obs": torch.randn(9, 3)})
    blob = encode_policy(policy, 7)
    again, version = decode_policy(blob)
    assert version == 7 and type(again) is type(policy) and same(state_arrays(again), state_arrays(policy))
    assert again.spaces == policy.spaces and again.config == policy.config and encode_policy(again, 7) == blob
    assert getattr(again, "network", None) == getattr(policy, "network", None)
    assert not [name for name in state_arrays(policy) if re.search("^bounds|support|noise", name)]
    rows = {"obs": torch.randn(6, 3, generator=generator())}
    found, expected = (one.step(rows, one.initial_state(6))[0] for one in (again, policy))
    assert torch.equal(found, expected)
    ours, theirs = (one.distribution.mode(expected) for one in (policy, again))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_board_blob_carries_all_policies_and_counters() -> None:
    states = {
        "left": state_arrays(policy_of(CONFIGS["normalized"])),
        "right-2": state_arrays(policy_of(CONFIGS["plain"])),
    }
    blob = encode_board(states, HEADER)
    found, header = decode_board(blob)
    assert header == HEADER
    assert found.keys() == states.keys() and all(same(found[name], states[name]) for name in states)
    assert encode_board(found, header) == blob


def test_state_arrays_are_copies() -> None:
    policy = policy_of(CONFIGS["plain"])
    arrays = state_arrays(policy)
    before = {name: array.copy() for name, array in arrays.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1.0)
    assert same(arrays, before)
    load_state_arrays(policy, arrays)
    assert same(state_arrays(policy), before)


def test_shared_encoder_travels_once() -> None:
    policy = policy_of(CONFIGS["shared encoder"])
    arrays = state_arrays(policy)
    assert not [name for name in arrays if name.startswith("critic.")]
    assert sum(array.size for array in arrays.values()) == sum(part.numel() for part in policy.parameters())
    found = policy_of(CONFIGS["shared encoder"])
    load_state_arrays(found, arrays)
    assert same(state_arrays(found), arrays) and found.critic is found.actor


def file_with(**header: Any) -> bytes:
    """A policy file with some header fields changed."""
    arrays, found = tensor_blob.decode(encode_policy(policy_of(CONFIGS["plain"]), 3))
    return tensor_blob.encode(arrays, found | header)


@pytest.mark.parametrize(
    ("blob", "said"),
    [
        (b"", "policy.safetensors is undecodable"),
        (b"garbage", "policy.safetensors is undecodable"),
        (b"\xff" * 64, "policy.safetensors is undecodable"),
        (file_with()[:-1], "policy.safetensors is undecodable"),
        (file_with()[:-5] + b"\x01" + file_with()[-4:], "policy.safetensors is corrupt"),
        (file_with(format=3), "this version of Stagecoach reads 1"),
        (file_with(format=None), "this version of Stagecoach reads 1"),
        (file_with(kind="transformer"), "no class for policies of kind 'transformer'"),
        (file_with(config={"hidden_sizes": [-1]}), "."),
        (file_with(config={"surprise": 1}), "."),
        (file_with(spaces={}), "."),
        (file_with(version="x"), "."),
    ],
    ids=range(12),
)
def test_invalid_policy_file_is_refused_by_name(blob: bytes, said: str) -> None:
    with pytest.raises(CheckpointDamaged, match=said):
        decode_policy(blob)


def test_weights_of_another_network_are_refused_by_name() -> None:
    policy = policy_of(CONFIGS["plain"])
    arrays = state_arrays(policy)
    wider = state_arrays(policy_of(PolicyConfig(hidden_sizes=(9,))))
    for wrong in (wider, {name: arrays[name] for name in list(arrays)[1:]}, arrays | {"surprise": np.zeros(1)}):
        with pytest.raises(CheckpointDamaged, match="the weights do not fit this policy"):
            load_state_arrays(policy, wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_single_infinite_weight_is_detected(value: float) -> None:
    policy = policy_of(CONFIGS["normalized"])
    assert finite_weights(policy), "a normalizer that has seen nothing has no bound, and that is no fault"
    for name, tensor in policy.state_dict().items():
        if tensor.numel() and not name.endswith(".bound"):
            kept = tensor.clone()
            tensor.view(-1)[-1] = value
            assert not finite_weights(policy), name
            tensor.copy_(kept)
    assert finite_weights(policy)
