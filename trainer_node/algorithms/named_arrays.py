"""The state of networks and of what goes with them, as named arrays for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from shared.spaces import Array, Columns


def part(arrays: Mapping[str, Array], prefix: str) -> Columns:
    """The arrays whose names begin so, named without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def network_state(network: nn.Module, prefix: str) -> Columns:
    """A network's parameters as named arrays."""
    return {prefix + name: tensor.detach().cpu().numpy().copy() for name, tensor in network.named_parameters()}


@torch.no_grad()
def load_network_state(network: nn.Module, prefix: str, arrays: Mapping[str, Array]) -> None:
    """The inverse of `network_state`; raises `KeyError` or `ValueError` where it is another network's."""
    for name, tensor in network.named_parameters():
        array = arrays[prefix + name]
        if array.shape != tuple(tensor.shape):
            raise ValueError(f"{prefix}{name} has the shape {array.shape}, expected {tuple(tensor.shape)}")
        tensor.copy_(torch.from_numpy(np.array(array)))
