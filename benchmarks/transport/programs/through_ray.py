"""Ray's object store: one actor puts fragments and hands over references, another gets them.

`python through_ray.py ARRAYS.npz COUNT`; then one line on standard input for each sample, and `SECONDS x` for answer.
Stands alone: it imports nothing of Stagecoach.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import ray

_IN_FLIGHT = 32
"""Fragments that may be under way: Ray's documentation bounds tasks by `ray.wait`, as done here."""


class Consumer:
    """Gets what it is given a reference to."""

    def take(self, references: list[Any]) -> int:
        """Bytes of one fragment, all of whose arrays are here."""
        arrays = ray.get(references[0])
        return sum(array.nbytes for array in arrays.values())


class Producer:
    """Puts."""

    def run(self, consumer: Any, arrays: dict[str, Any], count: int) -> float:
        """Seconds from the first put until the last fragment was got."""
        began, pending = time.monotonic(), []
        for _ in range(count):
            pending.append(consumer.take.remote([ray.put(arrays)]))
            if len(pending) >= _IN_FLIGHT:
                _, pending = ray.wait(pending, num_returns=1)
        ray.get(pending)
        return time.monotonic() - began


def main() -> None:
    """Serves samples until standard input ends."""
    with np.load(sys.argv[1]) as stored:
        arrays = dict(stored)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=1 << 30, log_to_driver=False)
    consumer_actor: Any = ray.remote(Consumer)
    producer_actor: Any = ray.remote(Producer)
    consumer, producer = consumer_actor.remote(), producer_actor.remote()
    print("READY", flush=True)
    for _ in sys.stdin:
        print("SECONDS", ray.get(producer.run.remote(consumer, arrays, int(sys.argv[2]))), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
