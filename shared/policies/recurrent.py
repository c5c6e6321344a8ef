"""The actor-critic policy with a core: what it does depends on what it has seen in the episode so far.

Observations → encoder → core (LSTM: Hochreiter and Schmidhuber 1997; GRU: Cho et al. 2014) → action and value head.
Actor and critic share all but the heads. An LSTM's state is its outputs and its cells, side by side.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shared.config import PolicyConfig
from shared.policies.actor_critic import Heads
from shared.policies.encoders import Encoder
from shared.spaces import PolicySpaces


class RecurrentActorCritic(Heads):
    """Encoder, core and heads."""

    kind = "recurrent_actor_critic"

    def __init__(self, spaces: PolicySpaces, config: PolicyConfig) -> None:
        super().__init__(spaces, config)
        self.encoder = Encoder(spaces.observation, config)
        cell = nn.LSTMCell if config.core == "lstm" else nn.GRUCell
        self.core = cell(self.encoder.features, config.core_size)
        for name, parameter in self.core.named_parameters():
            nn.init.zeros_(parameter) if name.startswith("bias") else nn.init.orthogonal_(parameter)
        self._make_heads(config.core_size, config.core_size)

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, P]` for `self.distribution`, and the state after these observations."""
        state = self._core(self.encoder(observations, self.normaliser), state)
        return self._with_deviations(self._outputs(state)), state

    def value(self, observations: Mapping[str, Tensor], state: Tensor) -> Tensor:
        """`[B]`: the critic's estimate of the discounted return, where the state before the observations is this."""
        state = self._core(self.encoder(observations, self.normaliser), state)
        return self._value(self._outputs(state))

    def sequence(
        self, observations: Mapping[str, Tensor], state_in: Tensor, over: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """T steps of S slots at once: parameters `[T, S, P]`, values `[T, S]` and the state after each `[T, S, …]`.

        `state_in` `[S, …]` is that before the first step. After a step where `over` `[T, S]` the state begins at zero.
        """
        steps, slots = over.shape
        rows = {name: tensor.flatten(0, 1) for name, tensor in observations.items()}
        features = self.encoder(rows, self.normaliser).reshape(steps, slots, self.encoder.features)
        state, states = state_in, []
        for step in range(steps):
            states.append(self._core(features[step], state))
            state = states[-1].masked_fill(over[step].unsqueeze(1), 0.0)
        after = torch.stack(states)
        outputs = self._outputs(after).flatten(0, 1)
        params = self._with_deviations(outputs).reshape(steps, slots, self.distribution.parameters)
        return params, self._value(outputs).reshape(steps, slots), after

    def _core(self, features: Tensor, state: Tensor) -> Tensor:
        if isinstance(self.core, nn.LSTMCell):
            outputs, cells = state.chunk(2, dim=1)
            return torch.cat(self.core(features, (outputs, cells)), dim=1)
        after: Tensor = self.core(features, state)
        return after

    def _outputs(self, state: Tensor) -> Tensor:
        return state[..., : self.config.core_size]
