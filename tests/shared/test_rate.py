"""The rate limit: what is within the window counts, what is older is forgotten."""

from __future__ import annotations

import time

import pytest

from shared.rate import Rate


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until it is set."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_more_than_allowed_within_the_window_is_too_often(clock: list[float]) -> None:
    limit = Rate(2, 10.0)
    assert [limit.exceeded(), limit.exceeded(), limit.exceeded()] == [False, False, True]
    clock[0] += 10.1
    assert not limit.exceeded()


def test_the_pause_lasts_until_one_more_is_allowed(clock: list[float]) -> None:
    limit = Rate(2, 10.0)
    pauses = []
    for _ in range(3):
        pauses.append(limit.pause_seconds())
        limit.exceeded()
        clock[0] += 1.0
    assert pauses == [0.0, 0.0, 8.0]
    clock[0] += 20.0
    assert limit.pause_seconds() == 0.0


def test_nothing_allowed_still_has_a_pause_that_ends(clock: list[float]) -> None:
    limit = Rate(0, 10.0)
    assert limit.pause_seconds() == 0.0
    assert limit.exceeded()
    assert limit.pause_seconds() == 10.0
