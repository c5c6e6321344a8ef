"""The batch of an update: what on-policy algorithms learn from, as rows that minibatches are taken of."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast

from torch import Tensor

from shared.policies.actor_critic import ActorCritic, Heads


@dataclass(frozen=True)
class Batch:
    """One update's transitions, flat: observations and actions by column, the rest `[B]`."""

    observations: dict[str, Tensor]
    actions: dict[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    target: Tensor
    figures: dict[str, float] = field(default_factory=dict)
    """Metrics of the whole batch, beside those of the gradient steps."""

    def __len__(self) -> int:
        return len(self.log_prob)

    def take(self, rows: Tensor | slice) -> Self:
        """The minibatch of these rows."""
        taken = {item.name: _rows_of(getattr(self, item.name), rows) for item in fields(self) if item.name != "figures"}
        return replace(self, figures={}, **taken)

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
        return (
            replace(self, advantage=(self.advantage - known.mean()) / (known.std() + 1e-8)) if len(known) > 1 else self
        )

    def outputs(self, policy: Heads) -> tuple[Tensor, Tensor]:
        """Parameters `[B, P]` and values `[B]` for the rows of `flat()`."""
        return cast(ActorCritic, policy).action_parameters_and_value(self.observations)


def _rows_of(value: Any, rows: Tensor | slice) -> Any:
    return {name: tensor[rows] for name, tensor in value.items()} if isinstance(value, dict) else value[rows]
