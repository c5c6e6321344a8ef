"""What is known of a member of the fleet."""

from __future__ import annotations

import pytest

from coordinator.member import cause
from shared.errors import EnvironmentFailure, EnvironmentUnusable, StoreError
from shared.failure import Failure, FailureKind, RunEnd


@pytest.mark.parametrize(
    ("raised", "kind", "reason"),
    [
        (StoreError("no room"), FailureKind.OTHER, "failed: no room"),
        (EnvironmentFailure("stuck"), FailureKind.ENVIRONMENT, "failed: environment: stuck"),
        (EnvironmentFailure("stuck\nTraceback\n  odd"), FailureKind.ENVIRONMENT, "failed: environment: stuck"),
        (EnvironmentUnusable("no mesh"), FailureKind.ENVIRONMENT, "failed: environment: no mesh"),
        (ValueError("environment: odd\nand long"), FailureKind.OTHER, "failed: ValueError: environment: odd"),
        (AssertionError(), FailureKind.OTHER, "failed: AssertionError"),
    ],
)
def test_what_a_role_raised_is_told_without_rays_frame(raised: Exception, kind: FailureKind, reason: str) -> None:
    error = RuntimeError("Ray's long text")
    error.cause = raised  # type: ignore[attr-defined]
    assert RunEnd.failed(Failure.of(cause(error))) == RunEnd(reason, kind)
