"""A share of a minibatch: what one process learns from where several ranks learn together.

`Whole` is the share of one that learns alone; `trainer_node/group.py: RankShare` is that of one rank among several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

Terms = tuple[Tensor, dict[str, Tensor]]
"""A loss, and what it is made of."""


class Share(Protocol):
    """What an algorithm asks about its part in a minibatch. The parts of all ranks together are the whole."""

    def rows(self, count: int) -> slice:
        """Which of a minibatch's `count` rows are ours."""
        ...

    def mean(self, values: Tensor, count: int) -> Tensor:
        """What our rows' `values` add to their mean over all `count` rows."""
        ...

    def forward(self, loss: Callable[..., Terms], *arguments: Any) -> Terms:
        """What `loss` answers; the gradients of its `backward` will be those of all ranks together."""
        ...

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, the same bits on each of them."""
        ...


class Whole:
    """All of it."""

    def rows(self, count: int) -> slice:
        """Every one."""
        return slice(0, count)

    def mean(self, values: Tensor, count: int) -> Tensor:
        """The mean."""
        return values.mean()

    def forward(self, loss: Callable[..., Terms], *arguments: Any) -> Terms:
        """As it is."""
        return loss(*arguments)

    def total(self, part: Tensor) -> Tensor:
        """The part itself."""
        return part
