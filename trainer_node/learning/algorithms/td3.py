"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018).

DDPG (Lillicrap et al. 2016) is the same with one critic, and without delay and noise on the targets (`DDPGConfig`).
TD3+BC (Fujimoto and Gu 2021) learns from recorded experience: the policy stays near what the data do.
"""

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.off_policy import DDPGConfig, TD3Config
from stagecoach.shared.config.algorithms.offline import TD3BCConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.policies.continuous import Deterministic
from stagecoach.shared.policies.policy import copy_sharing_buffers
from stagecoach.trainer_node.learning.algorithms.off_policy import ActorAndCritics, Lesson, Minibatch
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.building_blocks.optimization import soft_update

_LEAST_VALUE = 1e-6


class TD3(ActorAndCritics):
    _config: TD3Config | DDPGConfig

    def __init__(self, policy: Deterministic, config: TD3Config | DDPGConfig, setting: Setting) -> None:
        self._bounds = policy.bounds
        super().__init__(policy, config, setting, count=config.critics, action_size=policy.bounds.size)
        self.target_policy = copy_sharing_buffers(policy)
        self.parts["target_policy/"] = self.target_policy
        self._critic_loss = self.compiled(self.critic_loss, self._critics_adam)
        self._actor_loss = self.compiled(self.actor_loss, self._actor_adam)

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """Returns `[B]`, eq. 14 and 15: r + γ min Q'(s', π'(s') + clipped noise); `noise` `[B, D]` is normal."""
        bound = self._config.target_noise_clip
        with torch.no_grad():
            action = torch.tanh(self.target_policy.action_parameters(batch.next_observations))
            disturbed = action + (self._config.target_noise * noise).clamp(-bound, bound)
            values: Tensor = self.targets(batch.next_observations, self.policy.normalizer, disturbed.clamp(-1.0, 1.0))
            return batch.clipped(batch.reward + batch.discount * values.squeeze(2).amin(dim=0))

    def critic_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the weighted mean squared error summed over critics; values and errors, `[C, B]`."""
        values = self.critics(batch.observations, self.policy.normalizer, self._bounds.flat(batch.actions)).squeeze(2)
        errors = values - self.targets_of(batch, noise)
        return (batch.weight * errors.square()).mean(dim=1).sum(), values, errors

    def actor_loss(self, batch: Minibatch) -> Tensor:
        """Returns the weighted mean of −Q of the first critic, at the policy's action."""
        return -(batch.weight * self._acted(batch)[1]).mean()

    def _acted(self, batch: Minibatch) -> tuple[Tensor, Tensor]:
        """Returns the policy's actions in [-1, 1], `[B, D]`, and the first critic's values `[B]`."""
        action = torch.tanh(self.policy.action_parameters(batch.observations))
        value: Tensor = self.critics(batch.observations, self.policy.normalizer, action, first_only=True)
        return action, value.reshape(-1)

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        noise = torch.randn(len(batch), self._bounds.size, generator=generator).to(self._setting.device)
        metrics, td_error = self._step_critics(*self._critic_loss(batch, noise), counters)
        if (self.done + 1) % self._config.policy_delay == 0:
            metrics |= self._step_actor(self._actor_loss(batch, *self._beside(batch)), counters)
            soft_update(self.targets, self.critics, self._config.tau)
            soft_update(self.target_policy, self.policy, self._config.tau)
        return Lesson(metrics, td_error)

    def _beside(self, batch: Minibatch) -> tuple[Tensor, ...]:
        """Returns extra arguments of the actor loss."""
        return ()


class TD3BC(TD3):
    _config: TD3BCConfig

    def __init__(self, policy: Deterministic, config: TD3Config | DDPGConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._size = self.compiled(self.size)

    @torch.no_grad()
    def size(self, batch: Minibatch) -> Tensor:
        return self._acted(batch)[1].abs().mean()

    def _beside(self, batch: Minibatch) -> tuple[Tensor, ...]:
        """Returns mean |Q| over the minibatch if the loss sees a rank's part alone."""
        return () if self._share == 1.0 else (self.mean_of_all(self._size(batch)),)

    def actor_loss(self, batch: Minibatch, size: Tensor | None = None) -> Tensor:
        """Returns the weighted mean of −λ Q + (π(s) − a)² (Fujimoto and Gu, eq. 5), a in [-1, 1]; λ = α / mean |Q|."""
        action, value = self._acted(batch)
        size = value.detach().abs().mean() if size is None else size
        share = self._config.value_weight / size.clamp_min(_LEAST_VALUE)
        apart = (action - self._bounds.flat(batch.actions)).square().mean(dim=1)
        return (batch.weight * (apart - share * value)).mean()
