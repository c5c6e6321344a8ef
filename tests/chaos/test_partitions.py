"""A network that fails between plain role processes and a Redis and store of one's own: each link, each kind of fault.
And a trainer that is cut off while another takes its place, and comes back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagecoach.coordinator.lifecycle.preparation import prepare_new
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED
from tests.support.processes.command_line import CommandLine, OwnServers, check_ledger, command_line, own_servers
from tests.support.runs import lockstep_run
from tests.support.services.fault_proxy import FaultProxy

RUN, UNDISTURBED = "partitioned", "undisturbed"
FAULTS: dict[str, Callable[[FaultProxy], None]] = {
    "latency": lambda proxy: proxy.delay(0.05, jitter=0.02),
    "cut": lambda proxy: proxy.cut(),
    "refused": lambda proxy: proxy.refuse(),
    "half-open": lambda proxy: proxy.black_hole(),
    "throttled": lambda proxy: proxy.throttle(20_000),
}
LASTS_SECONDS = 0.5
pytestmark = pytest.mark.timeout(400)


@dataclasses.dataclass
class Network:
    """A prepared run on servers of its own; each role may reach them through links of its own."""

    terminal: CommandLine
    role: RunContext
    servers: OwnServers
    config: Path
    links: dict[str, FaultProxy] = dataclasses.field(default_factory=dict)

    def start(self, name: str, module: str, *more: str, direct: bool = False) -> subprocess.Popen[str]:
        """A role; its links are `name Redis` and `name store`, unless it goes `direct`."""
        ports = {"Redis": self.servers.redis.port, "store": self.servers.s3.port}
        if not direct:
            for server, port in list(ports.items()):
                link = self.links[f"{name} {server}"] = FaultProxy(port)
                ports[server] = link.port
        arguments = [
            RUN, "--redis", f"redis://127.0.0.1:{ports['Redis']}/0", "--store", f"s3://{BUCKET}",
            "--endpoint-url", f"http://127.0.0.1:{ports['store']}", "--config", str(self.config),
        ]  # fmt: skip
        return self.terminal.module(module, *arguments, *more, environ=self.servers.environ)

    def until_after(self, version: int) -> int:
        """Waits until a later version than this is published, the accounting balancing all the while; answers it."""

        def later() -> bool:
            accounting = read_accounting(self.role.redis, RUN)
            assert all(line.balances for line in accounting.values()), accounting
            return self.role.flow.read().version > version

        self.terminal.wait_until(f"a version after {version}", later)
        return self.role.flow.read().version

    def end(self, *processes: subprocess.Popen[str]) -> None:
        """Stops the run as a user does; the roles end in order, and the weights are those of an undisturbed run."""
        assert self.role.flow.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)
        ends = [self.terminal.ended(process) for process in processes]
        assert [end.code for end in ends] == [0] * len(ends), ends
        finished = self.role.checkpoints.marker(FINISHED)
        assert finished is not None and finished["reason"] == "stopped"
        check_ledger(finished)
        goal = {"updates": finished["counters"]["train"]["updates"]}
        calm = self.terminal.run(
            "train", lockstep_run.write_config(self.terminal, 0.0, stop_at=goal), "--run-id", UNDISTURBED, "--inline"
        )
        assert calm.code == 0, calm
        found = self.role.checkpoints.load(finished["final"]).objects
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in found.items() if name.endswith("tensors")}
        assert hashes == lockstep_run.final_weights(self.terminal, UNDISTURBED)


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    (tmp_path / "slow.py").write_text(lockstep_run.ENVIRONMENT)
    with contextlib.ExitStack() as started:
        servers = started.enter_context(own_servers(tmp_path / "servers"))
        terminal = started.enter_context(command_line(tmp_path))
        path = lockstep_run.write_config(
            terminal, 0.003, stop_at={"updates": 10**6}, checkpoint={"every": "3 updates"},
            redis=servers.config["redis"] | {"timeout_seconds": 2, "retry_seconds": 120},
            store=servers.config["store"] | {"timeout_seconds": 10, "retries": 1},
        ).rename(tmp_path / "partitioned.yaml")  # fmt: skip
        role = open_run_context(load_config(path, environ={}), servers.address(RUN))
        started.callback(role.redis.close)
        with contextlib.chdir(tmp_path), pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            prepare_new(role, check(role.config))
        network = Network(terminal, role, servers, path)
        yield network
        for link in network.links.values():
            link.close()


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
