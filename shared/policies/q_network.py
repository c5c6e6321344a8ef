"""The Q network: the value of each choice of one discrete action, as a number or as a distribution.

The best choice is the one of the largest mean. Encoder and heads share all layers but the last hidden one, which is
each stream's own (one stream, or two where it duels).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from shared.config import PolicyConfig
from shared.errors import UnsupportedSpace
from shared.policies.encoders import ACTIVATIONS, Encoder
from shared.policies.noisy import LayerNoise, NoisyLinear
from shared.policies.policy import Policy
from shared.spaces import PolicySpaces, SpaceSpec

Head = Literal["expected", "c51", "qr"]
_NEVER = math.log(1e-38)
_SIGMA = 0.5


class BestChoice:
    """The distribution of whoever takes the choice of the largest value; the parameters are the values."""

    def __init__(self, action: SpaceSpec) -> None:
        self._name = action.column_names("action")[0]

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The best one: what is random about it is in the values, or in the exploration."""
        return self.mode(params)

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        """The best one, the first of equal ones."""
        return {self._name: params.argmax(dim=1)}

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: 0 for the best choice; a finite number for the others, that stands for never."""
        best = params.argmax(dim=1) == actions[self._name]
        return torch.where(best, 0.0, torch.full_like(params[:, 0], _NEVER))


class Stream(nn.Module):
    """A hidden layer (where there is one) and the outputs."""

    def __init__(self, inputs: int, hidden: int | None, outputs: int, activation: str, noisy: bool) -> None:
        super().__init__()
        sizes = [inputs, *([hidden] if hidden else []), outputs]
        self.layers = nn.ModuleList(
            NoisyLinear(below, above, _SIGMA) if noisy else nn.Linear(below, above) for below, above in pairwise(sizes)
        )
        self._activation = ACTIVATIONS[activation]()

    def forward(self, values: Tensor, noise: Iterator[LayerNoise] | None) -> Tensor:
        """`[B, inputs]` → `[B, outputs]`; takes as much noise as it has layers."""
        for number, layer in enumerate(self.layers):
            if number:
                values = self._activation(values)
            values = layer(values) if noise is None else layer(values, next(noise))
        return values


class QNetwork(Policy):
    """Observation → values of all choices. What acting needs is here; targets belong to the algorithm."""

    kind = "q_network"
    support: Tensor
    """`[atoms]`: the returns that c51's probabilities are of."""

    def __init__(
        self,
        spaces: PolicySpaces,
        config: PolicyConfig,
        *,
        head: Head = "expected",
        dueling: bool = False,
        noisy: bool = False,
        atoms: int = 51,
        v_min: float = -10.0,
        v_max: float = 10.0,
        quantiles: int = 200,
    ) -> None:
        """`atoms`, `v_min` and `v_max` are for head `c51`, `quantiles` for `qr`."""
        given = {"atoms": atoms, "v_min": v_min, "v_max": v_max} if head == "c51" else {}
        given |= {"quantiles": quantiles} if head == "qr" else {}
        super().__init__(spaces, config, head=head, dueling=dueling, noisy=noisy, **given)
        self.choices = _choices(spaces.action)
        self.head, self._noisy = head, noisy
        self.width = {"expected": 1, "c51": atoms, "qr": quantiles}[head]
        """Numbers per choice."""
        self.register_buffer("support", torch.linspace(v_min, v_max, atoms), persistent=False)
        self.distribution: BestChoice = BestChoice(spaces.action)
        *below, hidden = config.hidden_sizes or (None,)
        self.encoder = Encoder(spaces.observation, config.model_copy(update={"hidden_sizes": tuple(below)}))
        features, activation = self.encoder.features, config.activation
        self.advantage = Stream(features, hidden, self.choices * self.width, activation, noisy)
        self.value = Stream(features, hidden, self.width, activation, noisy) if dueling else None
        for module in self.modules():  # as PyTorch begins: biases that differ tell small observations apart
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()

    def draw_noise(self, generator: torch.Generator) -> list[LayerNoise] | None:
        """Noise for all noisy layers; None where there are none."""
        if not self._noisy:
            return None
        layers = chain(self.advantage.layers, self.value.layers if self.value is not None else ())
        return [layer.draw(generator) for layer in layers if isinstance(layer, NoisyLinear)]

    def outputs(self, observations: Mapping[str, Tensor], noise: list[LayerNoise] | None = None) -> Tensor:
        """`[B, A, width]`: values, logits of c51's atoms, or quantiles; without noise of the mean weights."""
        features, drawn = self.encoder(observations, self.normaliser), None if noise is None else iter(noise)
        found: Tensor = self.advantage(features, drawn).unflatten(1, (self.choices, self.width))
        if self.value is not None:  # Wang et al. 2016, eq. 9
            found = found - found.mean(dim=1, keepdim=True) + self.value(features, drawn).unsqueeze(1)
        return found

    def means(self, outputs: Tensor) -> Tensor:
        """`[…, width]` → `[…]`: the expected return."""
        if self.head == "c51":
            return outputs.softmax(dim=-1) @ self.support
        return outputs.mean(dim=-1)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, A]`: the value of each choice, of the mean weights."""
        return self.means(self.outputs(observations))

    def exploring_parameters(self, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """`[B, A]`, with noise on the weights where they are noisy: drawn anew each time, the same for all rows."""
        return self.means(self.outputs(observations, self.draw_noise(generator)))


def _choices(action: SpaceSpec) -> int:
    leaf = action.leaves[0]
    if len(action.leaves) != 1 or leaf.kind != "discrete":
        kinds = ", ".join(leaf.kind for leaf in action.leaves)
        raise UnsupportedSpace(f"a Q network needs one Discrete action, found {kinds}; use another algorithm")
    return leaf.nvec[0]
