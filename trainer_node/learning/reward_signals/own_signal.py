"""A user's own reward signal behind checks: an error or an unusable return value names the signal and its method."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import calling, make_own, unusable
from stagecoach.shared.config.algorithms.reward_signals import OwnSignalConfig
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.reward_signals.base import RewardSignal, Rows


def make_own_signal(name: str, config: OwnSignalConfig, policy: Policy) -> RewardSignal:
    """Returns a new signal of the user's class; raises `ConfigError`. Its methods raise `UserCodeError`."""
    where = f"algorithm.reward_signals.{name}"
    made = make_own(config.kind, f"{where}.kind", RewardSignal, policy, **config.kwargs)
    if type(made).reward is RewardSignal.reward or getattr(made, "normalizer", None) is None:
        expected = "a method reward(rows), and super().__init__(policy) in __init__"
        raise ConfigError(f"{where}.kind={config.kind}: expected {expected}, as stagecoach.RewardSignal has")
    given: dict[str, Callable[..., Any]] = {method: getattr(made, method) for method in ("observe", "reward", "loss")}

    def observe(observations: Mapping[str, Tensor]) -> None:
        with calling(f"{where}: observe()"):
            given["observe"](observations)

    def reward(rows: Rows) -> Tensor:
        with calling(f"{where}: reward()"):
            found = given["reward"](rows)
        if not (isinstance(found, Tensor) and found.shape == (len(rows),) and bool(found.isfinite().all())):
            raise unusable(f"{where}: reward()", found, f"a tensor [{len(rows)}] of finite numbers")
        return found.to(torch.float32)

    def loss(rows: Rows, generator: torch.Generator) -> tuple[Tensor | None, dict[str, Tensor]]:
        with calling(f"{where}: loss()"):
            found = given["loss"](rows, generator)
        value, terms = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        scalars = isinstance(terms, dict) and all(isinstance(it, Tensor) and not it.dim() for it in terms.values())
        if terms is None or not scalars:
            raise unusable(
                f"{where}: loss()", found, "(loss, metrics): a scalar tensor or None, and scalar tensors by name"
            )
        if value is not None and not (isinstance(value, Tensor) and not value.dim() and value.requires_grad):
            raise unusable(
                f"{where}: loss()", value, "a scalar tensor with a gradient, or None for a signal that does not learn"
            )
        return value, {term: found.detach().to(torch.float32) for term, found in terms.items()}

    for method, checked in (("observe", observe), ("reward", reward), ("loss", loss)):
        setattr(made, method, checked)
    return made
