"""User-defined explorations, whose results are validated before they reach the environment."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagecoach.rollout_worker.exploration.base import Acted, Exploration, Tensors, legal_by_leaf
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import make_own, raised
from stagecoach.shared.config.algorithms.exploration import OwnExploration
from stagecoach.shared.policies.policy import Policy


def make_own_exploration(config: OwnExploration, now: Mapping[str, float]) -> Exploration:
    """Makes the exploration with its schedules' values `now`; raises `ConfigError`, also later from `act`."""
    field = "algorithm.exploration.kind"
    made = make_own(config.kind, field, Exploration, **config.kwargs, **now)
    if type(made).act is Exploration.act:
        raise ConfigError(f"{field}={config.kind}: expected a method `act`, as stagecoach.Exploration has it")
    act, where = made.act, f"{field}={config.kind}: act"

    def checked(policy: Policy, observations: Tensors, generator: Any) -> Acted:
        try:
            actions, params = act(policy, observations, generator)
        except Exception as failed:
            raise ConfigError(f"{where} {raised(failed)}; expected (actions by column, parameters)") from failed
        rows, choices = len(next(iter(observations.values()))), legal_by_leaf(observations, policy.spaces)
        for leaf in policy.spaces.action.leaves:
            name, shape = leaf.column("action"), (rows, *leaf.shape)
            found = actions.get(name) if isinstance(actions, Mapping) else None
            if not isinstance(found, Tensor) or found.shape != shape:
                told = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.60}"
                raise ConfigError(f"{where} gave {told} as {name!r}; expected a tensor {list(shape)}")
            array = found.detach().cpu().numpy()
            odd = leaf.beyond(array) if leaf.nvec else ~np.isfinite(array)
            if odd.any():
                wanted = f"0 to less than {leaf.nvec}" if leaf.nvec else "finite numbers"
                raise ConfigError(f"{where} gave {array[odd].tolist()[:3]} in {name!r}; expected {wanted}")
            if leaf.nvec and choices is not None:
                chosen = found.detach().reshape(rows, -1, 1).long().unbind(1)
                masks = torch.split(next(choices), list(leaf.nvec), dim=1)
                if not all(mask.gather(1, each).all() for mask, each in zip(masks, chosen, strict=True)):
                    raise ConfigError(
                        f"{where} gave an illegal choice in {name!r}; expected one that the action mask allows, as "
                        f"policy.distribution and stagecoach's own explorations take"
                    )
        if not isinstance(params, Tensor) or len(params) != rows:
            raise ConfigError(f"{where} gave {params!r:.60} as parameters; expected a tensor of {rows} rows")
        return actions, params

    made.act = checked  # type: ignore[method-assign]
    return made
