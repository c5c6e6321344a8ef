"""Base class of reward signals, and the networks that they use."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import SpaceSpec
from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer, flat, flat_size, linear
from stagecoach.shared.policies.encoders import mlp as hidden_layers
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Pairs


@dataclass(frozen=True)
class Rows(Pairs):
    """Transitions, a row each; every dict is columns `[B, …]` (shared/experience/fragment.py)."""

    next_observations: dict[str, Tensor]
    """`obs…` after the step; where it terminated and that is not known, what stands there means nothing."""


class RewardSignal(nn.Module):
    """Base of all signals. A subclass computes `reward`, and `loss` if it learns; parameters that want gradients are
    learned. Parameters and buffers are its state: named arrays in each checkpoint."""

    needs_next: ClassVar[bool] = True
    """True if it reads next observations; then steps without a known one are neither rewarded nor learned."""
    scaled: ClassVar[bool] = True
    """True if its rewards are divided by the running deviation of their discounted returns."""
    clip: ClassVar[float] = 5.0
    """Bound of a normalized observation, in standard deviations (Burda et al. 2019, section 2.4)."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.normalizer = ObservationNormalizer(policy.spaces.observation.own, self.clip)
        """The statistics that observations are normalized with, apart from the policy's."""

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """Takes each update's observations `[B, …]` into statistics, before anything else, also in warm-up."""
        self.normalizer.update(observations)

    def reward(self, rows: Rows) -> Tensor:
        """Returns the rewards of transitions, `[B]`; no gradients are recorded. Must not change the state."""
        raise NotImplementedError

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns the scalar loss of a minibatch, None for a signal that does not learn, and metrics by name.

        Args:
            rows: transitions of the update.
            generator: source of all randomness (CPU).
        """
        return None, {}


def mlp(inputs: int, hidden: Sequence[int], outputs: int, activation: Literal["tanh", "relu"]) -> nn.Sequential:
    layers, width = hidden_layers(inputs, PolicyConfig(hidden_sizes=tuple(hidden), activation=activation))
    return nn.Sequential(*layers, linear(width, outputs, 1.0))


class Embedding(nn.Module):
    """Observations → `[B, size]`, float32: an encoder as `config` has it, with layers of its own, and a linear head."""

    def __init__(self, observation: SpaceSpec, config: PolicyConfig, size: int, gain: float = math.sqrt(2)) -> None:
        super().__init__()
        self.encoder = Encoder(observation, config)
        self.head = linear(self.encoder.features, size, gain)

    def forward(self, observations: Mapping[str, Tensor], normalizer: ObservationNormalizer | None) -> Tensor:
        embedded: Tensor = self.head(self.encoder(observations, normalizer))
        return embedded


def embedding(policy: Policy, hidden_sizes: tuple[int, ...], size: int) -> Embedding:
    changes = {"hidden_sizes": hidden_sizes, "activation": "relu"}
    return Embedding(policy.spaces.observation.own, policy.config.model_copy(update=changes), size)


class ActionEncoding(nn.Module):
    """Action columns `[B, …]` → `[B, size]`, float32, that networks can take in and predict."""

    def __init__(self, action: SpaceSpec) -> None:
        super().__init__()
        self._leaves = action.leaves
        self.size = sum(flat_size(leaf) for leaf in action.leaves)
        for number, leaf in enumerate(action.leaves):
            if leaf.kind == "box":
                for name, bound in zip(("low", "high"), leaf.bounds(), strict=True):
                    self.register_buffer(f"{name}{number}", torch.from_numpy(bound.reshape(-1)), persistent=False)

    def forward(self, actions: Mapping[str, Tensor]) -> Tensor:
        """One-hot choices; boxes clipped to their bounds, as the environment takes them, and rescaled to [-1, 1] where
        both bounds are finite."""
        parts = []
        for number, leaf in enumerate(self._leaves):
            values = flat(actions[leaf.column("action")], leaf)
            if leaf.kind == "box":
                low, high = self.get_buffer(f"low{number}"), self.get_buffer(f"high{number}")
                clipped, span = values.clamp(low, high), high - low
                values = torch.where(span.isfinite() & (span > 0), 2 * (clipped - low) / span - 1, clipped)
            parts.append(values)
        return torch.cat(parts, dim=1)

    def errors(self, guessed: Tensor, actions: Tensor) -> Tensor:
        """`[B]`: how wrong a network's outputs are about encoded actions: cross-entropy of each choice plus half the
        squared error of each element of a box."""
        total, at = torch.zeros(len(guessed), device=guessed.device), 0
        for leaf in self._leaves:
            for size in leaf.nvec or (leaf.size,):
                found, wanted = guessed[:, at : at + size], actions[:, at : at + size]
                if leaf.kind == "box":
                    total = total + 0.5 * (found - wanted).square().sum(dim=1)
                else:
                    total = total - (wanted * found.log_softmax(dim=1)).sum(dim=1)
                at += size
        return total
