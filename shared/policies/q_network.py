"""The Q network: the value of each choice of one discrete action, as a number or as a distribution.

All layers but the last hidden one are shared; each stream (two if dueling) has its own. The heads of an ensemble are
computed together: their rows follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces, SpaceSpec
from stagecoach.shared.policies.actor_critic import Core
from stagecoach.shared.policies.encoders import ACTIVATIONS, ParallelLayerNorm, unrounded
from stagecoach.shared.policies.masks import ILLEGAL, masked
from stagecoach.shared.policies.policy import Policy

Head = Literal["expected", "c51", "qr", "hl_gauss"]
OF_LOGITS = ("c51", "hl_gauss")
"""Heads whose outputs are logits of the returns in `support`."""
_NEVER = math.log(1e-38)
_SIGMA = 0.5
_RESCALING = 1e-3


class BestChoice:
    """Takes the choice of the largest value; the parameters are the values."""

    draws = False

    def __init__(self, action: SpaceSpec) -> None:
        self._name = action.column_names("action")[0]

    def sample(self, params: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return self.mode(params)

    def mode(self, params: Tensor) -> dict[str, Tensor]:
        return {self._name: params.argmax(dim=1)}

    def log_prob(self, params: Tensor, actions: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: 0 for the best choice; a finite number that stands for never for the others."""
        best = params.argmax(dim=1) == actions[self._name]
        return torch.where(best, 0.0, torch.full_like(params[:, 0], _NEVER))


