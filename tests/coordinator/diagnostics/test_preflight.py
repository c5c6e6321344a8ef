"""What a config is refused for before anything starts, and what each machine of a cluster is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.diagnostics.preflight import difference, examine_machine, versions
from stagecoach.coordinator.lifecycle import validation
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.runtime.launch import RoleLaunch
from tests.conftest import minimal_config
from tests.support.environments.broken import MODULE as BROKEN


@pytest.fixture
def launch(servers: tuple[str, str], unique_run_id: str) -> RoleLaunch:
    address = Address(unique_run_id, servers[0], "s3://stagecoach", servers[1])
    return RoleLaunch(minimal_config().model_dump(mode="json"), address, (), None)


def away(launch: RoleLaunch, **changes: str) -> RoleLaunch:
    return dataclasses.replace(launch, address=dataclasses.replace(launch.address, **changes))


def test_examine_machine_finds_no_problem(launch: RoleLaunch) -> None:
    assert examine_machine(launch) == (versions(), None)


def test_examine_machine_reports_unreachable_or_missing(launch: RoleLaunch, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(launch: RoleLaunch) -> str:
        return str(examine_machine(launch)[1])

    assert "Redis at 127.0.0.1:9 does not answer" in problem(away(launch, redis_url="redis://127.0.0.1:9"))
    assert "http://127.0.0.1:9 does not answer" in problem(away(launch, endpoint_url="http://127.0.0.1:9"))
    assert "the bucket 'nowhere' does not exist" in problem(away(launch, store_url="s3://nowhere"))
    game = minimal_config(environment={"id": "a_game_of_mine:make"}).model_dump(mode="json")
    assert "a_game_of_mine" in problem(dataclasses.replace(launch, config=game))
    dying = minimal_config(environment={"id": f"{BROKEN}:Dies", "kwargs": {"how": "crash", "at_start": True}})
    said = problem(dataclasses.replace(launch, config=dying.model_dump(mode="json")))
    assert "its start (__init__) ended its process with SIGSEGV" in said
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", "of another server")
    assert "refuses the credentials" in problem(launch)


def test_examine_machine_imports_from_launch_path(launch: RoleLaunch, tmp_path: Path) -> None:
    (tmp_path / "preflight_game.py").write_text("import gymnasium\nmake = lambda: gymnasium.make('CartPole-v1')\n")
    game = minimal_config(environment={"id": "preflight_game:make"})
    launch = dataclasses.replace(launch, config=game.model_dump(mode="json"), import_path=(str(tmp_path),))
    assert examine_machine(launch)[1] is None


def test_other_versions_are_named_on_both_sides() -> None:
    mine = versions()
    assert difference(mine, mine) is None
    said = str(difference(mine | {"torch": "1.0", "Stagecoach's code": "feed"}, mine))
    assert f"torch 1.0 (here {mine['torch']})" in said and "Stagecoach's code feed" in said


def test_code_that_was_changed_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "folder" / "a.py").write_text("1")
    (tmp_path / "package" / "shared").symlink_to("../folder")  # as a checkout has it
    tmp_path /= "package"
    before = versions(tmp_path)["Stagecoach's code"]
    assert versions(tmp_path)["Stagecoach's code"] == before
    (tmp_path / "shared" / "a.py").write_text("2")
    assert versions(tmp_path)["Stagecoach's code"] != before


def test_check_refuses_values_too_large_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_width(width: int, **sections: Any) -> None:
        check(minimal_config(policies={"default": {"hidden_sizes": [width]}}, **sections))

    monkeypatch.setattr(validation, "_MOST_VALUE_BYTES", 50_000)
    check_width(64)
    with pytest.raises(ConfigError, match=r"a policy version of \d+ bytes .*policy_versions.transport: object_store"):
        check_width(2000)
    check_width(2000, policy_versions={"transport": "object_store"})
    check_width(8, rollout={"fragment_steps": 64})
    with pytest.raises(ConfigError, match=r"a fragment of about \d+ bytes .*lower rollout.fragment_steps or"):
        check_width(8, rollout={"fragment_steps": 640})


@pytest.mark.parametrize("transport", ["redis", "object_store"])
def test_check_refuses_network_too_large_without_building_it(transport: str) -> None:
    policies = {"default": {"hidden_sizes": [65536] * 100}}
    with pytest.raises(
        ConfigError, match=r"the policies take [\d,.]+ GB, and training .* a process on this machine has .*hidden_sizes"
    ):
        check(minimal_config(policies=policies, policy_versions={"transport": transport}))


def test_check_refuses_evaluation_with_other_spaces() -> None:
    wrapper = {"path": "stagecoach.rollout_worker.environments.wrappers:MapAction", "kwargs": {"actions": [0, 1]}}
    check(minimal_config(evaluation={"wrappers": [wrapper]}))
    for wrapped in ({**wrapper, "kwargs": {"actions": [0]}}, "gymnasium.wrappers:TimeAwareObservation"):
        with pytest.raises(ConfigError, match=r"evaluation\.wrappers.* has other spaces than the one of training"):
            check(minimal_config(evaluation={"wrappers": [wrapped]}))
