"""DeepMind Reverb: a server with a queue table, one process that inserts fragments and one that samples them.

`python through_reverb.py ARRAYS.npz COUNT`, in an environment of its own; then one line on standard input for each
sample, and `SECONDS x` for answer. Writer and sampler are used as Reverb's README has it. Stands alone: it imports
nothing of Stagecoach.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

_TABLE = "fragments"
_QUEUED, _UNCONFIRMED = 64, 8


def produce(address: str, path: str, count: int, lines: Any, answers: Any) -> None:
    """Appends and inserts; answers when it began."""
    import numpy as np
    import reverb

    with np.load(path) as stored:
        arrays = {name: array for name, array in stored.items() if array.size}
    client = reverb.Client(address)
    while lines.get():
        began = time.monotonic()
        with client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for _ in range(count):
                writer.append(arrays)
                trajectory = {name: column[-1:] for name, column in writer.history.items()}
                writer.create_item(_TABLE, priority=1.0, trajectory=trajectory)
                writer.flush(block_until_num_items=_UNCONFIRMED)
        answers.put(began)


def consume(address: str, count: int, lines: Any, answers: Any) -> None:
    """Samples each once, in order; answers when it has the last."""
    import reverb

    client = reverb.Client(address)
    while lines.get():
        for _ in client.sample(_TABLE, num_samples=count, emit_timesteps=False):
            pass
        answers.put(time.monotonic())


def main() -> None:
    """Serves samples until standard input ends."""
    import reverb

    server = reverb.Server([reverb.Table.queue(_TABLE, max_size=_QUEUED)])
    address, path, count = f"localhost:{server.port}", sys.argv[1], int(sys.argv[2])
    context = multiprocessing.get_context("spawn")
    ways = [(context.Queue(), context.Queue()) for _ in range(2)]
    processes = [
        context.Process(target=produce, args=(address, path, count, *ways[0]), daemon=True),
        context.Process(target=consume, args=(address, count, *ways[1]), daemon=True),
    ]
    for process in processes:
        process.start()
    print("READY", flush=True)
    for _ in sys.stdin:
        for line, _ in ways:
            line.put(True)
        began, ended = (answer.get(timeout=120) for _, answer in ways)
        print("SECONDS", ended - began, flush=True)
    for line, _ in ways:
        line.put(False)
    for process in processes:
        process.join(10)
    server.stop()


if __name__ == "__main__":
    main()
