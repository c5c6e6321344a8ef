"""What is known of a member of the fleet."""

from __future__ import annotations

from coordinator.member import cause
from shared.errors import EnvironmentFailure, StoreError


def test_what_a_role_raised_is_told_without_rays_frame() -> None:
    def failed(raised: Exception) -> Exception:
        error = RuntimeError("Ray's long text")
        error.cause = raised  # type: ignore[attr-defined]
        return error

    assert cause(failed(StoreError("no room"))) == "no room"
    assert cause(failed(EnvironmentFailure("stuck"))) == "environment: stuck"
    assert cause(failed(EnvironmentFailure("stuck\nTraceback\n  odd"))) == "environment: stuck"
    assert cause(failed(ValueError("odd\nand long"))) == "ValueError: odd"
    assert cause(failed(AssertionError())) == "AssertionError"
