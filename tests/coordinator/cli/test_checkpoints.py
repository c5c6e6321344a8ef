"""`stagecoach checkpoints …` as people type it: what is printed, JSON, and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.storage.checkpoint_store import MARKS
from tests.support.processes.command_line import Stagecoach, check_refused, contents
from tests.support.runs.checkpoints import upload_in

NAMES = [f"{version}_Step-{version * 64}.ckpt" for version in range(5)]
LAST = NAMES[-1]
POLICY = "default/policy.safetensors"


@pytest.fixture
def run(stagecoach: Stagecoach, ended_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the ended run in the test's own folder; answers its objects' folder."""
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(ended_run.config.runs_dir, tmp_path / "runs")
    return tmp_path / "runs" / "a" / "s3" / BUCKET / "a"


def damage(run: Path, name: str) -> None:
    path = upload_in(run / "checkpoints" / name) / POLICY
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_list_may_be_left_out(stagecoach: Stagecoach, run: Path) -> None:
    listed = stagecoach("checkpoints", "a")
    assert listed == stagecoach("checkpoints", "list", "a") == stagecoach("checkpoints", "--runs-dir", "runs", "a")
    assert all(name in listed.out for name in (*NAMES, "latest", "final", str(run)))
    assert [entry["name"] for entry in stagecoach("checkpoints", "a", "--json").json()] == NAMES
    assert stagecoach("checkpoints", "--json", "a").json() == stagecoach("checkpoints", "list", "a", "--json").json()


def test_verify_says_what_is_damaged_and_ends_with_1(stagecoach: Stagecoach, run: Path) -> None:
    done = stagecoach("checkpoints", "verify", "a")
    assert [line.split()[:2] for line in done.out.splitlines()] == [["ok", name] for name in NAMES]
    damage(run, NAMES[1])
    half = run / "checkpoints" / "1_Step-1.ckpt" / "0123456789abcdef" / "half"
    half.parent.mkdir(parents=True)
    half.touch()
    done = stagecoach("checkpoints", "verify", "a")
    assert done.code == 1
    lines = {line.rpartition(".ckpt")[0].split()[-1] + ".ckpt": line for line in done.out.splitlines()}
    assert lines[NAMES[1]].endswith(f"{NAMES[1]}  {POLICY} was altered: its SHA-256 is not the manifest's")
    assert "never completed" in lines["1_Step-1.ckpt"]
    assert stagecoach("checkpoints", "verify", "a", NAMES[0]).code == 0
    printed = stagecoach("checkpoints", "verify", "a", NAMES[1], "--json")
    assert printed.code == 1
    (found,) = json.loads(printed.out)
    assert (found["name"], found["state"], len(found["problems"])) == (NAMES[1], "damaged", 1)


def test_show_prints_the_provenance(stagecoach: Stagecoach, run: Path) -> None:
    upload = upload_in(run / "checkpoints" / LAST)
    manifest = json.loads((upload / "manifest.json").read_text())
    shown = stagecoach("checkpoints", "show", "a", "--json").json()
    assert {key: shown[key] for key in manifest} == manifest
    assert {"latest", "final"} <= set(shown["marks"])
    assert shown["evaluation"]["episodes"] == 2
    printed = stagecoach("checkpoints", "show", "a", LAST).out
    assert stagecoach("checkpoints", "show", "a").out == printed
    said = manifest["provenance"]
    words = [
        NAMES[-2], upload.name, said["code_version"],
        f"{said['config_hash']} (this run's config)", " to ".join(said["log_range"]),
        "3 to 4", "256 env steps", "ledger, worker-0", "ledger, all workers",
        "256 committed = 256 consumed + 0 dropped", f"{said['evaluation']['checkpoint']} ", "over 2 episodes",
        *(item["sha256"] for item in manifest["objects"].values()),
    ]  # fmt: skip
    assert [word for word in words if word not in printed] == []
    assert "none: it is the first" in stagecoach("checkpoints", "show", "a", NAMES[0]).out


