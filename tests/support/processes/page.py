"""Tools for tests of the page: its token, a live run, and waits for its content."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.conftest import minimal_config
from tests.support.suite.speed import stretched

TOKEN = "a-token-of-24-characters"


@contextlib.contextmanager
def live_run(folder: Path, **sections: Any) -> Iterator[Run]:
    """A run at work, `live`, in a thread of this process, its folder in `runs` there; abandoned at the end."""
    config = minimal_config(
        runs_dir=str(folder / "runs"), stop_at={"updates": 10**6},
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 4}, **sections,
    )  # fmt: skip
    run = Run.start(config, "live", inline=True)
    yield run
    run.abandon()
    soon("the run to end", lambda: run.ended)


def soon(what: str, done: Callable[[], Any]) -> None:
    poll(Wait(what, stretched(60)), lambda: bool(done()), 0.05)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def refused(self, status: int, *words: str) -> None:
        assert self.status == status, self
        assert list(self.json) == ["error"]
        assert "\n" not in self.json["error"]
        assert [word for word in words if word not in self.json["error"]] == []


@dataclass(frozen=True)
class Visitor:
    """Somebody who sends requests, by default with the token."""

    url: str
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {TOKEN}"})

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=stretched(30))

    def ask(self, path: str, order: Any = None, **headers: str) -> Reply:
        """`order` is posted as JSON."""
        with contextlib.closing(self.connect()) as connection:
            body = None if order is None else json.dumps(order)
            connection.request("POST" if body else "GET", path, body, self.headers | headers)
            found = connection.getresponse()
            return Reply(found.status, found.headers, found.read())

    @contextlib.contextmanager
    def updates(self, run_id: str) -> Iterator[http.client.HTTPResponse]:
        """The server-sent events of a run; who leaves the context closes the connection."""
        with contextlib.closing(self.connect()) as connection:
            connection.request("GET", f"/api/runs/{run_id}/updates", headers=self.headers)
            yield connection.getresponse()

    def order(self, run_id: str, verb: str, order: Any = {}) -> Reply:  # noqa: B006
        return self.ask(f"/api/runs/{run_id}/{verb}", order)

    def as_(self, **headers: str) -> Visitor:
        return Visitor(self.url, headers)
