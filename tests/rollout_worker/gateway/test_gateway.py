"""The golden session of docs/reference/gateway_protocol.md, byte by byte, with a real gateway and a scripted policy."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.gateway.gateway import Gateway
from stagecoach.rollout_worker.gateway.scripted_server import SPACES
from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.protocol.experience_log import ExperienceLog, Settled
from stagecoach.shared.protocol.heartbeat import Heartbeat
from tests.conftest import MakeRole, minimal_config
from tests.support.suite.speed import stretched

PAGE = Path(__file__).parents[3] / "docs/reference/gateway_protocol.md"
MARK = "<!-- golden session -->"


class GoldenSession:
    """A gateway, which may be replaced, and one connection; the policy gives the actions and versions of the page."""

    def __init__(self, make: Callable[[], Gateway], token: str, ended: ExitStack) -> None:
        self._make, self._token, self._ended = make, token, ended
        self.replace()

    def replace(self) -> None:
        self._ended.close()
        self._gateway = self._make()
        self._ended.callback(self._gateway.close)
        self.connect()

    def connect(self) -> None:
        header = {"Authorization": f"Bearer {self._token}"}
        self.socket: ClientConnection = self._ended.enter_context(connect(self._gateway.url, additional_headers=header))

    def receive(self, line: str) -> str:
        """Returns the gateway's next message; the sampler's part of it is played until it comes."""
        expected: dict[str, Any] = json.loads(line)
        environment, until = self._gateway.environment, time.monotonic() + stretched(20)
        environment.version = expected.get("version", environment.version)
        actions = {"default": {"action": np.full(4, expected.get("action", 0))}}
        while time.monotonic() < until:
            with suppress(TimeoutError):
                return str(self.socket.recv(timeout=0.05))
            marks = {its.name: its.first_needed for its in environment.sessions.by_name.values()}
            if expected["type"] == "acknowledged" and expected["seq"] in marks.values():
                environment.settled = Settled(marks, 0)
                environment.pushed()
            else:
                environment.step(actions)
        raise AssertionError(f"nothing came; expected {line}")


def test_golden_session_has_the_bytes_of_the_page(make_role: MakeRole) -> None:
    environment = {"id": "corridor", "api": "external", "num_envs": 4, "spaces": SPACES}
    config = minimal_config(environment=environment, gateway={"port": 0}, evaluation={"episodes": 0})
    role = make_role(config)
    log, beat = ExperienceLog(role.redis, role.run_id), Heartbeat(role.redis, role.run_id, "worker", "worker-0")
    token, description = add_token(role.checkpoints.store, "robot"), describe_environment(config)
    text = PAGE.read_text().partition(MARK)[2]
    lines = re.findall(r"^(C|G|--) (.*)$", text[: text.index("```\n", 10)], re.MULTILINE)
    assert len(lines) > 20
    with ExitStack() as ended:
        played = GoldenSession(
            lambda: Gateway(config, description, log, beat, role.checkpoints.store, "external", 0), token, ended
        )
        for who, line in lines[1:]:
            if who == "C":
                played.socket.send(line)
            elif who == "G":
                assert played.receive(line) == line
            elif code := re.match(r"the gateway closes the connection: (\d+)", line):
                with pytest.raises(ConnectionClosed):
                    played.socket.recv(timeout=stretched(10))
                assert played.socket.close_code == int(code[1])
            elif line.startswith("the gateway is replaced"):
                played.replace()
            else:
                assert line.startswith("the client connects")
                played.connect()
