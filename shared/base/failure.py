"""How a role or a run has ended: a failure's kind decides the exit code, its words are for people."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from stagecoach.shared.base.errors import EnvironmentFailure, EnvironmentUnusable, headline


class FailureKind(StrEnum):
    ENVIRONMENT = "environment"
    """The user's environment cannot be made, raised, hangs, ended its process, or returned what cannot be used."""
    OTHER = "other"


class RoleEnd(StrEnum):
    FINISHED = "finished"
    STOPPING = "stopping"
    DRAINED = "drained"
    PREEMPTED = "preempted"
    """It was asked to end (SIGTERM, Ctrl-C); its place is to be filled by a new process."""
    TERMINATED = "terminated"
    OUTGROWN = "outgrew its memory limit"
    SUPERSEDED = "superseded by a newer incarnation"
    FAILED = "failed"


@dataclass(frozen=True)
class Failure:
    """Why a role has failed; `detail` is one line."""

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
    """The reason of a run's end, or of a role's, as people are told it; files and `--json` have the word itself."""
    return "completed, it has reached stop_at" if reason == EndReason.EXHAUSTED else reason


@dataclass(frozen=True)
class RunEnd:
    """Why a run has ended: an `EndReason`, or `failed: ` and what has failed."""

    reason: str
    failure: FailureKind | None = None

    @classmethod
    def failed(cls, failure: Failure) -> RunEnd:
        return cls(f"failed: {failure}", failure.kind)
