"""What each machine of a cluster is asked before a run starts, asked of this one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from coordinator import preflight
from coordinator.job import PACKAGES
from coordinator.preflight import Machine, difference, look, versions
from shared.config import Config
from shared.connection import Address
from shared.launch import RoleLaunch
from tests.broken_environments import MODULE as BROKEN
from tests.conftest import RedisServer, minimal_config


@pytest.fixture
def launch(
    redis_server: RedisServer,
    s3_servers: dict[str, tuple[str, str, str]],
    unique_run_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> RoleLaunch:
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", redis_server.password)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    address = Address(unique_run_id, redis_server.url, "s3://stagecoach", endpoint)
    return RoleLaunch(minimal_config().model_dump(mode="json"), address, (), None)


def away(launch: RoleLaunch, **changes: str) -> RoleLaunch:
    return dataclasses.replace(launch, address=dataclasses.replace(launch.address, **changes))


def test_a_machine_that_has_everything_has_no_problem(launch: RoleLaunch) -> None:
    assert look(launch) == Machine(versions(), None)


def test_what_a_machine_does_not_reach_or_have_is_said(launch: RoleLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(launch: RoleLaunch) -> str:
        return str(look(launch).problem)

    assert "Redis at 127.0.0.1:9 does not answer" in problem(away(launch, redis_url="redis://127.0.0.1:9"))
    assert "http://127.0.0.1:9 does not answer" in problem(away(launch, endpoint_url="http://127.0.0.1:9"))
    assert "there is no bucket 'nowhere'" in problem(away(launch, store_url="s3://nowhere"))
    game = minimal_config(environment={"id": "a_game_of_mine:make"}).model_dump(mode="json")
    assert "a_game_of_mine" in problem(dataclasses.replace(launch, config=game))
    for kwargs, words in (({"how": "exit"}, "exit code 3; it said last: "), ({"how": "crash"}, "with SIGSEGV")):
        dying = minimal_config(environment={"id": f"{BROKEN}:Dies", "kwargs": kwargs | {"at_start": True}})
        said = problem(dataclasses.replace(launch, config=dying.model_dump(mode="json")))
        assert "its start (__init__) ended its process with " in said and words in said
    kwargs = {"place": "start"}
    hanging = minimal_config(environment={"id": f"{BROKEN}:Hangs", "kwargs": kwargs, "step_deadline_seconds": 3})
    assert "its start (__init__) hangs" in problem(dataclasses.replace(launch, config=hanging.model_dump(mode="json")))
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", "of another server")
    assert "refuses the credentials" in problem(launch)


def test_the_user_s_modules_are_found_where_the_launch_says(launch: RoleLaunch, tmp_path: Path) -> None:
    (tmp_path / "preflight_game.py").write_text("import gymnasium\nmake = lambda: gymnasium.make('CartPole-v1')\n")
    game = minimal_config(environment={"id": "preflight_game:make"})
    assert isinstance(game, Config)
    found = look(dataclasses.replace(launch, config=game.model_dump(mode="json"), import_path=(str(tmp_path),)))
    assert found.problem is None


def test_other_versions_are_named_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = versions()
    assert difference(mine, mine) is None
    said = difference(mine | {"torch": "1.0", "Stagecoach's code": "feed"}, mine)
    assert said is not None
    assert f"torch 1.0 (here {mine['torch']})" in said
    assert "Stagecoach's code feed" in said


def test_code_that_was_changed_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text("1")
    monkeypatch.setattr(preflight, "__file__", str(tmp_path / "coordinator" / "preflight.py"))
    before = versions()["Stagecoach's code"]
    assert versions()["Stagecoach's code"] == before
    (tmp_path / "shared" / "a.py").write_text("2")
    assert versions()["Stagecoach's code"] != before
