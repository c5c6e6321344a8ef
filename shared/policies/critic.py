"""Parts of critics that acting never uses: an encoder of a whole team's observations, and the scale of values."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import SpaceSpec
from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer, mlp, unrounded

TEAM = "team_"
MASK, NUMBER = TEAM + "mask", TEAM + "number"
_BETA = 0.99999
_LEAST_VARIANCE = 1e-2


def team_columns(observation: SpaceSpec) -> tuple[str, ...]:
    """The columns that `TeamEncoder` reads; trainer_node/learning/building_blocks/team.py makes them."""
    return MASK, NUMBER, *(TEAM + name for name in observation.column_names("obs"))


class EachAgent(nn.Module):
    """Observations of A agents, concatenated: choices one-hot, images convolved (with shared weights), zeros for absent
    agents."""

    def __init__(self, observation: SpaceSpec, config: PolicyConfig, agents: int) -> None:
        super().__init__()
        self.each = Encoder(observation, config.model_copy(update={"hidden_sizes": ()}))
        self.features = agents * self.each.features

    def forward(
        self, observations: Mapping[str, Tensor], there: Tensor, normalizer: ObservationNormalizer | None
    ) -> Tensor:
        """Maps rows `[B · A, …]` and presence `[B, A]` to `[B, features]`."""
        rows: Tensor = self.each(observations, normalizer)
        return (rows.reshape(*there.shape, rows.shape[1]) * there.unsqueeze(2)).flatten(1)


class EnvironmentState(nn.Module):
    """The environment's own state (`critic_observes: state`), which the rows of a team have alike."""

    def __init__(self, state: SpaceSpec, config: PolicyConfig) -> None:
        super().__init__()
        self.each = Encoder(state, config.model_copy(update={"hidden_sizes": ()}))
        self.features = self.each.features

    def forward(
        self, observations: Mapping[str, Tensor], there: Tensor, normalizer: ObservationNormalizer | None
    ) -> Tensor:
        """Encodes like `EachAgent`, from the row of each team's first present agent."""
        first = torch.arange(len(there), device=there.device) * there.shape[1] + there.argmax(dim=1)
        found: Tensor = self.each({name: tensor[first] for name, tensor in observations.items()}, normalizer)
        return found


class TeamEncoder(nn.Module):
    """Team columns `[B, A, …]` → features `[B, features]` (Yu et al. 2022, with death masking)."""

    def __init__(self, observation: SpaceSpec, config: PolicyConfig, agents: int) -> None:
        super().__init__()
        self._names, self._agents = observation.column_names("obs"), agents
        self.team = EachAgent(observation, config, agents)
        self.mlp, self.features = mlp(self.team.features + agents, config)

    def forward(self, observations: Mapping[str, Tensor], normalizer: ObservationNormalizer | None) -> Tensor:
        rows = {name: observations[TEAM + name].flatten(0, 1) for name in self._names}
        seen = self.team(rows, observations[MASK], normalizer)
        number = nn.functional.one_hot(observations[NUMBER], self._agents).to(seen.dtype)
        return unrounded(self.mlp(torch.cat([seen, number], dim=1)))


class ValueScale(nn.Module):
    """Running mean and standard deviation of value targets, as MAPPO's ValueNorm: exponentially weighted averages over
    batches with bias correction. Mean 0 and deviation 1 before the first batch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, targets: Tensor) -> None:
        """Updates the scale with targets `[B]` in the environment's units."""
        if not len(targets):
            return
        seen = targets.to(torch.float64)
        news = {"mean": seen.mean(), "square": seen.square().mean(), "weight": torch.ones_like(seen[0])}
        for name, new in news.items():
            cast(Tensor, getattr(self, name)).mul_(_BETA).add_(new * (1 - _BETA))

    def normalized(self, values: Tensor) -> Tensor:
        mean, deviation = self.moments(values)
        return (values - mean) / deviation

    def restored(self, values: Tensor) -> Tensor:
        """Returns a critic's prediction in the environment's units: the inverse of `normalized`."""
        mean, deviation = self.moments(values)
        return values * deviation + mean

    def moments(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation, of the dtype of `like`."""
        mean, square, weight = (cast(Tensor, getattr(self, name)) for name in ("mean", "square", "weight"))
        known = weight.clamp_min(1e-12)
        variance = (square / known - (mean / known).square()).clamp_min(_LEAST_VARIANCE)
        deviation = torch.where(weight > 0, variance.sqrt(), 1.0)
        return (mean / known).to(like.dtype), deviation.to(like.dtype)
