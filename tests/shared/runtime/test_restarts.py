"""The bound on consecutive restarts without progress."""

from __future__ import annotations

import pytest

from stagecoach.shared.runtime.restarts import RestartBound


@pytest.mark.parametrize(
    ("allowed", "lives", "number"),
    [
        (2, [0, 0, 0, 0], 3),
        (0, [0], 1),
        (2, [0, 0, 1, 1, 1, 2, 2, 2, 2], 9),  # what made progress counts anew, its own end not at all
        (2, [5, 3, 4, 5], 4),  # what a former life had reached already is no progress
        (1, [1, 2, 3, 4, 5, 6, 7, 8], None),
    ],
)
def test_restart_bound_counts_ends_without_progress(allowed: int, lives: list[int], number: int | None) -> None:
    bound, given_up = RestartBound(allowed), list[bool]()
    bound.record_progress((0,))
    for progress in lives:
        bound.record_progress((progress,))
        given_up.append(bound.ended())
    assert (given_up.index(True) + 1 if any(given_up) else None) == number
