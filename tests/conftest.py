"""Fixtures: real servers, started and ended by the tests, on loopback and free ports; nothing is mocked here."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis
from _pytest.config import create_terminal_writer
from hypothesis import settings

from stagecoach.coordinator.services.embedded import BUCKET, new_secret, start_redis, start_s3
from stagecoach.shared.base.address import Address
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.object_store import ObjectStore, open_store
from stagecoach.shared.storage.s3_store import s3_client
from tests.support.runs.builders import RedisServer as RedisServer
from tests.support.runs.builders import folder_address, make_run
from tests.support.suite import groups, speed

if TYPE_CHECKING:
    from tests.support.processes.command_line import CommandLine

logging.getLogger("stagecoach").propagate = True
settings.register_profile("stagecoach", deadline=None)  # how fast a machine is makes no test fail
settings.load_profile("stagecoach")
for _name in ("COLUMNS", "LINES"):  # readline gives a terminal's to all children; tests say how wide theirs is
    os.environ.pop(_name, None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Selects the scheduler for `-n`, regardless of `--dist`."""
    from tests.support.suite.distribution import LongestFirst

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


pytest_addoption = groups.add_options
pytest_runtest_setup = pytest.hookimpl(tryfirst=True)(groups.skip_if_too_late)
pytest_terminal_summary = groups.name_those_without_a_turn


def pytest_configure(config: pytest.Config) -> None:
    """Groups, and the machine's speed; the processes of pytest-xdist inherit that from the first."""
    groups.configure(config)
    speed.measure()
    if hasattr(config, "workerinput"):  # it has no terminal, so that pytest-timeout could not say where a test hangs
        config.get_terminal_writer = lambda: create_terminal_writer(config, sys.__stderr__)  # type: ignore[method-assign]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips folders without a test of the selected part, and what they import."""
    return groups.ignores(collection_path, config) or None


def pytest_report_header() -> list[str]:
    """Reports what the results depend on."""
    return [f"limits are stretched by {speed.measure()}", *groups.header()]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects, stretches, and orders: with `-n` alike in each process; a file's tests keep their order."""
    groups.select(config, items)
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = float(limit.args[0] if limit else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(speed.stretched(seconds)), append=False)
    if hasattr(config, "workerinput"):
        from tests.support.suite.distribution import longest_first

        longest_first(items, config.getoption("part"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escapes output that cannot be encoded, which would end pytest-xdist."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(autouse=True, scope="session")
def _the_kernel_writes_when_it_likes() -> Iterator[None]:
    """Replaces `fsync` in this process: only processes die here, never the machine. On a slow disk the thousands of
    them would take longer than time limits allow. Processes that tests start do call it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One Redis for all tests; each run has its own prefix."""
    folder = tmp_path_factory.mktemp("redis")
    password = new_secret()
    service = start_redis(folder / "data", folder / "redis.log", password)
    yield RedisServer(f"redis://127.0.0.1:{service.port}", password)
    service.stop()


@pytest.fixture
def redis_client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """A connection to the shared Redis."""
    with redis_server.client() as client:
        yield client


@pytest.fixture(scope="session")
def s3_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str, str]]]:
    """Two S3 servers: name → endpoint, access key, secret key. Both have the bucket."""
    from moto.server import ThreadedMotoServer

    folder = tmp_path_factory.mktemp("s3")
    access, secret = new_secret(), new_secret()
    rclone = start_s3(folder / "data", folder / "rclone.log", access, secret)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    keys = folder / "moto.json"
    keys.write_text(json.dumps({"s3_access_key": "moto-access", "s3_secret_key": "moto-secret"}))
    address = Address("any", "", f"s3://{BUCKET}", f"http://{host}:{port}", str(keys))
    s3_client(address, minimal_config().store).create_bucket(Bucket=BUCKET)
    servers = {
        "rclone": (f"http://127.0.0.1:{rclone.port}", access, secret),
        "moto": (f"http://{host}:{port}", "moto-access", "moto-secret"),
    }
    yield servers
    moto.stop()
    rclone.stop()


def minimal_config(**sections: Any) -> Config:
    """A small valid config; `sections` replace or add top-level keys.

    In lockstep and without heat-up, whatever the algorithm has by default.
    """
    data: dict[str, Any] = {
        "environment": {"id": "CartPole-v1", "num_envs": 4},
        "rollout": {"fragment_steps": 8, "fragments_per_update": 2},
        "algorithm": {"minibatch_size": 32, "epochs": 2},
        "checkpoint": {"every": "2 updates"},
        "evaluation": {"episodes": 4, "final_wait_seconds": 30},
        "stop_at": {"updates": 4},
        "heatup": "0 env_steps",
    }
    data |= sections
    patient = {"catch_up_seconds": 600}  # a machine that stands still is no slow environment
    data["rollout"] = patient | {"max_policy_lag": 0} | data["rollout"]
    return parse_config(data)


@pytest.fixture
def unique_run_id() -> str:
    """A run id of this test's own."""
    return f"t-{new_secret()[:12]}"


@pytest.fixture(params=groups.some_quick(["file", "rclone", "moto"], "file", "rclone"))
def any_store(
    request: pytest.FixtureRequest, tmp_path: Path, s3_servers: dict[str, tuple[str, str, str]], unique_run_id: str
) -> ObjectStore:
    """The same tests run on a folder and on both S3 servers."""
    if request.param == "file":
        (tmp_path / "store").mkdir()
        return open_store(Address(unique_run_id, "", f"file://{tmp_path / 'store'}"), minimal_config())
    endpoint, access, secret = s3_servers[request.param]
    credentials_file = tmp_path / "credentials.json"
    credentials_file.write_text(json.dumps({"s3_access_key": access, "s3_secret_key": secret}))
    address = Address(unique_run_id, "", f"s3://{BUCKET}/tests", endpoint, str(credentials_file))
    return open_store(address, minimal_config())


MakeRole = Callable[..., RunContext]


@pytest.fixture
def make_role(redis_server: RedisServer, tmp_path: Path, unique_run_id: str) -> MakeRole:
    """`make_role(config)` → a `RunContext` of a run that exists in the shared Redis and in a folder store.

    Called again it answers another connection to the same run.
    """

    def make(config: Config | None = None) -> RunContext:
        address = folder_address(redis_server, tmp_path, unique_run_id)
        return make_run(config or minimal_config(), address)

    return make


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[CommandLine]:
    """Stagecoach's command line in a folder of the test's own; whatever a run leaves behind is ended."""
    from tests.support.processes.command_line import command_line

    with command_line(tmp_path) as terminal:
        yield terminal
