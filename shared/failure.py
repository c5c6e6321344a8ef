"""What has failed, as a kind and in words: the kind decides the exit code, the words are for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from shared.errors import EnvironmentFailure, EnvironmentUnusable, headline


class FailureKind(StrEnum):
    """Whose failure it is."""

    ENVIRONMENT = "environment"
    """The user's environment cannot be made, raised, hangs, ended its process, or returned what cannot be used."""
    OTHER = "other"


@dataclass(frozen=True)
class Failure:
    """Why a role has failed; `detail` is one line."""

    kind: FailureKind
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What was raised."""
        environment = isinstance(error, (EnvironmentFailure, EnvironmentUnusable))
        return cls(FailureKind.ENVIRONMENT if environment else FailureKind.OTHER, headline(error))

    def __str__(self) -> str:
        return f"environment: {self.detail}" if self.kind is FailureKind.ENVIRONMENT else self.detail


_IN_WORDS = {"exhausted": "completed, it has reached stop_at"}


def reason_in_words(reason: str) -> str:
    """The reason of a run's end, or of a role's, as people are told it; files and `--json` have the word itself."""
    return _IN_WORDS.get(reason, reason)


@dataclass(frozen=True)
class RunEnd:
    """Why a run has ended: `solved`, `exhausted`, `stopped`, `abandoned`, or what has failed."""

    reason: str
    failure: FailureKind | None = None

    @classmethod
    def failed(cls, failure: Failure) -> RunEnd:
        """The end of a run that this failure ends."""
        return cls(f"failed: {failure}", failure.kind)
