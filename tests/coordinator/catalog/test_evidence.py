"""`stagecoach evidence`: a folder that is complete, that verifies, and that names what was dropped or is damaged."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.object_store import FileStore
from tests.conftest import minimal_config
from tests.support.processes.command_line import Stagecoach, check_refused, contents, redis_of, until
from tests.support.runs.checkpoints import upload_in

FILES = {
    "README.md", "SHA256SUMS", "checkpoints.csv", "config.yaml", "curves.png", "drops.csv", "environment.json",
    "evidence.json", "ledger.json", "metrics/evaluations.csv", "metrics/events.csv", "metrics/train.csv",
    "packages.txt",
}  # fmt: skip
POLICY = "default/policy.safetensors"
pytestmark = pytest.mark.timeout(180)


def has_dropped(run: Run, reason: str) -> None:
    until(run, lambda status: reason in status.ledger.get("total", {}).get("dropped", {}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of an ended run `a` with its whole log, and the position of an entry that no worker pushed."""
    runs = tmp_path_factory.mktemp("evidence") / "runs"
    config = minimal_config(
        runs_dir=str(runs), archive="all", checkpoint={"every": "2 updates", "keep_last": 3}, heatup="64 env_steps",
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 2}, evaluation={"episodes": 1},
        stop_at={"updates": 10**6},
    )  # fmt: skip
    run = Run.start(config, "a", inline=True)
    try:
        until(run, lambda status: status.updates > 2 and bool(run.checkpoints()))
        with redis_of(run) as client:
            untyped: Any = client
            position = untyped.xadd(
                RunKeys("a").log, {"worker": "stranger", "seq": "1", "fragment": "garbage"}
            ).decode()
        has_dropped(run, "foreign")
        live = run.evidence(runs.parent / "live")
        version = live.summary["version"]
        assert live.summary["state"] == f"live, up to version {version}" and version >= 0
        assert live.summary["drops"]["fragments"] >= 1 and live.damaged == []
        until(run, lambda status: status.version > version + 2)
        run.stop()
        assert run.wait(120).reason == "stopped"
    finally:
        run.abandon()
    return runs, position


@pytest.fixture
def run(stagecoach: Stagecoach, trained: tuple[Path, str], tmp_path: Path) -> Path:
    """The store's folder of a copy of that run, which commands in this folder find."""
    shutil.copytree(trained[0], tmp_path / "runs")
    return tmp_path / "runs" / "a" / "s3" / BUCKET / "a"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary(folder: Path) -> Any:
    return json.loads((folder / "evidence.json").read_text())


def sums_are_right(folder: Path) -> bool:
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS", "--strict", "--quiet"], cwd=folder, capture_output=True)
    return done.returncode == 0


