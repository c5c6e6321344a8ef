"""Ends of a role or a run: a failure's kind decides the exit code, its text is for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stagecoach.shared.base.errors import EnvironmentFailure, EnvironmentUnusable, headline


class FailureKind(StrEnum):
    ENVIRONMENT = "environment"
    """The user's environment cannot be created, raised, hangs, ended its process, or returned unusable values."""
    OTHER = "other"


class RoleEnd(StrEnum):
    FINISHED = "finished"
    STOPPING = "stopping"
    DRAINED = "drained"
    PREEMPTED = "preempted"
    """The process got SIGTERM or Ctrl-C; a new one replaces it."""
    TERMINATED = "terminated"
    OUTGROWN = "outgrew its memory limit"
    SUPERSEDED = "superseded by a newer incarnation"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """Failure of a role; `detail` is one line."""

    kind: FailureKind
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        environment = isinstance(error, (EnvironmentFailure, EnvironmentUnusable))
        return cls(FailureKind.ENVIRONMENT if environment else FailureKind.OTHER, headline(error))

    def __str__(self) -> str:
        return f"environment: {self.detail}" if self.kind is FailureKind.ENVIRONMENT else self.detail


class EndReason(StrEnum):
    SOLVED = "solved"
    EXHAUSTED = "exhausted"
    STOPPED = "stopped"
    ABANDONED = "abandoned"


def reason_in_words(reason: str) -> str:
    """Returns the reason of a run's or a role's end for people; files and `--json` have the word itself."""
    return "reached stop_at" if reason == EndReason.EXHAUSTED else reason


@dataclass(frozen=True)
class RunEnd:
    """End of a run; `reason` is an `EndReason`, or `failed: ` and the failure."""

    reason: str
    failure: FailureKind | None = None

    @classmethod
    def failed(cls, failure: Failure) -> RunEnd:
        return cls(f"failed: {failure}", failure.kind)
