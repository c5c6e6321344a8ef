"""A custom algorithm, given to Stagecoach as `algorithm: own_algorithm:Reinforce`.

REINFORCE with a learned baseline (Williams 1992; Sutton and Barto 2018, section 13.4): the log-probability of each
action is weighted by its return less the baseline. The baseline estimates the return beyond the fragment's end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import nn

from stagecoach import (
    ActorCritic,
    Adam,
    AlgorithmConfig,
    Columns,
    Counters,
    Experience,
    Setting,
    Shard,
    Trajectories,
    gae,
    side_by_side,
)


class ReinforceConfig(AlgorithmConfig):
    """Fields of `algorithm:` in addition to `name`, `learning_rate` and `gamma`."""

    learns_from_others = False  # its gradient holds for what its own policy acted: no `dataset`
    corrects_policy_lag = False  # and for the newest version alone: `rollout.max_policy_lag` stays 0

    entropy_coefficient: float = Field(0.01, ge=0)
    """Weight of the entropy bonus."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""


class Reinforce:
    """Learns one policy: one gradient step for each update's fragments."""

    Config = ReinforceConfig

    def __init__(self, policy: ActorCritic, config: ReinforceConfig, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        self.shard = Shard()
        self._config = config
        self._device = setting.device
        self._optimizer = Adam(self.policy.parameters(), epsilon=1e-5)

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """The gradient of log π(a|s) · (return − baseline), averaged over the batch."""
        tensors = {
            name: torch.from_numpy(array.copy()).to(self._device) for name, array in side_by_side(experience).items()
        }
        shape = tensors["reward"].shape
        names = self.policy.spaces.observation.column_names("obs")
        observations = {name: tensors[name].flatten(0, 1) for name in names}
        actions = {name: tensors[name].flatten(0, 1) for name in self.policy.spaces.action.column_names("action")}
        parameters, value = self.policy.action_parameters_and_value(observations)
        with torch.no_grad():
            trajectories = Trajectories(
                reward=tensors["reward"], value=value.detach().reshape(shape),
                bootstrap_value=self.policy.value({name: tensors[f"bootstrap_{name}"] for name in names}),
                terminated=tensors["terminated"], truncated=tensors["truncated"], mask=tensors["mask"],
                final_index=tensors["final_index"].to(torch.int64),
                final_value=self.policy.value({name: tensors[f"final_{name}"] for name in names}),
                gamma=self._config.gamma,
            )  # fmt: skip
            advantage = gae(trajectories, gae_lambda=1.0)[0].flatten()
        mask = tensors["mask"].flatten()
        target = (advantage + value.detach())[mask]
        policy_loss = -(self.policy.distribution.log_prob(parameters, actions) * advantage)[mask].mean()
        value_loss = (value[mask] - target).square().mean()
        entropy = self.policy.distribution.entropy(parameters)[mask].mean()
        self._optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss - self._config.entropy_coefficient * entropy).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm)
        self._optimizer.step(self._config.learning_rate.value(counters))
        self.observe(experience)  # after learning: the batch is learned with the statistics that it was acted with
        return {
            "train/policy_loss": float(policy_loss),
            "train/value_loss": float(value_loss),
            "train/entropy": float(entropy),
        }

    def observe(self, experience: Sequence[Experience]) -> None:
        """Moves the statistics of `policies.<id>.normalize_observations`; in warm-up this is called alone."""
        if self.policy.normalizer is None:
            return
        columns = side_by_side(experience)
        names = self.policy.spaces.observation.column_names("obs")
        seen = {name: torch.from_numpy(columns[name][columns["mask"]]).to(self._device) for name in names}
        self.policy.normalizer.update(seen)

    def state(self) -> Columns:
        """The optimizer; all else is in the policy."""
        return self._optimizer.state()

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        self._optimizer.load_state(arrays)
