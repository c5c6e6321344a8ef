"""The batch of an update: what on-policy algorithms learn from, as rows that minibatches are taken of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast

import torch
from torch import Tensor

from shared.policies.actor_critic import ActorCritic, Heads

_AT_ONCE_BYTES = 16 << 20
"""Of observations: of more than this, a copy of all of them costs more than it spares."""


@dataclass(frozen=True)
class Batch:
    """One update's transitions, flat: observations and actions by column, the rest `[B]`."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    anchor_params: Tensor | None = None
    """`[B, P]`: outputs of another network, which the policy is to stay close to."""
    start_log_prob: Tensor | None = None
    """`[B]`: of the actions, by the policy as it is when the update begins; only where `target_kl` needs it."""
    figures: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole batch, beside those of the gradient steps."""

    def __len__(self) -> int:
        return len(self.log_prob)

    def take(self, rows: Tensor | slice) -> Self:
        """The minibatch of these rows."""
        if isinstance(rows, Tensor):
            return self.each(lambda tensor: tensor.index_select(0, rows))
        return self if rows == slice(0, len(self)) else self.each(lambda tensor: tensor[rows])

    def shuffled(self, order: Tensor, minibatches: int) -> Iterator[Self]:
        """Minibatches of equal parts of these rows. Unless they are large all rows are put in order at once."""
        held = sum(tensor.nbytes for tensor in self.observations.values())
        if held > _AT_ONCE_BYTES:
            yield from (self.take(rows) for rows in order.tensor_split(minibatches))
            return
        ordered, at = self.take(order), 0
        for rows in order.tensor_split(minibatches):
            yield ordered.take(slice(at, at := at + len(rows)))

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """With all its tensors changed so, and without figures."""
        names = [item.name for item in fields(self) if item.name != "figures"]
        return replace(self, **{name: _each(getattr(self, name), change) for name in names}, figures={})

    def counted(self, tensor: Tensor) -> Tensor:
        """Of a tensor with the shape of `log_prob` (and more axes), the transitions that count."""
        return tensor

    def flat(self) -> Batch:
        """All transitions that count, a row each."""
        return self

    def minibatches(self, size: int) -> int:
        """How many there are of at most `size` transitions, and of equal parts."""
        return -(-len(self) // size)

    def normalised(self) -> Self:
        """Its advantages with zero mean and unit variance; as they are where there is one alone."""
        known = self.counted(self.advantage)
        if len(known) < 2:
            return self
        deviation, mean = torch.std_mean(known)
        return replace(self, advantage=(self.advantage - mean) / (deviation + 1e-8))

    def outputs(self, policy: Heads) -> tuple[Tensor, Tensor]:
        """Parameters `[B, P]` and values `[B]` for the rows of `flat()`."""
        return cast(ActorCritic, policy).action_parameters_and_value(self.observations)


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):
        return {name: _each(item, change) for name, item in value.items()}
    return change(value) if isinstance(value, Tensor) else value
