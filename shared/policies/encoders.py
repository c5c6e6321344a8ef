"""Encoders of observations: one-hot choices, normalized vectors, convolutions for images, then an MLP."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.config.sections import ConvolutionLayer, PolicyConfig
from stagecoach.shared.experience.spaces import Leaf, SpaceSpec


def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
    """Returns a layer with orthogonal weights of this gain and zero bias (Saxe et al. 2014), as in PPO's reference."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def unrounded(values: Tensor) -> Tensor:
    """Returns bfloat16 outputs (`trainer.precision`) as float32."""
    return values.to(torch.float32) if values.dtype == torch.bfloat16 else values


class ObservationNormalizer(nn.Module):
    """One `RunningMoments` per vector leaf; images and choices pass unchanged."""

    def __init__(self, observation: SpaceSpec, clip: float) -> None:
        super().__init__()
        leaves = [leaf for leaf in observation.leaves if leaf.kind == "box" and not leaf.is_image and not leaf.mask]
        self._names = {leaf.column("obs"): str(index) for index, leaf in enumerate(leaves)}
        self.moments = nn.ModuleDict({str(i): RunningMoments(leaf.size, clip) for i, leaf in enumerate(leaves)})

    def forward(self, name: str, values: Tensor) -> Tensor:
        normalized: Tensor = self.moments[self._names[name]](values)
        return normalized

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Updates the moments with observations `[B, …]` by column."""
        for name, index in self._names.items():
            moments = self.moments[index]
            assert isinstance(moments, RunningMoments)
            moments.update(observations[name])


def mlp(width: int, config: PolicyConfig) -> tuple[nn.Sequential, int]:
    """Returns the layers of `hidden_sizes`, and their number of outputs."""
    layers: list[nn.Module] = []
    for size in config.hidden_sizes:
        norm = [nn.LayerNorm(size)] if config.layer_norm else []
        layers += [linear(width, size, math.sqrt(2)), *norm, ACTIVATIONS[config.activation]()]
        width = size
    return nn.Sequential(*layers), width


class ParallelLayerNorm(nn.Module):
    """Layer normalization of K networks computed together, `[K, B, size]`, each with its own weights."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, 1, size))
        self.bias = nn.Parameter(torch.zeros(count, 1, size))

    def forward(self, values: Tensor) -> Tensor:
        """Normalizes the values of all K networks, or of the first."""
        normalized, count = nn.functional.layer_norm(values, values.shape[-1:]), len(values)
        return normalized * self.weight[:count] + self.bias[:count]


