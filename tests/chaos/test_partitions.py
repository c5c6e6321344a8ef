"""A network that fails between plain role processes and a Redis and store of one's own: each link, each kind of fault.
And a trainer that is cut off while another takes its place, and comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.runs.network import Network
from tests.support.services.fault_proxy import FaultProxy

FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "latency": lambda proxy: proxy.delay(0.05, jitter=0.02),
    "cut": lambda proxy: proxy.cut(),
    "refused": lambda proxy: proxy.refuse(),
    "half-open": lambda proxy: proxy.black_hole(),
    "throttled": lambda proxy: proxy.throttle(20_000),
}
LASTS_SECONDS = 0.5
pytestmark = pytest.mark.timeout(400)


def test_link_failures_leave_weights_equal(network: Network) -> None:
    trainer = network.start("trainer", "stagecoach.trainer_node")
    worker = network.start("worker", "stagecoach.rollout_worker", "--index", "0")
    version = network.until_after(0)
    for link in network.links.values():
        for fault in FAULTS.values():
            fault(link)
            time.sleep(LASTS_SECONDS)
            link.heal()
            version = network.until_after(version)
    assert all(link.cuts for name, link in network.links.items() if name != "worker store"), "faults that nobody met"
    network.end(trainer, worker)


def test_isolated_trainer_writes_nothing_after_it_returns(network: Network) -> None:
    """The network drops what it sends and receives; its connections stay. Another trainer is started meanwhile."""
    old = network.start("old", "stagecoach.trainer_node")
    worker = network.start("worker", "stagecoach.rollout_worker", "--index", "0", direct=True)
    version = network.until_after(6)
    network.links["old Redis"].black_hole()
    network.links["old store"].black_hole()
    new = network.start("new", "stagecoach.trainer_node", direct=True)
    version = network.until_after(version + 4)
    assert old.poll() is None, "the old one is there, and waits"
    epoch = network.role.flow.read().epoch
    for link in network.links.values():
        link.heal()
    ended = network.terminal.ended(old)
    assert ended.code == 1 and "a newer trainer has taken over" in ended.err, ended
    network.until_after(network.role.flow.read().version + 4)
    assert network.role.flow.read().epoch == epoch
    pointer = network.role.checkpoints.pointer()
    assert pointer is not None and pointer.epoch == epoch
    network.end(new, worker)
