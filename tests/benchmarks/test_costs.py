"""The costs of the protocol's steps: all of them are measured, on a real Redis."""

from __future__ import annotations

from benchmarks.costs import measure


def test_every_step_has_its_cost() -> None:
    found = measure(workers=5, steps=4, envs=2)
    assert {"claim, granted", "claim, refused", "push", "heartbeat", "publish", "trim"} <= {
        cost.step for cost in found.costs
    }
    assert all(cost.redis >= 0 and cost.caller > 0 for cost in found.costs)
    assert all(size > 0 for size in found.sizes.values())