def test_folder_is_complete_equal_twice_and_verifies(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    told = stagecoach("evidence", "a").ok()
    assert told.startswith("a-evidence: finished; ")
    folder = tmp_path / "a-evidence"
    stagecoach("evidence", "a", "again").ok()
    files = set(contents(folder))
    assert files - {"metrics/fleet.csv"} == FILES  # a run of a few seconds may have no row of the fleet
    assert contents(folder) == contents(tmp_path / "again")
    listed = {line.split("  ", 1)[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed == files - {"SHA256SUMS"} and sums_are_right(folder)
    readme = (folder / "README.md").read_text()
    assert [name for name in files - {"README.md", "SHA256SUMS"} if f"- `{name}`: " not in readme] == []
    assert "metrics.episodes: true" in readme
    (folder / "ledger.json").write_text("{}")
    assert not sums_are_right(folder)

    finished = json.loads((run / ".finished").read_text())
    assert json.loads((tmp_path / "again" / "ledger.json").read_text()) == finished["ledger"]
    manifests = {path.name: json.loads((upload_in(path) / "manifest.json").read_text()) for path in
                 (run / "checkpoints").iterdir()}  # fmt: skip
    found = {(row["checkpoint"], row["object"]): row["sha256"] for row in rows(folder / "checkpoints.csv")}
    for name, manifest in manifests.items():
        assert {key: found[name, key] for key in manifest["objects"]} == {
            key: item["sha256"] for key, item in manifest["objects"].items()
        }
    said = summary(folder)
    assert said["up_to"] == finished["final"] and said["seeds"]["checkpoints"][0]["value"] == said["seeds"]["config"]
    assert f"stagecoach replay a --from start --to {finished['final']}" in readme and said["replay_from"] == "start"
    assert said["config_hash"] == manifests[finished["final"]]["provenance"]["config_hash"]


def test_each_drop_is_listed_with_its_position(stagecoach: Stagecoach, run: Path, trained: tuple[Path, str]) -> None:
    stagecoach("evidence", "a", "found").ok()
    dropped = rows(Path("found/drops.csv"))
    (stranger,) = [row for row in dropped if row["reason"] == "foreign"]
    assert (stranger["position"], stranger["worker"], stranger["fragments"]) == (trained[1], "strangers", "1")
    assert "no worker pushed it" in stranger["detail"]
    ledger = json.loads((run / ".finished").read_text())["ledger"]
    for worker, line in ledger.items():
        for reason, count in line["dropped"].items() if worker != "total" else ():
            its = [row for row in dropped if (row["worker"], row["reason"]) == (worker, reason)]
            assert sum(int(row["fragments"]) for row in its) == count["fragments"]
            assert sum(int(row["transitions"]) for row in its) == count["transitions"]
    assert summary(Path("found"))["drops"]["fragments"] == len(dropped) >= 1


def test_without_archive_drops_are_counted_by_reason(stagecoach: Stagecoach, run: Path) -> None:
    shutil.rmtree(run / "experience")
    told = stagecoach("evidence", "a", "found").ok()
    assert "positions of drops: run a has no archive of its log: its config says archive.keep=all" in told
    rest = [row for row in rows(Path("found/drops.csv")) if row["reason"] == "foreign"]
    assert [(row["position"], row["fragments"], row["detail"]) for row in rest] == [
        ("", "1", "the position is not known")
    ]
    check_refused(stagecoach("evidence", "a", "other", "--replay"), "--replay", "archive=all")
    assert not Path("other").exists()
    assert summary(Path("found"))["replay_from"] is None
    assert "stagecoach replay" not in Path("found/README.md").read_text()


def test_archive_that_contradicts_the_ledger_is_named(
    stagecoach: Stagecoach, run: Path, trained: tuple[Path, str]
) -> None:
    """Its segments are intact, but an entry that was dropped is not in them any more."""
    archive = Archive(FileStore(run.parent, run.name), run.name)
    for segment in archive.segments():
        kept = [entry for entry in archive.entries(segment.after, segment.through) if entry.id != trained[1]]
        archive.delete(segment)
        archive.write(segment.after, segment.through, kept)
    done = stagecoach("evidence", "a", "found")
    assert done.code == 1 and "damaged: experience" in done.out
    assert "judged again, does not give the ledger" in summary(Path("found"))["absent"]["positions of drops"]
    assert {row["position"] for row in rows(Path("found/drops.csv"))} == {""}


def test_run_that_went_back_lists_drops_since_then(stagecoach: Stagecoach, run: Path) -> None:
    origin = stagecoach("checkpoints", "a", "--json").json()[0]
    goal = f"stop_at.updates={origin['updates'] + 3}"
    stagecoach("resume", "a", "--inline", "--from", origin["name"], "--set", goal).ok()
    stagecoach("evidence", "a", "found").ok()
    found = summary(Path("found"))
    begin = found["replay_from"]
    assert begin != "start" and f"only from {begin} on" in found["absent"]["positions of earlier drops"]
    assert stagecoach("replay", "a", "--from", begin, "--to", found["up_to"], "--json").json()["equal"]
    replayed = stagecoach("evidence", "a", "replayed", "--replay", "--json").json()["replay"]
    assert replayed["equal"] and (replayed["start"], replayed["goal"]) == (begin, found["up_to"]) and begin != "start"
    assert f"- Replay from {begin}: equal" in Path("replayed/README.md").read_text()
    (stranger,) = [row for row in rows(Path("found/drops.csv")) if row["reason"] == "foreign"]
    assert stranger["position"] == "" and f"or before {begin}" in stranger["detail"]


def test_damaged_object_is_named_and_ends_with_1(stagecoach: Stagecoach, run: Path) -> None:
    final = json.loads((run / ".finished").read_text())["final"]
    path = upload_in(run / "checkpoints" / final) / POLICY
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    done = stagecoach("evidence", "a", "found")
    assert done.code == 1 and f"damaged: {final}" in done.out
    named = [row for row in rows(Path("found/checkpoints.csv")) if row["verdict"] == "damaged"]
    assert {row["checkpoint"] for row in named} == {final} and POLICY in named[0]["problems"]
    assert summary(Path("found"))["damaged"] == [final] and sums_are_right(Path("found"))
    done = stagecoach("evidence", "a", "replayed", "--replay")
    assert done.code == 1 and "was altered" in summary(Path("replayed"))["replay"]["error"]


def test_nothing_to_replay_since_a_rollback_is_refused(stagecoach: Stagecoach, run: Path) -> None:
    origin = stagecoach("checkpoints", "a", "--json").json()[0]
    goal = f"stop_at.updates={origin['updates'] + 3}"
    stagecoach("resume", "a", "--inline", "--from", origin["name"], "--set", goal).ok()
    *others, last = (each["name"] for each in stagecoach("checkpoints", "a", "--json").json())
    for name in others:
        shutil.rmtree(run / "checkpoints" / name)
    done = stagecoach("evidence", "a", "found", "--replay")
    check_refused(done, "--replay: ", "went back", f"only {last} is kept", "nothing to replay")


def test_altered_config_is_damage(stagecoach: Stagecoach, run: Path) -> None:
    path = Path("runs/a/config.yaml")
    path.write_text(path.read_text().replace("gamma: 0.99", "gamma: 0.9"))
    done = stagecoach("evidence", "a", "found")
    assert done.code == 1 and "damaged: config.yaml" in done.out
    assert "was trained with the hash" in summary(Path("found"))["absent"]["config that trained"]


def test_ledger_that_does_not_balance_ends_with_1(stagecoach: Stagecoach, run: Path) -> None:
    finished = json.loads((run / ".finished").read_text())
    finished["ledger"]["total"]["balances"] = False
    (run / ".finished").write_text(json.dumps(finished))
    done = stagecoach("evidence", "a", "found")
    assert done.code == 1 and "damaged: ledger" in done.out
    assert "- Ledger balances: NO." in Path("found/README.md").read_text()


def test_deleted_metrics_are_damage(stagecoach: Stagecoach, run: Path) -> None:
    for path in (run / "metrics" / "train").rglob("*"):
        path.unlink() if path.is_file() else None
    done = stagecoach("evidence", "a", "found")
    assert done.code == 1 and "damaged: metrics/train" in done.out
    assert "has updates" in summary(Path("found"))["absent"]["metrics/train.csv"]


def test_replay_is_recorded(stagecoach: Stagecoach, run: Path) -> None:
    found = stagecoach("evidence", "a", "found", "--replay", "--json").json()
    assert found == summary(Path("found"))
    assert found["replay"]["equal"] and found["replay"]["goal"] == found["up_to"]
    assert "equal, all" in Path("found/README.md").read_text()


def test_folder_that_is_not_empty_is_refused(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stagecoach("evidence", "a", "empty").ok()
    before = contents(tmp_path / "empty")
    check_refused(stagecoach("evidence", "a", "empty"), "empty exists and is not an empty folder", "another folder")
    assert contents(tmp_path / "empty") == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".partial-")] == []


def test_without_matplotlib_the_tables_stand_alone(
    stagecoach: Stagecoach, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    stagecoach("evidence", "a", "found").ok()
    assert not Path("found/curves.png").exists()
    assert "matplotlib" in summary(Path("found"))["absent"]["curves.png"]
    assert rows(Path("found/metrics/train.csv"))


def test_run_in_a_store_gives_evidence_elsewhere(
    config: Callable[..., Any], servers: tuple[str, str], tmp_path: Path
) -> None:
    redis_url, endpoint = servers
    store = {"url": f"s3://{BUCKET}/evidence", "endpoint_url": endpoint}
    started = Run.start(config(redis={"url": redis_url}, store=store, archive="all"), "far", inline=True)
    assert started.wait(120).reason == "exhausted"
    run = Run.attach(f"s3://{BUCKET}/evidence/far", tmp_path / "elsewhere", endpoint_url=endpoint)
    found = run.evidence(tmp_path / "found")
    assert found.damaged == [] and found.summary["state"] == "finished" and sums_are_right(found.folder)
    assert "started elsewhere" in found.summary["absent"]["installed packages"]
    assert "positions of drops" not in found.summary["absent"]


def test_damaged_archive_of_an_ended_run_is_named(tmp_path: Path) -> None:
    config = minimal_config(runs_dir=str(tmp_path), archive="all", evaluation={"episodes": 0}, stop_at={"updates": 6})
    run = Run.start(config, "a", inline=True)
    run.wait(120)
    assert run.evidence(tmp_path / "sound").damaged == []
    segment = next((tmp_path / "a" / "s3").rglob("log.safetensors"))
    segment.write_bytes(segment.read_bytes()[:-9])
    assert run.evidence(tmp_path / "cut").damaged == ["experience"]
