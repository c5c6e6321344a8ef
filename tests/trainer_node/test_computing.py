"""Precision: what changes, and that all else stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.policies.codec import finite
from tests.trainer_node.continuous import any_algorithm, learnt
from trainer_node.algorithms.computing import computing


@pytest.mark.parametrize("name", ["a2c", "bc", "dqn", "ppo", "sac", "td3"])
def test_bfloat16_learns_nearly_the_same_and_the_same_each_time(name: str) -> None:
    plain, rounded, again = (learnt(any_algorithm(name, precision=how)) for how in ("float32", "bfloat16", "bfloat16"))
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
