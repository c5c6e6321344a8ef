"""The profile of a run: what its processes leave, read back by the command, as a table, a timeline and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.cli.live_view import in_one_line
from coordinator.cli.profile_and_bench import read_profile
from coordinator.run import Run
from shared.errors import UserError
from shared.storage.checkpoint_store import CheckpointStore
from shared.storage.object_store import FileStore
from tests.conftest import minimal_config

pytestmark = pytest.mark.timeout(120)
ROLES = {"trainer / training", "trainer / publishing", "worker-0 / acting", "evaluator / evaluating"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One that has ended, with a profile."""
    config = minimal_config(
        runs_dir=str(tmp_path_factory.mktemp("runs")), metrics={"profile": True}, stop_at={"updates": 3},
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 1}, evaluation={"episodes": 1},
    )  # fmt: skip
    run = Run.start(config, "profiled", inline=True)
    assert run.wait(100).reason == "exhausted"
    return run


def test_each_process_has_left_its_stages(run: Run) -> None:
    events, seconds = read_profile(run.checkpoint_store())
    assert seconds.keys() == ROLES
    for role, stages in {
        "trainer / training": {"update", "publish", "observe", "decode", "read", "report", "checkpoint"},
        "worker-0 / acting": {"act", "env", "record", "encode", "push", "claim"},
        "trainer / publishing": {"upload", "pointer and pruning", "trim", "idle"},
    }.items():
        assert stages <= seconds[role].keys()
    assert sum((event["ph"], event["name"]) == ("X", "update") for event in events) == 3


def test_the_command_writes_the_timeline_and_tells_the_shares(run: Run, tmp_path: Path) -> None:
    runs_dir, out = str(run.folder.path.parent), tmp_path / "timeline.json"
    shown = CliRunner().invoke(app, ["profile", run.run_id, "--runs-dir", runs_dir, "--out", str(out)])
    assert shown.exit_code == 0 and "trainer / training" in shown.output and "update" in shown.output
    assert {event["ph"] for event in json.loads(out.read_text())["traceEvents"]} == {"M", "X"}
    as_json = CliRunner().invoke(app, ["profile", run.run_id, "--runs-dir", runs_dir, "--json"])
    assert json.loads(as_json.output)["seconds"].keys() == ROLES
    assert (run.folder.path / "profile.json").is_file()


def test_a_profile_that_is_not_there_or_was_cut_off_is_told(tmp_path: Path) -> None:
    store = CheckpointStore(FileStore(tmp_path, "profiled"), "profiled")
    with pytest.raises(UserError, match="train --profile"):
        read_profile(store)
    store.store.put("profile/worker-9.json", b'{"traceEvents": [')
    with pytest.raises(UserError, match=r"profile/worker-9\.json of run 'profiled' was cut off"):
        read_profile(store)


def test_one_line_has_the_largest_shares_of_the_time_after_the_start() -> None:
    stages = {"start": 100.0, "update": 6.0, "publish": 3.0, "look": 1.0, "observe": 0.01}
    assert in_one_line(stages) == "update 60%, publish 30%, look 10%"
    assert in_one_line({"start": 3.0}) == ""
