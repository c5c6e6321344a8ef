"""Deep Q-learning (Mnih et al. 2015) with the extensions that make Rainbow (Hessel et al. 2018), each to be chosen.

Order of the file: target, loss, gradient step, state. Memory and minibatches are trainer_node/algorithms/off_policy.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from shared.algorithm_configs.dqn import QLearningConfig
from shared.policies.noisy import LayerNoise
from shared.policies.policy import copy_sharing_buffers
from shared.policies.q_network import QNetwork
from shared.spaces import Columns
from shared.steps import Counters
from trainer_node.algorithms import distributional
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.bootstrap_masks import bootstrap_masks
from trainer_node.algorithms.descent import descend, follow
from trainer_node.algorithms.named_arrays import load_network_state, network_state, part
from trainer_node.algorithms.off_policy import Lesson, Minibatch, OffPolicy
from trainer_node.memories.batch import Batch

_TARGET, _OPTIMISER = "target/", "optimiser/"
Noise = list[LayerNoise] | None


class DQN(OffPolicy):
    """Learns one policy."""

    policy: QNetwork

    def __init__(self, policy: QNetwork, config: QLearningConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._config = config
        self.target = copy_sharing_buffers(self.policy).requires_grad_(False)
        """The network that bootstraps."""
        self._parameters = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self._optimiser = Adam(self._parameters, config.adam_epsilon)
        self._loss = self.compiled(self.loss)

    @torch.no_grad()
    def bootstrap(self, batch: Minibatch, choosing: Noise, bootstrapping: Noise) -> Tensor:
        """`[K·B, width]`: the target network's output for the action that is best after each transition.

        Each head of an ensemble bootstraps from itself.
        """
        outputs = self.target.outputs(batch.next_observations, bootstrapping)
        if self._config.double:
            values = self.policy.means(self.policy.outputs(batch.next_observations, choosing))
        else:
            values = self.policy.means(outputs)
        return _of_actions(outputs, values.argmax(dim=1))

    def loss(self, batch: Minibatch, noise: tuple[Noise, Noise, Noise] = (None, None, None)) -> tuple[Tensor, Lesson]:
        """The scalar loss of a minibatch; noise of the online network, of it as it chooses, of the target network."""
        learning, choosing, bootstrapping = noise
        (action,) = batch.actions.values()
        heads = self.policy.heads
        reward, discount = batch.reward, batch.discount
        if heads > 1:
            action, reward, discount = (tensor.repeat(heads) for tensor in (action, reward, discount))
        predicted = _of_actions(self.policy.outputs(batch.observations, learning), action)
        after = self.bootstrap(batch, choosing, bootstrapping)
        each, td_error = self._each(predicted, after, reward, discount)
        value = self.policy.means(predicted.detach())
        if heads == 1:
            loss, metrics = (batch.weight * each).mean(), {}
        else:
            taught = torch.ones(heads, len(batch), device=each.device) if batch.heads is None else batch.heads
            loss = (batch.weight * taught * each.reshape(heads, -1)).mean()
            td_error = (td_error.reshape(heads, -1).abs() * taught).sum(dim=0) / taught.sum(dim=0).clamp_min(1)
            metrics = {"train/disagreement": value.reshape(heads, -1).std(dim=0, correction=0).mean()}
        metrics |= {
            "train/loss": loss.detach(), "train/td_error": td_error.abs().mean(), "train/q_value": value.mean(),
        }  # fmt: skip
        return loss, Lesson(metrics, td_error)

    def _each(self, predicted: Tensor, after: Tensor, reward: Tensor, discount: Tensor) -> tuple[Tensor, Tensor]:
        """`[K·B]`: the loss of each transition for each head, and how wrong it was."""
        if self._config.head == "c51":
            target = distributional.project(after.softmax(dim=1), reward, discount, self.policy.support)
            wrong = distributional.divergence(predicted.detach(), target)
            return distributional.cross_entropy(predicted, target), wrong
        target = torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), after)
        if self._config.head == "qr":
            wrong = target.mean(dim=1) - predicted.detach().mean(dim=1)
            return distributional.quantile_huber(predicted, target), wrong
        predicted, target = predicted.squeeze(1), target.squeeze(1)
        error = nn.functional.smooth_l1_loss if self._config.loss == "huber" else nn.functional.mse_loss
        return error(predicted, target, reduction="none"), target - predicted.detach()

    def _on_device(self, drawn: Batch) -> Minibatch:
        batch, share = super()._on_device(drawn), self._config.bootstrap_share
        if self.policy.heads == 1 or share == 1:
            return batch
        numbers = self.memory.ring.numbers(drawn.row)
        return replace(
            batch, heads=self._tensor(bootstrap_masks(numbers, self.policy.heads, share, self._setting.seed))
        )

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        """One gradient step; after every `target_update_steps` of them the target network follows."""
        config = self._config
        noise = (
            self.policy.draw_noise(generator),
            self.policy.draw_noise(generator) if config.double else None,
            self.policy.draw_noise(generator),
        )
        loss, lesson = self._loss(batch, noise)
        rate = config.learning_rate.value(counters)
        lesson.metrics["train/grad_norm"] = descend(loss, self._parameters, self._optimiser, rate, config.max_grad_norm)
        if (self.done + 1) % config.target_update_steps == 0:
            follow(self.target, self.policy, config.tau)
        return lesson

    def networks(self) -> Columns:
        """Target network and optimiser."""
        optimiser = {_OPTIMISER + name: array for name, array in self._optimiser.state().items()}
        return network_state(self.target, _TARGET) | optimiser

    def load_networks(self, arrays: Columns) -> None:
        """The inverse of `networks`."""
        load_network_state(self.target, _TARGET, arrays)
        self._optimiser.load_state(part(arrays, _OPTIMISER))


def _of_actions(outputs: Tensor, actions: Tensor) -> Tensor:
    """`[B, A, width]` and `[B]` → `[B, width]`."""
    if outputs.shape[2] == 1:
        return outputs.squeeze(2).gather(1, actions.reshape(-1, 1))
    return outputs.gather(1, actions.reshape(-1, 1, 1).expand(-1, 1, outputs.shape[2])).squeeze(1)