def test_prune_promote_and_export(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    assert stagecoach("checkpoints", "promote", "a", NAMES[1]).out == f"a: {NAMES[1]} is promoted\n"
    listed = stagecoach("checkpoints", "a", "--json").json()
    marks = {entry["name"]: entry["marks"] for entry in listed}
    assert "promoted" in marks[NAMES[1]]
    going = [name for name in NAMES if not marks[name]]
    would = stagecoach("checkpoints", "prune", "a", "--keep-last", "1", "--dry-run").out
    assert stagecoach("checkpoints", "a", "--json").json() == listed
    did = stagecoach("checkpoints", "prune", "a", "--keep-last", "1").out
    assert did == would.replace("would remove", "removed")
    assert [line.split()[1] for line in did.splitlines()[:-1]] == going
    assert did.splitlines()[-1].endswith(f"; {len(NAMES) - len(going)} left")
    assert f"removed {len(going)} checkpoint" in did
    assert stagecoach("checkpoints", "prune", "a", "--json").json() == []
    exported = tmp_path / "out" / "a" / "checkpoints" / NAMES[1]
    assert stagecoach("checkpoints", "export", "a", "out").out.splitlines()[0] == "out/a/checkpoints/" + NAMES[1]
    assert (upload_in(exported) / POLICY).is_file()
    assert f"{LAST}\n" in stagecoach("checkpoints", "export", "a", "latest", "other").out
    for target in ("a", "a/promoted", str(exported), str(upload_in(exported)), str(tmp_path / "out" / "a")):
        assert stagecoach("evaluate", target).out.startswith(f"{NAMES[1]}: ")
    begun = stagecoach("train", "config.yaml", "--run-id", "b", "--inline", "--initialize-from", str(exported)).ok()
    assert f"begins with {NAMES[1]} of run a; taken: policy; reset: optimizers, counters" in begun
    assert f"none: it began with {NAMES[1]} of run a" in stagecoach("checkpoints", "show", "b", "0_Step-0.ckpt").out
    assert stagecoach("checkpoints", "promote", "a", "--clear").out == f"a: {NAMES[1]} is no longer promoted\n"
    assert stagecoach("checkpoints", "promote", "a", "--clear").out == "a: nothing was promoted\n"


def test_checkpoint_commands_explain_refusals(stagecoach: Stagecoach, run: Path) -> None:
    before = contents(run)
    there = f"there are: {', '.join(NAMES)}; or say {', '.join(MARKS)}"
    for command in (["verify", "a", "x"], ["show", "a", "x"], ["promote", "a", "x"], ["export", "a", "x", "out"]):
        check_refused(stagecoach("checkpoints", *command), "run a has no checkpoint 'x'", there)
    check_refused(stagecoach("checkpoints", "show", "a", "promoted"), "no promoted checkpoint", there)
    check_refused(stagecoach("checkpoints", "promote", "a"), "give the name of a checkpoint", "--clear")
    check_refused(stagecoach("checkpoints", "promote", "a", NAMES[0], "--clear"), "or --clear")
    check_refused(stagecoach("checkpoints", "export", "a", "b", "c", "d"), "expected [NAME] DIR, found b c d")
    for command in (["prune", "a", "--keep-last", "0"], ["export", "a"], ["promote"], []):
        done = stagecoach("checkpoints", *command)
        assert done.code == 2 and "Usage: " in done.err + done.out
    damage(run, LAST)
    for command in (["promote", "a", "latest"], ["export", "a", "latest", "out"], ["prune", "a"]):
        done = stagecoach("checkpoints", *command)
        assert (done.code, done.err.count("\n")) == (1, 1) and "was altered" in done.err
    damaged = upload_in(run / "checkpoints" / LAST) / POLICY
    damaged.write_bytes(before[str(damaged.relative_to(run))])
    assert contents(run) == before


def test_resume_after_damaged_checkpoint_says_where_it_continues(stagecoach: Stagecoach, run: Path) -> None:
    damage(run, LAST)
    told = stagecoach("resume", "a", "--inline", "--set=stop_at.updates=6").ok()
    assert f"{LAST}/{POLICY} was altered: its SHA-256 is not the manifest's; going back to {NAMES[3]}" in told
    assert f"restored {NAMES[3]}, but the log behind it is trimmed: continues as version 5" in told
    assert stagecoach("checkpoints", "a", "--json").json()[-1]["updates"] == 6
    assert stagecoach("checkpoints", "verify", "a", "latest").ok()


def test_resume_reports_other_versions_and_strict_refuses(stagecoach: Stagecoach, run: Path) -> None:
    for name in NAMES:
        path = upload_in(run / "checkpoints" / name) / "manifest.json"
        manifest = json.loads(path.read_text())
        code = manifest["provenance"]["code_version"]
        assert set(manifest["provenance"]["computed_with"]) >= {"torch", "numpy", "python"}
        manifest["provenance"]["code_version"] = "0.0.1"
        manifest["provenance"]["computed_with"]["torch"] = "1.0"
        path.write_text(json.dumps(manifest))
    words = f"was written by other versions (code 0.0.1 then, {code} now; torch 1.0 then, {torch.__version__} now): "
    cases: list[tuple[int, str, list[str]]] = [(5, LAST, []), (6, NAMES[1], ["--from", NAMES[1]])]
    before = contents(run)
    for updates, name, sets in cases:
        done = stagecoach("resume", "a", "--inline", "--strict", f"--set=stop_at.updates={updates}", *sets)
        check_refused(done, f"resume --strict: {name} {words}", "nothing was changed; install those versions")
    assert contents(run) == before
    for updates, name, sets in cases:
        told = stagecoach("resume", "a", "--inline", f"--set=stop_at.updates={updates}", *sets).ok()
        assert told.count("was written by other versions") == 1 and f"{name} {words}" in told
    assert "other versions" not in stagecoach("resume", "a", "--inline", "--strict", "--set=stop_at.updates=7").ok()
