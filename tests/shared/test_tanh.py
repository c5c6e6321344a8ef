"""tanh in fewer passes: the same values and gradients as PyTorch's, also of gradients."""

from __future__ import annotations

import pytest
import torch

from shared.policies.tanh import Tanh

VALUES = torch.cat([torch.linspace(-30, 30, 10_001), torch.tensor([0.0, 1e-8, -1e-8, 1e-3, torch.inf, -torch.inf])])


def test_it_is_tanh_to_float32s_precision_and_the_same_with_and_without_gradients() -> None:
    found = Tanh()(VALUES)
    assert (found - torch.tanh(VALUES)).abs().max() < 2.5e-7
    assert torch.equal(Tanh()(VALUES.clone().requires_grad_()), found)
    assert Tanh()(torch.tensor([torch.nan])).isnan().all()


def test_what_goes_in_stays_as_it_was() -> None:
    before = VALUES.clone()
    Tanh()(VALUES)
    assert torch.equal(VALUES, before)


def test_the_gradient_is_that_of_tanh_and_so_is_the_gradients_gradient() -> None:
    at = torch.linspace(-4, 4, 101)
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for function, into in ((Tanh(), found), (torch.tanh, expected)):
        values = at.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(values).sum(), values, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), values)
        into += [first.detach(), second]
    for ours, its in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_are_pytorchs(dtype: torch.dtype) -> None:
    values = VALUES[:100].to(dtype)
    assert torch.equal(Tanh()(values), torch.tanh(values))
