"""Ends of a role or a run: a failure's kind decides the exit code, its text is for people."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from stagecoach.shared.base.errors import EnvironmentFailure, EnvironmentUnusable, headline


class FailureKind(StrEnum):
    ENVIRONMENT = "environment"
    """The user's environment cannot be created, raised, hangs, ended its process, or returned unusable values."""
    RESOURCES = "resources"
    """The process got no memory, file or thread: the next one may get it."""
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
        kind = FailureKind.OTHER
        if isinstance(error, (EnvironmentFailure, EnvironmentUnusable)):
            kind = FailureKind.ENVIRONMENT
        elif any(map(_lacks_resources, _with_causes(error))):
            kind = FailureKind.RESOURCES
        return cls(kind, headline(error))

    def __str__(self) -> str:
        return f"environment: {self.detail}" if self.kind is FailureKind.ENVIRONMENT else self.detail


def _lacks_resources(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):  # PyTorch's, and that of a thread
        return any(text in str(error) for text in ("can't allocate memory", "can't start new thread"))
    codes = errno.EMFILE, errno.ENFILE, errno.ENOMEM
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in codes)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


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
