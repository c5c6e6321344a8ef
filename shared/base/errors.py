"""The named errors of Stagecoach.

Every message states the value, the expectation and the remedy. `UserError` and its children are mistakes of the user
(exit code 2); everything else that derives from `StagecoachError` has another cause (exit code 1).
"""

import re
import traceback
from enum import StrEnum
from pathlib import Path

PACKAGE = Path(__file__).parents[2]
"""The folder of the package `stagecoach`."""
_OURS = re.compile(rf"<frozen |/lib/python3\.\d+/|^{re.escape(str(PACKAGE))}/")
"""Files of Stagecoach, of Python, and of installed packages."""


def headline(error: BaseException) -> str:
    """Returns an error as one line for reasons, events and tables: its first line, with its type unless it is a named
    error, and its notes."""
    first = next(iter(str(error).strip().splitlines()), "")
    if not (isinstance(error, StagecoachError) and first):
        first = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return "; ".join([first, *getattr(error, "__notes__", ())])


def place(error: BaseException) -> str:
    """Returns ` (at FILE:LINE)`, the innermost line of the user's code that raised `error`; else nothing."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if not _OURS.search(frame.filename)), None)
    return f" (at {frame.filename}:{frame.lineno})" if frame else ""


class StagecoachError(Exception):
    """Base of every error that Stagecoach raises on purpose."""


class UserError(StagecoachError):
    """The request cannot be fulfilled; the message says what to change."""


class ConfigError(UserError):
    """The configuration is misspelled, out of bounds, or combines what cannot work together."""


class UserCodeError(StagecoachError):
    """A user's own part raised an error or returned an unusable value; the message names the part and the place."""


class RunExists(UserError):
    """A run with this id is already there; nothing of it is overwritten."""


class RunLive(UserError):
    """A coordinator already runs this run."""


class RunNotFound(UserError):
    """No run (or no live run) has this id."""


class UnsupportedSpace(UserError):
    """An observation or action space that the chosen algorithm cannot handle."""


class EnvironmentUnusable(UserError):
    """The environment cannot be created at all: unknown id, failing factory, missing package."""


class OtherApi(EnvironmentUnusable):
    """A PettingZoo environment, where `environment.api` says gymnasium."""


class EnvironmentFailure(StagecoachError):
    """An environment raised in `reset` or `step`; carries which one, where, and its traceback."""


class RedisUnavailable(UserError):
    """Redis does not answer, refuses the credentials, or cannot serve (loading, full)."""


class ShardUnavailable(StagecoachError):
    """A Redis shard is unavailable; it may be back at the next try."""


class ShardFull(ShardUnavailable):
    """The memory of a Redis shard is full; a durable checkpoint frees some."""


class BodyLost(StagecoachError):
    """A fragment that was learned from cannot be read again: no shard has its body any more."""


class StoreUnavailable(UserError):
    """The store does not answer, refuses the credentials, or has no such bucket."""


class CredentialsRefused(StoreUnavailable):
    """The store refuses the credentials, or has none; the next attempt may have new credentials."""


class OperationRefused(StoreUnavailable):
    """The store knows the credentials and refuses one operation: by a right that is lacking, a quota, or a lock."""


class DeletionRefused(OperationRefused):
    """The store refuses to delete; whatever was to go stays, and everything else works."""


class StoreError(StagecoachError):
    """The store failed on one request, after its bounded retries."""


class ObjectMissing(StoreError):
    """The store has no object under this key."""


class DropReason(StrEnum):
    """Reason for dropping a fragment; each has an account in the ledger."""

    UNDECODABLE = "undecodable"
    CORRUPT = "corrupt"
    WIRE_VERSION = "wire_version"
    SCHEMA = "schema"
    FOREIGN = "foreign"
    FOREIGN_RUN = "foreign_run"
    NOT_FINITE = "not_finite"
    MAGNITUDE = "magnitude"
    STALE = "stale"
    DUPLICATE = "duplicate"
    LOST = "lost"
    LOST_BODY = "lost_body"
    POISON = "poison"
    LEFT_OUT = "left_out"


class FragmentError(StagecoachError):
    """Bytes that are not a valid fragment (or another blob); `detail` describes them."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


class CheckpointError(StagecoachError):
    """A checkpoint that cannot be used."""


class CheckpointNotFound(CheckpointError, UserError):
    """The checkpoint does not exist."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint is there, but incomplete, altered, of another run, or of a newer format."""


class PolicyKindUnknown(CheckpointDamaged):
    """A policy is of a class that no module registered in this process."""


class SharedObjectUnusable(StagecoachError):
    """An object that checkpoints share, such as a player, is missing from the store, altered, or not allowed."""


class ArchiveIncomplete(UserError):
    """The archive lacks a requested part of the log, or holds something else in its place."""


class MetricsDamaged(UserError):
    """A segment of a run's metrics is there, but incomplete, altered, or of a newer format."""


class DatasetError(UserError):
    """A dataset cannot be read, is not what its format says, or does not fit the run's spaces."""


class WeightsNotFinite(StagecoachError):
    """An update produced NaN or infinite weights; they are neither published nor stored."""


class Fenced(StagecoachError):
    """A newer trainer has taken over this run; this one must not write any more."""


class RedisRolledBack(StagecoachError):
    """Redis may have lost what this trainer's ledger says; the two must be matched before it continues."""


class VersionsDiverged(StagecoachError):
    """Redis has policy versions of other experience than this trainer's, and it cannot arrive at them."""


class WaitTimeout(StagecoachError):
    """A named wait outlasted its deadline."""


class WorkerSuperseded(StagecoachError):
    """A newer incarnation of this worker has registered; this one must end."""


class ExportFailed(StagecoachError):
    """A policy cannot be exported as ONNX, or the exported one acts differently."""
