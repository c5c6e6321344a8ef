"""The batch of a policy with a core: whole sequences of a fragment's steps, a row for each slot.

What the policy remembers is worked out anew in each gradient step, from the state that the fragment begins with; so
gradients flow back in time as far as the fragment's first step, and not across the ends of episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shared.fragment import STATE
from shared.policies.actor_critic import Heads
from shared.policies.recurrent import RecurrentActorCritic
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.gae import advantages

_CHUNK = 8192


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
        return Batch(
            {name: tensor[self.mask] for name, tensor in self.observations.items()},
            {name: tensor[self.mask] for name, tensor in self.actions.items()},
            self.log_prob[self.mask], self.value[self.mask], self.advantage[self.mask], self.target[self.mask],
        )  # fmt: skip

    def minibatches(self, size: int) -> int:
        return -(-len(self) // max(1, size // self.mask.shape[1]))

    def outputs(self, policy: Heads) -> tuple[Tensor, Tensor]:
        params, value, _ = self.run(cast(RecurrentActorCritic, policy))
        return params.transpose(0, 1)[self.mask], value.transpose(0, 1)[self.mask]

    def run(self, policy: RecurrentActorCritic) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters, values and states as `RecurrentActorCritic.sequence` answers them: `[T, S, …]`."""
        observations = {name: tensor.transpose(0, 1) for name, tensor in self.observations.items()}
        return policy.sequence(observations, self.state_in, self.over.transpose(0, 1))


def sequences_by_gae(
    policy: RecurrentActorCritic, tensors: Mapping[str, Tensor], gamma: float, gae_lambda: float
) -> Sequences:
    """From the columns of fragments side by side `[T, S, …]`; slots that nobody acted in are left out.

    The value after a truncated step is that of its last observation with what was remembered then; likewise after the
    last step.
    """
    names = policy.spaces.observation.column_names("obs")
    value, states = _values_and_states(policy, tensors)
    step, slot = tensors["final_index"].to(torch.int64).unbind(dim=1)
    advantage = advantages(
        value=value,
        bootstrap_value=policy.value({name: tensors["bootstrap_" + name] for name in names}, states[-1]),
        final_index=torch.stack([step, slot], dim=1),
        final_value=policy.value({name: tensors["final_" + name] for name in names}, states[step, slot]),
        **{name: tensors[name] for name in ("reward", "terminated", "truncated", "mask")},
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    there = tensors["mask"].any(dim=0)

    def by_slot(tensor: Tensor) -> Tensor:
        return tensor.transpose(0, 1)[there]

    return Sequences(
        {name: by_slot(tensors[name]) for name in names},
        {name: by_slot(tensors[name]) for name in policy.spaces.action.column_names("action")},
        by_slot(tensors["log_prob"]), by_slot(value), by_slot(advantage), by_slot(advantage + value),
        mask=by_slot(tensors["mask"]), over=by_slot(_over(tensors)), state_in=tensors[STATE][there],
    )  # fmt: skip


def _over(tensors: Mapping[str, Tensor]) -> Tensor:
    return tensors["terminated"] | tensors["truncated"] | ~tensors["mask"]


def _values_and_states(policy: RecurrentActorCritic, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`[T, S]` and `[T, S, state size]`, of so many slots at a time that a large batch of images fits."""
    steps, slots = tensors["mask"].shape
    width, over, values, states = max(1, _CHUNK // steps), _over(tensors), [], []
    for start in range(0, slots, width):
        part = slice(start, start + width)
        observations = {name: tensors[name][:, part] for name in policy.spaces.observation.column_names("obs")}
        _, value, after = policy.sequence(observations, tensors[STATE][part], over[:, part])
        values.append(value)
        states.append(after)
    return torch.cat(values, dim=1), torch.cat(states, dim=1)
