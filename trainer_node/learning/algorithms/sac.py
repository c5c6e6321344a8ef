"""Soft actor-critic (Haarnoja et al. 2018b) for boxes, and its version for one discrete choice (Christodoulou 2019).

The losses are the same for both: expectations over the policy's actions are taken over one that is drawn, or over all.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.config.algorithms.exploration import Sampling
from stagecoach.shared.config.algorithms.off_policy import SoftConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.continuous import Actor, SquashedGaussian
from stagecoach.shared.policies.masks import legal_choices
from stagecoach.trainer_node.learning.algorithms.off_policy import ActorAndCritics, Lesson, Minibatch
from stagecoach.trainer_node.learning.building_blocks.critics import Critics
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, soft_update

_DISCRETE_EPSILON = 0.1
"""The target entropy of one choice is that of ε-greedy acting with this ε, as DQN explores in the end."""


@dataclass(frozen=True)
class Considered:
    """Actions over which expectations of the policy are taken; all `[B, A]`."""

    probability: Tensor
    log_prob: Tensor
    value: Tensor
    """Value to the policy: the minimum of the critics."""

    def expectation(self, values: Tensor) -> Tensor:
        return (self.probability * values).sum(dim=1)


class Drawn:
    """One reparameterized action of boxes, so that gradients flow through it."""

    def __init__(self, policy: Actor, distribution: SquashedGaussian) -> None:
        self._policy, self.distribution = policy, distribution
        self.shape = {"count": 2, "action_size": policy.bounds.size}
        """Arguments of `Critics`."""
        self.target_entropy = -float(policy.bounds.size)

    def target_entropy_of(self, observations: Mapping[str, Tensor]) -> float | Tensor:
        """Returns the target entropy for these observations, if the config has none."""
        return self.target_entropy

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, self._policy.bounds.size, generator=generator)

    def consider(self, critics: Critics, observations: Mapping[str, Tensor], noise: Tensor) -> Considered:
        action, log_prob = self.distribution.reparameterized(self._policy.action_parameters(observations), noise)
        value = self.combined(critics(observations, self._policy.normalizer, action))
        return Considered(torch.ones_like(value), log_prob.unsqueeze(1), value)

    def combined(self, values: Tensor) -> Tensor:
        """Returns `[B, 1]` from the critics' values `[C, B, N]`."""
        return values.amin(dim=0)

    def value(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        """Returns each critic's value of these actions, `[C, B]`."""
        values: Tensor = critics(observations, self._policy.normalizer, self._policy.bounds.flat(actions))
        return values.squeeze(2)


class Counted:
    """All choices of one discrete action, each with its probability. Has the methods of `Drawn`."""

    def __init__(self, policy: Actor, config: SoftConfig) -> None:
        leaves = policy.spaces.action.leaves
        if len(leaves) != 1 or len(leaves[0].nvec) != 1:
            raise UnsupportedSpace(
                f"{config.name} learns boxes or one discrete choice, found {[leaf.kind for leaf in leaves]} with "
                f"{sum(len(leaf.nvec) for leaf in leaves)} choices; use algorithm: ppo, or iql for recorded experience"
            )
        if not isinstance(config.exploration, Sampling):
            kind = config.exploration.kind
            raise UnsupportedSpace(f"algorithm.exploration={kind} is for continuous actions; use sampling")
        (choices,) = leaves[0].nvec
        self._policy, self._name = policy, leaves[0].column("action")
        self.shape = {"count": 2, "outputs": choices}
        self.target_entropy = self._entropy(choices)

    @staticmethod
    def _entropy(choices: int) -> float:
        other = _DISCRETE_EPSILON / choices
        best = 1.0 - _DISCRETE_EPSILON + other
        return -best * math.log(best) - (choices - 1) * other * math.log(other)

    def target_entropy_of(self, observations: Mapping[str, Tensor]) -> float | Tensor:
        """Returns the mean over rows, each by its number of legal choices."""
        legal = legal_choices(observations, self._policy.spaces)
        if legal is None:
            return self.target_entropy
        by_count = [self._entropy(max(1, count)) for count in range(legal.shape[1] + 1)]
        return torch.tensor(by_count, device=legal.device)[legal.sum(dim=1)].mean()

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.zeros(0)

    def consider(self, critics: Critics, observations: Mapping[str, Tensor], noise: Tensor) -> Considered:
        log_prob = torch.log_softmax(self._policy.action_parameters(observations), dim=1)
        value = critics(observations, self._policy.normalizer, None).amin(dim=0)
        return Considered(log_prob.exp(), log_prob, value)

    def value(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        values: Tensor = critics(observations, self._policy.normalizer, None)
        chosen = actions[self._name].reshape(1, -1, 1).expand(len(values), -1, 1)
        return values.gather(2, chosen).squeeze(2)


class SAC(ActorAndCritics):
    _config: SoftConfig

    def __init__(self, policy: Actor, config: SoftConfig, setting: Setting) -> None:
        self.actions = self.considered(policy, config)
        super().__init__(policy, config, setting, **self.actions.shape)
        initial = math.log(config.initial_temperature)
        self.log_temperature = torch.tensor(initial, device=setting.device, requires_grad=True)
        self.target_entropy = self.actions.target_entropy if config.target_entropy is None else config.target_entropy
        self._temperature_adam = Adam([self.log_temperature], config.adam_epsilon)
        self.parts |= {"log_temperature": self.log_temperature, "adam/temperature/": self._temperature_adam}
        if config.learn_temperature:
            self.beside_policy["temperature"] = "log_temperature"
        self._critic_loss = self.compiled(self.critic_loss, self._critics_adam)
        self._actor_loss = self.compiled(self.actor_loss, self._actor_adam)

    @staticmethod
    def considered(policy: Actor, config: Any) -> Drawn | Counted:
        """Returns the actions that expectations are taken over; raises `UnsupportedSpace`."""
        squashed = policy.distribution
        return Drawn(policy, squashed) if isinstance(squashed, SquashedGaussian) else Counted(policy, config)

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """Returns `[B]`, eq. 2 and 3: r + γ E[min Q' − α ln π]."""
        with torch.no_grad():
            then = self.actions.consider(self.targets, batch.next_observations, noise)
            soft = then.expectation(then.value - self.log_temperature.exp() * then.log_prob)
            return batch.reward + batch.discount * soft

    def critic_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns eq. 5, half the weighted mean squared error summed over critics; values and errors, `[C, B]`."""
        values = self.actions.value(self.critics, batch.observations, batch.actions)
        errors = values - self.targets_of(batch, noise)
        return 0.5 * (batch.weight * errors.square()).mean(dim=1).sum(), values, errors

    def actor_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns eq. 7 (and 9), the weighted mean of E[α ln π − min Q]; and the entropies `[B]`."""
        now = self.actions.consider(self.critics, batch.observations, noise)
        cost = now.expectation(self.log_temperature.detach().exp() * now.log_prob - now.value)
        return (batch.weight * cost).mean(), -now.expectation(now.log_prob.detach()).detach()

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        noise = [self.actions.noise(len(batch), generator).to(self._setting.device) for _ in range(2)]
        metrics, td_error = self._move_critics(batch, noise[0], counters, generator)
        loss, entropies = self._actor_loss(batch, noise[1])
        metrics |= self._step_actor(loss, counters)
        metrics |= {"train/entropy": entropies.mean(), "train/temperature": self.log_temperature.detach().exp()}
        if self._config.learn_temperature:
            schedule = self._config.learning_rate
            target_entropy: float | Tensor = self.target_entropy
            if self._config.target_entropy is None:
                target_entropy = self.actions.target_entropy_of(batch.observations)
            self.move_temperature(self.mean_of_all(entropies.mean()), schedule.value(counters), target_entropy)
        soft_update(self.targets, self.critics, self._config.tau)
        return Lesson(metrics, td_error)

    def _move_critics(
        self, batch: Minibatch, noise: Tensor, counters: Counters, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        return self._step_critics(*self._critic_loss(batch, noise), counters)

    def move_temperature(self, entropy: Tensor, learning_rate: float, target_entropy: float | Tensor) -> None:
        """Moves α by eq. 18, on ln α so that α stays positive: down if the entropy exceeds `target_entropy`."""
        self.log_temperature.grad = entropy - target_entropy
        self._temperature_adam.step(learning_rate)
