"""GAE and V-trace against their definitions (tests/support/learning/slow_returns.py)."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.learning.slow_returns import COLUMNS, random_case

quick = settings(max_examples=80, derandomize=True)
sizes = given(seed=st.integers(0, 10_000), steps=st.integers(1, 12), slots=st.integers(1, 4))


@quick
@sizes
def test_advantages_equal_the_papers(seed: int, steps: int, slots: int) -> None:
    case, kept = random_case(seed, steps, slots), random_case(seed, steps, slots)
    np.testing.assert_allclose(case.gae(), case.slow_gae(), rtol=1e-10, atol=1e-10)
    for found, expected in zip(case.vtrace(), case.slow_vtrace(), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)
    changed = [name for name in COLUMNS if not np.array_equal(getattr(case, name), getattr(kept, name))]
    assert changed == [], "nothing that is handed in is changed"


@quick
@sizes
def test_v_trace_targets_equal_gae_returns_on_policy(seed: int, steps: int, slots: int) -> None:
    """Remark 1 of the paper: where the acting policy is the learning one, v_s is the n-step return, or TD(λ)'s."""
    case = random_case(seed, steps, slots, away=0.0)
    case.rho_bar = case.c_bar = 1.0
    found, of_gae = case.vtrace(), torch.from_numpy(case.gae())
    torch.testing.assert_close(found.target, torch.from_numpy(case.value) + of_gae, rtol=1e-9, atol=1e-9)
    if case.decay == 1.0:
        torch.testing.assert_close(found.weight * found.advantage, of_gae, rtol=1e-9, atol=1e-9)
