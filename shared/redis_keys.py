"""Every Redis key of a run, in one place. All are on the server at `redis.url`, but for `bodies`, on `redis.shards`.

All keys of a run start with `stagecoach:{RUN}:`; the braces keep them on one slot of a Redis Cluster. They live from
the start of the run until `stagecoach` or a person deletes them; nothing expires on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.errors import UserError

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_KEY = re.compile(r"stagecoach:\{[^}]*\}:([a-z_]+)(?::.*)?")
_TYPES = {
    "hash": ("flow", "bodies", "quarantine", "pushed", "produced", "incarnations", "board", "ledger", "heartbeats",
             "evaluations"),
    "stream": ("log", "pushes", "wakeups", "events", "ranks"),
    "set": ("lost_bodies", "draining"), "zset": ("claims",), "list": ("trail",), "string": ("signals", "store_status"),
}  # fmt: skip
COUNTS = ("pushed", "produced", "incarnations")
"""Hashes whose values are whole numbers."""


def check_run_id(run_id: str) -> str:
    """Returns `run_id`; raises `UserError` where it could not be a key, a folder and an object name alike."""
    if not _RUN_ID.fullmatch(run_id):
        raise UserError(
            f"run id {run_id!r}: expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first"
        )
    return run_id


def redis_place(url: str) -> str:
    """`host:port/db` of a Redis address: what tells one server's contents from another's."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or 6379}/{parts.path.strip('/') or 0}"


def key_name(key: str) -> str | None:
    """`flow`, `log`, `trail` … for a key of a run's; None for anything else."""
    found = _KEY.fullmatch(key)
    return found[1] if found else None


def key_type(key: str) -> str | None:
    """What Redis says to `TYPE` of a key of a run's."""
    name = key_name(key)
    return next((kind for kind, names in _TYPES.items() if name in names), None)


@dataclass(frozen=True)
class RunKeys:
    """The keys of one run."""

    run_id: str

    @property
    def prefix(self) -> str:
        """What all of them start with."""
        return f"stagecoach:{{{self.run_id}}}:"

    @property
    def flow(self) -> str:
        """Hash; epoch, state, version, consumed, claimed, bounds, positions. Writers: the scripts; readers: all."""
        return self.prefix + "flow"

    @property
    def log(self) -> str:
        """Stream; the experience log, an entry per fragment. Writer: workers (push); reader: trainer."""
        return self.prefix + "log"

    @property
    def pushes(self) -> str:
        """Stream of empty entries; the ids of the log's entries that workers pushed, until they are trimmed: what else
        the log holds was put in by hand. Writer: workers (push); reader: trainer."""
        return self.prefix + "pushes"

    def bodies(self, worker: str) -> str:
        """Hash, on the shards; incarnation:seq:digest → a fragment's body, until the log names it no more.
        Writer: worker; reader: trainer."""
        return f"{self.prefix}bodies:{worker}"

    @property
    def lost_bodies(self) -> str:
        """Set; log ids of the fragments that were dropped because their body was lost, until they are trimmed: they
        stay dropped, whatever a shard comes back with. Writer: trainer (drop); reader: trainer."""
        return self.prefix + "lost_bodies"

    @property
    def quarantine(self) -> str:
        """Hash; log id → why it is dropped unread (`poison`), or `dropped` for a reason of its own; until trimmed.
        Writers: trainer (as it begins; drop), resume --drop; reader: trainer."""
        return self.prefix + "quarantine"

    @property
    def claims(self) -> str:
        """Sorted set; claim id → end of its lease (ms). Writers: claim, push, release."""
        return self.prefix + "claims"

    @property
    def pushed(self) -> str:
        """Hash; worker:incarnation → last sequence number pushed, so that repeats and gaps show;
        worker:incarnation:refused → how many of its pushes were stale; worker:tries → how many incarnations have died
        since the last push, while they acted. Writers: push, worker."""
        return self.prefix + "pushed"

    @property
    def produced(self) -> str:
        """Hash; worker:fragments, worker:transitions produced; and what push refused as stale. Writer: push."""
        return self.prefix + "produced"

    @property
    def incarnations(self) -> str:
        """Hash; worker → its current incarnation. Writer: register."""
        return self.prefix + "incarnations"

    @property
    def draining(self) -> str:
        """Set; workers that shall end after their fragment. Writer: coordinator; reader: claim."""
        return self.prefix + "draining"

    @property
    def wakeups(self) -> str:
        """Stream (short); an entry whenever credit may have become free. Writers: scripts; readers: waiting workers."""
        return self.prefix + "wakeups"

    def trail(self, worker: str) -> str:
        """List; what `worker` did in its running episodes, an entry per fragment; gone when it is drained.
        Writer: push; reader: worker."""
        return f"{self.prefix}trail:{worker}"

    @property
    def board(self) -> str:
        """Hash; the policy board: version, header, blob (or the checkpoint that holds it). Writer: trainer."""
        return self.prefix + "board"

    @property
    def ledger(self) -> str:
        """Hash; worker → JSON, its account in the trainer's ledger through flow.settled_id. Writer: trainer."""
        return self.prefix + "ledger"

    @property
    def heartbeats(self) -> str:
        """Hash; role:id → JSON (time, pid, host, what it waits for). Writers: all roles; reader: status."""
        return self.prefix + "heartbeats"

    @property
    def events(self) -> str:
        """Stream (the last thousand); checkpoints, evaluations, deaths … for the console and the evaluator."""
        return self.prefix + "events"

    @property
    def evaluations(self) -> str:
        """Hash; checkpoint name → JSON scores. Writer: evaluator; reader: trainer (best checkpoint), status."""
        return self.prefix + "evaluations"

    @property
    def signals(self) -> str:
        """String, JSON; the newest training figures. Writer: trainer; readers: console, status."""
        return self.prefix + "signals"

    @property
    def ranks(self) -> str:
        """Stream (short); where the trainer opens a group for its other ranks, and an entry before each message to it.
        Writer: trainer (of the newest epoch); reader: ranks."""
        return self.prefix + "ranks"

    @property
    def store_status(self) -> str:
        """String, JSON; what the trainer's uploads wait for or failed with. Writer: trainer; reader: status."""
        return self.prefix + "store_status"
