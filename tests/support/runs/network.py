"""Plain role processes of a prepared run, on a Redis and a store of their own, each behind links of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import subprocess
from collections.abc import Iterator, Mapping
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


@dataclasses.dataclass
class Network:
    """A prepared run on servers of its own; each role may reach them through links of its own."""

    terminal: CommandLine
    role: RunContext
    servers: OwnServers
    config: Path
    links: dict[str, FaultProxy] = dataclasses.field(default_factory=dict)

    def start(
        self, name: str, module: str, *more: str, direct: bool = False, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
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
        return self.terminal.module(module, *arguments, *more, environ={**self.servers.environ, **(environ or {})})

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


@contextlib.contextmanager
def network_in(tmp_path: Path) -> Iterator[Network]:
    """In lockstep: the log has one order."""
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
