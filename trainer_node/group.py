"""A group of learner ranks on torch.distributed: how it is opened, joined and left, and what its members exchange.

Rank 0 opens a group and waits until every other rank is there; then it says `go`, and all of them connect. A group has
one size and one life: whoever was not there at `go` can never be in it, and one that loses a member breaks, for all.

Gradients are gathered from all ranks and added up in the order of the ranks, not by a ring: so each sum has the same
bits whatever bucket it stands in (torch's DDP forms its buckets anew after the first step of each life).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from shared.errors import StagecoachError
from shared.policies.policy import Policy
from trainer_node.algorithms.share import Terms

_REACH_SECONDS = 10.0
"""For one connection to whoever opened the group."""
_POLL_SECONDS = 0.02
_GO = "go"
_MARKS = ("gloo", "nccl", "NCCL", "c10d")
"""What an error says that comes from the group; gloo raises no class of its own."""

_SOURCE = re.compile(r"^.*\[/\S*/gloo/\S*\] ")
"""What gloo puts before its words, and DDP before gloo's."""


class GroupBroken(StagecoachError):
    """A rank of the group is gone, cut off or hung; the ranks that are left meet again in a new group."""


class RanksDiffer(StagecoachError):
    """Ranks that learnt from the same have come to different weights."""


@dataclass(frozen=True)
class Invitation:
    """Where a group is opened, and for how many."""

    host: str
    port: int
    size: int


@contextlib.contextmanager
def group_errors() -> Iterator[None]:
    """Whatever the group fails with is a `GroupBroken`; other errors stay what they are."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(mark in str(error) for mark in _MARKS):
            raise GroupBroken(_SOURCE.sub("gloo: ", str(error).strip().splitlines()[0])) from error
        raise


class Opening:
    """A group that rank 0 opens on its address and a free port; nobody is in it yet."""

    def __init__(self, host: str, size: int, timeout_seconds: float) -> None:
        _get_ready()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            self.invitation = Invitation(host, listener.getsockname()[1], size)
            self._timeout = timeout_seconds
            # On that one address: without a socket of ours it would listen on all of them
            self._store = TCPStore(
                host, self.invitation.port, None, True, timedelta(seconds=timeout_seconds), wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip

    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        with group_errors():
            return [rank for rank in range(1, self.invitation.size) if not self._store.check([_place(rank)])]

    def close(self, device: torch.device) -> Group:
        """The group of those who are there now; nobody else gets in any more."""
        with group_errors():
            here = [_who(device)]
            here += [json.loads(self._store.get(_place(rank))) for rank in range(1, self.invitation.size)]
            cards = [one["card"] for one in here]
            own_cards = all(cards) and len(set(cards)) == len(cards)
            go = {"members": [one["nonce"] for one in here], "nccl": own_cards, "name": secrets.token_hex(8)}
            self._store.set(_GO, json.dumps(go))
            return _connected(self._store, go, 0, self.invitation.size, self.invitation.host, self._timeout, device)


def join(
    invitation: Invitation, rank: int, device: torch.device, timeout_seconds: float, look: Callable[[], object]
) -> Group:
    """Comes to a group as `rank` and waits until it begins; `look` is called again and again meanwhile.

    Raises `GroupBroken` where there is nobody any more, or the group has begun without us.
    """
    _get_ready()
    where = (invitation.host, invitation.port)
    own_host = _own_address(*where)
    with group_errors():
        timeout = timedelta(seconds=timeout_seconds)
        store = TCPStore(*where, None, False, timeout, wait_for_workers=False)
        me = _who(device)
        if not store.check([_GO]):
            store.set(_place(rank), json.dumps(me))
        while not store.check([_GO]):
            look()
            time.sleep(_POLL_SECONDS)
        go = json.loads(store.get(_GO))
        if go["members"][rank] != me["nonce"]:
            raise GroupBroken(f"this group has begun, with another rank {rank}")
        return _connected(store, go, rank, invitation.size, own_host, timeout_seconds, device)


def _get_ready() -> None:
    """DDP imports PyTorch's compiler when one is made: seconds that nobody shall wait for within an exchange."""
    importlib.import_module("torch._dynamo")


