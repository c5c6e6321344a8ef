"""The policy board: the newest policy version, weights and normalizers as one unit: on the board itself or, if they are
large, in memory that all roles share (`redis`), or as the name of the checkpoint that holds them (`object_store`)."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never, cast

import redis
import xxhash

from stagecoach.shared.base.errors import ConfigError, Fenced, FragmentError, RedisRolledBack, VersionsDiverged
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.log_entry import BodyPlace
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.serialization import VersionHeader, decode_board, decode_policy, state_arrays
from stagecoach.shared.protocol.flow_control import KeyDamaged, RunState, sound
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.shared.protocol.scripts import Script
from stagecoach.shared.protocol.shared_memory import AT_LEAST, PLACE, SharedMemory
from stagecoach.shared.storage.checkpoint_store import Checkpoint, CheckpointStore

_FILE = "policy:"
"""Start of the names of versions in shared memory, where a worker's bodies have its name."""


@dataclass(frozen=True)
class PolicyVersion:
    header: VersionHeader
    states: dict[str, Columns]


class PublishReply(StrEnum):
    PUBLISHED = "published"
    KNOWN = "known"
    OTHER = "other"
    """Another policy has this version in Redis."""
    FENCED = "fenced"
    BEHIND = "behind"


@dataclass(frozen=True)
class Published:
    """A publication that is on the board: PUBLISHED or KNOWN."""

    reply: PublishReply
    state: RunState
    reason: str
    log_bytes: int


class PolicyBoard:
    """The board in Redis; of the files in `memory`, the last published one is never written over."""

    def __init__(self, client: redis.Redis, run_id: str, memory: SharedMemory | None = None) -> None:
        self._redis, self._keys, self._memory = client, RunKeys(run_id), memory or SharedMemory()
        self._publish = Script(client, self._keys, "publish")
        self._published = self._spare = ""
        self._alone = False
        """True once the files of former trainers are removed."""

    def publish(
        self, *, epoch: int, version: int, consumed: int, committed_id: str, ledger: Ledger, header: VersionHeader,
        blob: bytes, checkpoint: str = "", process: str = "",
    ) -> Published:  # fmt: skip
        """Publishes version, weights, credit and ledger in one step; raises `Fenced` for an older trainer.

        Raises `RedisRolledBack`, and changes nothing, where Redis is not `process`, or knows an older epoch, and
        `VersionsDiverged` where it has other weights under this version. `blob` is empty and `checkpoint` names the
        weights under the transport `object_store`.
        """
        place, file = self._share(epoch, version, blob)
        found, state, reason, log_bytes = self._publish(
            epoch=epoch, version=version, history=header.history, consumed=consumed, committed_id=committed_id,
            blob=b"" if place else blob, place=place, process=process, header=json.dumps(header.as_dict()),
            checkpoint=checkpoint, accounts=ledger.news(),
        )  # fmt: skip
        match reply := PublishReply(found.decode()):
            case PublishReply.FENCED:
                raise Fenced(f"epoch {epoch} may not publish version {version}; a newer trainer has taken over")
            case PublishReply.BEHIND:
                why = "Redis came back, perhaps with less than it had"
                raise RedisRolledBack(f"version {version} is not published: {why}")
            case PublishReply.OTHER:
                raise VersionsDiverged(f"Redis has a version {version} that comes from other experience")
            case PublishReply.PUBLISHED:
                ledger.told()
            case PublishReply.KNOWN:
                pass
            case _:
                assert_never(reply)
        if file != self._published:
            self._published, self._spare = file, self._published
        if reply is PublishReply.PUBLISHED and not self._alone:
            self._memory.remove(name for name in self._memory.names() if name.startswith(_FILE) and name != file)
            self._alone = True
        try:
            run_state = RunState(state.decode())
        except ValueError as error:
            raise KeyDamaged(self._keys.flow, f"its field state: {error}") from None
        return Published(reply, run_state, reason.decode(errors="replace"), int(log_bytes))

    @property
    def lost(self) -> bool:
        """True if the shared memory no longer holds the last published version, which should be published again."""
        return bool(self._published) and not self._memory.holds(self._published)

    def _share(self, epoch: int, version: int, blob: bytes) -> tuple[bytes, str]:
        """Writes a large version to shared memory; returns place and file, or nothing if it belongs on the board."""
        if len(blob) < AT_LEAST or not self._memory.token:
            return b"", ""
        place = BodyPlace(PLACE, f"{epoch}:{max(version, 0)}:{xxhash.xxh3_128_hexdigest(blob)}", len(blob))
        name = f"{_FILE}{place.field}"
        if name != self._published:
            self._memory.rename(self._spare, name)
            self._spare = name
        return (place.encode(), name) if self._memory.put(name, blob) else (b"", "")

    def fetch(self, checkpoints: CheckpointStore) -> PolicyVersion | None:
        """Returns the newest version; None before the first, and while its file in shared memory is being replaced.

        Raises `KeyDamaged`, `ConfigError` in a process without that memory, or what the store raises.
        """
        return sound(lambda: self._fetch(checkpoints))

    def _fetch(self, checkpoints: CheckpointStore) -> PolicyVersion | None:
        fields = cast(list[bytes | None], self._redis.hmget(self._keys.board, ["blob", "checkpoint", "place"]))
        blob, checkpoint, place = fields
        if blob is None:
            return None
        if place:
            return self._read(place)
        if checkpoint:
            name = checkpoint.decode(errors="replace")
            if checkpoint_version(name) is None:
                wrong = f"its field checkpoint is {name!r}, which is not a checkpoint's name"
                raise KeyDamaged(self._keys.board, wrong)
            return version_of(checkpoints.load(name, only="policy.safetensors"))
        try:
            states, header = decode_board(blob)
        except (FragmentError, ValueError) as error:
            raise KeyDamaged(self._keys.board, f"its field blob is not a policy version ({error})") from None
        return PolicyVersion(header, states)

    def _read(self, place: bytes) -> PolicyVersion | None:
        if (decoded := BodyPlace.decode(place)) is None:
            raise KeyDamaged(self._keys.board, f"its field place is {place[:40]!r}, which is not a place")
        token = cast(bytes | None, self._redis.hget(self._keys.flow, "memory"))
        if token and token.decode(errors="replace") != self._memory.token:
            raise ConfigError(
                "the policy versions of this run are in shared memory that this process does not see; start it where "
                "the run's other roles are, or resume the run with redis.shared_memory=false"
            )
        if (blob := self._memory.get(f"{_FILE}{decoded.field}", decoded.size)) is None:
            return None
        try:
            states, header = decode_board(blob)
        except (FragmentError, ValueError):  # written over by a later one
            return None
        return PolicyVersion(header, states)


def version_of(checkpoint: Checkpoint) -> PolicyVersion:
    """Returns the policy version in a checkpoint, of which at least the policy files are loaded."""
    header = VersionHeader.from_dict({"version": checkpoint.manifest.version, **checkpoint.manifest.provenance})
    policies = {key: data for key, data in checkpoint.objects.items() if key.endswith("policy.safetensors")}
    states = {key.partition("/")[0]: state_arrays(decode_policy(data)[0]) for key, data in policies.items()}
    return PolicyVersion(header, states)
