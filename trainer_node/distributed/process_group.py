"""A group of learner ranks on torch.distributed: how it is opened, joined and left, and what its members exchange.

Rank 0 opens a group and waits until every other rank is there; then it says `go`, and all of them connect. A group has
one size for good: a rank that was not there at `go` can never be in it, and a group that loses a member breaks.

Gradients are gathered from all ranks and added up in the order of the ranks, not by a ring: so each sum has the same
bits wherever it stands (a ring's depend on the place, and torch's DDP forms its buckets again in each process).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError
from stagecoach.trainer_node.learning.building_blocks.interface import Shard

_REACH_SECONDS, _POLL_SECONDS = 10.0, 0.02
"""Time limit of one connection to rank 0; pause between two checks whether the group has begun."""
_GRACE_SECONDS = 10.0
"""Seconds after gloo's own deadline at which an exchange is abandoned that gloo does not end."""
_GO = "go"
_MARKS = ("gloo", "nccl", "NCCL", "c10d")
"""Text of errors that come from the group; gloo raises no class of its own."""
_SOURCE = re.compile(r"^.*\[/\S*/gloo/\S*\] ")
"""Prefix of gloo's messages."""


class GroupBroken(StagecoachError):
    """A rank of the group is gone, cut off or hung; the ranks that are left meet again in a new group."""


@dataclass(frozen=True)
class Invitation:
    host: str
    port: int
    size: int


@contextlib.contextmanager
def group_errors() -> Iterator[None]:
    """Raises errors of the group as `GroupBroken`; other errors pass unchanged."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS):
            raise GroupBroken(_SOURCE.sub("gloo: ", str(error).strip().splitlines()[0])) from error
        raise


class Opening:
    """A group that rank 0 opens on its address and a free port; no other rank is in it yet."""

    def __init__(self, host: str, size: int, timeout_seconds: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            self.invitation, self._timeout = Invitation(host, listener.getsockname()[1], size), timeout_seconds
            # On that one address: without a socket of ours it would listen on all of them
            self._store = TCPStore(
                host, self.invitation.port, None, True, timedelta(seconds=timeout_seconds), wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip

    def missing(self) -> list[int]:
        with group_errors():
            return [rank for rank in range(1, self.invitation.size) if not self._store.check([_place(rank)])]

    def close(self, device: torch.device) -> Group:
        with group_errors():
            here = [_who(device)]
            here += [json.loads(self._store.get(_place(rank))) for rank in range(1, self.invitation.size)]
            cards = [one["card"] for one in here]
            own_cards = all(cards) and len(set(cards)) == len(cards)
            go = {"members": [one["nonce"] for one in here], "nccl": own_cards, "name": world.token_hex(8)}
            self._store.set(_GO, json.dumps(go))
            return Group(self._store, go, 0, self.invitation.size, self.invitation.host, self._timeout, device)


def join(
    invitation: Invitation, rank: int, device: torch.device, timeout_seconds: float, poll: Callable[[], object]
) -> Group:
    """Joins a group as `rank`, calling `poll` until it begins. Raises `GroupBroken` if it cannot."""
    where = (invitation.host, invitation.port)
    try:
        with socket.create_connection(where, timeout=_REACH_SECONDS) as probe:
            own_host = str(probe.getsockname()[0])  # the address of this machine that the others of that network reach
    except OSError as error:
        raise GroupBroken(f"nothing accepts a connection at {where[0]}:{where[1]} ({error})") from None
    with group_errors():
        timeout = timedelta(seconds=timeout_seconds)
        store = TCPStore(*where, None, False, timeout, wait_for_workers=False)
        me = _who(device)
        if not store.check([_GO]):
            store.set(_place(rank), json.dumps(me))
        while not store.check([_GO]):
            poll()
            world.sleep(_POLL_SECONDS)
        go = json.loads(store.get(_GO))
        if go["members"][rank] != me["nonce"]:
            raise GroupBroken(f"this group has begun, with another rank {rank}")
        return Group(store, go, rank, invitation.size, own_host, timeout_seconds, device)


def _place(rank: int) -> str:
    return f"here/{rank}"


def _who(device: torch.device) -> dict[str, Any]:
    """A member: one process of one rank, and the graphics card that it learns on."""
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {"nonce": world.token_hex(8), "card": card}


class Group:
    """One rank's place in a group. Every call that exchanges something raises `GroupBroken`."""

    def __init__(
        self, store: Any, go: dict[str, Any], rank: int, size: int, host: str, seconds: float, device: torch.device
    ) -> None:
        """All connect to all. Messages go by gloo, gradients by nccl if each rank has a graphics card of its own."""
        timeout = timedelta(seconds=seconds)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()  # the only way to give gloo an address; it would ask the resolver for our own name
        options._devices, options._timeout = [gloo.create_device(hostname=host)], timeout
        own = PrefixStore(go["name"], store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout, pg_options=options)
        if go["nccl"]:
            torch.cuda.set_device(device)
        self._gradients: Any = dist.new_group(backend="nccl", timeout=timeout) if go["nccl"] else None
        self.rank, self.size, self.backend = rank, size, "nccl" if go["nccl"] else "gloo"
        self._deadline = timedelta(seconds=seconds + _GRACE_SECONDS)
        self._store = store  # rank 0's ends with it

    @group_errors()
    def broadcast(self, blob: bytes = b"") -> bytes:
        length = torch.tensor(len(blob))
        self._finish(dist.broadcast(length, 0, async_op=True))
        data = np.frombuffer(blob, np.uint8).copy() if self.rank == 0 else np.empty(int(length), np.uint8)
        self._finish(dist.broadcast(torch.from_numpy(data), 0, async_op=True))
        return data.tobytes()

    @group_errors()
    def compare(self, number: int) -> list[int]:
        parts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._finish(dist.all_gather(parts, torch.tensor([number]), async_op=True))
        return [int(part) for part in parts]

    @group_errors()
    def total(self, part: Tensor) -> Tensor:
        """The sum of a tensor of equal shape from each rank, in the order of the ranks."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        work: Any = dist.all_gather(parts, part.contiguous(), group=self._gradients, async_op=True)
        if self.backend == "gloo":
            self._finish(work)
        else:
            work.wait()  # of nccl only the card waits, and its own watchdog has the deadline
        total, *others = parts
        for other in others:
            total += other
        return total

    def _finish(self, work: Any) -> None:
        """Waits until our own deadline: if a member dies at a bad moment, gloo may lock up before its own deadline."""
        try:
            work.wait(self._deadline)
        except RuntimeError as error:
            if "Operation timed out" not in str(error):
                raise
            # its threads are never joined: they would not end
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
            raise GroupBroken(f"gloo: An exchange did not end within {self._deadline.total_seconds():g} s") from error

    def leave(self) -> None:
        """The ranks that are still in the group see it break at the next exchange."""
        if self._store is not None:
            self._store = self._gradients = None
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


class RankShard(Shard):
    """A rank's shard of each minibatch: an even slice."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def rows(self, count: int) -> slice:
        """Slices differ by at most one row; where there are fewer rows than ranks, some are empty."""
        rank, size = self._group.rank, self._group.size
        return slice(count * rank // size, count * (rank + 1) // size)

    def mean(self, values: Tensor, count: int) -> Tensor:
        return values.sum() / count

    def total(self, part: Tensor) -> Tensor:
        return self._group.total(part)
