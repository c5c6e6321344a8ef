"""Running moments against NumPy's; the observation normaliser against both."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_worker.making import describe_space
from shared.config import PolicyConfig
from shared.policies.encoders import Encoder, ObservationNormaliser
from shared.policies.normaliser import RunningMoments


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


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_moments_are_those_of_all_data_together(seed: int, sizes: list[int]) -> None:
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


def test_it_is_the_identity_until_it_has_seen_anything() -> None:
    moments = RunningMoments(2, clip=1.0)
    values = torch.tensor([[1e20, -3.25], [0.0, 1e-30]])
    assert torch.equal(moments(values), values)
    moments.update(torch.zeros(0, 2))
    assert torch.equal(moments(values), values)


def test_clipping_starts_with_the_first_update() -> None:
    moments = RunningMoments(1, clip=2.0)
    moments.update(torch.tensor([[-1.0], [1.0]]))
    assert moments(torch.tensor([[1.5], [100.0], [-100.0]])).flatten().tolist() == pytest.approx([1.5, 2.0, -2.0])


def test_the_order_of_batches_decides_nothing_but_the_last_digits() -> None:
    parts = batches(1, [5, 1, 17, 8])
    reference = moments_after(parts)
    for order in itertools.permutations(parts):
        other = moments_after(list(order))
        for name in ("mean", "m2"):
            torch.testing.assert_close(other.get_buffer(name), reference.get_buffer(name), rtol=1e-9, atol=1e-9)


def test_the_same_order_gives_the_same_bits_also_from_a_snapshot() -> None:
    parts = batches(2, [5, 1, 17, 8])
    whole = moments_after(parts)
    assert as_bytes(whole) == as_bytes(moments_after(parts))
    resumed = RunningMoments(3, clip=10.0)
    resumed.load_state_dict(moments_after(parts[:2]).state_dict())
    for part in parts[2:]:
        resumed.update(part)
    assert as_bytes(resumed) == as_bytes(whole)


def test_a_constant_observation_does_not_divide_by_zero() -> None:
    moments = RunningMoments(1, clip=10.0)
    moments.update(torch.full((4, 1), 7.0))
    assert moments(torch.tensor([[7.0]])).item() == 0.0
    assert np.isfinite(moments(torch.tensor([[8.0]])).item())


SPACE: spaces.Space[Any] = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (6, 6, 3), np.uint8),
        "joints": spaces.Box(-100.0, 100.0, (2, 2)),
        "mode": spaces.Discrete(3),
        "speed": spaces.Box(-100.0, 100.0, (1,)),
    }
)


def test_vectors_are_normalised_and_images_and_choices_are_not() -> None:
    spec = describe_space(SPACE)
    normaliser = ObservationNormaliser(spec, clip=10.0)
    random = torch.Generator().manual_seed(0)
    rows = {
        "obs.camera": torch.randint(0, 256, (50, 6, 6, 3), generator=random, dtype=torch.uint8),
        "obs.joints": torch.randn(50, 2, 2, generator=random) * 20 + 5,
        "obs.mode": torch.randint(0, 3, (50,), generator=random),
        "obs.speed": torch.randn(50, 1, generator=random) * 3 - 50,
    }
    normaliser.update(rows)
    encoder = Encoder(spec, PolicyConfig(cnn="small", hidden_sizes=()))
    plain, normal = encoder(rows, None), encoder(rows, normaliser)
    changed = (plain != normal).any(dim=0)
    assert int(changed.sum()) == 5
    vectors = normal[:, changed]
    torch.testing.assert_close(vectors.mean(0), torch.zeros(5), rtol=0, atol=1e-4)
    torch.testing.assert_close(vectors.std(0, correction=0), torch.ones(5), rtol=0, atol=1e-4)


def test_the_statistics_travel_in_the_state_of_the_policy() -> None:
    normaliser = ObservationNormaliser(describe_space(SPACE), clip=10.0)
    names = {name.rpartition(".")[2] for name in normaliser.state_dict()}
    assert names == {"count", "mean", "m2", "shift", "scale", "bound"}
    assert not list(normaliser.parameters())
