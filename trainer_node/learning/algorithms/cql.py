"""Conservative Q-learning (Kumar et al. 2020), CQL(H): SAC whose critics are held down where data have no action."""

import math

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.offline import CQLConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.continuous import Actor
from stagecoach.shared.policies.masks import masked
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from stagecoach.trainer_node.learning.algorithms.sac import SAC, Drawn
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam

_LOG_WEIGHT_BOUNDS = math.log(1e-6), math.log(1e6)
"""Bounds of a learned penalty weight, so that it recovers soon after a gap that cannot reach `largest_gap`."""
_WEIGHT_LEARNING_RATE = 3e-4


class CQL(SAC):
    _config: CQLConfig

    def __init__(self, policy: Actor, config: CQLConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._penalized_loss = self.compiled(self.penalized_loss, self._critics_adam)
        self._clones = config.cloning_steps > 0
        self.log_conservatism = torch.tensor(math.log(config.conservatism), device=setting.device)
        self._conservatism_adam = Adam([self.log_conservatism], config.adam_epsilon)
        self.parts |= {"log_conservatism": self.log_conservatism, "adam/conservatism/": self._conservatism_adam}
        if config.largest_gap is not None:
            self.beside_policy["conservatism"] = "log_conservatism"

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """Returns `[B]`: r + γ E[min Q'], with the entropy term of SAC if `value_entropy`."""
        if self._config.value_entropy:
            return super().targets_of(batch, noise)
        with torch.no_grad():
            then = self.actions.consider(self.targets, batch.next_observations, noise)
            return batch.reward + batch.discount * then.expectation(then.value)

    def gaps(self, batch: Minibatch, values: Tensor, drawn: Tensor) -> Tensor:
        """Returns `[C, B]`, eq. 4: the soft maximum less the `values` `[C, B]` of the recorded actions."""
        return self.soft_maximum(batch, drawn) - values

    def penalized_loss(self, batch: Minibatch, noise: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns SAC's critic loss plus the weighted gaps; values, errors and gaps, `[C, B]`."""
        loss, values, errors = self.critic_loss(batch, noise)
        gaps = self.gaps(batch, values, drawn)
        penalty = self.log_conservatism.exp() * (batch.weight * gaps).mean(dim=1).sum()
        return loss + penalty, values, errors, gaps

    def actor_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns SAC's actor loss; during `cloning_steps`, −ln π of the recorded action replaces −Q."""
        if not self._clones:
            return super().actor_loss(batch, noise)
        now = self.actions.consider(self.critics, batch.observations, noise)
        entropies = -now.expectation(now.log_prob)
        params = self.policy.action_parameters(batch.observations)
        likelihood = self.policy.distribution.log_prob(params, batch.actions)
        cost = -self.log_temperature.detach().exp() * entropies - likelihood
        return (batch.weight * cost).mean(), entropies.detach()

    def draw(self, rows: int, generator: torch.Generator) -> Tensor:
        """Returns the noise of `soft_maximum`, for boxes `[B, 3, A, D]`: uniform actions and standard normal."""
        if not isinstance(self.actions, Drawn):
            return torch.zeros(0)
        shape = (rows, self._config.considered_actions, self.actions.shape["action_size"])
        uniform = 2.0 * torch.rand(shape, generator=generator) - 1.0
        return torch.stack([uniform, *(torch.randn(shape, generator=generator) for _ in range(2))], dim=1)

    def soft_maximum(self, batch: Minibatch, drawn: Tensor) -> Tensor:
        """Returns `[C, B]`: ln ∫ exp Q(s, a) da over [-1, 1]^D (a sum for one choice), by importance sampling: a third
        of the actions are uniform, the others the policy's. Gradients go to the critics alone."""
        if not isinstance(self.actions, Drawn):
            values = self.critics(batch.observations, self.policy.normalizer, None)
            return torch.logsumexp(masked(values, batch.observations, self.policy.spaces), dim=2)
        with torch.no_grad():
            drawn = drawn.transpose(0, 1)
            volume = torch.full_like(drawn[0, ..., 0], drawn.shape[-1] * math.log(2.0))
            actions, densities = [drawn[0]], [-volume]  # [B, A, D], and the log density that each was drawn with
            for noise, seen in zip(drawn[1:], (batch.observations, batch.next_observations), strict=True):
                params = self.policy.action_parameters(seen).unsqueeze(1)
                action, density = self.actions.distribution.reparameterized(params, noise)
                actions.append(action)
                densities.append(density)
        proposed = torch.cat(actions, dim=1)
        values = self.critics.of_each(batch.observations, self.policy.normalizer, proposed)
        return torch.logsumexp(values - torch.cat(densities, dim=1), dim=2) - math.log(proposed.shape[1])

    def _move_critics(
        self, batch: Minibatch, noise: Tensor, counters: Counters, generator: torch.Generator
    ) -> tuple[dict[str, Tensor], Tensor]:
        self._clones = self.done < self._config.cloning_steps
        drawn = self.draw(len(batch), generator).to(self._setting.device)
        loss, values, errors, gaps = self._penalized_loss(batch, noise, drawn)
        gap, weight = gaps.detach().mean(), self.log_conservatism.exp()
        metrics, td_error = self._step_critics(loss, values, errors, counters)
        self.move_conservatism(self.mean_of_all(gap))
        return metrics | {"train/conservative_gap": gap, "train/conservatism": weight}, td_error

    def move_conservatism(self, gap: Tensor) -> None:
        """Moves the weight by eq. 30, on ln α so that α stays positive: up if the gap exceeds `largest_gap`."""
        if self._config.largest_gap is not None:
            self.log_conservatism.grad = self._config.largest_gap - gap
            self._conservatism_adam.step(_WEIGHT_LEARNING_RATE)
            self.log_conservatism.clamp_(*_LOG_WEIGHT_BOUNDS)
