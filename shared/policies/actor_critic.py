"""The actor-critic policy: what a worker acts with and the trainer learns, the same class on both sides."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shared.config import PolicyConfig
from shared.policies.distributions import ActionDistribution
from shared.policies.encoders import Encoder, ObservationNormaliser, linear
from shared.spaces import PolicySpaces

_RANDOM_STATE = threading.Lock()


class ActorCritic(nn.Module):
    """Encoder(s), action head, value head, and the observation normaliser.

    Observations and actions are dicts of columns (shared/spaces.py) with a batch axis first.
    """

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig) -> None:
        super().__init__()
        self.spaces = spaces
        self.config = config
        self.distribution = ActionDistribution(spaces.action)
        self.normaliser = (
            ObservationNormaliser(spaces.observation, config.clip_observations)
            if config.normalise_observations
            else None
        )
        self.actor = Encoder(spaces.observation, config)
        self.critic = self.actor if config.share_encoder else Encoder(spaces.observation, config)
        self.head = linear(self.actor.features, self._head_width(), 0.01)
        self.value_head = linear(self.critic.features, 1, 1.0)
        self._gaussians = [leaf.size if leaf.kind == "box" else 0 for leaf in spaces.action.leaves]
        self.log_std = nn.Parameter(torch.full((sum(self._gaussians),), config.log_std_init))

    def _head_width(self) -> int:
        return self.distribution.parameters - sum(leaf.size for leaf in self.spaces.action.leaves if leaf.kind == "box")

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, P]` for `self.distribution`."""
        return self._with_deviations(self.actor(observations, self.normaliser))

    def value(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: the critic's estimate of the discounted return."""
        value: Tensor = self.value_head(self.critic(observations, self.normaliser)).squeeze(-1)
        return value

    def action_parameters_and_value(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Both, with one pass through a shared encoder."""
        features = self.actor(observations, self.normaliser)
        critic = features if self.critic is self.actor else self.critic(observations, self.normaliser)
        return self._with_deviations(features), self.value_head(critic).squeeze(-1)

    def _with_deviations(self, features: Tensor) -> Tensor:
        """The head's outputs, with the state-independent log σ of each Gaussian leaf put behind its means."""
        outputs: Tensor = self.head(features)
        if not any(self._gaussians):
            return outputs
        parts, out_at, std_at = [], 0, 0
        for leaf, gaussian in zip(self.spaces.action.leaves, self._gaussians, strict=True):
            width = gaussian or sum(leaf.nvec)
            parts.append(outputs[:, out_at : out_at + width])
            out_at += width
            if gaussian:
                parts.append(self.log_std[std_at : std_at + gaussian].expand(len(outputs), -1))
                std_at += gaussian
        return torch.cat(parts, dim=1)


def torch_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one. Ray shows a process only its own GPUs, and counts them from 0."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if number and int(number) >= torch.cuda.device_count():
        name = kind
    return torch.device(name)


@contextmanager
def borrowed_random_state() -> Iterator[None]:
    """PyTorch draws initial weights from one global state: for one thread at a time, and given back as it was."""
    with _RANDOM_STATE, torch.random.fork_rng(devices=[]):
        yield


def build_policies(
    spaces: Mapping[str, PolicySpaces], configs: Mapping[str, PolicyConfig], seed: int
) -> dict[str, ActorCritic]:
    """One policy per policy id, initialised from `seed` alone (the global random state is left as it was)."""
    with borrowed_random_state():
        policies = {}
        for index, policy_id in enumerate(sorted(spaces)):
            torch.manual_seed(seed + index)
            policies[policy_id] = ActorCritic(spaces[policy_id], configs[policy_id])
    return policies