class Encoder(nn.Module):
    """Observation columns `[B, …]` → features `[B, features]`."""

    def __init__(self, observation: SpaceSpec, config: PolicyConfig) -> None:
        super().__init__()
        self._leaves = tuple(leaf for leaf in observation.leaves if not leaf.mask)
        self.images = nn.ModuleDict()
        width = 0
        for index, leaf in enumerate(self._leaves):
            if leaf.is_image:
                self.images[str(index)], features = _convolutions(leaf, config.cnn)
                width += features
            else:
                width += flat_size(leaf)
                if sum(leaf.nvec) > _MOST_CHOICES:
                    raise UnsupportedSpace(
                        f"observation {leaf.path or 'space'}: its choices become {sum(leaf.nvec):,} numbers, one for "
                        f"each, expected at most {_MOST_CHOICES:,}; observe digits (MultiDiscrete) or a Box instead"
                    )
        self.mlp, self.features = mlp(width, config)

    def forward(self, observations: Mapping[str, Tensor], normalizer: ObservationNormalizer | None) -> Tensor:
        parts = []
        for index, leaf in enumerate(self._leaves):
            name = leaf.column("obs")
            values = observations[name]
            if leaf.is_image:
                parts.append(self.images[str(index)](values))
            elif leaf.nvec or normalizer is None:
                parts.append(flat(values, leaf))
            else:
                parts.append(normalizer(name, values.reshape(-1, leaf.size)))
        features: Tensor = self.mlp(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
        return unrounded(features)


class _Image(nn.Module):
    """Converts bytes to channels first in [0, 1]: H×W×C, C×H×W, and stacks of either (stack × H × W × C).

    The layout follows from the two equal sides (a board may have more planes than rows), else from the smaller number
    of channels.
    """

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self._scale = float(leaf.bounds()[1].max()) or 1.0  # bytes of ones and zeros are no dark pictures
        self._stacked = len(leaf.shape) == 4
        shape = leaf.shape[1:] if self._stacked else leaf.shape
        self._channels_last = shape[-1] <= shape[0]
        if (shape[0] == shape[1]) != (shape[1] == shape[2]):
            self._channels_last = shape[0] == shape[1]
        height, width, channels = shape if self._channels_last else (shape[1], shape[2], shape[0])
        self.shape = (channels * (leaf.shape[0] if self._stacked else 1), height, width)

    def forward(self, values: Tensor) -> Tensor:
        if self._channels_last:
            values = values.movedim(-1, -3)
        if self._stacked:
            values = values.flatten(1, 2)
        # Channels in memory last, whatever the shape says: convolutions are faster so, forward and backward
        return values.to(torch.float32, memory_format=torch.channels_last) / self._scale


class _Residual(nn.Module):
    """x + conv(ReLU(conv(ReLU(x)))) (Espeholt et al. 2018, fig. 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), _convolution(channels, channels, 3, padding=1),
            nn.ReLU(), _convolution(channels, channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, values: Tensor) -> Tensor:
        added: Tensor = self.layers(values)
        return values + added


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


_FEATURES = 256
_STACKS: dict[str, tuple[list[ConvolutionLayer], int]] = {
    "nature": ([(32, 8, 4), (64, 4, 2), (64, 3, 1)], 512),  # Mnih et al. 2015
    "small": ([(16, 3, 1)], 128),  # MinAtar's network (Young and Tian 2019)
}
"""Layers, and the number of features."""
_MOST_CHOICES = 1 << 17
"""Limit of an observed choice: beyond it the first layer alone is larger than any other network here, and hardly
learns."""
_SMALLEST = {"nature": 36, "small": 5, "residual": 1}


def _convolutions(leaf: Leaf, kind: str | Sequence[ConvolutionLayer]) -> tuple[nn.Sequential, int]:
    """Returns convolutions and their number of features; raises `UnsupportedSpace` if the images are too small."""
    image = _Image(leaf)
    channels, height, width = image.shape
    if not isinstance(kind, str):
        return _stacked(image, kind, _FEATURES, leaf)
    if kind == "auto":
        kind = "nature" if min(height, width) >= _SMALLEST["nature"] else "small"
    if min(height, width) < (smallest := _SMALLEST[kind]):
        other = "residual" if kind == "small" else "auto"
        raise UnsupportedSpace(
            f"observation {leaf.path or 'space'}: images of {height}×{width} are too small for cnn: {kind}, which "
            f"needs {smallest}×{smallest}; use policies.<id>.cnn: {other} or larger images"
        )
    if kind != "residual":
        return _stacked(image, *_STACKS[kind], leaf)
    layers: list[nn.Module] = [image]
    for outputs in (16, 32, 32):
        layers += [_convolution(channels, outputs, 3, padding=1), nn.MaxPool2d(3, 2, 1)]
        layers += [_Residual(outputs), _Residual(outputs)]
        channels, height, width = outputs, (height + 1) // 2, (width + 1) // 2
    layers += [nn.ReLU(), nn.Flatten(), linear(channels * height * width, _FEATURES, math.sqrt(2)), nn.ReLU()]
    return nn.Sequential(*layers), _FEATURES


def _stacked(image: _Image, plan: Sequence[ConvolutionLayer], features: int, leaf: Leaf) -> tuple[nn.Sequential, int]:
    """Returns convolutions without padding, followed by a layer of `features`."""
    layers: list[nn.Module] = [image]
    channels, height, width = image.shape
    for number, (outputs, kernel, stride) in enumerate(plan, 1):
        if min(height, width) < kernel:
            raise UnsupportedSpace(
                f"observation {leaf.path or 'space'}: layer {number} of policies.<id>.cnn has a kernel of "
                f"{kernel}×{kernel} and gets {height}×{width}; use smaller kernels or strides"
            )
        layers += [_convolution(channels, outputs, kernel, stride), nn.ReLU()]
        channels, height, width = outputs, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    layers += [nn.Flatten(), linear(channels * height * width, features, math.sqrt(2)), nn.ReLU()]
    return nn.Sequential(*layers), features


def flat_size(leaf: Leaf) -> int:
    return sum(leaf.nvec) if leaf.nvec else leaf.size


def flat(values: Tensor, leaf: Leaf) -> Tensor:
    """Returns a leaf's column `[B, …]` as float32 `[B, flat_size]`, with one-hot choices."""
    if not leaf.nvec:
        return values.reshape(-1, leaf.size).to(torch.float32)
    if leaf.kind == "multi_binary":  # both ones carry the same information, but all choices are encoded alike
        bits = values.flatten(1)
        return torch.stack([1 - bits, bits], dim=-1).flatten(1).to(torch.float32)
    choices = values.reshape(-1, len(leaf.nvec))
    parts = [nn.functional.one_hot(choices[:, i], n) for i, n in enumerate(leaf.nvec)]
    return torch.cat(parts, dim=1).to(torch.float32)


_EPSILON = 1e-8
_WIDE = frozenset({torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64})
"""Types that float32 rounds: the mean is subtracted before conversion."""


class RunningMoments(nn.Module):
    """Normalizes `[B, size]` to zero mean and unit variance, by buffers that travel with the policy's weights. The
    identity before the first update. Moments are float64, merged batch by batch (Chan et al. 1979)."""

    def __init__(self, size: int, clip: float) -> None:
        super().__init__()
        self._clip = clip
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.ones(size))
        self.register_buffer("bound", torch.full((), float("inf")))

    def forward(self, values: Tensor) -> Tensor:
        shift, scale, bound = (cast(Tensor, getattr(self, name)) for name in ("shift", "scale", "bound"))
        if values.dtype in _WIDE:  # a time stamp as a float32 is off by a minute
            moved = (values.to(torch.float64) - cast(Tensor, self.mean)).to(torch.float32)
        else:
            moved = values.to(torch.float32) - shift
        return torch.clamp(moved * scale, -bound, bound)

    @torch.no_grad()
    def update(self, values: Tensor) -> None:
        if len(values) == 0:
            return
        count, mean, m2 = (cast(Tensor, getattr(self, name)) for name in ("count", "mean", "m2"))
        batch = values.to(torch.float64).reshape(len(values), mean.numel())
        batch_mean = batch.mean(dim=0)
        delta = batch_mean - mean
        total = count + len(batch)
        m2 += (batch - batch_mean).square().sum(dim=0) + delta.square() * (count * len(batch) / total)
        mean += delta * (len(batch) / total)
        count.copy_(total)
        variance = m2 / total
        cast(Tensor, self.shift).copy_(mean)
        cast(Tensor, self.scale).copy_((variance + _EPSILON).rsqrt())
        cast(Tensor, self.bound).fill_(self._clip)


_MINUS_ONE = torch.tensor(-1.0)


class Tanh(nn.Module):
    """tanh as 2σ(2x) − 1 for float32 on a CPU, four times as fast as PyTorch's: a third of a small network's gradient
    step. PyTorch's own elsewhere, and in exports. It differs from tanh by at most 2e-7, and is the same in acting and
    in learning."""

    def forward(self, values: Tensor) -> Tensor:
        if values.dtype != torch.float32 or values.device.type != "cpu" or torch.compiler.is_compiling():
            return torch.tanh(values)
        if torch.is_grad_enabled() and values.requires_grad:
            learned: Tensor = _Tanh.apply(values)  # type: ignore[no-untyped-call]
            return learned
        return _tanh(values)


class _Tanh(torch.autograd.Function):
    """Uses tanh's own derivative, 1 − y², in one pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        result = _tanh(values)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        result: Tensor = torch.ops.aten.tanh_backward(gradient, ctx.saved_tensors[0])
        return result


def _tanh(values: Tensor) -> Tensor:
    result = values.mul(2.0).sigmoid_()
    return torch.add(_MINUS_ONE, result, alpha=2.0, out=result)


ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
