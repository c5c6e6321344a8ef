"""Whether memory stays flat: very many tiny fragments through the real protocol, and what Redis and this process hold.

`python -m tests.chaos.memory --fragments 1000000` prints the figures; tests/chaos/test_memory.py does some thousands.
Claim, push with a trail, take, publish, trim: the product's own classes on a real Redis; only acting, learning and the
store are left out. Workers die and register anew all the time, some fragments are rubbish.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.services import new_secret, start_redis
from rollout_worker.making import describe_environment
from shared import fragment
from shared.checkpoint import ENVIRONMENT
from shared.connection import Address
from shared.events import emit
from shared.ledger import read_books
from shared.redis_keys import RunKeys
from shared.role import Role, open_role
from tests.conftest import create_flow
from tests.trainer_node.test_intake import SIZE, SmallTrainer, SmallWorker, small_config

WORKERS, K = 4, 4
TRIM_EVERY = 10
"""Versions between two trims, as between two checkpoints."""
RUBBISH_EVERY = 50


@dataclass(frozen=True)
class Held:
    """What is held at one moment."""

    fragments: int
    redis_bytes: int
    process_bytes: int
    keys: dict[str, int]
    """Redis key, without the run's prefix → bytes."""


def pump(role: Role, fragments: int, look_every: int, life: int) -> Iterator[Held]:
    """So many fragments through the run, workers living `life` rounds; yields what is held, now and then."""
    trainer = SmallTrainer(role)
    trainer.publish(0)
    workers = [SmallWorker(role, f"worker-{index}") for index in range(WORKERS)]
    done = 0
    for turn in range(1, fragments // K + 1):
        if turn % life == 0:
            index = turn // life % WORKERS
            workers[index] = SmallWorker(role, f"worker-{index}")
            emit(role.redis, role.run_id, "worker", f"worker-{index} joined")
        for worker in workers:
            _act(worker, trainer.version, rubbish=worker is workers[1] and turn % RUBBISH_EVERY == 0)
        while trainer.taken < K:
            if trainer.take() is None:  # rubbish gave its credit back
                _act(workers[0], trainer.version)
        trainer.publish()
        if turn % TRIM_EVERY == 0:
            trainer.log.trim(trainer.epoch, trainer.intake.committed.position)
        done += K
        if turn % (look_every // K) == 0:
            yield held(role, done)


def _act(worker: SmallWorker, version: int, rubbish: bool = False) -> None:
    assert worker.claim().granted
    blob = b"rubbish" if rubbish else fragment.encode(worker.act(version))
    word = worker.log.push(worker.name, worker.incarnation, worker.seq, worker.epoch, SIZE, blob, b"trail" * 20, 8)
    assert word == "pushed", word
    worker.seq += 1


def held(role: Role, fragments: int) -> Held:
    """One look."""
    client: Any = role.redis
    prefix = RunKeys(role.run_id).prefix
    keys = {key.decode().removeprefix(prefix): int(client.memory_usage(key)) for key in client.scan_iter(f"{prefix}*")}
    resident = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")
    ).split()
    return Held(fragments, int(client.info("memory")["used_memory_rss"]), int(resident[1]) * 1024, keys)


def new_role(url: str, password: str, folder: Path) -> Role:
    """A run of tiny fragments."""
    config = small_config(fragments_per_update=K)
    (folder / "store").mkdir()
    (folder / "keys.json").write_text(json.dumps({"redis_password": password}))
    address = Address(f"t-{new_secret()[:12]}", url, f"file://{folder / 'store'}", None, str(folder / "keys.json"))
    role = open_role(config, address)
    create_flow(role)
    role.checkpoints.store.put(ENVIRONMENT, json.dumps(describe_environment(config).as_dict()).encode())
    return role


def main() -> int:
    """Reads the command line; prints a table; answers the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.memory")
    parser.add_argument("--fragments", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, password, begun = Path(name), new_secret(), time.monotonic()
        service = start_redis(folder / "redis", folder / "redis.log", password)
        try:
            role = new_role(f"redis://127.0.0.1:{service.port}/0", password, folder)
            print("| fragments | Redis, resident (MiB) | trainer and workers, resident (MiB) | largest keys (KiB) |")
            print("|---|---|---|---|")
            for look in pump(role, given.fragments, max(K, given.fragments // 10), life=500):
                largest = sorted(look.keys.items(), key=lambda item: -item[1])[:3]
                keys = ", ".join(f"{key} {size / 1024:.0f}" for key, size in largest)
                resident = f"{look.redis_bytes / 2**20:.1f} | {look.process_bytes / 2**20:.1f}"
                print(f"| {look.fragments:,} | {resident} | {keys} |", flush=True)
            balanced = all(line.balances for line in read_books(role.redis, role.run_id).values())
            print(f"\nbooks: {'balanced' if balanced else 'OUT OF BALANCE'}; {time.monotonic() - begun:.0f} s")
            return 0 if balanced else 1
        finally:
            service.stop()


if __name__ == "__main__":
    sys.exit(main())
