"""TorchRL's remote replay buffer: a process holds it, one extends it and one samples it, over `torch.distributed.rpc`.

`python through_torchrl.py ARRAYS.npz COUNT`; then one line on standard input for each sample, and `SECONDS x` for
answer. The arrangement is that of TorchRL's own distributed replay buffer example. Stands alone: it imports nothing of
Stagecoach.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as multiprocessing
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RemoteTensorDictReplayBuffer

_KEPT = 64
"""Fragments that the buffer holds."""
_ROLES = ("buffer", "producer", "consumer", "driver")
_IN_FLIGHT = 8


class Buffer(RemoteTensorDictReplayBuffer):  # type: ignore[misc]
    """Fragments as its items."""

    def __init__(self) -> None:
        super().__init__(storage=LazyTensorStorage(_KEPT), batch_size=1)


def produce(buffer: Any, arrays: dict[str, Any], count: int) -> float:
    """Extends the buffer; answers when it began."""
    fragment = TensorDict({name: torch.from_numpy(array)[None] for name, array in arrays.items()}, batch_size=[1])
    began, pending = time.monotonic(), []
    for _ in range(count):
        pending.append(rpc.rpc_async(buffer.owner(), Buffer.extend, args=(buffer, fragment)))
        if len(pending) >= _IN_FLIGHT:
            pending.pop(0).wait()
    for future in pending:
        future.wait()
    return began


def consume(buffer: Any, count: int) -> float:
    """Samples as many fragments; answers when it ended."""
    pending: list[Any] = []
    for _ in range(count):
        pending.append(rpc.rpc_async(buffer.owner(), Buffer.sample, args=(buffer, 1)))
        if len(pending) >= _IN_FLIGHT:
            pending.pop(0).wait()
    for future in pending:
        future.wait()
    return time.monotonic()


def join(rank: int, port: int, path: str, count: int, lines: Any, answers: Any) -> None:
    """One process's life."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TP_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        _ROLES[rank], rank=rank, world_size=len(_ROLES), rpc_backend_options=options
    )
    if _ROLES[rank] == "driver":
        with np.load(path) as stored:
            arrays = {name: array for name, array in stored.items() if array.size}
        buffer = rpc.remote("buffer", Buffer)
        rpc.rpc_sync("producer", produce, args=(buffer, arrays, 2))
        answers.put("READY")
        while lines.get():
            ended = rpc.rpc_async("consumer", consume, args=(buffer, count))
            began = rpc.rpc_sync("producer", produce, args=(buffer, arrays, count))
            answers.put(f"SECONDS {max(ended.wait(), time.monotonic()) - began}")
    rpc.shutdown()


def main() -> None:
    """Serves samples until standard input ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    lines, answers = context.Queue(), context.Queue()
    processes = [
        context.Process(target=join, args=(rank, port, sys.argv[1], int(sys.argv[2]), lines, answers), daemon=True)
        for rank in range(len(_ROLES))
    ]
    for process in processes:
        process.start()
    print(answers.get(timeout=120), flush=True)
    for _ in sys.stdin:
        lines.put(True)
        print(answers.get(timeout=120), flush=True)
    lines.put(False)
    for process in processes:
        process.join(20)


if __name__ == "__main__":
    main()
