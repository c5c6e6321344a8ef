"""Soft actor-critic (Haarnoja et al. 2018b) for boxes, and its version for one discrete choice (Christodoulou 2019).

Order of the file: what is considered of the policy's actions, losses, one gradient step, state. The losses are the same
for both: expectations over the policy's actions are taken over one that is drawn, or over all that there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.algorithm_configs.sac import SoftConfig
from shared.errors import UnsupportedSpace
from shared.exploration_config import Sampling
from shared.policies.actor import Actor, SquashedGaussian
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

_DISCRETE_EPSILON = 0.1
"""The target entropy of one choice is that of ε-greedy acting with this ε, as DQN explores in the end."""


@dataclass(frozen=True)
class Considered:
    """Actions that stand for the policy's, `[B, A]`."""

    probability: Tensor
    log_prob: Tensor
    value: Tensor
    """The smaller one of the critics'."""

    def expectation(self, values: Tensor) -> Tensor:
        """`[B, A]` → `[B]`."""
        return (self.probability * values).sum(dim=1)


class Actions(Protocol):
    """What SAC needs to know of a kind of actions."""

    target_entropy: float

    def make_critics(self) -> Critics:
        """Untrained ones."""
        ...

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """What `consider` needs."""
        ...

    def consider(self, critics: Critics, observations: Mapping[str, Tensor], noise: Tensor) -> Considered:
        """The policy's actions on these observations."""
        ...

    def value(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        """`[C, B]`: each critic's value of these actions."""
        ...


class Drawn:
    """Actions of boxes: one, reparameterised, so that gradients go through it."""

    def __init__(self, policy: Actor, distribution: SquashedGaussian) -> None:
        self._policy, self._distribution = policy, distribution
        self.target_entropy = -float(policy.bounds.size)

    def make_critics(self) -> Critics:
        spaces = self._policy.spaces
        return Critics(spaces.observation, self._policy.config, count=2, action_size=self._policy.bounds.size)

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.randn(rows, self._policy.bounds.size, generator=generator)

    def consider(self, critics: Critics, observations: Mapping[str, Tensor], noise: Tensor) -> Considered:
        action, log_prob = self._distribution.reparameterised(self._policy.action_parameters(observations), noise)
        value = critics(observations, self._policy.normaliser, action).amin(dim=0)
        return Considered(torch.ones_like(value), log_prob.unsqueeze(1), value)

    def value(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        values: Tensor = critics(observations, self._policy.normaliser, self._policy.bounds.flat(actions))
        return values.squeeze(2)


class Counted:
    """One discrete choice: all that there are, each with its probability."""

    def __init__(self, policy: Actor, learner: str) -> None:
        leaves = policy.spaces.action.leaves
        if len(leaves) != 1 or len(leaves[0].nvec) != 1:
            raise UnsupportedSpace(
                f"{learner} learns boxes or one discrete choice, found {[leaf.kind for leaf in leaves]} with "
                f"{sum(len(leaf.nvec) for leaf in leaves)} choices; use algorithm: ppo, or iql for recorded experience"
            )
        self._policy, self._name, self._choices = policy, leaves[0].column("action"), leaves[0].nvec[0]
        other = _DISCRETE_EPSILON / self._choices
        best = 1.0 - _DISCRETE_EPSILON + other
        self.target_entropy = -best * math.log(best) - (self._choices - 1) * other * math.log(other)

    def make_critics(self) -> Critics:
        return Critics(self._policy.spaces.observation, self._policy.config, count=2, outputs=self._choices)

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.zeros(0)

    def consider(self, critics: Critics, observations: Mapping[str, Tensor], noise: Tensor) -> Considered:
        log_prob = torch.log_softmax(self._policy.action_parameters(observations), dim=1)
        value = critics(observations, self._policy.normaliser, None).amin(dim=0)
        return Considered(log_prob.exp(), log_prob, value)

    def value(self, critics: Critics, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        values: Tensor = critics(observations, self._policy.normaliser, None)
        chosen = actions[self._name].reshape(1, -1, 1).expand(len(values), -1, 1)
        return values.gather(2, chosen).squeeze(2)


class SAC(OffPolicy):
    """Learns one policy."""

    def __init__(self, policy: Actor, config: SoftConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config
        if isinstance(policy.distribution, SquashedGaussian):
            self.actions: Actions = Drawn(policy, policy.distribution)
        else:
            self.actions = Counted(policy, config.name)
            if not isinstance(config.exploration, Sampling):
                raise UnsupportedSpace(
                    f"algorithm.exploration={config.exploration.kind} is for continuous actions; use sampling"
                )
        with borrowed_random_state(update_seed(setting.seed, 0)):
            self.critics = self.actions.make_critics().to(setting.device)
        self.targets = copy_sharing_buffers(self.critics)
        initial = math.log(config.initial_temperature)
        self.log_temperature = torch.tensor(initial, device=setting.device, requires_grad=True)
        self.target_entropy = self.actions.target_entropy if config.target_entropy is None else config.target_entropy
        self._optimisers = {
            "actor": Adam(policy.parameters(), config.adam_epsilon),
            "critics": Adam(self.critics.parameters(), config.adam_epsilon),
            "temperature": Adam([self.log_temperature], config.adam_epsilon),
        }
        self._critic_loss = self.compiled(self.critic_loss)
        self._actor_loss = self.compiled(self.actor_loss)

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """`[B]`, eq. 2 and 3 of the paper: r + γ E[min Q' − α ln π]."""
        with torch.no_grad():
            then = self.actions.consider(self.targets, batch.next_observations, noise)
            soft = then.expectation(then.value - self.log_temperature.exp() * then.log_prob)
            return batch.reward + batch.discount * soft

    def critic_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 5: half the weighted mean squared error, summed over the critics; the values and the errors `[C, B]`."""
        values = self.actions.value(self.critics, batch.observations, batch.actions)
        errors = values - self.targets_of(batch, noise)
        return 0.5 * (batch.weight * errors.square()).mean(dim=1).sum(), values, errors

    def actor_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Eq. 7 (and 9), weighted mean of E[α ln π − min Q]; and the entropies `[B]`."""
        now = self.actions.consider(self.critics, batch.observations, noise)
        cost = now.expectation(self.log_temperature.detach().exp() * now.log_prob - now.value)
        return (batch.weight * cost).mean(), -now.expectation(now.log_prob.detach()).detach()

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """One step of the critics, of the policy, of the temperature, and of the targets."""
        noise = [self.actions.noise(len(batch), generator).to(self._setting.device) for _ in range(2)]
        loss, values, errors = self._critic_loss(batch, noise[0])
        metrics = self._move_critics(loss, values, errors, counters) | self._move_policy(batch, noise[1], counters)
        follow(self.targets, self.critics, self._config.tau)
        return Lesson(metrics, errors.detach().abs().mean(dim=0))

    def _move_critics(self, loss: Tensor, values: Tensor, errors: Tensor, counters: Counters) -> dict[str, Tensor]:
        config, parameters = self._config, list(self.critics.parameters())
        rate = (config.critic_learning_rate or config.learning_rate).value(counters)
        norm = descend(loss, parameters, self._optimisers["critics"], rate, config.max_grad_norm)
        return {
            "train/critic_loss": loss.detach(),
            "train/q_value": values.detach().mean(),
            "train/td_error": errors.detach().abs().mean(),
            "train/grad_norm": norm,
        }

    def _move_policy(self, batch: Minibatch, noise: Tensor, counters: Counters) -> dict[str, Tensor]:
        """And the temperature."""
        config, rate = self._config, self._config.learning_rate.value(counters)
        loss, entropies = self._actor_loss(batch, noise)
        whole, cloned = self.imitating(loss)
        descend(whole, list(self.policy.parameters()), self._optimisers["actor"], rate, config.max_grad_norm)
        metrics = cloned | {
            "train/actor_loss": loss.detach(),
            "train/entropy": entropies.mean(),
            "train/temperature": self.log_temperature.detach().exp(),
        }
        if config.learn_temperature:
            schedule = config.temperature_learning_rate or config.learning_rate
            self._move_temperature(entropies.mean(), schedule.value(counters))
        return metrics

    def _move_temperature(self, entropy: Tensor, learning_rate: float) -> None:
        """Eq. 18, with ln α in place of α, so that α stays positive: down where the entropy is more than asked for."""
        self.log_temperature.grad = entropy - self.target_entropy
        self._optimisers["temperature"].step(learning_rate)

    @property
    def beside_policy(self) -> dict[str, str]:
        """The critics; the temperature where it is learnt."""
        return {"critics": "critics/"} | ({"temperature": "log_temperature"} if self._config.learn_temperature else {})

    def networks(self) -> Columns:
        """Critics, their targets, the temperature and all optimisers."""
        arrays = network_state(self.critics, "critics/") | network_state(self.targets, "targets/")
        arrays["log_temperature"] = self.log_temperature.detach().cpu().numpy().copy()
        for name, optimiser in self._optimisers.items():
            arrays |= {f"adam/{name}/{key}": array for key, array in optimiser.state().items()}
        return arrays

    def load_networks(self, arrays: Columns) -> None:
        """The inverse of `networks`."""
        load_network_state(self.critics, "critics/", arrays)
        load_network_state(self.targets, "targets/", arrays)
        with torch.no_grad():
            self.log_temperature.copy_(torch.from_numpy(np.array(arrays["log_temperature"])))
        for name, optimiser in self._optimisers.items():
            optimiser.load_state(part(arrays, f"adam/{name}/"))