def _own_address(host: str, port: int) -> str:
    """The address of this machine that the others of that network reach."""
    try:
        with socket.create_connection((host, port), timeout=_REACH_SECONDS) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupBroken(f"nobody answers at {host}:{port} ({error})") from None


def _place(rank: int) -> str:
    return f"here/{rank}"


def _who(device: torch.device) -> dict[str, Any]:
    """A member: one life of one rank, and the graphics card that it learns on."""
    card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return {"nonce": secrets.token_hex(8), "card": card}


def _connected(
    store: Any, go: dict[str, Any], rank: int, size: int, host: str, timeout_seconds: float, device: torch.device
) -> Group:
    """All connect to all. Messages go by gloo; gradients by nccl, where each rank has a graphics card of its own."""
    timeout = timedelta(seconds=timeout_seconds)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # the only way to give gloo an address; it would ask the resolver for our own name
    options._devices, options._timeout = [gloo.create_device(hostname=host)], timeout
    own = PrefixStore(go["name"], store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=timeout, pg_options=options)
    if go["nccl"]:
        torch.cuda.set_device(device)
    return Group(rank, size, dist.new_group(backend="nccl", timeout=timeout) if go["nccl"] else None, store)


class Group:
    """One rank's place in a group. Every call that exchanges something raises `GroupBroken`."""

    def __init__(self, rank: int, size: int, gradients: Any, store: Any) -> None:
        self.rank, self.size = rank, size
        self.backend = "gloo" if gradients is None else "nccl"
        self._gradients = gradients
        self._store = store  # rank 0's ends with it

    def broadcast(self, blob: bytes = b"") -> bytes:
        """Rank 0's bytes, on every rank."""
        with group_errors():
            length = torch.tensor(len(blob))
            dist.broadcast(length, 0)
            data = np.frombuffer(blob, np.uint8).copy() if self.rank == 0 else np.empty(int(length), np.uint8)
            dist.broadcast(torch.from_numpy(data), 0)
            return data.tobytes()

    def compare(self, number: int) -> list[int]:
        """Every rank's number, in the order of the ranks."""
        with group_errors():
            parts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(parts, torch.tensor([number]))
            return [int(part) for part in parts]

    def gather(self, part: Tensor) -> Any:
        """Begins to gather a tensor of equal shape from each rank; a future of the sum, in the order of the ranks."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        work: Any = dist.all_gather(parts, part.contiguous(), group=self._gradients, async_op=True)
        return work.get_future().then(lambda done: _in_order(done, parts))

    def leave(self) -> None:
        """Whoever still is in the group hears of it at the next exchange."""
        if self._store is not None:
            self._store = self._gradients = None
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()


def _in_order(done: Any, parts: Sequence[Tensor]) -> Tensor:
    done.value()  # raises what went wrong
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total


class RankShare:
    """A rank's share in the minibatches of one policy: an even slice, and DDP for the gradients."""

    def __init__(self, group: Group, policy: Policy) -> None:
        self._group = group
        with group_errors():
            self._parallel = DistributedDataParallel(_Weights(policy), process_group=group._gradients)
            self._parallel.register_comm_hook(group, lambda group, bucket: group.gather(bucket.buffer()))

    def rows(self, count: int) -> slice:
        """Slices differ by at most one row; where there are fewer rows than ranks, some are empty."""
        rank, size = self._group.rank, self._group.size
        return slice(count * rank // size, count * (rank + 1) // size)

    def mean(self, values: Tensor, count: int) -> Tensor:
        """Our part of the sum, over the whole count."""
        return values.sum() / count

    def forward(self, loss: Callable[..., Terms], *arguments: Any) -> Terms:
        """DDP adds up the gradients of what it was asked to compute."""
        terms: Terms = self._parallel(loss, *arguments)
        return terms

    def total(self, part: Tensor) -> Tensor:
        """The parts of all ranks, added in their order."""
        with group_errors():
            total: Tensor = self._group.gather(part).wait()
            return total


class _Weights(nn.Module):
    """What DDP wants to see of a policy: the weights that get gradients, and a forward that leads to a loss."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameter for parameter in policy.parameters() if parameter.numel())

    def forward(self, loss: Callable[..., Terms], *arguments: Any) -> Terms:
        return loss(*arguments)
