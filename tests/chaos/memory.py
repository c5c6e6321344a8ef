"""Memory of Redis and this process while very many tiny fragments pass through the real protocol.

`python -m tests.chaos.memory --fragments 1000000` prints the figures; tests/chaos/test_memory.py does some thousands.
Claim, push, take, publish, trim: the product's own classes on a real Redis; only acting, learning and the
store are left out. Workers die and register anew all the time, some fragments are rubbish.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagecoach.shared.experience import fragment
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext
from tests.support.runs.builders import RedisServer, folder_address, make_run
from tests.support.runs.small_run import SIZE, SmallTrainer, SmallWorker, small_config
from tests.support.services.own_redis import OwnRedis

WORKERS, K = 4, 4
TRIM_EVERY = 10
"""Versions between two trims, as between two checkpoints."""
RUBBISH_EVERY = 50


@dataclass(frozen=True)
class Held:
    fragments: int
    redis_bytes: int
    process_bytes: int
    keys: dict[str, int]
    """Redis key, without the run's prefix → bytes."""


def pump(role: RunContext, fragments: int, look_every: int, life: int) -> Iterator[Held]:
    """Passes fragments through the run, with workers that live `life` rounds; yields the memory in use."""
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
            trainer.log.trim(trainer.epoch, trainer.consumer.committed.position)
        done += K
        if turn % (look_every // K) == 0:
            yield held(role, done)


def _act(worker: SmallWorker, version: int, rubbish: bool = False) -> None:
    assert worker.claim().granted
    blob = b"rubbish" if rubbish else fragment.encode(worker.act(version))
    word = worker.log.push(worker.name, worker.incarnation, worker.seq, worker.epoch, SIZE, blob, b"trace" * 50, 8)
    assert word == "pushed", word
    worker.seq += 1


def held(role: RunContext, fragments: int) -> Held:
    client: Any = role.redis
    prefix = RunKeys(role.run_id).prefix
    keys = {key.decode().removeprefix(prefix): int(client.memory_usage(key)) for key in client.scan_iter(f"{prefix}*")}
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(fragments, int(client.info("memory")["used_memory_rss"]), pages * resource.getpagesize(), keys)


def new_role(server: RedisServer, folder: Path) -> RunContext:
    return make_run(small_config(fragments_per_update=K), folder_address(server, folder))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.memory")
    parser.add_argument("--fragments", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.monotonic()
        server = OwnRedis(folder / "redis", settings={"appendonly": "no"})
        try:
            role = new_role(server.through(server.port), folder)
            print("| fragments | Redis, resident (MiB) | trainer and workers, resident (MiB) | largest keys (KiB) |")
            print("|---|---|---|---|")
            for look in pump(role, given.fragments, max(K, given.fragments // 10), life=500):
                largest = sorted(look.keys.items(), key=lambda item: -item[1])[:3]
                keys = ", ".join(f"{key} {size / 1024:.0f}" for key, size in largest)
                resident = f"{look.redis_bytes / 2**20:.1f} | {look.process_bytes / 2**20:.1f}"
                print(f"| {look.fragments:,} | {resident} | {keys} |", flush=True)
            balanced = all(line.balances for line in read_accounting(role.redis, role.run_id).values())
            print(f"\nledger: {'balanced' if balanced else 'OUT OF BALANCE'}; {time.monotonic() - begun:.0f} s")
            return 0 if balanced else 1
        finally:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
