"""Going back and beginning from another run, by the command line: what cannot be done is refused before any write."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from tests.coordinator.terminal import Stagecoach, check_refused

MORE = "--set=stop_at.updates=9"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def store_of(folder: Path, run_id: str) -> Path:
    """Where the run's objects are."""
    return folder / "runs" / run_id / "s3" / "stagecoach" / run_id


def describe_anew(checkpoint: Path, key: str, data: bytes) -> None:
    """Another object, and a manifest that says so."""
    (checkpoint / key).write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["objects"][key] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def trained(stagecoach: Stagecoach, folder: Path, run_id: str = "a", *more: str) -> Path:
    """A run that has ended; answers the folder of its objects."""
    arguments = ["--set=checkpoint.keep_last=9", "--set=checkpoint.every=1 updates", "--set=stop_at.updates=2", *more]
    done = stagecoach("train", "config.yaml", "--run-id", run_id, "--inline", *arguments)
    assert done.code == 0, done
    return store_of(folder, run_id)


def test_a_damaged_checkpoint_is_neither_gone_back_to_nor_begun_from(stagecoach: Stagecoach, tmp_path: Path) -> None:
    store = trained(stagecoach, tmp_path)
    (older,) = store.glob("checkpoints/1_*")
    altered = older / "trainer" / "state.json"
    altered.write_bytes(altered.read_bytes() + b" ")
    before = contents(store)
    done = stagecoach("resume", "a", "--from", older.name, "--inline", MORE)
    check_refused(done, f"resume --from {older.name}", "state.json was altered", "choose another checkpoint")
    assert contents(store) == before
    describe_anew(older, "trainer/state.json", b"{}")  # whole, and yet nothing that could be restored
    done = stagecoach("resume", "a", "--from", older.name, "--inline", MORE)
    check_refused(done, f"{older.name} cannot be restored", "nothing was changed")
    altered = older / "default" / "policy.safetensors"
    altered.write_bytes(altered.read_bytes()[:-1])
    before = contents(store)
    done = stagecoach("train", "config.yaml", "--run-id", "b", "--inline", "--initialize-from", f"a/{older.name}")
    check_refused(
        done, f"initialize_from=a/{older.name}", "policy.safetensors was altered", "choose another checkpoint"
    )
    assert contents(store) == before
    assert not (tmp_path / "runs" / "b").exists()
    assert stagecoach("resume", "a", "--inline", MORE).code == 0, "nothing was changed, so it can still go on"


def test_a_run_that_was_cut_off_before_it_had_its_weights_does_not_begin_without_them(
    stagecoach: Stagecoach, tmp_path: Path
) -> None:
    trained(stagecoach, tmp_path)
    store = trained(stagecoach, tmp_path, "b", "--initialize-from", "a")
    for path in [*store.iterdir(), tmp_path / "runs" / "b" / "redis"]:
        if path.name not in ("config.yaml", "environment.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(store)
    done = stagecoach("resume", "b", "--inline", MORE)
    check_refused(done, "cut off before it had the policies of a", "start a new run")
    assert contents(store) == before
