"""The profile of a run: what its processes leave, read back by the command, as a table, a timeline and JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stagecoach.coordinator.cli.profile_and_bench import read_profile
from stagecoach.coordinator.cli.terminal.live_view import in_one_line
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.object_store import FileStore
from tests.support.processes.command_line import Stagecoach

ROLES = {"trainer / training", "trainer / publishing", "worker-0 / acting", "evaluator / evaluating"}


def test_each_process_has_left_its_stages(ended_run: Run) -> None:
    events, seconds = read_profile(ended_run.checkpoint_store())
    assert seconds.keys() == ROLES
    for role, stages in {
        "trainer / training": {"update", "publish", "observe", "decode", "read", "report", "checkpoint"},
        "worker-0 / acting": {"act", "env", "record", "encode", "push", "claim"},
        "trainer / publishing": {"upload", "pointer and status", "trim", "idle"},
    }.items():
        assert stages <= seconds[role].keys()
    assert sum((event["ph"], event["name"]) == ("X", "update") for event in events) == 4


def test_profile_writes_timeline_and_prints_shares(ended_run: Run, stagecoach: Stagecoach, tmp_path: Path) -> None:
    shutil.copytree(ended_run.config.runs_dir, tmp_path / "runs")
    shown = stagecoach("profile", "a", "--out", "timeline.json").ok()
    assert "trainer / training" in shown and "update" in shown
    assert {event["ph"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]} == {"M", "X"}
    assert stagecoach("profile", "a", "--json").json()["seconds"].keys() == ROLES
    assert (tmp_path / "runs" / "a" / "profile.json").is_file()


def test_profile_explains_missing_or_cut_off_file(tmp_path: Path) -> None:
    store = CheckpointStore(FileStore(tmp_path, "profiled"), "profiled")
    with pytest.raises(UserError, match="train --profile"):
        read_profile(store)
    store.store.put("profile/worker-9.json", b'{"traceEvents": [')
    with pytest.raises(UserError, match=r"profile/worker-9\.json of run 'profiled' was cut off"):
        read_profile(store)


def test_largest_stages_fit_in_one_line() -> None:
    stages = {"start": 100.0, "update": 6.0, "publish": 3.0, "look": 1.0, "observe": 0.01}
    assert in_one_line(stages) == "update 60%, publish 30%, look 10%"
    assert in_one_line({"start": 3.0}) == ""
