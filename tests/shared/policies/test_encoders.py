"""Encoders, activations, normalizer: observations become features that mean what the environment meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.base.errors import ConfigError, UnsupportedSpace
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer, ParallelLayerNorm, RunningMoments, Tanh
from tests.conftest import minimal_config
from tests.support.environments.small import OBSERVATIONS
from tests.support.experience.policies import batch_of

PLAIN = PolicyConfig(hidden_sizes=())
SMALL = PolicyConfig(cnn="small", hidden_sizes=(16,))


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_encoder_treats_rows_independently(name: str) -> None:
    encoder = Encoder(describe_space(OBSERVATIONS[name]), SMALL)
    rows = batch_of(OBSERVATIONS[name], 4)
    together = encoder(rows, None)
    assert together.shape == (4, encoder.features) == (4, 16)
    assert together.dtype == torch.float32 and bool(torch.isfinite(together).all())
    alone = torch.cat([encoder({key: value[i : i + 1] for key, value in rows.items()}, None) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert len({tuple(row.tolist()) for row in together.detach()}) > 1


@pytest.mark.parametrize(
    ("space", "values", "expected"),
    [
        (spaces.Discrete(4, start=-1), [np.array(value) for value in (-1, 2, 0)],
         [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]),
        (spaces.MultiDiscrete([2, 3]), [np.array([1, 2]), np.array([0, 0])], [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]),
        (spaces.MultiBinary(2), [np.array([1, 0])], [[0, 1, 1, 0]]),
        (spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-9.0, 9.0, (2,))}),
         [{"a": np.array([3.0, 4.0], np.float32), "b": np.array(1)}], [[3, 4, 0, 1]]),
    ],
    ids=["discrete", "multi-discrete", "bits", "dict"],
)  # fmt: skip
def test_choices_are_one_hot_from_their_start(
    space: spaces.Space[Any], values: list[Any], expected: list[list[int]]
) -> None:
    spec = describe_space(space)
    rows = [spec.flatten("obs", value) for value in values]
    columns = {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    assert Encoder(spec, PLAIN)(columns, None).tolist() == expected


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, 255), (np.uint8, 1), (np.bool_, 1)])
@pytest.mark.parametrize(
    ("shape", "channels", "size", "place"),
    [((40, 48, 3), 3, (40, 48), (5, 7, 0)), ((3, 40, 48), 3, (40, 48), (0, 5, 7)),
     ((4, 40, 48), 4, (40, 48), (0, 5, 7)), ((4, 40, 48, 3), 12, (40, 48), (0, 5, 7, 0)),
     ((4, 3, 40, 48), 12, (40, 48), (0, 0, 5, 7)), ((8, 8, 111), 111, (8, 8), (5, 7, 0)),
     ((111, 8, 8), 111, (8, 8), (0, 5, 7)), ((16, 10, 10), 16, (10, 10), (0, 5, 7)),
     ((2, 8, 8, 17), 34, (8, 8), (0, 5, 7, 0))],
    ids=["HWC", "CHW", "stacked gray", "stack of HWC", "stack of CHW", "chess", "chess first", "16 gray", "stacked go"],
)  # fmt: skip
def test_images_are_channels_first_and_scaled(
    shape: tuple[int, ...], channels: int, size: tuple[int, int], place: tuple[int, ...], dtype: Any, most: int
) -> None:
    space = spaces.Box(0, most, shape, dtype)
    image = torch.from_numpy(np.zeros((1, *shape), dtype))
    image[(0, *place)] = most
    encoder, met = Encoder(describe_space(space), PolicyConfig()), list[torch.Tensor]()
    first = next(module for module in encoder.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda _, arguments: met.append(arguments[0]))
    assert encoder({"obs": image}, None).shape == (1, 64)
    (seen,) = met
    assert seen.shape == (1, channels, *size)
    assert seen.nonzero().tolist() == [[0, 0, 5, 7]] and seen.max().item() == 1.0


@pytest.mark.parametrize(("kind", "least"), [("nature", 36), ("small", 5), ("auto", 5)])
def test_images_below_smallest_size_are_rejected(kind: Any, least: int) -> None:
    def encoder(*size: int) -> Encoder:
        spec = describe_space(spaces.Dict({"camera": spaces.Box(0, 255, (*size, 3), np.uint8)}))
        return Encoder(spec, PolicyConfig(cnn=kind))

    images = {"obs.camera": torch.zeros((2, least, least, 3), dtype=torch.uint8)}
    assert encoder(least, least)(images, None).shape == (2, 64)
    said = rf"camera: images of {least - 1}×60 are too small for cnn: (nature|small).*{least}×{least}"
    with pytest.raises(UnsupportedSpace, match=said):
        encoder(least - 1, 60)


@pytest.mark.parametrize(("side", "kind"), [(8, "small"), (35, "small"), (36, "nature"), (84, "nature")])
def test_auto_cnn_equals_the_network_that_fits(side: int, kind: Any) -> None:
    spec, image = (
        describe_space(spaces.Box(0, 255, (side, side, 2), np.uint8)),
        np.full((1, side, side, 2), 7, np.uint8),
    )
    made = []
    for named in ("auto", kind):
        torch.manual_seed(3)
        made.append(Encoder(spec, PolicyConfig(cnn=named)))
    auto, plain = (encoder({"obs": torch.from_numpy(image)}, None) for encoder in made)
    assert torch.equal(auto, plain)
    assert PolicyConfig().cnn == "auto"


def test_custom_convolutions_see_lines_of_four_and_are_checked() -> None:
    spec = describe_space(spaces.Dict({"board": spaces.Box(0, 1, (6, 7, 2), np.bool_)}))
    config = PolicyConfig.model_validate_json(PolicyConfig(cnn=((8, 4, 1), (4, 2, 1))).model_dump_json())
    encoder = Encoder(spec, config)
    first, second = (layer for layer in encoder.modules() if isinstance(layer, torch.nn.Conv2d))
    assert (first.weight.shape, second.weight.shape) == ((8, 2, 4, 4), (4, 8, 2, 2))
    assert encoder({"obs.board": torch.ones((3, 6, 7, 2), dtype=torch.bool)}, None).shape == (3, 64)
    with pytest.raises(UnsupportedSpace, match=r"board: layer 2 of policies.<id>.cnn has a kernel of 4×4 and gets 3×4"):
        Encoder(spec, PolicyConfig(cnn=((8, 4, 1), (4, 4, 1))))
    with pytest.raises(ConfigError, match=r"; policies.default.cnn.0.1: expected 1 or more, found 0$"):
        minimal_config(policies={"default": {"cnn": [[8, 0, 1]]}})


@pytest.mark.parametrize("size", [(1, 2), (8, 8), (21, 30)])
def test_residual_cnn_uses_every_pixel_of_any_size(size: tuple[int, int]) -> None:
    encoder = Encoder(describe_space(spaces.Box(0, 255, (*size, 3), np.uint8)), PolicyConfig(cnn="residual"))
    assert sum(isinstance(module, torch.nn.Conv2d) for module in encoder.modules()) == 15, "as in the paper's figure 3"
    images = torch.randint(0, 256, (4, *size, 3), dtype=torch.uint8)
    features = encoder({"obs": images}, None)
    assert features.shape == (4, 64) and len(set(features[:, 0].tolist())) == 4
    features.square().sum().backward()
    assert all(item.grad is not None and bool(item.grad.abs().sum() > 0) for item in encoder.parameters())
    block = next(module for module in encoder.modules() if type(module).__name__ == "_Residual")
    for item in block.parameters():
        torch.nn.init.zeros_(item)
    values = torch.randn(1, 16, 3, 3)
    assert torch.equal(block(values), values), "what it adds is nothing then"


def test_activation_is_configurable() -> None:
    spec = describe_space(spaces.Box(-1.0, 1.0, (3,)))
    for name, kind in {"tanh": Tanh, "relu": torch.nn.ReLU, "elu": torch.nn.ELU, "silu": torch.nn.SiLU}.items():
        encoder = Encoder(spec, PolicyConfig.model_validate({"activation": name, "hidden_sizes": (5, 6)}))
        assert [type(layer) for layer in encoder.mlp] == [torch.nn.Linear, kind, torch.nn.Linear, kind]
        assert encoder.features == 6
    (_, norm, _) = Encoder(spec, PolicyConfig(hidden_sizes=(5,), layer_norm=True)).mlp
    assert isinstance(norm, torch.nn.LayerNorm) and norm.normalized_shape == (5,)


def test_parallel_layer_norm_matches_pytorch() -> None:
    ours, values = ParallelLayerNorm(3, 5), torch.randn(3, 4, 5)
    with torch.no_grad():
        ours.weight.normal_(), ours.bias.normal_()
    for networks in (3, 1):
        expected = [
            torch.nn.functional.layer_norm(values[i], (5,), ours.weight[i, 0], ours.bias[i, 0]) for i in range(networks)
        ]
        torch.testing.assert_close(ours(values[:networks]), torch.stack(expected))


VALUES = torch.cat([torch.linspace(-30, 30, 10_001), torch.tensor([0.0, 1e-8, -1e-8, 1e-3, torch.inf, -torch.inf])])


def test_tanh_matches_to_float32_precision() -> None:
    before = VALUES.clone()
    found = Tanh()(VALUES)
    assert torch.equal(VALUES, before)
    assert (found - torch.tanh(VALUES)).abs().max() < 2.5e-7
    assert torch.equal(Tanh()(VALUES.clone().requires_grad_()), found)
    assert Tanh()(torch.tensor([torch.nan])).isnan().all()


def test_tanh_has_exact_first_and_second_gradients() -> None:
    at = torch.linspace(-4, 4, 101)
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for function, into in ((Tanh(), found), (torch.tanh, expected)):
        values = at.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(values).sum(), values, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), values)
        into += [first.detach(), second]
    for ours, its in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tanh_of_other_precisions_is_pytorchs(dtype: torch.dtype) -> None:
    values = VALUES[:100].to(dtype)
    assert torch.equal(Tanh()(values), torch.tanh(values))


def batches(seed: int, sizes: list[int]) -> list[torch.Tensor]:
    random = np.random.default_rng(seed)
    scale, offset = np.array([1.0, 1e-3, 50.0]), np.array([0.0, 1.0, -1e4])
    return [torch.from_numpy(random.normal(size=(n, 3)) * scale + offset) for n in sizes]


def moments_after(parts: list[torch.Tensor]) -> RunningMoments:
    moments = RunningMoments(3, clip=10.0)
    for part in parts:
        moments.update(part)
    return moments


def as_bytes(moments: RunningMoments) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in moments.state_dict().items()}


@settings(max_examples=40, derandomize=True)
@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_moments_match_all_data_together(seed: int, sizes: list[int]) -> None:
    parts = batches(seed, sizes)
    everything = torch.cat(parts).numpy()
    moments = moments_after(parts)
    assert float(moments.get_buffer("count")) == len(everything)
    if not len(everything):
        return
    np.testing.assert_allclose(moments.get_buffer("mean").numpy(), everything.mean(0), rtol=1e-9, atol=1e-12)
    variance = moments.get_buffer("m2").numpy() / len(everything)
    np.testing.assert_allclose(variance, everything.var(0), rtol=1e-7, atol=1e-12)
    values = torch.from_numpy(everything[:1].astype(np.float32))
    shift, deviation = everything.mean(0).astype(np.float32), np.sqrt(everything.var(0) + 1e-8)
    expected = np.clip((values.numpy() - shift) / deviation, -10, 10)
    np.testing.assert_allclose(moments(values).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_moments_are_identity_before_first_update() -> None:
    moments = RunningMoments(2, clip=1.0)
    values = torch.tensor([[1e20, -3.25], [0.0, 1e-30]])
    assert torch.equal(moments(values), values)
    moments.update(torch.zeros(0, 2))
    assert torch.equal(moments(values), values)


def test_clipping_starts_with_the_first_update() -> None:
    moments = RunningMoments(1, clip=2.0)
    moments.update(torch.tensor([[-1.0], [1.0]]))
    assert moments(torch.tensor([[1.5], [100.0], [-100.0]])).flatten().tolist() == pytest.approx([1.5, 2.0, -2.0])
    constant = RunningMoments(1, clip=10.0)
    constant.update(torch.full((4, 1), 7.0))
    assert constant(torch.tensor([[7.0], [8.0]])).flatten().tolist() == [0.0, 10.0], "not divided by zero"


def test_moments_resume_bit_equal() -> None:
    parts = batches(2, [5, 1, 17, 8])
    whole = moments_after(parts)
    assert as_bytes(whole) == as_bytes(moments_after(parts))
    resumed = RunningMoments(3, clip=10.0)
    resumed.load_state_dict(moments_after(parts[:2]).state_dict())
    for part in parts[2:]:
        resumed.update(part)
    assert as_bytes(resumed) == as_bytes(whole)


SPACE: spaces.Space[Any] = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (6, 6, 3), np.uint8),
        "joints": spaces.Box(-100.0, 100.0, (2, 2)),
        "mode": spaces.Discrete(3),
        "speed": spaces.Box(-100.0, 100.0, (1,)),
    }
)


def test_normalizer_leaves_images_and_choices() -> None:
    spec = describe_space(SPACE)
    normalizer = ObservationNormalizer(spec, clip=10.0)
    random = torch.Generator().manual_seed(0)
    rows = {
        "obs.camera": torch.randint(0, 256, (50, 6, 6, 3), generator=random, dtype=torch.uint8),
        "obs.joints": torch.randn(50, 2, 2, generator=random) * 20 + 5,
        "obs.mode": torch.randint(0, 3, (50,), generator=random),
        "obs.speed": torch.randn(50, 1, generator=random) * 3 - 50,
    }
    normalizer.update(rows)
    encoder = Encoder(spec, PolicyConfig(cnn="small", hidden_sizes=()))
    plain, normal = encoder(rows, None), encoder(rows, normalizer)
    changed = (plain != normal).any(dim=0)
    assert int(changed.sum()) == 5
    vectors = normal[:, changed]
    torch.testing.assert_close(vectors.mean(0), torch.zeros(5), rtol=0, atol=1e-4)
    torch.testing.assert_close(vectors.std(0, correction=0), torch.ones(5), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_large_offset_is_subtracted_before_rounding(dtype: Any) -> None:
    """Of a time stamp in seconds, which float32 rounds to multiples of 128."""
    observation = describe_space(spaces.Box(0, 2e9, (1,), dtype))
    normalizer, encoder = ObservationNormalizer(observation, 10.0), Encoder(observation, PLAIN)
    stamps = (1_790_000_000 + np.arange(100)).astype(dtype)[:, np.newaxis]
    normalizer.update({"obs": torch.from_numpy(stamps)})
    features = encoder({"obs": torch.from_numpy(stamps)}, normalizer)
    assert features.dtype == torch.float32
    expected = (np.arange(100) - 49.5) / np.arange(100).std()
    np.testing.assert_allclose(features.detach().numpy()[:, 0], expected, atol=1e-5)
