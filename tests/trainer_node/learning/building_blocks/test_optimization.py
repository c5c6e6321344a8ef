"""Our Adam and PyTorch's: the same, step by step; and what precision changes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, autocast
from tests.support.learning.algorithms import make
from tests.support.learning.experience import weights_after_updates


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


@pytest.mark.parametrize(("max_norm", "decay"), [(None, 0.0), (0.1, 0.0), (0.1, 0.3)])
def test_adam_step_equals_pytorch(max_norm: float | None, decay: float) -> None:
    """To rounding: the kernel is another one than that of PyTorch's plain loop, and the norm is of all at once."""
    ours, theirs = network(1), network(1)
    learned = [item for layer in list(theirs.children())[:2] for item in layer.parameters()]
    adam = Adam(ours.parameters(), 1e-5, decay)
    reference = torch.optim.AdamW(learned, eps=1e-5, weight_decay=decay)
    for step in range(20):
        norm = stepped(adam, ours, step, max_norm)
        reference.zero_grad()
        backward(theirs, step)
        expected_norm = nn.utils.clip_grad_norm_(theirs.parameters(), float("inf") if max_norm is None else max_norm)
        assert norm == pytest.approx(float(expected_norm), rel=1e-5)
        reference.param_groups[0]["lr"] = 1e-2 / (step + 1)
        reference.step()
    assert [torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True)][4] == (not decay)
    torch.testing.assert_close(list(ours.parameters())[:4], learned, rtol=1e-5, atol=1e-6)
    slots = reference.state_dict()["state"]
    expected = {f"{number}/{name}" for number, slot in slots.items() for name in slot}
    assert set(adam.state()) == expected and len(expected) == 4 * 3, "none for what has no gradient"
    for name, array in adam.state().items():
        number, _, slot = name.partition("/")
        torch.testing.assert_close(torch.from_numpy(array), slots[int(number)][slot], rtol=1e-4, atol=1e-8)


def test_adam_keeps_shapes_strides_and_alignment() -> None:
    images = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = [(item.detach().clone(), item.stride()) for item in images.parameters()]
    Adam(images.parameters(), 1e-5)
    for item, (values, stride) in zip(images.parameters(), before, strict=True):
        assert torch.equal(item, values) and item.stride() == stride and item.data_ptr() % 64 == 0


def test_adam_detects_a_moved_network() -> None:
    layers = network(1)
    adam = Adam(layers.parameters(), 1e-5)
    stepped(adam, layers, 0)
    next(layers.parameters()).data = torch.ones(7, 5)
    with pytest.raises(RuntimeError, match="before creating its optimizer"):
        stepped(adam, layers, 1)
    with pytest.raises(ValueError, match="one dtype on one device"):
        Adam([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], 1e-5)


def test_adam_refuses_state_of_another_network() -> None:
    adam = Adam(network(1).parameters(), 1e-5)
    for number, error in ((99, IndexError), (0, ValueError)):
        with pytest.raises(error):
            adam.load_state({f"{number}/{name}": torch.zeros(1).numpy() for name in ("step", "exp_avg", "exp_avg_sq")})


def test_trainer_does_not_import_pytorch_compiler() -> None:
    code = (
        "import sys, torch; from stagecoach.trainer_node.learning.building_blocks.optimization import Adam\n"
        "layer = torch.nn.Linear(2, 2); adam = Adam(layer.parameters(), 1e-5)\n"
        "layer(torch.ones(1, 2)).sum().backward(); adam.step(1e-3)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("name", ["a2c", "appo", "bc", "cql", "ddpg", "dqn", "impala", "iql", "ppo", "sac", "td3"])
def test_weight_decay_and_layer_norm_reach_every_algorithm(name: str) -> None:
    plain, decayed = (weights_after_updates(make(name, shape=(4, 3), weight_decay=decay)) for decay in (0.0, 0.5))
    assert all(np.isfinite(array).all() for array in decayed.values())
    assert plain.keys() == decayed.keys() and not all(np.array_equal(plain[key], decayed[key]) for key in plain)
    made = make(name, None, {"layer_norm": True}, shape=(4, 3))
    normalized = weights_after_updates(made)
    norms = normalized.keys() - plain.keys()
    assert norms and all(np.isfinite(array).all() for array in normalized.values())
    assert any("norms." in key for key in made.state()) == hasattr(made, "critics")


@pytest.mark.parametrize("name", ["a2c", "bc", "dqn", "ppo", "sac", "td3"])
def test_bfloat16_learns_nearly_the_same_and_the_same_each_time(name: str) -> None:
    plain, rounded, again = (
        weights_after_updates(make(name, shape=(4, 3), setting={"precision": how}))
        for how in ("float32", "bfloat16", "bfloat16")
    )
    assert all(np.isfinite(array).all() for array in rounded.values()) and {
        array.dtype for array in rounded.values()
    } == {np.dtype(np.float32)}
    assert all(np.array_equal(rounded[key], again[key]) for key in rounded)
    assert not all(np.array_equal(rounded[key], plain[key]) for key in plain)
    assert all(np.allclose(rounded[key], plain[key], atol=0.05) for key in plain)


def test_autocast_uses_changed_weights() -> None:
    """Autocast would keep its rounded copies, and a step of SAC moves its critics and then asks them."""
    layer, inputs = torch.nn.Linear(3, 2), torch.ones(1, 3)
    with autocast(torch.device("cpu"), "bfloat16"):
        before = layer(inputs)
        with torch.no_grad():
            layer.weight.add_(1.0)
        assert before.dtype == torch.bfloat16 and not torch.equal(layer(inputs), before)
