"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018); `ddpg.py` is the same without its additions.

Order of the file: losses, one gradient step, state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.algorithm_configs.ddpg import DDPGConfig
from shared.algorithm_configs.td3 import TD3Config
from shared.policies.actor import Deterministic
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


class TD3(OffPolicy):
    """Learns one policy."""

    def __init__(self, policy: Deterministic, config: TD3Config | DDPGConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config
        self._bounds = policy.bounds
        with borrowed_random_state(update_seed(setting.seed, 0)):
            made = Critics(
                policy.spaces.observation, policy.config, count=config.critics, action_size=policy.bounds.size
            )
        self.critics = made.to(setting.device)
        self.targets = copy_sharing_buffers(self.critics)
        self.target_policy = copy_sharing_buffers(policy)
        self._optimisers = {
            "actor": Adam(policy.parameters(), config.adam_epsilon),
            "critics": Adam(self.critics.parameters(), config.adam_epsilon),
        }
        self._critic_loss = self.compiled(self.critic_loss)
        self._actor_loss = self.compiled(self.actor_loss)

    def targets_of(self, batch: Minibatch, noise: Tensor) -> Tensor:
        """`[B]`, eq. 14 and 15: r + γ min Q'(s', π'(s') + clipped noise); `noise` `[B, D]` is standard normal."""
        config = self._config
        with torch.no_grad():
            action = torch.tanh(self.target_policy.action_parameters(batch.next_observations))
            disturbed = action + (config.target_noise * noise).clamp(
                -config.target_noise_clip, config.target_noise_clip
            )
            values: Tensor = self.targets(batch.next_observations, self.policy.normaliser, disturbed.clamp(-1.0, 1.0))
            return batch.reward + batch.discount * values.squeeze(2).amin(dim=0)

    def critic_loss(self, batch: Minibatch, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted mean squared error, summed over the critics; the values and the errors `[C, B]`."""
        actions = self._bounds.flat(batch.actions)
        values = self.critics(batch.observations, self.policy.normaliser, actions).squeeze(2)
        errors = values - self.targets_of(batch, noise)
        return (batch.weight * errors.square()).mean(dim=1).sum(), values, errors

    def actor_loss(self, batch: Minibatch) -> Tensor:
        """The weighted mean of −Q of the first critic, at the policy's action."""
        action = torch.tanh(self.policy.action_parameters(batch.observations))
        value: Tensor = self.critics(batch.observations, self.policy.normaliser, action, first_only=True)
        return -(batch.weight * value.reshape(-1)).mean()

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """One step of the critics, and at every `policy_delay`-th one of the policy and the targets."""
        config, optimisers = self._config, self._optimisers
        rate = config.learning_rate.value(counters)
        noise = torch.randn(len(batch), self._bounds.size, generator=generator).to(self._setting.device)
        loss, values, errors = self._critic_loss(batch, noise)
        critic_rate = config.critic_learning_rate.value(counters) if config.critic_learning_rate else rate
        norm = descend(loss, list(self.critics.parameters()), optimisers["critics"], critic_rate, config.max_grad_norm)
        metrics = {
            "train/critic_loss": loss.detach(),
            "train/q_value": values.detach().mean(),
            "train/td_error": errors.detach().abs().mean(),
            "train/grad_norm": norm,
        }
        if (self.done + 1) % config.policy_delay == 0:
            actor_loss = self._actor_loss(batch)
            policy_loss, cloned = self.imitating(actor_loss)
            descend(policy_loss, list(self.policy.parameters()), optimisers["actor"], rate, config.max_grad_norm)
            metrics |= cloned | {"train/actor_loss": actor_loss.detach()}
            follow(self.targets, self.critics, config.tau)
            follow(self.target_policy, self.policy, config.tau)
        return Lesson(metrics, errors.detach().abs().mean(dim=0))

    @property
    def beside_policy(self) -> dict[str, str]:
        """The critics."""
        return {"critics": "critics/"}

    def networks(self) -> Columns:
        """Critics, all targets and both optimisers."""
        arrays = network_state(self.critics, "critics/") | network_state(self.targets, "targets/")
        arrays |= network_state(self.target_policy, "target_policy/")
        for name, optimiser in self._optimisers.items():
            arrays |= {f"adam/{name}/{key}": array for key, array in optimiser.state().items()}
        return arrays

    def load_networks(self, arrays: Columns) -> None:
        """The inverse of `networks`."""
        load_network_state(self.critics, "critics/", arrays)
        load_network_state(self.targets, "targets/", arrays)
        load_network_state(self.target_policy, "target_policy/", arrays)
        for name, optimiser in self._optimisers.items():
            optimiser.load_state(part(arrays, f"adam/{name}/"))
