"""What Stagecoach's own Adam and tanh give: whole updates with them and with PyTorch's, in turns in one process.

    python -m benchmarks.own_kernels [--pairs 40]

Prints, for each workload, the median and the quartiles over pairs of (time with PyTorch's) / (time with ours).
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.suite.learner import _ours
from stagecoach.shared.policies.encoders import ACTIVATIONS

_USERS = ("on_policy", "off_policy", "dqn", "sac", "cql")
_SECONDS = 0.15
"""Of each half of a pair, at least."""


class TorchAdam:
    """torch.optim.Adam behind the interface of our own: one step, its learning rate, and clipping of the gradients."""

    def __init__(self, parameters: Iterable[Tensor], epsilon: float, fused: bool) -> None:
        self.parameters = list(parameters)
        self._adam = torch.optim.Adam(self.parameters, eps=epsilon, fused=fused, foreach=not fused)

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self._adam.zero_grad()

    def step(self, learning_rate: float, max_norm: float | None = None) -> Tensor:
        """Moves all parameters; returns the norm of the gradients before they were scaled down."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        norm = nn.utils.clip_grad_norm_(self.parameters, np.inf if max_norm is None else max_norm, foreach=True)
        self._adam.step()
        return norm


@contextmanager
def with_torch_adam(fused: bool) -> Iterator[None]:
    """While it lasts, algorithms are made with PyTorch's Adam."""
    with ExitStack() as stack:
        for name in _USERS:
            module = importlib.import_module(f"stagecoach.trainer_node.learning.algorithms.{name}")
            stack.enter_context(patch.object(module, "Adam", partial(TorchAdam, fused=fused)))
        yield


def _timed(update: Callable[[], int]) -> float:
    """Seconds of a gradient step, of the processor's time: other processes do not count."""
    steps, began = 0, time.process_time()
    while time.process_time() - began < _SECONDS:
        steps += update()
    return (time.process_time() - began) / steps


def compare(name: str, other: AbstractContextManager[object], pairs: int) -> str:
    """A line for one workload; `other` is entered while the learner to compare with is made."""
    ours = _ours(name)
    with other:
        theirs = _ours(name)
    ours(), theirs()
    ratios = []
    for number in range(pairs):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        times = {id(call): _timed(call) for call in (first, second)}
        ratios.append(times[id(theirs)] / times[id(ours)])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    """All lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    others: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "Adam, fused": lambda: with_torch_adam(fused=True),
        "Adam, foreach": lambda: with_torch_adam(fused=False),
        "tanh": lambda: patch.dict(ACTIVATIONS, tanh=nn.Tanh),
    }
    for name in ("PPO, minibatch 128", "PPO, minibatch 512", "A2C, 4096 at once", "DQN", "SAC, 64×64", "SAC, 256×256"):
        for kind, other in others.items():
            if kind != "tanh" or name.startswith(("PPO", "A2C")):
                print(f"{name:20} {kind:14} {compare(name, other(), pairs)}", flush=True)


if __name__ == "__main__":
    main()
