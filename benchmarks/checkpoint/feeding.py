"""A worker that feeds a trainer with made fragments."""

from __future__ import annotations

import json
import time
from typing import cast

import redis

from benchmarks.transport.made_fragments import Shape, made_columns, made_fragment
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.launch import RoleLaunch


class FeedingWorker:
    """A rollout worker's process that makes up its fragments: as many as the trainer has credit for."""

    def __init__(self, index: int) -> None:
        self._worker = f"worker-{index}"

    def feed(self, launch: RoleLaunch, shape: Shape) -> int:
        """Until the run ends; answers how many."""
        role = launch.open(self._worker)
        client, keys, log = role.redis, RunKeys(role.run_id), role.log()
        while not client.hexists(keys.board, "header"):  # claims are granted before version 0 is there
            time.sleep(0.05)
        columns = made_columns(role.description(), shape, 0)
        incarnation, _ = role.flow.register(self._worker)
        seq = 0
        while True:
            claim = role.flow.claim(self._worker, incarnation, seq)
            if claim.waiting:
                role.flow.wait_for_wakeup(claim, 1.0)
                continue
            if not claim.granted:
                break
            version, history, phase = _acting(client, keys)
            made = made_fragment(role.run_id, self._worker, seq, version, shape, columns, incarnation, phase, history)
            log.push(self._worker, incarnation, seq, claim.epoch, shape.transitions, fragment.encode(made))
            seq += 1
        role.redis.close()
        return seq


def _acting(client: redis.Redis, keys: RunKeys) -> tuple[int, str, Phase]:
    """Returns version, history and phase of the policies on the board."""
    header = json.loads(cast(bytes, client.hget(keys.board, "header")))
    return int(header["version"]), str(header.get("history", "")), Phase(header["phase"])
