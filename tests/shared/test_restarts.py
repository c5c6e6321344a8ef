"""The bound on restarts: ends without progress count in a row, and how long they take makes no difference."""

from __future__ import annotations

import pytest

from shared.restarts import RestartBound


def given_up_at(bound: RestartBound, lives: list[int]) -> int | None:
    """The number of the life with which it is given up; each life comes so far."""
    bound.saw((0,))
    for number, progress in enumerate(lives, 1):
        bound.saw((progress,))
        if bound.ended():
            return number
    return None


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
def test_it_is_given_up_after_so_many_ends_in_a_row_without_progress(
    allowed: int, lives: list[int], number: int | None
) -> None:
    assert given_up_at(RestartBound(allowed), lives) == number
