"""Encoders: every kind of observation becomes features that mean what the environment meant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.making import describe_space
from shared.config import PolicyConfig
from shared.errors import UnsupportedSpace
from shared.policies.encoders import Encoder
from shared.policies.tanh import Tanh
from tests.environments_for_tests import OBSERVATIONS

PLAIN = PolicyConfig(hidden_sizes=())
SMALL = PolicyConfig(cnn="small", hidden_sizes=(16,))


def batch_of(space: spaces.Space[Any], rows: int) -> dict[str, torch.Tensor]:
    """Random observations as the sampler hands them to a policy."""
    space.seed(7)
    spec = describe_space(space)
    samples = [spec.flatten("obs", space.sample()) for _ in range(rows)]
    return {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}


@pytest.mark.parametrize("name", OBSERVATIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_space_becomes_features(name: str, rows: int) -> None:
    encoder = Encoder(describe_space(OBSERVATIONS[name]), SMALL)
    features = encoder(batch_of(OBSERVATIONS[name], rows), None)
    assert features.shape == (rows, encoder.features) == (rows, 16)
    assert features.dtype == torch.float32 and bool(torch.isfinite(features).all())


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_each_row_is_encoded_by_itself(name: str) -> None:
    encoder = Encoder(describe_space(OBSERVATIONS[name]), SMALL)
    rows = batch_of(OBSERVATIONS[name], 4)
    together = encoder(rows, None)
    alone = torch.cat([encoder({key: value[i : i + 1] for key, value in rows.items()}, None) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert len({tuple(row.tolist()) for row in together.detach()}) > 1


def test_a_discrete_observation_is_one_hot_counted_from_its_start() -> None:
    space = spaces.Discrete(4, start=-1)
    columns = describe_space(space).flatten("obs", np.array([-1, 2, 0]))
    encoder = Encoder(describe_space(space), PLAIN)
    expected = [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert encoder({"obs": torch.from_numpy(columns["obs"])}, None).tolist() == expected


def test_multi_discrete_is_one_hot_per_element_and_bits_are_two_hot() -> None:
    many = Encoder(describe_space(spaces.MultiDiscrete([2, 3])), PLAIN)
    assert many({"obs": torch.tensor([[1, 2], [0, 0]])}, None).tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    bits = Encoder(describe_space(spaces.MultiBinary(2)), PLAIN)
    assert bits({"obs": torch.tensor([[1, 0]])}, None).tolist() == [[0, 1, 1, 0]]


def test_the_leaves_of_a_dict_stand_beside_each_other_in_order() -> None:
    space = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Box(-9.0, 9.0, (2,))})
    encoder = Encoder(describe_space(space), PLAIN)
    rows = {"obs.a": torch.tensor([[3.0, 4.0]]), "obs.b": torch.tensor([1])}
    assert sorted(encoder(rows, None)[0].tolist()) == [0.0, 1.0, 3.0, 4.0]
    assert encoder(rows, None).shape == (1, 4)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((40, 48, 3), 3), ((3, 40, 48), 3), ((4, 40, 48), 4), ((4, 40, 48, 3), 12), ((4, 3, 40, 48), 12)],
    ids=["HWC", "CHW", "stacked grey", "stack of HWC", "stack of CHW"],
)
def test_images_reach_the_convolutions_channels_first_and_scaled_to_one(shape: tuple[int, ...], channels: int) -> None:
    spec = describe_space(spaces.Box(0, 255, shape, np.uint8))
    encoder = Encoder(spec, PolicyConfig())
    seen: list[torch.Tensor] = []
    for module in encoder.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
            break
    image = np.zeros((1, *shape), np.uint8)
    where = [0] * len(shape)
    spatial = {
        (40, 48, 3): (0, 1),
        (3, 40, 48): (1, 2),
        (4, 40, 48): (1, 2),
        (4, 40, 48, 3): (1, 2),
        (4, 3, 40, 48): (2, 3),
    }
    for axis, position in zip(spatial[shape], (5, 7), strict=True):
        where[axis] = position
    image[(0, *where)] = 255
    assert encoder({"obs": torch.from_numpy(image)}, None).shape == (1, 64)
    assert seen[0].shape == (1, channels, 40, 48)
    assert seen[0].nonzero().tolist() == [[0, 0, 5, 7]] and seen[0].max().item() == 1.0


def test_a_boolean_image_is_not_scaled() -> None:
    encoder = Encoder(describe_space(spaces.Box(0, 1, (10, 10, 4), np.bool_)), SMALL)
    image = torch.ones((2, 10, 10, 4), dtype=torch.bool)
    seen: list[torch.Tensor] = []
    next(m for m in encoder.modules() if isinstance(m, torch.nn.Conv2d)).register_forward_pre_hook(
        lambda _, arguments: seen.append(arguments[0])
    )
    encoder({"obs": image}, None)
    assert seen[0].min().item() == seen[0].max().item() == 1.0


@pytest.mark.parametrize(
    ("kind", "size", "needed"), [("nature", 35, "36×36"), ("small", 4, "5×5")], ids=["nature", "small"]
)
def test_images_that_are_too_small_are_refused_by_name(kind: Any, size: int, needed: str) -> None:
    spec = describe_space(spaces.Dict({"camera": spaces.Box(0, 255, (size, 60, 3), np.uint8)}))
    with pytest.raises(UnsupportedSpace, match=rf"camera: images of {size}×60 are too small for cnn: {kind}.*{needed}"):
        Encoder(spec, PolicyConfig(cnn=kind))


@pytest.mark.parametrize(("kind", "size"), [("nature", 36), ("small", 5)])
def test_the_smallest_images_allowed_work(kind: Any, size: int) -> None:
    encoder = Encoder(describe_space(spaces.Box(0, 255, (size, size, 3), np.uint8)), PolicyConfig(cnn=kind))
    assert encoder({"obs": torch.zeros((2, size, size, 3), dtype=torch.uint8)}, None).shape == (2, 64)


def test_the_activation_is_the_configured_one() -> None:
    spec = describe_space(spaces.Box(-1.0, 1.0, (3,)))
    for name, kind in {
        "tanh": Tanh,
        "relu": torch.nn.ReLU,
        "elu": torch.nn.ELU,
        "silu": torch.nn.SiLU,
    }.items():
        encoder = Encoder(spec, PolicyConfig.model_validate({"activation": name, "hidden_sizes": (5, 6)}))
        assert [type(layer) for layer in encoder.mlp] == [torch.nn.Linear, kind, torch.nn.Linear, kind]
        assert encoder.features == 6
