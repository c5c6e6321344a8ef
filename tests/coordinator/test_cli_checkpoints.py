"""`stagecoach checkpoints …` as people type it: what is printed, JSON, and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.services.embedded import BUCKET
from shared.storage.checkpoint_store import MARKS
from tests.support.checkpoints import upload_in
from tests.support.command_line import Ended, Stagecoach, check_refused, train_inline

NAMES = ["0_Step-0.ckpt", "1_Step-32.ckpt", "2_Step-64.ckpt", "3_Step-96.ckpt"]
SETS = [
    "--set=stop_at.updates=3", "--set=checkpoint.every=1 updates", "--set=policy_versions.transport=object_store",
]  # fmt: skip
POLICY = "default/policy.safetensors"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an ended run `a` with four checkpoints."""
    return train_inline(tmp_path_factory.mktemp("trained"), *SETS)


@pytest.fixture
def run(stagecoach: Stagecoach, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That run in the test's own folder; answers its objects' folder."""
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(trained, tmp_path / "runs")
    return tmp_path / "runs" / "a" / "s3" / BUCKET / "a"


def data(done: Ended) -> Any:
    assert done.code == 0, done
    return json.loads(done.out)


def damage(run: Path, name: str) -> None:
    path = upload_in(run / "checkpoints" / name) / POLICY
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def test_list_may_be_left_out(stagecoach: Stagecoach, run: Path) -> None:
    listed = stagecoach("checkpoints", "a")
    assert listed == stagecoach("checkpoints", "list", "a") == stagecoach("checkpoints", "--runs-dir", "runs", "a")
    assert all(name in listed.out for name in (*NAMES, "latest", "final", str(run)))
    assert [entry["name"] for entry in data(stagecoach("checkpoints", "a", "--json"))] == NAMES
    assert data(stagecoach("checkpoints", "--json", "a")) == data(stagecoach("checkpoints", "list", "a", "--json"))


def test_verify_says_what_is_damaged_and_ends_with_1(stagecoach: Stagecoach, run: Path) -> None:
    done = stagecoach("checkpoints", "verify", "a")
    assert [line.split()[:2] for line in done.out.splitlines()] == [["ok", name] for name in NAMES]
    damage(run, NAMES[1])
    (run / "checkpoints" / "1_Step-1.ckpt" / "0123456789abcdef").mkdir(parents=True)
    (run / "checkpoints" / "1_Step-1.ckpt" / "0123456789abcdef" / "half").touch()
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
    manifest = json.loads((upload_in(run / "checkpoints" / NAMES[3]) / "manifest.json").read_text())
    shown = data(stagecoach("checkpoints", "show", "a", "--json"))
    assert {key: shown[key] for key in manifest} == manifest
    assert {"latest", "final"} <= set(shown["marks"])
    assert shown["evaluation"]["episodes"] == 1
    printed = stagecoach("checkpoints", "show", "a", NAMES[3]).out
    assert stagecoach("checkpoints", "show", "a").out == printed
    said = manifest["provenance"]
    words = [
        NAMES[2], upload_in(run / "checkpoints" / NAMES[3]).name, said["code_version"],
        f"{said['config_hash']} (this run's config)", " to ".join(said["log_range"]),
        "2 to 3", "96 env steps", "ledger, worker-0", "ledger, all workers", "96 committed = 96 consumed + 0 dropped",
        f"{said['evaluation']['checkpoint']} ", "over 1 episode",
        *(item["sha256"] for item in manifest["objects"].values()),
    ]  # fmt: skip
    assert [word for word in words if word not in printed] == []
    assert "none: it is the first" in stagecoach("checkpoints", "show", "a", NAMES[0]).out


def test_prune_promote_and_export(stagecoach: Stagecoach, run: Path, tmp_path: Path) -> None:
    assert stagecoach("checkpoints", "promote", "a", NAMES[1]).out == f"a: {NAMES[1]} is promoted\n"
    listed = data(stagecoach("checkpoints", "a", "--json"))
    marks = {entry["name"]: entry["marks"] for entry in listed}
    assert "promoted" in marks[NAMES[1]]
    going = [name for name in NAMES if not marks[name]]
    would = stagecoach("checkpoints", "prune", "a", "--keep-last", "1", "--dry-run").out
    assert data(stagecoach("checkpoints", "a", "--json")) == listed
    did = stagecoach("checkpoints", "prune", "a", "--keep-last", "1").out
    assert did == would.replace("would remove", "removed")
    assert [line.split()[1] for line in did.splitlines()[:-1]] == going
    assert did.splitlines()[-1].endswith(f"; {len(NAMES) - len(going)} left")
    assert f"removed {len(going)} checkpoint" in did
    assert data(stagecoach("checkpoints", "prune", "a", "--json")) == []
    exported = tmp_path / "out" / "a" / "checkpoints" / NAMES[1]
    assert stagecoach("checkpoints", "export", "a", "out").out.splitlines()[0] == "out/a/checkpoints/" + NAMES[1]
    assert (upload_in(exported) / POLICY).is_file()
    assert f"{NAMES[3]}\n" in stagecoach("checkpoints", "export", "a", "latest", "other").out
    for target in ("a", "a/promoted", str(exported), str(upload_in(exported)), str(tmp_path / "out" / "a")):
        assert stagecoach("evaluate", target).out.startswith(f"{NAMES[1]}: ")
    begun = stagecoach("train", "config.yaml", "--run-id", "b", "--inline", "--initialize-from", str(exported))
    assert begun.code == 0, begun
    assert f"begins with {NAMES[1]} of run a; taken: policy; begins anew: optimizers, counters" in begun.out
    assert f"none: it began with {NAMES[1]} of run a" in stagecoach("checkpoints", "show", "b", "0_Step-0.ckpt").out
    assert stagecoach("checkpoints", "promote", "a", "--clear").out == f"a: {NAMES[1]} is no longer promoted\n"
    assert stagecoach("checkpoints", "promote", "a", "--clear").out == "a: nothing was promoted\n"


def test_what_cannot_be_done_says_why(stagecoach: Stagecoach, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
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
    damage(run, NAMES[3])
    for command in (["promote", "a", "latest"], ["export", "a", "latest", "out"], ["prune", "a"]):
        done = stagecoach("checkpoints", *command)
        assert (done.code, done.err.count("\n")) == (1, 1) and "was altered" in done.err
    damaged = upload_in(run / "checkpoints" / NAMES[3]) / POLICY
    damaged.write_bytes(before[damaged])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_resume_behind_a_damaged_checkpoint_says_plainly_where_it_goes_on(stagecoach: Stagecoach, run: Path) -> None:
    damage(run, NAMES[3])
    done = stagecoach("resume", "a", "--inline", "--set=stop_at.updates=6")
    assert done.code == 0, done
    assert f"{NAMES[3]}/{POLICY} was altered: its SHA-256 is not the manifest's; going back to {NAMES[2]}" in done.out
    assert f"restored {NAMES[2]}, but the log behind it is trimmed: continues as version 4" in done.out
    entries = data(stagecoach("checkpoints", "a", "--json"))
    assert entries[-1]["updates"] == 6
    assert stagecoach("checkpoints", "verify", "a", "latest").code == 0


def test_a_resume_over_other_versions_says_so_and_a_strict_one_is_refused(stagecoach: Stagecoach, run: Path) -> None:
    for name in NAMES:
        path = upload_in(run / "checkpoints" / name) / "manifest.json"
        manifest = json.loads(path.read_text())
        code = manifest["provenance"]["code_version"]
        assert set(manifest["provenance"]["computed_with"]) >= {"torch", "numpy", "python"}
        manifest["provenance"]["code_version"] = "0.0.1"
        manifest["provenance"]["computed_with"]["torch"] = "1.0"
        path.write_text(json.dumps(manifest))
    words = f"was written by other versions (code 0.0.1 then, {code} now; torch 1.0 then, {torch.__version__} now): "
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name, sets in ((NAMES[3], []), (NAMES[1], ["--from", NAMES[1]])):
        done = stagecoach("resume", "a", "--inline", "--strict", "--set=stop_at.updates=4", *sets)
        check_refused(done, f"resume --strict: {name} {words}", "nothing was changed, install those versions")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    for updates, name, sets in ((4, NAMES[3], []), (5, NAMES[1], ["--from", NAMES[1]])):
        done = stagecoach("resume", "a", "--inline", f"--set=stop_at.updates={updates}", *sets)
        assert done.code == 0, done
        assert done.out.count("was written by other versions") == 1 and f"{name} {words}" in done.out
    done = stagecoach("resume", "a", "--inline", "--strict", "--set=stop_at.updates=6")
    assert done.code == 0 and "other versions" not in done.out, done
