"""Recurrent replay distributed DQN (R2D2, Kapturowski et al. 2019): Q-learning of sequences with a recurrent core.

Each gradient step recomputes hidden states from stored states: first through the burn-in fragments, by both networks
and without gradients, then through the learned sequence.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.q_learning import R2D2Config
from stagecoach.shared.config.algorithms.replay_buffer import PrioritizedReplay
from stagecoach.shared.policies.q_network import RecurrentQNetwork, rescaled, unscaled
from stagecoach.trainer_node.learning.algorithms.dqn import DQN
from stagecoach.trainer_node.learning.algorithms.off_policy import Lesson
from stagecoach.trainer_node.learning.building_blocks.interface import Setting
from stagecoach.trainer_node.learning.replay_buffers import sequences


@dataclass(frozen=True)
class Sequences:
    """A `SequenceBatch` on the device, its spans as (observations, over, state_in, goes_on)."""

    spans: tuple[tuple[dict[str, Tensor], Tensor, Tensor, Tensor], ...]
    action: Tensor
    next_observations: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    last: Tensor
    mask: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.weight)

    @property
    def steps(self) -> Tensor:
        """Returns the number of counted steps `[B]` of each sequence, at least 1."""
        return self.mask.sum(dim=0).clamp_min(1)

    def take(self, rows: slice) -> Self:
        def own(tensor: Tensor) -> Tensor:
            return tensor.reshape(*self.mask.shape, *tensor.shape[1:])[:, rows].flatten(0, 1)

        spans = tuple(
            ({name: own(tensor) for name, tensor in seen.items()}, over[:, rows], state[rows], goes_on[rows])
            for seen, over, state, goes_on in self.spans
        )
        after = {name: own(tensor) for name, tensor in self.next_observations.items()}
        numbers = own(self.action), after, own(self.reward), own(self.discount)
        return type(self)(spans, *numbers, self.last[:, rows], self.mask[:, rows], self.weight[rows])


class R2D2(DQN):
    policy: RecurrentQNetwork
    target: RecurrentQNetwork
    _config: R2D2Config

    def __init__(self, policy: RecurrentQNetwork, config: R2D2Config, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        size = (policy.spaces, setting.fragment_steps, setting.slots, config.replay_buffer.capacity)
        named: dict[str, Any] = {"state_size": policy.state_size, "burn_in": config.burn_in_fragments}
        if isinstance(config.replay_buffer, PrioritizedReplay):
            named |= {"alpha": config.replay_buffer.alpha, "epsilon": config.replay_buffer.epsilon}
            self.replay_buffer = sequences.PrioritizedSequences(*size, **named)
        else:
            self.replay_buffer = sequences.SequenceReplayBuffer(*size, **named)

    @property
    def minibatch_rows(self) -> int:
        return self._config.sequences(self._setting.fragment_steps)

    def share(self, batch: Sequences) -> float | Tensor:
        steps, rows = batch.steps, self.rows(batch)
        return 1.0 if rows == slice(0, len(batch)) else steps[rows].sum() / steps.sum()

    def on_device(self, drawn: sequences.SequenceBatch) -> Sequences:  # type: ignore[override]
        spans = tuple(tuple(map(self._moved, vars(span).values())) for span in drawn.spans)
        (action,) = drawn.actions.values()
        rest = (drawn.next_observations, drawn.reward, drawn.discount, drawn.last, drawn.mask, drawn.weight)
        return Sequences(spans, *map(self._moved, (action, *rest)))

    def states(self, network: RecurrentQNetwork, batch: Sequences) -> Tensor:
        """Returns `[T · B, state size]`: the network's hidden state after each step of the sequences."""
        (_, _, state, _), states = batch.spans[0], torch.empty(0)
        for number, (observations, over, stored, goes_on) in enumerate(batch.spans):
            if number:
                left = states[-1].masked_fill(batch.spans[number - 1][1][-1].unsqueeze(1), 0.0)
                state = torch.where(goes_on.unsqueeze(1), left, stored)
            with torch.set_grad_enabled(torch.is_grad_enabled() and number == len(batch.spans) - 1):
                states = network.states(observations, state, over)
        return states.flatten(0, 1)

    def loss(self, batch: Sequences, noise: object = None) -> tuple[Tensor, Lesson]:  # type: ignore[override]
        """Returns the scalar loss; the lesson's errors `[B]` become the sequences' priorities. y_t = h(Σ γ^i r_{t+i} +
        γ^n h⁻¹(Q_target(s_{t+n}, best action by the online network)))."""
        config, online = self._config, self.states(self.policy, batch)
        values = self.policy.values(batch.spans[-1][0], online)
        predicted = values.gather(1, batch.action.reshape(-1, 1)).reshape(batch.mask.shape)
        with torch.no_grad():
            after = self.after(self.target, batch, self.states(self.target, batch))
            best = self.after(self.policy, batch, online) if config.double else after
            chosen = after.gather(1, best.argmax(dim=1, keepdim=True)).reshape(batch.mask.shape)
            following = chosen.gather(0, batch.last)
            following = unscaled(following) if config.rescale_values else following
            target = torch.addcmul(batch.reward, batch.discount, following.flatten()).reshape(batch.mask.shape)
            target = rescaled(target) if config.rescale_values else target
        each = self.error(predicted, target, reduction="none") * batch.mask * batch.weight
        wrong = (target - predicted.detach()).abs() * batch.mask
        steps = batch.steps
        mean = wrong.sum(dim=0) / steps
        loss = each.sum() / steps.sum()
        metrics = {"train/loss": loss.detach(), "train/td_error": wrong.sum() / steps.sum()}
        metrics["train/q_value"] = (predicted.detach() * batch.mask).sum() / steps.sum()
        return loss, Lesson(metrics, config.priority_mix * wrong.amax(dim=0) + (1 - config.priority_mix) * mean)

    def after(self, network: RecurrentQNetwork, batch: Sequences, states: Tensor) -> Tensor:
        """Returns `[T · B, A]`: the network's values after each step, from its hidden states then."""
        return network.values(batch.next_observations, network.state_after(batch.next_observations, states))
