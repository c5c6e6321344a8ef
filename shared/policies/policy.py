"""What every policy is: a torch module that a worker acts with and the trainer learns, the same class on both sides."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.encoders import ObservationNormalizer

Network = TypeVar("Network", bound=nn.Module)


class Distribution(Protocol):
    """How actions follow from a policy's outputs: pure functions of `params` [B, P]; actions are dicts of columns."""

    draws: bool
    """Whether `sample` may give another action than `mode`."""

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """A random joint action."""

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        """The best joint action: how evaluation acts."""

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`, natural logarithm (density for boxes), of what `sample` draws."""


class Policy(nn.Module):
    """Base of all policies. A subclass sets `kind` and `distribution`, and computes `action_parameters`.

    Its constructor takes spaces, config and, as keyword arguments of plain data, what the algorithm asks of the network
    (`AlgorithmConfig.network`). All that acting needs is among its parameters and buffers, and nothing else should be:
    they are what travels to the workers with each version.

    Observations and actions are dicts of columns (shared/experience/spaces.py) with a batch axis first.
    """

    kind: ClassVar[str]
    """The word for its class in the files (shared/policies/registry.py)."""
    distribution: Distribution

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig, **network: Any) -> None:
        super().__init__()
        self.spaces = spaces
        self.config = config
        self.network = network
        """What it was made with beside the config; stands in its file."""
        normalizer = ObservationNormalizer(spaces.observation, config.clip_observations)
        self.normalizer = normalizer if config.normalize_observations else None

    @property
    def state_size(self) -> int:
        """How many numbers it remembers from step to step, per slot; 0 for one that acts on the observation alone."""
        return self.config.state_size

    def initial_state(self, slots: int) -> Tensor:
        """`[slots, state_size]`: what it remembers at the beginning of an episode."""
        return torch.zeros(slots, self.state_size, device=next(self.parameters()).device)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, P]` for `self.distribution`; only of a policy without state."""
        raise NotImplementedError(f"a policy of kind {self.kind} has no parameters for observations alone")

    def exploring_parameters(self, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """`action_parameters` as one acts in training: with noise on the weights, where a policy has that."""
        return self.action_parameters(observations)

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, P]` for `self.distribution` from observations and state `[B, state_size]`; and the state after them."""
        return self.action_parameters(observations), state

    def estimates(self, observations: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """What it has learned to predict, in the units of the rewards that were learned from: `value` `[B]`, the
        discounted return, and `action_values` `[B, A]`, that after each choice; only what its network knows."""
        return {}


def copy_sharing_buffers(network: Network) -> Network:
    """A copy with weights of its own that has the buffers of `network`, for all that acts or learns beside it (target
    networks, disturbed policies): statistics move with each batch, and a copy's own would become stale."""
    return copy.deepcopy(network, {id(buffer): buffer for buffer in network.buffers()})
