"""The policy board: the newest policy version, weights and normalisers as one unit.

One interface, two transports: `redis` keeps the blob on the board; `object_store` keeps only the name of the checkpoint
that holds the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import redis

from shared import scripts
from shared.checkpoint import Checkpoint, CheckpointStore, checkpoint_version
from shared.damaged_keys import KeyDamaged
from shared.errors import Fenced, RedisSetBack
from shared.ledger import Ledger
from shared.policies.codec import VersionHeader, decode_board, decode_policy, state_arrays
from shared.redis_keys import RunKeys
from shared.script_calls import Step
from shared.spaces import Columns
from shared.tensor_blob import BlobError


@dataclass(frozen=True)
class PolicyVersion:
    """The weights of all policy ids at one version, and what travels with them."""

    header: VersionHeader
    states: dict[str, Columns]


@dataclass(frozen=True)
class Published:
    """The answer to a publication. `word`: published, or known (it was there already)."""

    word: str
    state: str
    reason: str
    log_bytes: int


class PolicyBoard:
    """Publishes (trainer) and fetches (workers) policy versions."""

    def __init__(self, client: redis.Redis, run_id: str) -> None:
        self._redis = client
        self._keys = RunKeys(run_id)
        self._publish = Step(client, scripts.PUBLISH)

    def publish(
        self,
        *,
        epoch: int,
        version: int,
        consumed: int,
        settled_id: str,
        ledger: Ledger,
        header: VersionHeader,
        blob: bytes,
        checkpoint: str = "",
        process: str = "",
    ) -> Published:
        """Version, weights, credit and ledger in one step; raises `Fenced` for an older trainer.

        Raises `RedisSetBack`, and changes nothing, where Redis may have lost what the ledger says: it is not `process`,
        or knows an older epoch.
        Of `ledger` only what Redis does not know yet travels. `blob` is empty and `checkpoint` names the weights under
        the transport `object_store`.
        """
        keys = [self._keys.flow, self._keys.board, self._keys.ledger, self._keys.wakeups]
        args: list[Any] = [
            epoch,
            version,
            consumed,
            settled_id,
            json.dumps(header.as_dict()),
            blob,
            checkpoint,
            process,
            *ledger.news(),
        ]
        word, state, reason, log_bytes = cast(list[Any], self._publish(keys, args))
        if word == b"fenced":
            raise Fenced(f"epoch {epoch} may not publish version {version}; a newer trainer has taken over")
        if word == b"behind":
            raise RedisSetBack(f"version {version} is not published: Redis came back, perhaps without what came last")
        if word == b"published":
            ledger.told()
        return Published(word.decode(), state.decode(errors="replace"), reason.decode(errors="replace"), int(log_bytes))

    def fetch(self, checkpoints: CheckpointStore) -> PolicyVersion | None:
        """The newest version, or None before the first; from the store where the board names a checkpoint.

        Raises `KeyDamaged`, or what the store raises.
        """
        raw = cast(list[bytes | None], self._redis.hmget(self._keys.board, ["blob", "checkpoint"]))
        blob, checkpoint = raw
        if blob is None:
            return None
        if checkpoint:
            name = checkpoint.decode(errors="replace")
            if checkpoint_version(name) is None:
                raise KeyDamaged(self._keys.board, f"its field checkpoint is {name!r}, which names none")
            return version_of(checkpoints.load(name, only="policy.safetensors"))
        try:
            states, header = decode_board(blob)
        except (BlobError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise KeyDamaged(self._keys.board, f"its field blob is no policy version ({error})") from None
        return PolicyVersion(header, states)


def version_of(checkpoint: Checkpoint) -> PolicyVersion:
    """The policy version in a checkpoint (loaded at least as far as its policy files)."""
    manifest = checkpoint.manifest
    header = VersionHeader.from_dict({"version": manifest.version, **manifest.provenance})
    policies = {key: data for key, data in checkpoint.objects.items() if key.endswith("policy.safetensors")}
    states = {key.partition("/")[0]: state_arrays(decode_policy(data)[0]) for key, data in policies.items()}
    return PolicyVersion(header, states)
