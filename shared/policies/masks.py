"""Action masks: which choices are legal, and what that makes of a policy's outputs.

A mask is a leaf of the observation (`Leaf.mask`), with a number for each choice of the action's leaves in their order:
above 0 it is legal. So it travels, is stored and is stacked as all that is observed. Networks do not see it; it changes
their outputs. With `environment.hierarchy.options` a number for each box follows: 0 where its values do nothing.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from stagecoach.shared.experience.spaces import PolicySpaces

ILLEGAL = -1e9
"""The logit or value of an illegal choice: its probability is exactly 0 in float32, and so is 0 · ILLEGAL."""
UNUSED_LOG_STD = -0.5 * (1 + math.log(2 * math.pi))
"""Log standard deviation of a normal distribution with entropy 0."""


def legal_choices(observations: Mapping[str, Tensor], spaces: PolicySpaces) -> Tensor | None:
    """`[B, C]` of all choices; None where nothing is masked.

    Where a mask has no legal choice at all, nothing is known of them, and all count: so it is with what is observed
    after an episode's last step, which may be bootstrapped from, and where nobody is to act.
    """
    legal = _legal(observations, spaces)
    return None if legal is None else legal[:, : spaces.action.choices]


def _legal(observations: Mapping[str, Tensor], spaces: PolicySpaces) -> Tensor | None:
    """`[B, C]` or `[B, C + boxes]`."""
    masks = [observations[name].flatten(1) for name in spaces.observation.mask_columns]
    if not masks:
        return None
    legal = (masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)) > 0
    return legal | ~legal.any(dim=1, keepdim=True)


def masked(outputs: Tensor, observations: Mapping[str, Tensor], spaces: PolicySpaces) -> Tensor:
    """Outputs `[…, B, P]`, of choices one for each and of boxes two for each element, with `ILLEGAL` in the place of
    illegal choices, and a normal of entropy 0 for an unused box. As they are where nothing is masked."""
    legal, leaves = _legal(observations, spaces), spaces.action.leaves
    if legal is None:
        return outputs
    if not any(leaf.kind == "box" for leaf in leaves):
        return outputs.masked_fill(~legal, ILLEGAL)
    parts, first, box = [], 0, spaces.action.choices
    widths = [sum(leaf.nvec) or 2 * leaf.size for leaf in leaves]
    for leaf, part in zip(leaves, torch.split(outputs, widths, dim=-1), strict=True):
        if leaf.kind != "box":
            part = part.masked_fill(~legal[:, first : first + part.shape[-1]], ILLEGAL)
            first += part.shape[-1]
        elif box < legal.shape[1]:
            mean, log_std = part.chunk(2, dim=-1)
            unused, box = ~legal[:, box : box + 1], box + 1
            part = torch.cat([mean.masked_fill(unused, 0.0), log_std.masked_fill(unused, UNUSED_LOG_STD)], dim=-1)
        parts.append(part)
    return torch.cat(parts, dim=-1)
