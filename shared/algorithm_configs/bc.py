"""The configuration of behavioural cloning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shared.algorithm_configs.section import AlgorithmConfig, BatchOfUpdate
from shared.schedules import Schedule, ScheduleField

if TYPE_CHECKING:
    from shared.config import Config


class BCConfig(BatchOfUpdate, AlgorithmConfig):
    """Behavioural cloning: the policy learns to do what recorded experience does, by maximum likelihood."""

    name: Literal["bc"]
    """The algorithm."""
    learning_rate: ScheduleField = Schedule(start=1e-3)
    """Adam's step size: a number or a schedule."""
    epochs: int = Field(1, ge=1)
    """Passes over each update's batch; the dataset itself is gone through again and again."""
    minibatch_size: int = Field(64, ge=1)
    """Transitions in one gradient step."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, against a policy that is surer than its data."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε; 1e-8 as in its paper."""

    def refuse(self, run: Config) -> None:
        """Raises `ValueError` where there is nothing to clone, or a minibatch is more than the batch."""
        super().refuse(run)
        if run.dataset is None:
            raise ValueError("algorithm.name=bc clones recorded experience; name it in dataset.path")
        if run.dataset.only_heatup:
            raise ValueError(
                "algorithm.name=bc with dataset.only_heatup=true would clone what it acts itself; leave that out, or "
                "take an algorithm with a replay memory"
            )
