"""The batch of a policy with a core: whole sequences of a fragment's steps, a row for each slot.

What the policy remembers is worked out anew in each gradient step, from the state that the fragment begins with; so
gradients flow back in time as far as the fragment's first step, and not across the ends of episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import cast

from torch import Tensor

from shared.fragment import STATE
from shared.policies.actor_critic import Heads
from shared.policies.recurrent import RecurrentActorCritic
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.outputs import over_after


@dataclass(frozen=True, kw_only=True)
class Sequences(Batch):
    """Everything is `[S, T, …]`; `take` takes slots."""

    mask: Tensor
    """`[S, T]`: the transitions that count."""
    over: Tensor
    """`[S, T]`: after which steps the state begins at zero."""
    state_in: Tensor
    """`[S, state size]`, before the first step."""

    def counted(self, tensor: Tensor) -> Tensor:
        return tensor[self.mask]

    def flat(self) -> Batch:
        of_batch = {item.name: getattr(self, item.name) for item in fields(Batch)}
        return Batch(**of_batch).each(lambda tensor: tensor[self.mask])

    def minibatches(self, size: int) -> int:
        return -(-len(self) // max(1, size // self.mask.shape[1]))

    def outputs(self, policy: Heads) -> tuple[Tensor, Tensor]:
        params, value, _ = self.run(cast(RecurrentActorCritic, policy))
        return params.transpose(0, 1)[self.mask], value.transpose(0, 1)[self.mask]

    def run(self, policy: RecurrentActorCritic) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters, values and states as `RecurrentActorCritic.sequence` answers them: `[T, S, …]`."""
        observations = {name: tensor.transpose(0, 1) for name, tensor in self.observations.items()}
        return policy.sequence(observations, self.state_in, self.over.transpose(0, 1))


def sequences(batch: Batch, tensors: Mapping[str, Tensor]) -> Sequences:
    """From a batch whose tensors are `[T, S, …]` and the columns it is of; slots that nobody acted in are left out."""
    there = tensors["mask"].any(dim=0)

    def by_slot(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)[there]

    return Sequences(
        **vars(batch.each(by_slot)),
        mask=by_slot(tensors["mask"]),
        over=by_slot(over_after(tensors)),
        state_in=tensors[STATE][there],
    )
