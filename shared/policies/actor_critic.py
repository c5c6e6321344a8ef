"""The actor-critic policy, without and with a recurrent core: LSTM (Hochreiter and Schmidhuber 1997) or GRU (Cho et al.
2014). An LSTM's hidden state is its outputs and cells, side by side."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.critic import TeamEncoder, ValueScale, team_columns
from stagecoach.shared.policies.distributions import ActionDistribution
from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer, linear, unrounded
from stagecoach.shared.policies.masks import masked
from stagecoach.shared.policies.policy import Policy


class Heads(Policy):
    """Action head and value head, on features of a subclass."""

    distribution: ActionDistribution

    def __init__(
        self, spaces: PolicySpaces, config: PolicyConfig, *, agents: int = 0, normalize_values: bool = False,
        without_value: bool = False,
    ) -> None:  # fmt: skip
        """`agents` of a centralized critic's team, 0 where each critic sees its own agent's observations.

        `without_value`: the algorithm does not learn what the value's head says.
        """
        asked = {"agents": agents, "normalize_values": normalize_values, "without_value": without_value}
        super().__init__(spaces, config, **{name: value for name, value in asked.items() if value})
        self.agents = agents
        self.distribution = ActionDistribution(spaces.action)
        self.value_scale = ValueScale() if normalize_values else None
        """Scale of `value`, if there is one."""

    @property
    def read_columns(self) -> tuple[str, ...]:
        """Inputs of actor and critic."""
        names = self.spaces.observation.column_names("obs")
        return names + (team_columns(self.spaces.observation) if self.agents else ())

    def estimates(self, observations: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        """Returns nothing if the critic sees more than its agent, or has learned nothing."""
        observation = self.spaces.observation
        if self.agents or observation.own is not observation or self.network.get("without_value"):
            return {}
        value = self.value(observations, state) if self.state_size else self.value(observations)
        return {"value": value if self.value_scale is None else self.value_scale.restored(value)}

    def value(self, observations: Mapping[str, Tensor], *state: Tensor) -> Tensor:
        """`[B]`: the critic's estimate of the discounted return; a core's takes its state before the observations."""
        raise NotImplementedError

    def _make_heads(self, actor_features: int, critic_features: int) -> None:
        self._gaussians = [leaf.size if leaf.kind == "box" else 0 for leaf in self.spaces.action.leaves]
        self.head = linear(actor_features, self.distribution.parameters - sum(self._gaussians), 0.01)
        self.value_head = linear(critic_features, 1, 1.0)
        self.log_std = nn.Parameter(torch.full((sum(self._gaussians),), self.config.log_std_init))

    def _value(self, features: Tensor) -> Tensor:
        """`[…, F]` → `[…]`, float32 in whichever precision the networks compute."""
        value: Tensor = self.value_head(features)
        return unrounded(value).squeeze(-1)

    def _params(self, features: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        """The head's outputs, illegal choices masked, with each Gaussian leaf's state-independent log σ behind it."""
        outputs: Tensor = unrounded(self.head(features))
        if not any(self._gaussians):
            return masked(outputs, observations, self.spaces)
        parts, out_at, std_at = [], 0, 0
        for leaf, gaussian in zip(self.spaces.action.leaves, self._gaussians, strict=True):
            width = gaussian or sum(leaf.nvec)
            parts.append(outputs[:, out_at : out_at + width])
            out_at += width
            if gaussian:
                parts.append(self.log_std[..., std_at : std_at + gaussian].expand(outputs.shape[0], -1))
                std_at += gaussian
        return masked(torch.cat(parts, dim=1), observations, self.spaces)


class ActorCritic(Heads):
    kind = "actor_critic"

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig, **network: Any) -> None:
        super().__init__(spaces, config, **network)
        self.actor = self.make_encoder(spaces.observation.own, config)
        self.critic: Encoder | TeamEncoder
        if self.agents:
            self.critic = TeamEncoder(spaces.observation, config, self.agents)
        else:
            self.critic = self.actor if config.share_encoder else self.make_encoder(spaces.observation, config)
        self._make_heads(self.actor.features, self.critic.features)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        return self._params(self.actor(observations, self.normalizer), observations)

    def value(self, observations: Mapping[str, Tensor], *state: Tensor) -> Tensor:
        return self._value(self.critic(observations, self.normalizer))

    def action_parameters_and_value(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns both, for a loss. A subclass that overrides one of them learns through its own."""
        own = type(self).action_parameters, type(self).value
        if self.critic is not self.actor or own != (ActorCritic.action_parameters, ActorCritic.value):
            return self.action_parameters(observations), self.value(observations)
        features = self.actor(observations, self.normalizer)
        return self._params(features, observations), self._value(features)


