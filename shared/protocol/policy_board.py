"""The policy board: the newest policy version, weights and normalizers as one unit: on the board itself (`redis`), or
as the name of the checkpoint that holds them (`object_store`)."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never, cast

import redis

from stagecoach.shared.base.errors import Fenced, FragmentError, RedisRolledBack, VersionsDiverged
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.serialization import VersionHeader, decode_board, decode_policy, state_arrays
from stagecoach.shared.protocol.flow_control import KeyDamaged, RunState, sound
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.shared.protocol.scripts import Script
from stagecoach.shared.storage.checkpoint_store import Checkpoint, CheckpointStore


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
    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis, self._keys = client, RunKeys(run_id)
        self._publish = Script(client, self._keys, "publish")

    def publish(
        self, *, epoch: int, version: int, consumed: int, committed_id: str, ledger: Ledger, header: VersionHeader,
        blob: bytes, checkpoint: str = "", process: str = "",
    ) -> Published:  # fmt: skip
        """Publishes version, weights, credit and ledger in one step; raises `Fenced` for an older trainer.

        Raises `RedisRolledBack`, and changes nothing, where Redis is not `process`, or knows an older epoch, and
        `VersionsDiverged` where it has other weights under this version. `blob` is empty and `checkpoint` names the
        weights under the transport `object_store`.
        """
        found, state, reason, log_bytes = self._publish(
            epoch=epoch, version=version, history=header.history, consumed=consumed, committed_id=committed_id,
            blob=blob, process=process, header=json.dumps(header.as_dict()), checkpoint=checkpoint,
            accounts=ledger.news(),
        )  # fmt: skip
        match reply := PublishReply(found.decode()):
            case PublishReply.FENCED:
                raise Fenced(f"epoch {epoch} may not publish version {version}; a newer trainer has taken over")
            case PublishReply.BEHIND:
                raise RedisRolledBack(
                    f"version {version} is not published: Redis came back, perhaps with less than it had"
                )
            case PublishReply.OTHER:
                raise VersionsDiverged(f"Redis has a version {version} that comes from other experience")
            case PublishReply.PUBLISHED:
                ledger.told()
            case PublishReply.KNOWN:
                pass
            case _:
                assert_never(reply)
        try:
            run_state = RunState(state.decode())
        except ValueError as error:
            raise KeyDamaged(self._keys.flow, f"its field state: {error}") from None
        return Published(reply, run_state, reason.decode(errors="replace"), int(log_bytes))

    def fetch(self, checkpoints: CheckpointStore) -> PolicyVersion | None:
        """The newest version, or None before the first; raises `KeyDamaged`, or what the store raises."""
        return sound(lambda: self._fetch(checkpoints))

    def _fetch(self, checkpoints: CheckpointStore) -> PolicyVersion | None:
        blob, checkpoint = cast(list[bytes | None], self._redis.hmget(self._keys.board, ["blob", "checkpoint"]))
        if blob is None:
            return None
        if checkpoint:
            name = checkpoint.decode(errors="replace")
            if checkpoint_version(name) is None:
                raise KeyDamaged(
                    self._keys.board, f"its field checkpoint is {name!r}, which is not a checkpoint's name"
                )
            return version_of(checkpoints.load(name, only="policy.safetensors"))
        try:
            states, header = decode_board(blob)
        except (FragmentError, ValueError) as error:
            raise KeyDamaged(self._keys.board, f"its field blob is not a policy version ({error})") from None
        return PolicyVersion(header, states)


def version_of(checkpoint: Checkpoint) -> PolicyVersion:
    """Returns the policy version in a checkpoint, of which at least the policy files are loaded."""
    header = VersionHeader.from_dict({"version": checkpoint.manifest.version, **checkpoint.manifest.provenance})
    policies = {key: data for key, data in checkpoint.objects.items() if key.endswith("policy.safetensors")}
    states = {key.partition("/")[0]: state_arrays(decode_policy(data)[0]) for key, data in policies.items()}
    return PolicyVersion(header, states)
