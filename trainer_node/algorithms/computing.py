"""How an algorithm computes: where its columns go, and in which precision its networks do.

With the defaults of the config nothing here changes a bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.spaces import Array


def to_device(array: Array, device: torch.device) -> Tensor:
    """As a tensor there. To a GPU by way of pinned memory, so that nobody waits for the copy."""
    owned = array if array.flags.writeable else np.array(array)  # PyTorch knows no memory that is only read
    tensor = torch.from_numpy(owned)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def computing(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Within it networks compute in this precision; what they answer, weights and losses stay float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)  # weights change while it lasts
