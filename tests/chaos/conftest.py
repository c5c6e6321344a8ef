"""Reference results that several modules compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol import payload_shards
from tests.conftest import RedisServer
from tests.support.runs.fault_run import FaultRun
from tests.support.runs.network import Network, network_in
from tests.support.runs.store_fault_run import MakeSite, StoreFaultRun, short_run


@pytest.fixture
def place(tmp_path: Path) -> Iterator[FaultRun]:
    """A Redis behind a proxy, without shards."""
    found = FaultRun(tmp_path)
    yield found
    found.close()


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[FaultRun]:
    found = FaultRun(tmp_path, shards=2)
    yield found
    found.close()


@pytest.fixture(params=["shards", "shared memory"])
def outside(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultRun]:
    """With all bodies outside the log, one way or the other."""
    monkeypatch.setattr(payload_shards, "AT_LEAST", 1)
    in_memory = request.param == "shared memory"
    found = FaultRun(tmp_path, shards=0 if in_memory else 2, memory=in_memory)
    yield found
    found.close()


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A run whose roles the test starts, each behind links of its own."""
    with network_in(tmp_path) as found:
        yield found


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of a run without shards or any fault."""
    found = FaultRun(tmp_path_factory.mktemp("undisturbed"))
    try:
        return found.game().finish()
    finally:
        found.close()


@pytest.fixture
def site(redis_server: RedisServer, s3_servers: dict[str, tuple[str, str, str]], tmp_path: Path) -> Iterator[MakeSite]:
    """`site(server, config)` → a new run behind a new proxy."""
    made: list[StoreFaultRun] = []

    def make(server: str = "rclone", config: Config | None = None) -> StoreFaultRun:
        made.append(StoreFaultRun(redis_server, s3_servers[server], tmp_path, config or short_run()))
        return made[-1]

    yield make
    for one in made:
        one.close()
