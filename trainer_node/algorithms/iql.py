"""Implicit Q-learning (Kostrikov, Nair and Levine 2022, "Offline reinforcement learning with implicit Q-learning").

Order of the file: losses, update. The value function is the critic of the policy (actor_critic); two Q
functions and their targets belong to the algorithm. No action is ever asked for that is not in the data.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shared.algorithm_configs.iql import IQLConfig
from shared.policies.actor_critic import ActorCritic
from shared.policies.encoders import flat, flat_size
from shared.policies.policy import copy_sharing_buffers
from shared.policies.registry import borrowed_random_state
from shared.spaces import Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.critics import Critics
from trainer_node.algorithms.descent import descend, follow
from trainer_node.algorithms.experience import update_seed
from trainer_node.algorithms.named_arrays import load_network_state, network_state, part
from trainer_node.algorithms.off_policy import Lesson, Minibatch, OffPolicy


class IQL(OffPolicy):
    """Learns one policy."""

    policy: ActorCritic

    def __init__(self, policy: ActorCritic, config: IQLConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config
        size = sum(flat_size(leaf) for leaf in policy.spaces.action.leaves)
        with borrowed_random_state(update_seed(setting.seed, 0)):
            made = Critics(policy.spaces.observation, policy.config, count=2, action_size=size)
        self.critics = made.to(setting.device)
        self.targets = copy_sharing_buffers(self.critics)
        self._policy_optimiser = Adam(self.policy.parameters(), config.adam_epsilon)
        self._critic_optimiser = Adam(self.critics.parameters(), config.adam_epsilon)
        self._policy_loss = self.compiled(self.policy_loss)
        self._critic_loss = self.compiled(self.critic_loss)

    def policy_loss(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Of the value (eq. 5 of the paper) and of the policy (eq. 7), and their terms."""
        config = self._config
        with torch.no_grad():
            q = self._q(self.targets, batch.observations, batch.actions).min(dim=0).values
        params, value = self.policy.action_parameters_and_value(batch.observations)
        advantage = q - value
        side = torch.where(advantage > 0, config.expectile, 1 - config.expectile)
        value_loss = (side * advantage.square()).mean()
        weight = (config.inverse_temperature * advantage.detach()).exp().clamp_max(config.largest_weight)
        policy_loss = -(weight * self.policy.distribution.log_prob(params, batch.actions)).mean()
        return value_loss + policy_loss, {
            "train/value_loss": value_loss.detach(),
            "train/policy_loss": policy_loss.detach(),
            "train/value_mean": value.detach().mean(),
            "train/advantage_weight": weight.mean(),
        }

    def critic_loss(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Of both Q functions (eq. 6), and `[B]` how wrong the first one was."""
        with torch.no_grad():
            target = batch.reward + batch.discount * self.policy.value(batch.next_observations)
        error = self._q(self.critics, batch.observations, batch.actions) - target
        return (batch.weight * error.square()).mean(dim=1).sum(), error[0].detach()

    def _q(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        """`[2, B]`."""
        parts = [flat(actions[leaf.column("action")], leaf) for leaf in self.policy.spaces.action.leaves]
        values: Tensor = critics(observations, self.policy.normaliser, torch.cat(parts, dim=1))
        return values.squeeze(2)

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """Value and policy, then the Q functions with that value, then their targets: the order of the paper."""
        config, rate = self._config, self._config.learning_rate.value(counters)
        loss, metrics = self._policy_loss(batch)
        descend(loss, list(self.policy.parameters()), self._policy_optimiser, rate, config.max_grad_norm)
        critic_loss, td_error = self._critic_loss(batch)
        critics = list(self.critics.parameters())
        descend(critic_loss, critics, self._critic_optimiser, rate, config.max_grad_norm)
        follow(self.targets, self.critics, config.target_rate)
        return Lesson(metrics | {"train/critic_loss": critic_loss.detach()}, td_error)

    @property
    def beside_policy(self) -> dict[str, str]:
        """The critics."""
        return {"critics": "critics/"}

    def networks(self) -> Columns:
        """The Q functions, their targets, and both optimisers."""
        optimisers = {"policy_optimiser/": self._policy_optimiser, "critic_optimiser/": self._critic_optimiser}
        found = network_state(self.critics, "critics/") | network_state(self.targets, "targets/")
        for prefix, optimiser in optimisers.items():
            found |= {prefix + name: array for name, array in optimiser.state().items()}
        return found

    def load_networks(self, arrays: Columns) -> None:
        """The inverse of `networks`."""
        load_network_state(self.critics, "critics/", arrays)
        load_network_state(self.targets, "targets/", arrays)
        self._policy_optimiser.load_state(part(arrays, "policy_optimiser/"))
        self._critic_optimiser.load_state(part(arrays, "critic_optimiser/"))
