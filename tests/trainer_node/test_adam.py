"""Our Adam and PyTorch's: the same, step by step; and its state travels."""

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


def stepped(adam: Adam, layers: nn.Module, step: int, max_norm: float | None = None) -> float:
    adam.zero_grad()
    backward(layers, step)
    return float(adam.step(1e-2 / (step + 1), max_norm))


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_it_moves_the_parameters_as_pytorchs_own_does(max_norm: float | None) -> None:
    """To rounding: the kernel is another one than that of PyTorch's plain loop, and the norm is of all at once."""
    ours, theirs = network(1), network(1)
    adam, reference = Adam(ours.parameters(), 1e-5), torch.optim.Adam(theirs.parameters(), eps=1e-5)
    for step in range(20):
        norm = stepped(adam, ours, step, max_norm)
        reference.zero_grad()
        backward(theirs, step)
        expected_norm = nn.utils.clip_grad_norm_(theirs.parameters(), float("inf") if max_norm is None else max_norm)
        assert norm == pytest.approx(float(expected_norm), rel=1e-5)
        reference.param_groups[0]["lr"] = 1e-2 / (step + 1)
        reference.step()
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-5, atol=1e-6)
    slots = reference.state_dict()["state"]
    expected = {f"{number}/{name}" for number, slot in slots.items() for name in slot}
    assert set(adam.state()) == expected and len(expected) == 4 * 3, "none for what has no gradient"
    for name, array in adam.state().items():
        number, _, slot = name.partition("/")
        torch.testing.assert_close(torch.from_numpy(array), slots[int(number)][slot], rtol=1e-4, atol=1e-8)


def test_a_state_of_pytorchs_own_is_gone_on_from() -> None:
    """Checkpoints of earlier versions hold such ones."""
    ours, theirs = network(1), network(1)
    reference = torch.optim.Adam(theirs.parameters(), lr=1e-2, eps=1e-5)
    for step in range(5):
        reference.zero_grad()
        backward(theirs, step)
        reference.step()
    ours.load_state_dict(theirs.state_dict())
    adam, slots = Adam(ours.parameters(), 1e-5), reference.state_dict()["state"]
    adam.load_state({f"{number}/{name}": item.numpy() for number, slot in slots.items() for name, item in slot.items()})
    assert {name: array.tobytes() for name, array in adam.state().items()} == {
        f"{number}/{name}": item.numpy().tobytes() for number, slot in slots.items() for name, item in slot.items()
    }
    reference.zero_grad()
    backward(theirs, 5)
    reference.step()
    adam.zero_grad()
    backward(ours, 5)
    adam.step(1e-2)
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=1e-6, atol=1e-7)


def test_parameters_keep_shape_and_memory_order_and_lie_as_they_would_alone() -> None:
    images = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = [(item.detach().clone(), item.stride()) for item in images.parameters()]
    Adam(images.parameters(), 1e-5)
    for item, (values, stride) in zip(images.parameters(), before, strict=True):
        assert torch.equal(item, values) and item.stride() == stride and item.data_ptr() % 64 == 0


def test_a_network_that_is_moved_away_from_its_optimiser_is_noticed() -> None:
    layers = network(1)
    adam = Adam(layers.parameters(), 1e-5)
    stepped(adam, layers, 0)
    next(layers.parameters()).data = torch.ones(7, 5)
    with pytest.raises(RuntimeError, match="before its optimiser is made"):
        stepped(adam, layers, 1)
    with pytest.raises(ValueError, match="one dtype on one device"):
        Adam([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], 1e-5)


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
    for number, error in ((99, IndexError), (0, ValueError)):
        with pytest.raises(error):
            adam.load_state({f"{number}/{name}": torch.zeros(1).numpy() for name in ("step", "exp_avg", "exp_avg_sq")})


def test_a_trainer_does_not_import_pytorchs_compiler() -> None:
    code = (
        "import sys, torch; from trainer_node.algorithms.adam import Adam\n"
        "layer = torch.nn.Linear(2, 2); adam = Adam(layer.parameters(), 1e-5)\n"
        "layer(torch.ones(1, 2)).sum().backward(); adam.step(1e-3)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
