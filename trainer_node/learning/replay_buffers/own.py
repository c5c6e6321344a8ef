"""A replay buffer of the user's: what it draws is checked before it is learned from."""

from collections.abc import Callable
from typing import Any

import numpy as np

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import make_own, raised
from stagecoach.shared.config.algorithms.replay_buffer import OwnReplay
from stagecoach.shared.experience.spaces import Array
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer


def make_own_replay_buffer(config: OwnReplay, *size: Any) -> ReplayBuffer:
    """Returns a new buffer of the user's class; raises `ConfigError`. Its methods raise `ConfigError` for errors of the
    class, and `draw` for rows that it does not hold."""
    field = "algorithm.replay_buffer.kind"
    made = make_own(config.kind, field, ReplayBuffer, *size, **config.kwargs)
    draw, ring, where = made.draw, made.ring, f"{field}={config.kind}: draw"

    def named(method: str) -> Callable[..., Any]:
        own = getattr(made, method)

        def call(*arguments: Any) -> Any:
            try:
                return own(*arguments)
            except Exception as failed:
                raise ConfigError(f"{field}={config.kind}: {method} {raised(failed)}") from failed

        return call

    def checked(count: int, generator: np.random.Generator, beta: float) -> tuple[Array, Array]:
        try:
            rows, weight = (np.asarray(part) for part in draw(count, generator, beta))
        except Exception as failed:
            raise ConfigError(f"{where} {raised(failed)}; expected (rows, their weights)") from failed
        if rows.shape != (count,) or weight.shape != (count,) or rows.dtype.kind not in "iu":
            told = f"rows {list(rows.shape)} of {rows.dtype} and weights {list(weight.shape)}"
            raise ConfigError(f"{where} gave {told}; expected {count} whole numbers and {count} weights")
        there = (rows >= 0) & (rows < made.fragments * ring.rows_each) & np.isfinite(weight)
        there[there] = ring.column("mask", rows[there])
        if not there.all():
            told = f"row {rows[~there][0]} with weight {weight[~there][0]}"
            raise ConfigError(f"{where} gave {told}; expected transitions that it holds, as super().draw gives them")
        return rows, weight

    state = named("state")
    copied = lambda: {name: np.array(array) for name, array in state().items()}  # noqa: E731 - written while it learns on
    methods = {"draw": checked, "state": copied, **{name: named(name) for name in ("added", "update_priorities")}}
    for name, method in methods.items():
        setattr(made, name, method)
    return made
