"""Configs, an ended run, and the command line in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagecoach.coordinator.cli.app import main
from stagecoach.coordinator.lifecycle.supervisor import Coordinator
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.conftest import RedisServer, minimal_config
from tests.support.processes.command_line import CONFIG, Ended, Stagecoach


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    """`config(**sections)`: runs below the test's folder, one worker unless `rollout` says otherwise."""

    def make(**sections: Any) -> Config:
        rollout = {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2} | sections.pop("rollout", {})
        common = {"runs_dir": str(tmp_path / "runs"), "rollout": rollout, "evaluation": {"episodes": 1}}
        return minimal_config(**common | sections)

    return make


@pytest.fixture(scope="session")
def ended_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An ended run `a` with a checkpoint of each version and a profile; tests change copies of it only."""
    config = minimal_config(
        runs_dir=str(tmp_path_factory.mktemp("ended") / "runs"), checkpoint={"every": "1 updates", "keep_last": 9},
        evaluation={"episodes": 2}, policy_versions={"transport": "object_store"}, metrics={"profile": True},
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 2},
    )  # fmt: skip
    run = Run.start(config, "a", inline=True)
    assert run.wait(120).reason == "exhausted"
    return run


@pytest.fixture
def no_run_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends what a test has started: a run that is left over would go on in a thread of this process."""
    started: list[Coordinator] = []

    def launched(*arguments: Any) -> Coordinator:
        started.append(Coordinator(*arguments))
        return started[-1]

    monkeypatch.setattr("stagecoach.coordinator.lifecycle.launcher.Coordinator", launched)
    yield
    for coordinator in started:
        coordinator.abandon()
    poll(Wait("abandoned runs to end", 60), lambda: all(each.outcome is not None for each in started))


@pytest.fixture
def servers(
    redis_server: RedisServer, s3_servers: dict[str, tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """URL of Redis and endpoint of the store, with their credentials in the environment."""
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", redis_server.password)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    return redis_server.url, endpoint


@pytest.fixture
def stagecoach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Stagecoach]:
    """`stagecoach …` in this process, in a folder of its own that has a `config.yaml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["stagecoach", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capfd.readouterr()
        return Ended(code, printed.out, printed.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
