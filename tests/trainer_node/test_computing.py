"""Precision: what changes, and that all else stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shared.algorithm_configs.registry import ALGORITHMS
from shared.config import PolicyConfig
from shared.policies.codec import finite, state_arrays
from shared.policies.registry import build_policies
from shared.spaces import Columns
from shared.steps import Counters
from tests.trainer_node.continuous import BOXES, CHOICE, SLOTS, STEPS, fragment
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.computing import computing
from trainer_node.algorithms.registry import make_algorithm

REPLAY: dict[str, Any] = {"minibatch_size": 16, "memory": {"kind": "uniform", "capacity": 20 * STEPS * SLOTS}}
FIELDS: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch_size": 4, "epochs": 2},
    "a2c": {},
    "bc": {"minibatch_size": 4},
    "dqn": REPLAY,
    "sac": REPLAY,
    "td3": REPLAY,
}


def make(name: str, **setting: Any) -> Any:
    config = ALGORITHMS[name].model_validate({"name": name, **FIELDS[name]})
    described = BOXES if name in {"sac", "td3"} else CHOICE
    network = PolicyConfig(hidden_sizes=(16, 16))
    policy = build_policies({"p": described}, {"p": network}, config, seed=3)["p"]
    return make_algorithm(policy, config, Setting(torch.device("cpu"), 3, STEPS, SLOTS, **setting))


def learnt(algorithm: Any) -> Columns:
    """The weights after three updates."""
    counters = Counters()
    for number in range(3):
        counters.env_steps += STEPS * SLOTS
        algorithm.update([fragment(algorithm.policy, number)], counters)
        counters.updates += 1
    return state_arrays(algorithm.policy)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_bfloat16_learns_nearly_the_same_and_the_same_each_time(name: str) -> None:
    plain, rounded, again = (learnt(make(name, precision=how)) for how in ("float32", "bfloat16", "bfloat16"))
    assert finite(rounded) and {array.dtype for array in rounded.values()} == {np.dtype(np.float32)}
    assert all(np.array_equal(rounded[key], again[key]) for key in rounded)
    assert not all(np.array_equal(rounded[key], plain[key]) for key in plain)
    assert all(np.allclose(rounded[key], plain[key], atol=0.05) for key in plain)


def test_weights_that_change_meanwhile_are_computed_with_as_they_are() -> None:
    """Autocast would keep its rounded copies, and a step of SAC moves its critics and then asks them."""
    layer, inputs = torch.nn.Linear(3, 2), torch.ones(1, 3)
    with computing(torch.device("cpu"), "bfloat16"):
        before = layer(inputs)
        with torch.no_grad():
            layer.weight.add_(1.0)
        assert before.dtype == torch.bfloat16 and not torch.equal(layer(inputs), before)
