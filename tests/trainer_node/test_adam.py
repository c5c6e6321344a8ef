"""Our Adam and PyTorch's: the same bits, step by step; and its state travels."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from trainer_node.algorithms.adam import Adam


def network(seed: int) -> nn.Module:
    """Three layers, of which the last never gets a gradient."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 3)])


def backward(layers: nn.Module, step: int) -> None:
    """Gradients that change from step to step."""
    first, second, _ = layers.children()
    inputs = torch.linspace(-1, 1, 20).reshape(4, 5) * (step + 1)
    torch.tanh(second(torch.tanh(first(inputs)))).pow(2).sum().backward()  # type: ignore[no-untyped-call]


def test_it_moves_the_parameters_as_pytorchs_own_does_bit_for_bit() -> None:
    ours, theirs = network(1), network(1)
    adam, reference = Adam(ours.parameters(), 1e-5), torch.optim.Adam(theirs.parameters(), eps=1e-5)
    for step in range(20):
        rate = 1e-2 / (step + 1)
        adam.zero_grad()
        reference.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        adam.step(rate)
        reference.param_groups[0]["lr"] = rate
        reference.step()
        assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True))
    slots = reference.state_dict()["state"]
    expected = {f"{number}/{name}" for number, slot in slots.items() for name in slot}
    assert set(adam.state()) == expected and len(expected) == 4 * 3, "none for what has no gradient"
    for name, array in adam.state().items():
        number, _, slot = name.partition("/")
        assert torch.equal(torch.from_numpy(array), slots[int(number)][slot])


def test_it_goes_on_from_its_state_and_without_it_goes_another_way() -> None:
    results = []
    for how in ("whole", "resumed", "forgotten"):
        layers = network(2)
        adam = Adam(layers.parameters(), 1e-5)
        for step in range(6):
            if step == 3 and how != "whole":
                state, adam = adam.state(), Adam(layers.parameters(), 1e-5)
                adam.load_state(state if how == "resumed" else {})
            adam.zero_grad()
            backward(layers, step)
            adam.step(1e-2)
        results.append([parameter.detach().clone() for parameter in layers.parameters()])
    whole, resumed, forgotten = results
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(whole, forgotten, strict=True))


def test_the_state_of_another_network_is_refused() -> None:
    adam = Adam(network(1).parameters(), 1e-5)
    with pytest.raises(IndexError):
        adam.load_state({f"{99}/{name}": torch.zeros(1).numpy() for name in ("step", "exp_avg", "exp_avg_sq")})


def test_a_trainer_does_not_import_pytorchs_compiler() -> None:
    code = (
        "import sys, torch; from trainer_node.algorithms.adam import Adam\n"
        "layer = torch.nn.Linear(2, 2); adam = Adam(layer.parameters(), 1e-5)\n"
        "layer(torch.ones(1, 2)).sum().backward(); adam.step(1e-3)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
