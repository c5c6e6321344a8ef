"""What a policy makes of the fragments of an update, before anything is learnt from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from shared.fragment import STATE
from shared.policies.actor_critic import ActorCritic, Heads
from shared.policies.recurrent import RecurrentActorCritic

CHUNK = 8192
"""So many rows at a time, so that a large batch of images fits."""


@dataclass(frozen=True)
class Outputs:
    """Of T steps of S slots, of which M ended with an observation that is known."""

    value: Tensor
    """`[T, S]`."""
    bootstrap_value: Tensor
    """`[S]`, after the last step."""
    final_value: Tensor
    """`[M]`, of these last observations. Those of terminated episodes count for nothing: `gae.following_values`."""
    params: Tensor | None = None
    """`[T, S, P]`, for the policy's distribution, where they were asked for."""


def outputs(policy: Heads, tensors: Mapping[str, Tensor], *, with_params: bool) -> Outputs:
    """From the columns of fragments side by side (shared/fragment.py); no gradients should be recorded."""
    if policy.state_size:
        return _remembering(cast(RecurrentActorCritic, policy), tensors)
    plain, shape = cast(ActorCritic, policy), tensors["reward"].shape
    names = policy.spaces.observation.column_names("obs")

    def joined(observations: Mapping[str, Tensor]) -> Tensor:
        params, value = plain.action_parameters_and_value(observations)
        return torch.cat([params, value.unsqueeze(-1)], dim=1)

    flat = {name: tensors[name].flatten(0, 1) for name in names}
    bootstrap, final = (
        in_chunks(plain.value, {name: tensors[prefix + name] for name in names}) for prefix in ("bootstrap_", "final_")
    )
    if not with_params:
        return Outputs(in_chunks(plain.value, flat).reshape(shape), bootstrap, final)
    both = in_chunks(joined, flat).reshape(*shape, -1)
    return Outputs(both[..., -1], bootstrap, final, both[..., :-1])


def log_probs(policy: Heads, tensors: Mapping[str, Tensor], params: Tensor) -> Tensor:
    """`[T, S]`: of the actions in the columns, where `params` `[T, S, P]` are the policy's outputs."""
    actions = {name: tensors[name].flatten(0, 1) for name in policy.spaces.action.column_names("action")}
    return policy.distribution.log_prob(params.flatten(0, 1), actions).reshape(params.shape[:2])


def in_chunks(computed: Callable[[Mapping[str, Tensor]], Tensor], observations: Mapping[str, Tensor]) -> Tensor:
    """What is computed of each row, so many rows at a time."""
    first = next(iter(observations.values()))
    parts = [
        computed({name: tensor[start : start + CHUNK] for name, tensor in observations.items()})
        for start in range(0, len(first), CHUNK)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, device=first.device)


def _remembering(policy: RecurrentActorCritic, tensors: Mapping[str, Tensor]) -> Outputs:
    """The value after a step that ended is that of its last observation with what was remembered then; likewise after
    the last step.
    """
    names = policy.spaces.observation.column_names("obs")
    steps, slots = tensors["mask"].shape
    width, over, parts = max(1, CHUNK // steps), over_after(tensors), []
    for start in range(0, slots, width):
        part = slice(start, start + width)
        observations = {name: tensors[name][:, part] for name in names}
        parts.append(policy.sequence(observations, tensors[STATE][part], over[:, part]))
    params, value, states = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    step, slot = tensors["final_index"].to(torch.int64).unbind(dim=1)
    return Outputs(
        value,
        policy.value({name: tensors["bootstrap_" + name] for name in names}, states[-1]),
        policy.value({name: tensors["final_" + name] for name in names}, states[step, slot]),
        params,
    )


def over_after(tensors: Mapping[str, Tensor]) -> Tensor:
    """`[T, S]`: after which steps the state begins at zero."""
    return tensors["terminated"] | tensors["truncated"] | ~tensors["mask"]