class ParallelLinear(nn.Module):
    """A linear layer for each of K heads."""

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, inputs, outputs))
        self.bias = nn.Parameter(torch.empty(heads, 1, outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:  # as `nn.Linear` begins
        bound = 1 / math.sqrt(self.weight.shape[1])
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, values: Tensor) -> Tensor:
        """`[B, inputs]`, or `[K, B, inputs]` of each head → `[K, B, outputs]`."""
        return torch.baddbmm(self.bias, values.expand(len(self.weight), -1, -1), self.weight)


class Stream(nn.Module):
    """An optional hidden layer and the outputs, for each of the heads."""

    def __init__(
        self, inputs: int, hidden: int | None, outputs: int, config: PolicyConfig, *, noisy: bool, heads: int
    ) -> None:
        super().__init__()

        def layer(below: int, above: int) -> nn.Module:
            if noisy:
                return NoisyLinear(below, above, _SIGMA)
            return nn.Linear(below, above) if heads == 1 else ParallelLinear(heads, below, above)

        sizes = [inputs, *([hidden] if hidden else []), outputs]
        self.layers = nn.ModuleList(layer(below, above) for below, above in pairwise(sizes))
        self._activation = ACTIVATIONS[config.activation]()
        self.norm: nn.Module | None = None
        if hidden and config.layer_norm:
            self.norm = nn.LayerNorm(hidden) if heads == 1 else ParallelLayerNorm(heads, hidden)

    def forward(self, values: Tensor, noise: Iterator[LayerNoise] | None) -> Tensor:
        """Maps `[B, inputs]` to `[B, outputs]`, or `[K, B, outputs]` of K heads; consumes noise for each layer."""
        for number, layer in enumerate(self.layers):
            if number:
                values = self._activation(values if self.norm is None else self.norm(values))
            values = layer(values) if noise is None else layer(values, next(noise))
        return values


class QNetwork(Policy):
    """Maps observations to values of all choices. Targets belong to the algorithm."""

    kind = "q_network"
    support: Tensor
    """`[atoms]`: returns of the atoms of `OF_LOGITS`."""

    def __init__(
        self, spaces: PolicySpaces, config: PolicyConfig, *, head: Head = "expected", dueling: bool = False,
        noisy: bool = False, atoms: int = 51, v_min: float = -10.0, v_max: float = 10.0, quantiles: int = 200,
        heads: int = 1, prior_scale: float = 0.0, rescaled: bool = False,
    ) -> None:  # fmt: skip
        """`atoms`, `v_min` and `v_max` are for `OF_LOGITS`, `quantiles` for head `qr`; several `heads` cannot be noisy.

        `rescaled`: it learns h of the values, not the values.
        """
        given = {"atoms": atoms, "v_min": v_min, "v_max": v_max} if head in OF_LOGITS else {}
        given |= {"quantiles": quantiles} if head == "qr" else {}
        given |= {"heads": heads, "prior_scale": prior_scale} if heads > 1 else {}
        given |= {"rescaled": True} if rescaled else {}
        super().__init__(spaces, config, head=head, dueling=dueling, noisy=noisy, **given)
        self.choices = _choices(spaces.action)
        self.head = head
        self.width = {"expected": 1, "qr": quantiles}.get(head, atoms)
        self.heads = heads
        """K: number of heads."""
        self.register_buffer("support", torch.linspace(v_min, v_max, atoms), persistent=False)
        self.distribution: BestChoice = BestChoice(spaces.action)
        *below, hidden = config.hidden_sizes or (None,)
        common = config.model_copy(update={"hidden_sizes": tuple(below)})
        self.encoder = self.make_encoder(spaces.observation.own, common)
        features = self._features()
        self.advantage = Stream(features, hidden, self.choices * self.width, config, noisy=noisy, heads=heads)
        self.value = Stream(features, hidden, self.width, config, noisy=noisy, heads=heads) if dueling else None
        for module in self.modules():  # as PyTorch begins: biases that differ tell small observations apart
            if isinstance(module, nn.Linear | nn.Conv2d | ParallelLinear):
                module.reset_parameters()
        self._prior_scale = prior_scale
        if prior_scale:
            self.prior_encoder = self.make_encoder(spaces.observation.own, common).requires_grad_(False)
            self.prior = Stream(features, hidden, self.choices * self.width, config, noisy=False, heads=heads)
            self.prior.requires_grad_(False)

    def _features(self) -> int:
        """Returns the number of inputs of the streams."""
        return self.encoder.features

    def draw_noise(self, generator: torch.Generator) -> list[LayerNoise] | None:
        if not self.network["noisy"]:
            return None
        layers = chain(self.advantage.layers, self.value.layers if self.value is not None else ())
        return [layer.draw(generator) for layer in layers if isinstance(layer, NoisyLinear)]

    def outputs(self, observations: Mapping[str, Tensor], noise: list[LayerNoise] | None = None) -> Tensor:
        """`[K·B, A, width]`: values, logits of atoms, or quantiles; without noise of the mean weights."""
        found = self._of_features(self.encoder(observations, self.normalizer), noise)
        if self._prior_scale:  # Osband et al. 2018, alg. 1
            prior = self.prior(self.prior_encoder(observations, self.normalizer), None)
            found = found + self._prior_scale * prior.reshape(found.shape)
        return unrounded(found)

    def _of_features(self, features: Tensor, noise: list[LayerNoise] | None = None) -> Tensor:
        """Returns the streams' outputs for features `[B, …]`, `[K·B, A, width]`."""
        drawn = None if noise is None else iter(noise)
        found: Tensor = self.advantage(features, drawn).reshape(-1, self.choices, self.width)
        if self.value is not None:  # Wang et al. 2016, eq. 9
            value = self.value(features, drawn).reshape(-1, 1, self.width)
            found = found - found.mean(dim=1, keepdim=True) + value
        return found

    def means(self, outputs: Tensor) -> Tensor:
        """`[…, width]` → `[…]`: the expected return."""
        if self.head in OF_LOGITS:
            return outputs.softmax(dim=-1) @ self.support
        return outputs.squeeze(-1) if self.width == 1 else outputs.mean(dim=-1)

    def head_values(self, observations: Mapping[str, Tensor], noise: list[LayerNoise] | None = None) -> Tensor:
        """`[K, B, A]`: value of each choice by each head; `ILLEGAL` for illegal choices."""
        return self.legal(self.means(self.outputs(observations, noise)), observations)

    def legal(self, values: Tensor, observations: Mapping[str, Tensor]) -> Tensor:
        """`[K·B, A]` → `[K, B, A]`, with illegal choices masked."""
        return masked(values.reshape(self.heads, -1, self.choices), observations, self.spaces)

    def action_parameters(self, observations: Mapping[str, Tensor]) -> Tensor:
        """`[B, A]`: the value of each choice, of the mean weights; an ensemble's is the mean of its heads."""
        return self._together(self.head_values(observations))

    def exploring_parameters(self, observations: Mapping[str, Tensor], generator: torch.Generator) -> Tensor:
        """`[B, A]`, with new noise on noisy weights, the same for all rows."""
        return self._together(self.head_values(observations, self.draw_noise(generator)))

    def estimates(self, observations: Mapping[str, Tensor], state: Tensor) -> dict[str, Tensor]:
        values, _ = self.step(observations, state)
        if self.network.get("rescaled"):
            values = unscaled(values).clamp_min(ILLEGAL)
        return {"value": values.amax(dim=1), "action_values": values}

    def _together(self, values: Tensor) -> Tensor:
        return values[0] if self.heads == 1 else values.mean(dim=0)


class RecurrentQNetwork(Core, QNetwork):
    """A Q network whose streams read the output of a recurrent core."""

    kind = "recurrent_q_network"

    def _features(self) -> int:
        self._make_core()
        return self.config.core_size

    def values(self, observations: Mapping[str, Tensor], after: Tensor) -> Tensor:
        """`[B, A]` for the state after the observations, `[B, state size]`; illegal choices are masked."""
        found = unrounded(self._of_features(self._outputs(after)))
        return masked(found.squeeze(2), observations, self.spaces)

    def step(self, observations: Mapping[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        after = self.state_after(observations, state)
        return self.values(observations, after), after

    def outputs(self, observations: Mapping[str, Tensor], noise: list[LayerNoise] | None = None) -> Tensor:
        raise NotImplementedError(f"a policy of kind {self.kind} has no values for observations alone")


def rescaled(values: Tensor) -> Tensor:
    """h (Pohlen et al. 2018, proposition A.2): sign(x)(√(|x| + 1) − 1) + ε x."""
    return values.sign() * ((values.abs() + 1).sqrt() - 1) + _RESCALING * values


def unscaled(values: Tensor) -> Tensor:
    """h⁻¹; in float64, since of small values float32 leaves little."""
    size = values.double().abs()
    root = ((1 + 4 * _RESCALING * (size + 1 + _RESCALING)).sqrt() - 1) / (2 * _RESCALING)
    return (values.sign() * (root.square() - 1)).to(values.dtype)


def _choices(action: SpaceSpec) -> int:
    leaf = action.leaves[0]
    if len(action.leaves) != 1 or leaf.kind != "discrete":
        kinds = ", ".join(leaf.kind for leaf in action.leaves)
        raise UnsupportedSpace(f"a Q network needs one Discrete action, found {kinds}; use another algorithm")
    return leaf.nvec[0]


LayerNoise = tuple[Tensor, Tensor]
"""f(ε_in) and f(ε_out) of one layer."""


class NoisyLinear(nn.Module):
    """A linear layer with factorized Gaussian noise on its weights (Fortunato et al. 2018, §3.1 b).

    y = (μ_w + σ_w · f(ε_out) f(ε_in)ᵀ) x + μ_b + σ_b · f(ε_out), f(ε) = sgn(ε) √|ε|

    The noise is an argument, not a state: the caller draws it with a generator of its own; without noise the layer
    computes with the means.
    """

    def __init__(self, inputs: int, outputs: int, sigma: float) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))
        self.weight_sigma = nn.Parameter(torch.full((outputs, inputs), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((outputs,), sigma * bound))

    def draw(self, generator: torch.Generator) -> LayerNoise:
        """Noise for this layer; the generator's device may be another one."""
        outputs, inputs = self.weight.shape
        drawn = torch.randn(inputs + outputs, generator=generator, device=generator.device).to(self.weight.device)
        shaped = drawn.sign() * drawn.abs().sqrt()
        return shaped[:inputs], shaped[inputs:]

    def forward(self, values: Tensor, noise: LayerNoise | None = None) -> Tensor:
        if noise is None:
            return nn.functional.linear(values, self.weight, self.bias)
        inward, outward = noise
        weight = self.weight + self.weight_sigma * torch.outer(outward, inward)
        return nn.functional.linear(values, weight, self.bias + self.bias_sigma * outward)
