"""What shards bring: fragments pushed and read with one Redis, and with one and two shards beside it.

`python -m benchmarks.rehearsal.shards` starts servers on loopback and prints a table. Four processes push through the
product's own log, this one reads, publishes nothing and trims; acting, learning and the store are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from stagecoach.coordinator.services.embedded import new_secret, start_redis
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.run_context import RunContext, open_run_context

WORKERS = 4
MOST_BYTES = 256 << 20


def run_config(index: str, shards: list[str]) -> Config:
    """Claims are never short: only the log's bytes bound what is in flight."""
    return parse_config(
        {
            "environment": {"id": "CartPole-v1"}, "stop_at": {"updates": 1},
            "redis": {"url": index, "shards": shards},
            "rollout": {"fragments_per_update": 1_000_000, "max_log_bytes": MOST_BYTES},
        }
    )  # fmt: skip


def push(config: Config, address: Address, index: int, size: int, until: float) -> None:
    """One worker: claims and pushes the same bytes with another beginning, again and again."""
    role, name = open_run_context(config, address), f"worker-{index}"
    incarnation, epoch = role.flow.register(name)
    log, body, seq = role.log(), os.urandom(size - 16), 0
    while time.monotonic() < until:
        claim = role.flow.claim(name, incarnation, seq)
        if not claim.granted:
            role.flow.wait_for_wakeup(claim, 0.2)
            continue
        assert log.push(name, incarnation, seq, epoch, 1, b"%016d" % seq + body) == "pushed"
        seq += 1


def read(role: RunContext, size: int, until: float) -> int:
    """The trainer's side; answers how many fragments came through."""
    log, epoch, position, count, trimmed = role.log(), role.flow.take_over(), "0-0", 0, 0
    while time.monotonic() < until:
        for entry in log.read(position, 16, 0.1):
            assert entry.fragment is not None and len(entry.fragment) == size
            position, count = entry.id, count + 1
        if (count - trimmed) * size > MOST_BYTES // 8:
            role.redis.hset(RunKeys(role.run_id).flow, "committed_id", position)
            log.trim(epoch, position)
            trimmed = count
    return count


def measure(shards: int, size: int, seconds: float) -> float:
    """Fragments per second."""
    with tempfile.TemporaryDirectory() as name:
        folder, password = Path(name), new_secret()
        services = [
            start_redis(folder / str(number), folder / f"{number}.log", password) for number in range(1 + shards)
        ]
        try:
            urls = [f"redis://127.0.0.1:{service.port}/0" for service in services]
            (folder / "keys.json").write_text(json.dumps({"redis_password": password}))
            address = Address("bench", urls[0], f"file://{folder}", None, str(folder / "keys.json"))
            config = run_config(urls[0], urls[1:])
            role = open_run_context(config, address)
            role.flow.create(config, role.bodies.names)
            until = time.monotonic() + seconds
            context = multiprocessing.get_context("fork")
            pushers = [
                context.Process(target=push, args=(config, address, index, size, until)) for index in range(WORKERS)
            ]
            for pusher in pushers:
                pusher.start()
            count = read(role, size, until)
            for pusher in pushers:
                pusher.join()
                assert pusher.exitcode == 0
            return count / seconds
        finally:
            for service in services:
                service.stop()


def main() -> int:
    """Reads the command line; prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal.shards", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each line")
    given = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {WORKERS} pushing processes, one reading, loopback\n")
    print("| fragment | servers | fragments/s | MB/s, pushed and read |")
    print("|---|---|---|---|")
    for size in (64 << 10, 1 << 20):
        for shards in (0, 1, 2):
            rate = measure(shards, size, given.seconds)
            servers = f"index + {shards} shard{'s' * (shards > 1)}" if shards else "one Redis"
            print(f"| {size >> 10} KB | {servers} | {rate:,.0f} | {rate * size / 1e6:,.0f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