class Core(nn.Module):
    """Base of networks with a recurrent core on the features of their encoder."""

    config: PolicyConfig
    encoder: Encoder
    normalizer: ObservationNormalizer | None
    core: nn.Module

    def _make_core(self) -> None:
        cell = nn.LSTMCell if self.config.core == "lstm" else nn.GRUCell
        self.core = cell(self.encoder.features, self.config.core_size)
        for name, parameter in self.core.named_parameters():
            nn.init.zeros_(parameter) if name.startswith("bias") else nn.init.orthogonal_(parameter)

    def state_after(self, observations: Mapping[str, Tensor], state: Tensor) -> Tensor:
        """`[B, state size]`, from the one before the observations `[B, …]`."""
        return self._core(self.encoder(observations, self.normalizer), state)

    def states(self, rows: Mapping[str, Tensor], state_in: Tensor, over: Tensor) -> Tensor:
        """`[T, S, …]`: the state after each of T steps of S slots, whose observations are `rows` `[T · S, …]`.

        The first is `state_in` `[S, …]`; after a step where `over` `[T, S]` it begins at zero.
        """
        steps, slots = over.shape
        features = self.encoder(rows, self.normalizer).reshape(steps, slots, self.encoder.features)
        state, states = state_in, []
        for step in range(steps):
            states.append(self._core(features[step], state))
            state = states[-1].masked_fill(over[step].unsqueeze(1), 0.0)
        return torch.stack(states)

    def _core(self, features: Tensor, state: Tensor) -> Tensor:
        if isinstance(self.core, nn.LSTMCell):
            outputs, cells = state.chunk(2, dim=1)
            return torch.cat(self.core(features, (outputs, cells)), dim=1)
        after: Tensor = self.core(features, state)
        return after

    def _outputs(self, state: Tensor) -> Tensor:
        return state[..., : self.config.core_size]


class RecurrentActorCritic(Core, Heads):
    kind = "recurrent_actor_critic"

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig, **network: Any) -> None:
        super().__init__(spaces, config, **network)
        self.encoder = self.make_encoder(spaces.observation, config)
        self._make_core()
        self._make_heads(config.core_size, config.core_size)

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, P]` for `self.distribution`, and the state after these observations."""
        state = self.state_after(observations, state)
        return self._params(self._outputs(state), observations), state

    def value(self, observations: Mapping[str, Tensor], *state: Tensor) -> Tensor:
        (before,) = state
        return self._value(self._outputs(self.state_after(observations, before)))

    def sequence(
        self, observations: Mapping[str, Tensor], state_in: Tensor, over: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """T steps of S slots at once: parameters `[T, S, P]`, values `[T, S]` and the state after each `[T, S, …]`,
        from the first `state_in` `[S, …]`. After a step where `over` `[T, S]` the state begins at zero."""
        steps, slots = over.shape
        rows = {name: tensor.flatten(0, 1) for name, tensor in observations.items()}
        after = self.states(rows, state_in, over)
        outputs = self._outputs(after).flatten(0, 1)
        params = self._params(outputs, rows).reshape(steps, slots, self.distribution.parameters)
        return params, self._value(outputs).reshape(steps, slots), after


class Stateful(Policy):
    """A policy together with its hidden state: acts on the observations of the same slots, step after step."""

    def __init__(self, policy: Policy, state: Tensor) -> None:
        nn.Module.__init__(self)  # weights and normalizer are the policy's
        self.spaces, self.config, self.network = policy.spaces, policy.config, policy.network
        self.distribution, self.normalizer = policy.distribution, policy.normalizer
        self._policy = policy
        self.state = state
        """`[S, state_size]`: the hidden state."""

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[S, P]` for `self.distribution`; updates the hidden state."""
        params, self.state = self._policy.step(observations, self.state)
        return params

    def of(self, slots: Tensor) -> "Stateful":
        """Returns the same policy for slots `[R]` only, with its own state."""
        return Stateful(self._policy, self.state[slots])

    def forget(self, over: Tensor) -> None:
        """Resets the state of the slots whose episodes ended, `over` `[S]`."""
        self.state = self.state.masked_fill(over.unsqueeze(1), 0.0)


def with_states(
    policies: Mapping[str, Policy], slots: Mapping[str, int], states: Mapping[str, Tensor] | None = None
) -> dict[str, Stateful]:
    """Returns the policies with a hidden state, each with its state, else with that of `slots` new episodes."""
    recurrent = {policy_id: policy for policy_id, policy in policies.items() if policy.state_size}
    begun = {policy_id: policy.initial_state(slots[policy_id]) for policy_id, policy in recurrent.items()}
    begun |= {policy_id: state for policy_id, state in (states or {}).items() if policy_id in recurrent}
    return {policy_id: Stateful(policy, begun[policy_id]) for policy_id, policy in recurrent.items()}
