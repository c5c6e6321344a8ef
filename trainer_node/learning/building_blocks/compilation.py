"""Losses compiled by torch.compile (`trainer.compile`) in one graph with their gradients: fewer and larger operations.

The compiled code depends on the config alone, so that a resumed update computes the same. Each function has code for
each minibatch size of full updates; other sizes run as without `trainer.compile`. A function that cannot be compiled
is an error, never a silent fallback.
"""

import functools
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from stagecoach.shared.base.errors import ConfigError
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam

Answer = TypeVar("Answer")
_CODES = 8
"""Most code variants of one function: a size or two, with and without gradients."""
_BY_THE_CLOCK = ("max_autotune", "max_autotune_pointwise", "max_autotune_gemm", "coordinate_descent_tuning")
"""Options of the compiler that choose by measured time."""
_FASTER_TANH = "cpp.use_decompose_tanh"
"""The tanh of acting (shared/policies/encoders.py: Tanh): it differs from tanh by at most 2e-7."""
_ELSE = "or begin a new run with trainer.compile=false (`initialize_from` takes the policies over)"


def equal_parts(count: int, size: int) -> set[int]:
    """Returns the sizes of the minibatches of `count` transitions, at most `size` each."""
    parts = -(-count // size)
    return {count // parts, -(-count // parts)} if parts else set()


def compiled(
    loss: Callable[..., Answer], setting: Setting, sizes: Iterable[int], optimizer: Adam | None = None
) -> Callable[..., Answer]:
    """Returns `loss(batch, …)`, compiled for batches of these sizes if the setting says so.

    It returns the loss, alone or first of a tuple. With an optimizer, one graph computes the loss and its gradients for
    the optimizer's parameters, and for no others. It may read tensors, its arguments and constants alone. Float
    arguments become float64 tensors; any other number, also in a batch, compiles again for each value. A call raises
    `ConfigError` if it cannot be compiled.
    """
    if not setting.compile:
        return loss
    _set_up()
    from torch._dynamo import exc  # only where it is used: it takes seconds to import

    wanted = frozenset(sizes)
    fixed: dict[str, Any] = dict.fromkeys(_BY_THE_CLOCK, False) | {_FASTER_TANH: True}
    apart: dict[str, Any] = {"isolate_recompiles": True, "recompile_limit": _CODES}
    compiled = loss if optimizer is None else _with_gradients(loss, optimizer)
    fast: Callable[..., Any] = torch.compile(compiled, fullgraph=True, dynamic=False, options=fixed, **apart)

    def call(batch: Any, *arguments: Any, **named: Any) -> Answer:
        if len(batch) not in wanted:
            return loss(batch, *arguments, **named)
        try:
            found = fast(batch, *map(_tensor, arguments), **{name: _tensor(value) for name, value in named.items()})
            answer: Answer = found if optimizer is None else _connected(*found, optimizer=optimizer)
            return answer
        except (exc.TorchDynamoException, exc.FailOnRecompileLimitHit) as error:
            name = getattr(loss, "__qualname__", loss)
            lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
            if isinstance(error, exc.BackendCompilerFailed):
                why = " … ".join(dict.fromkeys(lines[:2] + lines[-2:]))
                here = f"trainer.compile: {name} cannot be compiled here: {why}; mend that, {_ELSE}"
                raise ConfigError(here) from error
            raise ConfigError(
                f"trainer.compile: {name} cannot be compiled: {''.join(lines[:1])}; it may read only tensors, and "
                f"what stays as it is from step to step; mend it, {_ELSE}"
            ) from error

    return call


def _with_gradients(loss: Callable[..., Any], optimizer: Adam) -> Callable[..., Any]:
    """Returns the function of both: the loss's result, all gradients as one tensor, and which parameters have one."""

    @functools.wraps(loss)
    def both(*arguments: Any, **named: Any) -> tuple[Any, Tensor, tuple[bool, ...]]:
        found = loss(*arguments, **named)
        value, *others = found if isinstance(found, tuple) else (found,)
        learned = [parameter for parameter in optimizer.moved if parameter.requires_grad]
        made = iter(torch.autograd.grad(value, learned, allow_unused=True))
        gradients = [next(made) if parameter.requires_grad else None for parameter in optimizer.moved]
        there = tuple(gradient is not None for gradient in gradients)
        apart = [item.detach() if isinstance(item, Tensor) else item for item in (value, *others)]
        return tuple(apart), optimizer.joined(gradients), there

    return both


def _connected(found: tuple[Tensor, ...], gradient: Tensor, there: Sequence[bool], *, optimizer: Adam) -> Any:
    """Returns the loss's result, with a loss from which `backward` leads to these gradients."""
    loss: Tensor = _Known.apply(optimizer.flat, found[0], gradient)  # type: ignore[no-untyped-call]
    optimizer.note(there)
    return (loss, *found[1:]) if len(found) > 1 else loss


class _Known(torch.autograd.Function):
    """A value whose gradient is known."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (scale,), (gradient,) = gradients, ctx.saved_tensors
        return gradient * scale, None, None


def _tensor(argument: Any) -> Any:
    """Converts a float, since a scheduled number would compile again for each value."""
    return torch.tensor(argument, dtype=torch.float64) if isinstance(argument, float) else argument


def _set_up() -> None:
    import torch._dynamo.config as tracing
    import torch._functorch.config as differentiating
    import torch._inductor.config as generating

    tracing.trace_autograd_ops = True
    tracing.accumulated_recompile_limit = sys.maxsize  # over all learners of the process; each has its own limit
    differentiating.force_non_lazy_backward_lowering = True  # so that `call` reports errors of gradients too
    generating.compile_threads = 1  # no pool of processes that would outlive a kill


def compiler() -> str:
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def has_compiler() -> bool:
    return shutil.which(compiler()) is not None


def check_compiling(here: bool = True) -> None:
    """Raises `ConfigError` if torch.compile cannot work with this PyTorch or (`here`) on this machine."""
    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        needed = "trainer.compile needs PyTorch 2.13 or newer"
        raise ConfigError(f"{needed}, found {torch.__version__}; install it, {_ELSE}")
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name, "0") not in ("", "0"):
            raise ConfigError(f"trainer.compile with {name}={os.environ[name]} in the environment; unset it, {_ELSE}")
    if here and not has_compiler():
        raise ConfigError(
            f"trainer.compile needs a C++ compiler where the trainer runs, and {compiler()} is not there; install it "
            f"(on Debian: apt-get install g++), name another in CXX, {_ELSE}"
        )
