"""An algorithm of one's own, given to Stagecoach as `algorithm: own_algorithm:Reinforce`.

REINFORCE with a learnt baseline (Williams 1992; Sutton and Barto 2018, section 13.4): each action is made more likely
by how much more came after it than the baseline expected. What comes after the fragment's end, the baseline says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import nn

from shared.algorithm_configs.section import AlgorithmConfig
from shared.policies.actor_critic import ActorCritic
from shared.spaces import Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.experience import Experience, side_by_side
from trainer_node.algorithms.gae import advantages
from trainer_node.algorithms.share import Share, Whole


class ReinforceConfig(AlgorithmConfig):
    """What may stand under `algorithm:` beside `name`, `learning_rate` and `gamma`."""

    entropy_coefficient: float = Field(0.01, ge=0)
    """Weight of the entropy bonus."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""


class Reinforce:
    """Learns one policy: one gradient step for each update's fragments."""

    Config = ReinforceConfig

    def __init__(self, policy: ActorCritic, config: ReinforceConfig, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        self.share: Share = Whole()
        self._config = config
        self._device = setting.device
        self._optimiser = Adam(self.policy.parameters(), epsilon=1e-5)

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
            advantage = advantages(
                reward=tensors["reward"], value=value.detach().reshape(shape),
                bootstrap_value=self.policy.value({name: tensors[f"bootstrap_{name}"] for name in names}),
                terminated=tensors["terminated"], truncated=tensors["truncated"], mask=tensors["mask"],
                final_index=tensors["final_index"].to(torch.int64),
                final_value=self.policy.value({name: tensors[f"final_{name}"] for name in names}),
                gamma=self._config.gamma, gae_lambda=1.0,
            ).flatten()  # fmt: skip
        mask = tensors["mask"].flatten()
        target = (advantage + value.detach())[mask]
        policy_loss = -(self.policy.distribution.log_prob(parameters, actions) * advantage)[mask].mean()
        value_loss = (value[mask] - target).square().mean()
        entropy = self.policy.distribution.entropy(parameters)[mask].mean()
        self._optimiser.zero_grad()
        (policy_loss + 0.5 * value_loss - self._config.entropy_coefficient * entropy).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm)
        self._optimiser.step(self._config.learning_rate.value(counters))
        return {
            "train/policy_loss": float(policy_loss),
            "train/value_loss": float(value_loss),
            "train/entropy": float(entropy),
        }

    def observe(self, experience: Sequence[Experience]) -> None:
        """Nothing is learnt in heat-up: there is no normaliser here."""

    def state(self) -> Columns:
        """The optimiser; all else is in the policy."""
        return self._optimiser.state()

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        self._optimiser.load_state(arrays)
