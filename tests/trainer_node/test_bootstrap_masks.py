"""Bootstrap masks: of the right share, one head's without regard to another's, and always the same for a transition."""

from __future__ import annotations

import numpy as np
import pytest

from trainer_node.algorithms.bootstrap_masks import bootstrap_masks


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_each_head_has_its_share_and_no_two_have_the_same(share: float) -> None:
    masks = bootstrap_masks(np.arange(40_000), 4, share, seed=3)
    assert masks.shape == (4, 40_000) and masks.dtype == np.float32 and set(np.unique(masks)) == {0.0, 1.0}
    np.testing.assert_allclose(masks.mean(axis=1), share, atol=0.012)
    among_heads, among_neighbours = np.corrcoef(masks), np.corrcoef(masks[:, :-1], masks[:, 1:])[:4, 4:]
    assert np.abs(among_heads - np.eye(4)).max() < 0.02 and np.abs(among_neighbours).max() < 0.02


def test_a_transition_keeps_its_mask_wherever_it_stands_in_a_batch_and_seeds_differ() -> None:
    numbers = np.array([7, 10**12, 0, 7, 123_456_789])
    masks = bootstrap_masks(numbers, 50, 0.5, seed=1)
    assert np.array_equal(masks[:, 0], masks[:, 3])
    assert np.array_equal(bootstrap_masks(numbers[::-1].copy(), 50, 0.5, seed=1), masks[:, ::-1])
    assert not np.array_equal(bootstrap_masks(numbers, 50, 0.5, seed=2), masks)
    assert not np.array_equal(masks[:, 0], masks[:, 1])


def test_a_share_of_one_is_all_of_them() -> None:
    assert bootstrap_masks(np.arange(1000), 3, 1.0, seed=0).all()
