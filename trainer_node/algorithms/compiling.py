"""Losses that torch.compile has made machine code of (`trainer.compile`): fewer and larger operations, the same steps.

What is compiled depends on nothing but the config: after a resume an update computes what it would have without
one. So each function has its own code for each size of a minibatch that full updates have, and none for others, which
are computed as without `trainer.compile`; and what cannot be compiled so is an error, never a quiet way around.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from shared.errors import ConfigError
from trainer_node.algorithms.algorithm import Setting

Answer = TypeVar("Answer")
_CODES = 8
"""Of one function, at most: a size or two, with and without gradients."""


def equal_parts(count: int, size: int) -> set[int]:
    """How large the minibatches are that `count` transitions make, of at most `size` each."""
    parts = -(-count // size)
    return {count // parts, -(-count // parts)}


def compiled(loss: Callable[..., Answer], setting: Setting, sizes: Iterable[int]) -> Callable[..., Answer]:
    """`loss(batch, …)` as it is, or where the setting says so compiled for batches of these sizes.

    It shall read nothing that changes from step to step but tensors and what it is called with: floats there become
    tensors of float64. Raises `ConfigError` where it is called and cannot be compiled.
    """
    if not setting.compile:
        return loss
    from torch._dynamo import exc  # only where it is used: it takes seconds to import

    wanted = frozenset(sizes)
    options: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": _CODES}
    fast: Callable[..., Answer] = torch.compile(loss, fullgraph=True, dynamic=False, **options)

    def call(batch: Any, *arguments: Any) -> Answer:
        if len(batch) not in wanted:
            return loss(batch, *arguments)
        try:
            return fast(batch, *(_tensor(argument) for argument in arguments))
        except (exc.Unsupported, exc.FailOnRecompileLimitHit, exc.BackendCompilerFailed) as error:
            why = next(iter(str(error.__cause__ or error).splitlines()), "")
            raise ConfigError(
                f"trainer.compile: {getattr(loss, '__qualname__', loss)} cannot be compiled: {why}; it shall read only "
                f"tensors, and what stays as it is from step to step; mend it, or set trainer.compile to false"
            ) from error

    return call


def _tensor(argument: Any) -> Any:
    """A number that a schedule moves would be code of its own for each value."""
    return torch.tensor(argument, dtype=torch.float64) if isinstance(argument, float) else argument


def check_compiler() -> None:
    """Raises `ConfigError` where torch.compile cannot work; to be called before anything is compiled."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        raise ConfigError(f"trainer.compile needs PyTorch 2.13 or newer, found {torch.__version__}; set it to false")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"trainer.compile needs a C++ compiler where the trainer runs, and {compiler} is not there; install it (on "
            f"Debian: apt-get install g++), name another in CXX, or set trainer.compile to false"
        )
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that would outlive a kill
