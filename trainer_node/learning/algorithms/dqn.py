"""Deep Q-learning (Mnih et al. 2015) with the extensions that make Rainbow (Hessel et al. 2018), each to be chosen."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from stagecoach.shared.config.algorithms.q_learning import QLearningConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.policy import copy_sharing_buffers
from stagecoach.shared.policies.q_network import LayerNoise, QNetwork
from stagecoach.trainer_node.learning.algorithms.off_policy import Lesson, Minibatch, OffPolicy
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, soft_update, to_device
from stagecoach.trainer_node.learning.replay_buffers.uniform import Batch

Noise = list[LayerNoise] | None


class DQN(OffPolicy):
    policy: QNetwork
    _config: QLearningConfig

    def __init__(self, policy: QNetwork, config: QLearningConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self.target = copy_sharing_buffers(self.policy).requires_grad_(False)
        learned = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self._optimizer = Adam(learned, config.adam_epsilon, config.weight_decay)
        self.parts |= {"target/": self.target, "optimizer/": self._optimizer}
        self.error = nn.functional.smooth_l1_loss if config.loss == "huber" else nn.functional.mse_loss
        self._loss = self.compiled(self.loss, self._optimizer)

    @torch.no_grad()
    def bootstrap(self, batch: Minibatch, choosing: Noise, bootstrapping: Noise) -> Tensor:
        """Returns `[K·B, width]`: the target network's output for the best action after each transition."""
        outputs = self.target.outputs(batch.next_observations, bootstrapping)
        if self._config.double:
            values = self.policy.means(self.policy.outputs(batch.next_observations, choosing))
        else:
            values = self.policy.means(outputs)
        best = self.policy.legal(values, batch.next_observations).argmax(dim=2)
        return of_actions(outputs, best.flatten())

    def loss(self, batch: Minibatch, noise: tuple[Noise, Noise, Noise] = (None, None, None)) -> tuple[Tensor, Lesson]:
        """Returns the scalar loss; `noise` is for the online network, for its choices, and for the target network."""
        learning, choosing, bootstrapping = noise
        (action,) = batch.actions.values()
        heads = self.policy.heads
        reward, discount = batch.reward, batch.discount
        if heads > 1:
            action, reward, discount = (tensor.repeat(heads) for tensor in (action, reward, discount))
        predicted = of_actions(self.policy.outputs(batch.observations, learning), action)
        each, td_error = self._each(batch, predicted, self.bootstrap(batch, choosing, bootstrapping), reward, discount)
        value = self.policy.means(predicted.detach())
        if heads == 1:
            loss, metrics = (batch.weight * each).mean(), {}
        else:
            taught = torch.ones(heads, len(batch), device=each.device) if batch.heads is None else batch.heads
            loss = (batch.weight * taught * each.reshape(heads, -1)).mean()
            td_error = (td_error.reshape(heads, -1).abs() * taught).sum(dim=0) / taught.sum(dim=0).clamp_min(1)
            metrics = {"train/disagreement": value.reshape(heads, -1).std(dim=0, correction=0).mean()}
        metrics |= {"train/td_error": td_error.abs().mean(), "train/q_value": value.mean()}
        return loss, Lesson(metrics | {"train/loss": loss.detach()}, td_error)

    def _each(
        self, batch: Minibatch, predicted: Tensor, after: Tensor, reward: Tensor, discount: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss and the TD error of each transition for each head, both `[K·B]`."""
        if self._config.head == "c51":
            target = project(after.softmax(dim=1), reward, discount, self.policy.support)
            wrong = divergence(predicted.detach(), target)
            return cross_entropy(predicted, target), wrong
        if self._config.head == "hl_gauss":
            value = batch.clipped(reward + discount * self.policy.means(after))
            target = gaussian_histogram(value, self.policy.support, self._config.smoothing)
            return cross_entropy(predicted, target), value - self.policy.means(predicted.detach())
        target = torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), after)
        if self._config.head == "qr":
            wrong = target.mean(dim=1) - predicted.detach().mean(dim=1)
            return quantile_huber(predicted, target), wrong
        predicted, target = predicted.squeeze(1), batch.clipped(target.squeeze(1))
        return self.error(predicted, target, reduction="none"), target - predicted.detach()

    def on_device(self, drawn: Batch) -> Minibatch:
        batch, share = super().on_device(drawn), self._config.bootstrap_share
        if self.policy.heads == 1 or share == 1:
            return batch
        numbers = self.replay_buffer.ring.numbers(drawn.row)
        masks = bootstrap_masks(numbers, self.policy.heads, share, self._setting.seed)
        return replace(batch, heads=to_device(masks, self._setting.device))

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        config, draw = self._config, self.policy.draw_noise
        noise = draw(generator), draw(generator) if config.double else None, draw(generator)
        loss, lesson = self._loss(batch, noise)
        rate = config.learning_rate.value(counters)
        norm, cloned = self.descend(loss, self._optimizer, rate, clones=True, all_inputs=True)
        lesson.metrics.update(cloned, **{"train/grad_norm": norm})
        if (self.done + 1) % config.target_update_steps == 0:
            soft_update(self.target, self.policy, config.tau)
        return lesson


def of_actions(outputs: Tensor, actions: Tensor) -> Tensor:
    """`[B, A, width]` and `[B]` → `[B, width]`."""
    return outputs.gather(1, actions.reshape(-1, 1, 1).expand(-1, 1, outputs.shape[2])).squeeze(1)


def project(probabilities: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """Φ T̂ Z (Bellemare et al. 2017, alg. 1): the distribution of reward + discount · Z, put on the atoms of Z.

    `probabilities` `[B, N]` of Z at the atoms `support` `[N]` (equally spaced); `reward` and `discount` `[B]`; returns
    `[B, N]`. Each atom gets what lies within one spacing of it, the nearer the more: as a dense sum, because to scatter
    would add up in an order of its own on a GPU.
    """
    low, high, spacing = support[0], support[-1], support[1] - support[0]
    moved = (reward.unsqueeze(1) + discount.unsqueeze(1) * support).clamp(low, high)
    share = (1 - (moved.unsqueeze(1) - support.unsqueeze(1)).abs() / spacing).clamp_min(0)
    return (share * probabilities.unsqueeze(1)).sum(dim=2)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """`[B]`: −Σ target log softmax(logits), both `[B, N]`."""
    return -(target * logits.log_softmax(dim=1)).sum(dim=1)


def gaussian_histogram(value: Tensor, support: Tensor, smoothing: float) -> Tensor:
    """`[B, N]`: a normal distribution around each value `[B]`, as the share of it nearest to each of `support` `[N]`.
    Farebrother et al. 2024, section 3.2: the standard deviation is `smoothing` distances of neighbors; what is beyond
    the ends by more than half of one is left out, and values are clipped to the ends."""
    spacing = support[1] - support[0]
    edges = torch.cat([support[:1] - spacing / 2, support + spacing / 2])
    places = (edges - value.clamp(support[0], support[-1]).unsqueeze(1)) / (spacing * smoothing)
    shares: Tensor = torch.special.ndtr(places).diff(dim=1)
    return shares / shares.sum(dim=1, keepdim=True)


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """`[B]`: KL(target ‖ softmax(logits)), which Rainbow takes for the priority; never below 0."""
    found: Tensor = cross_entropy(logits, target) + torch.special.xlogy(target, target).sum(dim=1)
    return found.clamp_min(0)


def quantile_huber(quantiles: Tensor, target: Tensor) -> Tensor:
    """`[B]`: Σ_i mean_j |τ_i − 1{u_ij < 0}| L(u_ij), u_ij = target_j − quantiles_i, L Huber's loss with κ = 1 (Dabney
    et al. 2018, eq. 10 and alg. 1); `[B, N]` and `[B, M]`; τ_i = (i + ½) / N."""
    count = quantiles.shape[1]
    midpoints = (torch.arange(count, device=quantiles.device) + 0.5) / count
    error = target.unsqueeze(1) - quantiles.unsqueeze(2)
    huber = torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)
    side = (midpoints.reshape(1, -1, 1) - (error.detach() < 0).to(error.dtype)).abs()
    return (side * huber).mean(dim=2).sum(dim=1)


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def bootstrap_masks(numbers: Array, heads: int, share: float, seed: int) -> Array:
    """Bootstrap sample of each head of an ensemble (Osband et al. 2016): `[heads, B]`, float32, 1 with probability
    `share`, else 0. It follows from a transition's number among all ever added, so nothing is stored."""
    key = np.random.SeedSequence([seed, heads]).generate_state(1, np.uint64)[0]
    cells = numbers.astype(np.uint64) * np.uint64(heads) + np.arange(heads, dtype=np.uint64)[:, np.newaxis]
    mixed = cells * _GOLDEN + key  # by SplitMix64's finalizer (Steele, Lea and Flood 2014)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    masks: Array = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53 < share
    return masks.astype(np.float32)
