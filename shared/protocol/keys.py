"""Every Redis key of a run, in one place. All are on the server at `redis.url`, but for `bodies`, on `redis.shards`.

All keys of a run start with `stagecoach:{RUN}:`. They live from the start of the run until `stagecoach` or a person
deletes them; nothing expires on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from stagecoach.shared.base.errors import UserError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"stagecoach:\{[^}]*\}:([a-z_]+)(?::.*)?")
BEATING = ("coordinator", "trainer", "rank", "evaluator", "worker")
"""The roles that send heartbeats, each into a key of its own."""
TYPES = {"bodies": "hash", "action_trace": "list", "heartbeats": "hash"}
"""Redis type by the name of each key; of the first two each worker has one, of the third each role."""
COUNTS = ("pushed", "produced", "incarnations")
"""Hashes whose values are whole numbers."""


def check_run_id(run_id: str) -> str:
    """Returns `run_id`; raises `UserError` where it could not be a key, a folder and an object name alike."""
    if not isinstance(run_id, str) or not _RUN_ID.fullmatch(run_id):  # programs give anything
        raise UserError(
            f"run id {run_id!r}: expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first"
        )
    return run_id


def key_name(key: str) -> str | None:
    """`flow`, `log`, `action_trace` … for a key of a run's; None for anything else."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def key_type(key: str) -> str | None:
    return TYPES.get(key_name(key) or "")


class Key:
    """A key of `RunKeys` with its Redis type, named like the attribute."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        TYPES[name] = self._kind

    def __get__(self, keys: RunKeys, owner: type) -> str:
        return keys.prefix + self._name


@dataclass(frozen=True)
class RunKeys:
    """The keys of one run, and which roles write and read each (deploy/users.acl holds them to that). The coordinator,
    as `stagecoach delete`, also deletes all of them."""

    run_id: str

    @property
    def prefix(self) -> str:
        return f"stagecoach:{{{self.run_id}}}:"

    flow = Key("hash")
    """Epoch, state, version, consumed, claimed, bounds, positions. Writers: all roles (scripts); readers: all."""
    log = Key("stream")
    """The experience log, an entry per fragment. Writers: workers (push), trainer (trim, fast_forward); readers:
    trainer, status."""
    pushes = Key("stream")
    """The ids of the log's entries that workers pushed, with their fields but the fragment, until they are trimmed;
    all other entries are another program's. Writers: workers (push), trainer (trim); readers: trainer, status."""
    lost_bodies = Key("set")
    """Log ids of the fragments that were dropped because their body was lost, until they are trimmed: they stay
    dropped, whatever a shard comes back with. Writer and reader: trainer (drop, give_up, trim)."""
    quarantine = Key("hash")
    """Log id → why it is dropped unread (`poison`), or `dropped` for a reason of its own; until trimmed. Writers:
    trainer (begin_work, drop, trim), coordinator (`resume --drop`); reader: trainer."""
    claims = Key("zset")
    """Claim id → end of its lease (ms). Writers: workers (claim, push, register, release), coordinator (release),
    trainer (fast_forward)."""
    pushed = Key("hash")
    """worker:incarnation → last sequence number pushed, so that repeats and gaps show; worker:incarnation:refused → how
    many of its pushes were stale; worker:tries → how many incarnations have died since the last push, while they acted;
    session:NAME → the first message of a gateway's session that is in no fragment so far, session:NAME:worker → its
    gateway. Writers: workers (push, register, tries, sessions), trainer (fast_forward), coordinator (a new start
    forgets the tries)."""
    produced = Key("hash")
    """worker:fragments, worker:transitions produced; and what push rejected as stale. Writers: workers (push), trainer
    (fast_forward); readers: status, fleet."""
    incarnations = Key("hash")
    """Worker → its current incarnation, plus one. Writers: workers (register, claim), trainer (fast_forward)."""
    draining = Key("set")
    """Workers that are to end after their fragment. Writer: coordinator; readers: workers (claim)."""
    wakeups = Key("stream")
    """Short: an entry whenever credit may have become free. Writers: all roles (scripts); readers: waiting workers."""
    board = Key("hash")
    """The policy board: version, header, blob (or the checkpoint that holds it). Writer: trainer; readers: workers."""
    ledger = Key("hash")
    """Worker → JSON, its account in the trainer's ledger through flow.committed_id. Writer: trainer; reader: status."""
    events = Key("stream")
    """The last thousand: checkpoints, evaluations, deaths … Writers: all roles; readers: console, evaluator."""
    evaluations = Key("hash")
    """Checkpoint name → JSON scores. Writers: evaluator, trainer (removes); readers: trainer, evaluator, status."""
    metrics = Key("stream")
    """Short: the newest rows of training metrics. Writer: trainer; readers: console, status, page."""
    ranks = Key("stream")
    """Short: where the trainer opens a group for its other ranks, and an entry before each message to it. Writer:
    trainer (of the newest epoch); readers: ranks."""
    store_status = Key("string")
    """JSON; what the trainer's uploads wait for or failed with. Writer: trainer; readers: all roles, status."""

    def bodies(self, worker: str) -> str:
        """Hash, on the shards; incarnation:seq:digest → a fragment's body, until the log names it no more.
        Writers: workers, trainer (sweeps); reader: trainer."""
        return f"{self.prefix}bodies:{worker}"

    def heartbeats(self, role: str) -> str:
        """Hash; id → JSON (time, pid, host, its wait) of the processes of `role`, one of `BEATING`. Writers: that role,
        coordinator (removes); readers: trainer, coordinator, status."""
        return f"{self.prefix}heartbeats:{role}"

    def action_trace(self, worker: str) -> str:
        """List; what `worker` did in its running episodes, an entry per fragment; gone when it is drained.
        Writers: workers (push), coordinator (a new start deletes it); readers: worker, trainer (of seats)."""
        return f"{self.prefix}action_trace:{worker}"
