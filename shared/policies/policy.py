"""Base of all policies: a torch module that a worker acts with and the trainer learns."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces, SpaceSpec
from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer

Network = TypeVar("Network", bound=nn.Module)


class Distribution(Protocol):
    """Distribution of actions given a policy's outputs: pure functions of `params` [B, P]."""

    draws: bool
    """`sample` may differ from `mode`."""

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
        """Constructor arguments in addition to the config; stored in its file."""
        normalizer = ObservationNormalizer(spaces.observation, config.clip_observations)
        self.normalizer = normalizer if config.normalize_observations else None

    def make_encoder(self, observation: SpaceSpec, config: PolicyConfig) -> Encoder:
        """Returns a new encoder of observations; the constructor calls it for each that the network has."""
        return Encoder(observation, config)

    @property
    def state_size(self) -> int:
        """Size of the hidden state per slot; 0 for a policy without memory."""
        return self.config.state_size

    def initial_state(self, slots: int) -> Tensor:
        """`[slots, state_size]`: what it remembers at the beginning of an episode."""
        return torch.zeros(slots, self.state_size, device=next(self.parameters()).device)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, P]` for `self.distribution`; only of a policy without state."""
        raise NotImplementedError(f"a policy of kind {self.kind} has no parameters for observations alone")

    def exploring_parameters(self, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """Returns `action_parameters` for training, with noise on noisy weights."""
        return self.action_parameters(observations)

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, P]` for `self.distribution` from observations and state `[B, state_size]`; and the state after them."""
        return self.action_parameters(observations), state

    def estimates(self, observations: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """Returns learned predictions in the units of the learning rewards, as far as the network has them: `value`
        `[B]`, the discounted return, and `action_values` `[B, A]`, the return after each choice."""
        return {}


def copy_sharing_buffers(network: Network) -> Network:
    """Returns a copy with its own weights that shares the buffers of `network`, for target networks and perturbed
    policies: statistics change with each batch, and copied buffers would become stale."""
    return copy.deepcopy(network, {id(buffer): buffer for buffer in network.buffers()})
