"""Conservative Q-learning (Kumar et al. 2020), CQL(H): SAC whose critics are held down where the data have no action.

Order of the file: the critics' soft maximum for either kind of actions, losses, one gradient step, state. All else is
SAC's: critics and their targets, the policy, the temperature.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shared.algorithm_configs.cql import CQLConfig
from shared.policies.actor import Actor, SquashedGaussian
from shared.spaces import Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.critics import Critics
from trainer_node.algorithms.descent import follow
from trainer_node.algorithms.off_policy import Lesson, Minibatch
from trainer_node.algorithms.sac import SAC

_LOG_WEIGHT_BOUNDS = math.log(1e-6), math.log(1e6)
"""Of the penalty, where it is learnt: so that it comes back soon from where the gap cannot be what is asked for."""


class SoftMaximum(Protocol):
    """ln of the sum or integral of exp Q(s, a) over all actions a."""

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Random numbers that `of` needs."""
        ...

    def of(self, critics: Critics, batch: Minibatch, drawn: Tensor) -> Tensor:
        """`[C, B]`: at the minibatch's observations; gradients go to the critics alone."""
        ...


class Summed:
    """Over the choices that there are."""

    def __init__(self, policy: Actor) -> None:
        self._policy = policy

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.zeros(0)

    def of(self, critics: Critics, batch: Minibatch, drawn: Tensor) -> Tensor:
        return torch.logsumexp(critics(batch.observations, self._policy.normaliser, None), dim=2)


class Estimated:
    """Over [-1, 1]^D, by importance sampling: a third of the actions are uniform, the others the policy's."""

    def __init__(self, policy: Actor, distribution: SquashedGaussian, actions: int) -> None:
        self._policy, self._distribution, self._actions = policy, distribution, actions

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """`[3, B, A, D]`: uniform actions, and standard normal numbers for the policy's."""
        shape = (rows, self._actions, self._policy.bounds.size)
        uniform = 2.0 * torch.rand(shape, generator=generator) - 1.0
        return torch.stack([uniform, *(torch.randn(shape, generator=generator) for _ in range(2))])

    def of(self, critics: Critics, batch: Minibatch, drawn: Tensor) -> Tensor:
        actions, densities = self._proposed(batch, drawn)
        values = critics.of_each(batch.observations, self._policy.normaliser, actions)
        return torch.logsumexp(values - densities, dim=2) - math.log(actions.shape[1])

    @torch.no_grad()
    def _proposed(self, batch: Minibatch, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Actions `[B, 3 A, D]`, and the log density that each was drawn with `[B, 3 A]`."""
        volume = torch.full_like(drawn[0, ..., 0], drawn.shape[-1] * math.log(2.0))
        actions, densities = [drawn[0]], [-volume]
        for noise, seen in zip(drawn[1:], (batch.observations, batch.next_observations), strict=True):
            params = self._policy.action_parameters(seen).unsqueeze(1)
            action, density = self._distribution.reparameterised(params, noise)
            actions.append(action)
            densities.append(density)
        return torch.cat(actions, dim=1), torch.cat(densities, dim=1)


class CQL(SAC):
    """Learns one policy."""

    def __init__(self, policy: Actor, config: CQLConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._conservative = config
        self._penalised_loss = self.compiled(self.penalised_loss)
        self._clones = config.cloning_steps > 0
        """In this gradient step."""
        self.soft_maximum: SoftMaximum = Summed(policy)
        if isinstance(policy.distribution, SquashedGaussian):
            self.soft_maximum = Estimated(policy, policy.distribution, config.considered_actions)
        self.log_conservatism = torch.tensor(math.log(config.conservatism), device=setting.device)
        self._optimisers["conservatism"] = Adam([self.log_conservatism], config.adam_epsilon)

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """`[B]`: r + γ E[min Q'], and the policy's entropy as in SAC where that is asked for."""
        if self._conservative.value_entropy:
            return super().targets_of(batch, noise)
        with torch.no_grad():
            then = self.actions.consider(self.targets, batch.next_observations, noise)
            return batch.reward + batch.discount * then.expectation(then.value)

    def gaps(self, batch: Minibatch, values: Tensor, drawn: Tensor) -> Tensor:
        """`[C, B]`, eq. 4: the soft maximum less the `values` `[C, B]` of what the data did."""
        return self.soft_maximum.of(self.critics, batch, drawn) - values

    def penalised_loss(self, batch: Minibatch, noise: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """SAC's of the critics and the weighted gaps; the values, the errors and the gaps, `[C, B]`."""
        loss, values, errors = self.critic_loss(batch, noise)
        gaps = self.gaps(batch, values, drawn)
        penalty = self.log_conservatism.exp() * (batch.weight * gaps).mean(dim=1).sum()
        return loss + penalty, values, errors, gaps

    def actor_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """SAC's; in the steps of cloning, −ln π of the data's action stands for −Q."""
        if not self._clones:
            return super().actor_loss(batch, noise)
        now = self.actions.consider(self.critics, batch.observations, noise)
        entropies = -now.expectation(now.log_prob)
        params = self.policy.action_parameters(batch.observations)
        likelihood = self.policy.distribution.log_prob(params, batch.actions)
        cost = -self.log_temperature.detach().exp() * entropies - likelihood
        return (batch.weight * cost).mean(), entropies.detach()

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """SAC's step, with the penalty in the critics' loss; and one of the penalty's weight."""
        device = self._setting.device
        self._clones = self.done < self._conservative.cloning_steps
        noise = [self.actions.noise(len(batch), generator).to(device) for _ in range(2)]
        drawn = self.soft_maximum.draw(len(batch), generator).to(device)
        loss, values, errors, gaps = self._penalised_loss(batch, noise[0], drawn)
        weight = self.log_conservatism.exp()
        metrics = self._move_critics(loss, values, errors, counters) | self._move_policy(batch, noise[1], counters)
        metrics |= {"train/conservative_gap": gaps.detach().mean(), "train/conservatism": weight}
        self._move_conservatism(gaps.detach().mean())
        follow(self.targets, self.critics, self._config.tau)
        return Lesson(metrics, errors.detach().abs().mean(dim=0))

    def _move_conservatism(self, gap: Tensor) -> None:
        """Eq. 30, with ln α in place of α, so that α stays positive: up where the gap is more than it may be."""
        config = self._conservative
        if config.largest_gap is None:
            return
        self.log_conservatism.grad = config.largest_gap - gap
        self._optimisers["conservatism"].step(config.conservatism_learning_rate)
        self.log_conservatism.clamp_(*_LOG_WEIGHT_BOUNDS)

    @property
    def beside_policy(self) -> dict[str, str]:
        """SAC's; the weight of the penalty where it is learnt."""
        learnt = self._conservative.largest_gap is not None
        return super().beside_policy | ({"conservatism": "log_conservatism"} if learnt else {})

    def networks(self) -> Columns:
        """SAC's, and the weight of the penalty."""
        return super().networks() | {"log_conservatism": self.log_conservatism.cpu().numpy().copy()}

    def load_networks(self, arrays: Columns) -> None:
        """The inverse of `networks`."""
        super().load_networks(arrays)
        self.log_conservatism.copy_(torch.from_numpy(np.array(arrays["log_conservatism"])))
