"""Action masks: which choices are legal, and what that makes of a policy's outputs.

A mask is a leaf of the observation (`Leaf.mask`), with a number for each choice of the action's leaves in their order:
above 0 it is legal. So it travels, is stored and is stacked as all that is observed. Networks do not see it; it changes
their outputs.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.experience.spaces import PolicySpaces

ILLEGAL = -1e9
"""The logit or value of an illegal choice: its probability is exactly 0 in float32, and so is 0 · ILLEGAL."""


def legal_choices(observations: Mapping[str, Tensor], spaces: PolicySpaces) -> Tensor | None:
    """`[B, C]` of all choices; None where nothing is masked.

    Where a mask has no legal choice at all, nothing is known of them, and all count: so it is with what is observed
    after an episode's last step, which may be bootstrapped from, and where nobody is to act.
    """
    masks = [observations[name].flatten(1) for name in spaces.observation.mask_columns]
    if not masks:
        return None
    legal = (masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)) > 0
    return legal | ~legal.any(dim=1, keepdim=True)


def masked(outputs: Tensor, observations: Mapping[str, Tensor], spaces: PolicySpaces) -> Tensor:
    """Outputs `[…, B, P]`, of choices one for each and of boxes two for each element, with `ILLEGAL` in the place of
    illegal choices. As they are where nothing is masked."""
    legal = legal_choices(observations, spaces)
    if legal is None:
        return outputs
    if any(leaf.kind == "box" for leaf in spaces.action.leaves):
        parts, first = [], 0
        for leaf in spaces.action.leaves:
            choices = sum(leaf.nvec)
            boxes = legal.new_ones(len(legal), 2 * leaf.size if leaf.kind == "box" else 0)
            parts += [legal[:, first : first + choices], boxes]
            first += choices
        legal = torch.cat(parts, dim=1)
    return outputs.masked_fill(~legal, ILLEGAL)
