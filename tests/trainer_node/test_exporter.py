"""The exporter beside a real trainer: what it stores, what it leaves alone, and that its failures stop nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from stagecoach.coordinator.catalog.checkpoint_operations import verify
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS
from stagecoach.shared.storage.export_record import RECORD, Export, read_export, read_file
from stagecoach.trainer_node.export import background_exporter as exporter
from tests.support import waiting
from tests.support.checkpoints import key_of
from tests.support.game import Game, NewGame, replayed, small
from tests.support.own_algorithm import TEXT

eventually = partial(waiting.eventually, seconds=200.0)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait for others' tests to leave a core free."""
    monkeypatch.setattr(exporter, "_NICE", 0)


def exporting(**sections: Any) -> Any:
    checkpoint = {"every": "2 updates", "keep_last": 2, "export": "onnx"}
    return small(**({"checkpoint": checkpoint, "archive": "all"} | sections))


def exporting_process() -> int | None:
    """The id of the child of this process that exports, if there is one."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            child = f"\nPPid:\t{os.getpid()}\n" in status.read_text()
            if child and "stagecoach.trainer_node.export.export_process" in status.with_name("cmdline").read_text():
                return int(status.parent.name)
    return None


def record_of(game: Game, name: str) -> Export:
    export = read_export(game.role.checkpoints, name)
    assert export is not None
    return export


@pytest.mark.processes
def test_the_newest_and_the_best_are_exported_and_nothing_else_changes(new_game: NewGame) -> None:
    game = new_game(exporting())
    first = game.role.checkpoints.names()[0]
    eventually(exporting_process)
    game.finish()
    checkpoints = game.role.checkpoints
    pointer = checkpoints.pointer()
    assert pointer is not None and pointer.latest == checkpoints.names()[-1]
    export = record_of(game, pointer.latest)
    compared = export.policies["default"].compared
    assert set(compared) == {"random", "recorded"} and compared["recorded"].rows == 8 * 4
    assert export.failures == {} and export.max_difference < 1e-4
    session = onnxruntime.InferenceSession(read_file(checkpoints, export, "default"))
    actions = session.run(["action"], {"obs": np.zeros((3, 4), np.float32)})[0]
    assert actions.shape == (3,) and actions.dtype == np.int64
    assert {verdict.state for verdict in verify(checkpoints)} == {"ok"}
    # kept apart from all that is compared, and gone with its checkpoint
    assert f"default/{RECORD}" not in checkpoints.manifest(pointer.latest).objects
    assert replayed(game).equal
    assert first not in checkpoints.names() and checkpoints.store.keys(f"{CHECKPOINTS}{first}/") == []
    assert game.events("export") == ""


@pytest.mark.processes
def test_a_killed_process_is_told_once_and_the_run_goes_on(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_REST", 0.0)
    game = new_game(exporting())
    for count, version in enumerate((0, 2), start=1):
        game.play_to(version)
        game.durable()
        os.kill(eventually(exporting_process) or 0, signal.SIGKILL)
        eventually(lambda count=count: len(failed(game)) == count)  # type: ignore[misc]
    first, _ = failed(game)
    eventually(lambda: "SIGKILL" in game.store_status().get("export", {}).get("error", ""))
    game.finish()
    told = game.events("export")
    failure = "default: the exporting process was ended by SIGKILL"
    assert told == f"{first} cannot be exported as ONNX, training continues: {failure}"
    assert game.finished()["reason"] == "exhausted"


def failed(game: Game) -> list[str]:
    """The checkpoints, oldest first, whose exporting process was killed."""
    read = {name: read_export(game.role.checkpoints, name) for name in game.role.checkpoints.names()}
    return [name for name, export in read.items() if export and "SIGKILL" in str(export.failures)]


def test_one_that_hangs_is_ended(new_game: NewGame, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_DEADLINE_SECONDS", 0.1)
    game = new_game(exporting())
    game.finish()
    latest = game.role.checkpoints.names()[-1]
    assert record_of(game, latest).failures["default"].startswith("the exporting process took more than 0.1 s")
    assert game.finished()["reason"] == "exhausted"


@pytest.mark.processes
def test_what_cannot_be_exported_trains_on(new_game: NewGame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own class, which looks at numbers while it acts."""
    package, text = tmp_path / "code" / "exp_pkg", TEXT.replace('"my_table"', '"exp_table"')
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    acting = "return self.preferences.expand"
    assert acting in text
    looks = "if float(self.preferences.sum()) < -1e9: raise ValueError\n        "
    (package / "algo.py").write_text(text.replace(acting, looks + acting))
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    policies = {"default": {"hidden_sizes": [8]}}
    game = new_game(exporting(algorithm={"name": "exp_pkg.algo:Bandit"}, policies=policies))
    game.finish()
    latest = game.role.checkpoints.names()[-1]
    (failure,) = record_of(game, latest).failures.values()
    told = game.events("export")
    assert told.count("\n") == 0 and failure in told and "training continues" in told
    assert "data-dependent" in failure and len(failure) < 500
    assert game.finished()["reason"] == "exhausted"
    assert {verdict.state for verdict in verify(game.role.checkpoints)} == {"ok"}


@pytest.mark.processes
def test_a_trainer_that_goes_on_exports_what_its_predecessor_did_not(new_game: NewGame) -> None:
    game = new_game(exporting(stop_at={"updates": 2}))
    game.play_to(2)
    game.durable()
    game.crash()
    (latest,) = {name for name in game.role.checkpoints.names() if name.startswith("2_")}
    if read_export(game.role.checkpoints, latest) is not None:  # it was quick
        game.role.checkpoints.store.delete(key_of(game.role.checkpoints, latest, RECORD))
    game.restart()
    eventually(lambda: read_export(game.role.checkpoints, latest) is not None)
    exported = record_of(game, latest).created
    game.crash()
    game.restart()
    game.finish()
    assert game.finished()["final"] == latest and record_of(game, latest).created == exported


def test_without_the_setting_no_process_is_started(new_game: NewGame) -> None:
    game = new_game(small())
    game.durable()
    assert exporting_process() is None
    game.finish()
    assert [key for key in game.role.checkpoints.store.keys(CHECKPOINTS) if key.endswith(RECORD)] == []
