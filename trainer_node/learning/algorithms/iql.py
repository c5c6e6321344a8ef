"""Implicit Q-learning (Kostrikov, Nair and Levine 2022, "Offline reinforcement learning with implicit Q-learning").

The value function is the critic of the policy (actor_critic); two Q functions and their targets belong to the
algorithm. It evaluates recorded actions alone.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.offline import IQLConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.encoders import flat, flat_size
from stagecoach.trainer_node.learning.algorithms.off_policy import Lesson, Minibatch, WithCritics
from stagecoach.trainer_node.learning.building_blocks.critics import Critics
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.building_blocks.optimization import soft_update


class IQL(WithCritics):
    policy: ActorCritic
    _config: IQLConfig

    def __init__(self, policy: ActorCritic, config: IQLConfig, setting: Setting) -> None:
        size = sum(flat_size(leaf) for leaf in policy.spaces.action.leaves)
        super().__init__(policy, config, setting, count=2, action_size=size)
        self._policy_loss = self.compiled(self.policy_loss, self._actor_adam)
        self._critic_loss = self.compiled(self.critic_loss, self._critics_adam)

    def policy_loss(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the sum of the value loss (eq. 5) and the policy loss (eq. 7), and their terms."""
        config = self._config
        with torch.no_grad():
            q = self.q(self.targets, batch.observations, batch.actions).min(dim=0).values
        params, value = self.policy.action_parameters_and_value(batch.observations)
        advantage = q - value
        side = torch.where(advantage > 0, config.expectile, 1 - config.expectile)
        value_loss = (batch.weight * side * advantage.square()).mean()
        weight = (config.inverse_temperature * advantage.detach()).exp().clamp_max(config.largest_weight)
        policy_loss = -(batch.weight * weight * self.policy.distribution.log_prob(params, batch.actions)).mean()
        terms = {"train/value_loss": value_loss, "train/policy_loss": policy_loss}
        terms |= {"train/value_mean": value.mean(), "train/advantage_weight": weight.mean()}
        return value_loss + policy_loss, {name: term.detach() for name, term in terms.items()}

    def critic_loss(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Returns the loss of both Q functions (eq. 6), and the TD error `[B]` of the first."""
        with torch.no_grad():
            target = batch.reward + batch.discount * self.policy.value(batch.next_observations)
        error = self.q(self.critics, batch.observations, batch.actions) - target
        return (batch.weight * error.square()).mean(dim=1).sum(), error[0].detach()

    def q(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        parts = [flat(actions[leaf.column("action")], leaf) for leaf in self.policy.spaces.action.leaves]
        values: Tensor = critics(observations, self.policy.normalizer, torch.cat(parts, dim=1))
        return values.squeeze(2)

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """Steps value and policy, then the Q functions with that value, then their targets, as the paper does."""
        config, rate = self._config, self._config.learning_rate.value(counters)
        loss, metrics = self._policy_loss(batch)
        self.descend(loss, self._actor_adam, rate)
        critic_loss, td_error = self._critic_loss(batch)
        self.descend(critic_loss, self._critics_adam, rate)
        soft_update(self.targets, self.critics, config.target_rate)
        return Lesson(metrics | {"train/critic_loss": critic_loss.detach()}, td_error)
