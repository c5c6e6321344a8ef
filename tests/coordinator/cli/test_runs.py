"""`runs`, `delete`, `--force`, presets and `--version`: what is told and done without what trains."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from stagecoach.coordinator.catalog.run_files import RunStatus
from stagecoach.coordinator.cli import foreground
from stagecoach.coordinator.cli.app import app
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_list import list_runs, row_from_servers
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.base.code_version import SOURCE
from stagecoach.shared.base.errors import RunLive
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.keys import RunKeys
from tests.conftest import RedisServer, minimal_config
from tests.support.processes.command_line import Stagecoach, check_refused, contents
from tests.support.services.store_faults import StoreFaults, refusal

HEAVY = {"torch", "ray", "redis", "boto3", "numpy", "gymnasium"}


@pytest.fixture(scope="module")
def folder(ended_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the ended run, one without `.finished`, and one whose checkpoints are ranked by a rating."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "cut-off", "rated"):
        shutil.copytree(ended_run.config.runs_dir / "a", folder / "runs" / name)
        store = folder / "runs" / name / "s3" / "stagecoach"
        (store / "a").rename(store / name)
    (folder / "runs" / "cut-off" / "s3" / "stagecoach" / "cut-off" / ".finished").unlink()
    status = store / "rated" / "training_status.json"
    told = json.loads(status.read_text())
    for entry in told["checkpoints"]:
        entry["evaluation"]["confirmation"] = entry["evaluation"] | {"ranking": 24.5, "ranked_by": "rating of main"}
    status.write_text(json.dumps(told))
    return folder


def test_list_runs_from_files_equals_status(folder: Path) -> None:
    rows = {row.run_id: row for row in list_runs(folder / "runs")}
    assert (rows["a"].state, rows["cut-off"].state) == ("finished", "interrupted")
    assert rows["a"].best is not None and rows["a"].env_steps > 0
    assert (rows["rated"].best, rows["rated"].ranked_by) == (24.5, "rating of main")
    described = {
        "environment": rows["a"].environment, "algorithm": rows["a"].algorithm, "created": rows["a"].created
    }  # fmt: skip
    assert (rows["a"].environment, rows["a"].algorithm) == ("CartPole-v1", "ppo")
    assert abs((rows["a"].created or 0.0) - time.time()) < 3600
    assert asdict(rows["a"]) == asdict(row_from_servers(folder / "runs" / "a")) | described
    assert [row.best for row in rows.values()] == [row_from_servers(folder / "runs" / name).best for name in rows]


PROGRAM = f"""
import contextlib, io, json, os, sys
from stagecoach.__main__ import main
printed = []
for arguments, environ in json.load(sys.stdin):
    os.environ |= environ
    sys.argv = ["stagecoach", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    printed.append(sorted(filter(None, out.getvalue().splitlines())))
print(json.dumps([printed, sorted({HEAVY!r} & set(sys.modules))]))
"""
COMPLETED = {
    "sta": ["status"], "train --or": ["--or-resume"], "status ": ["a", "cut-off", "rated"], "evaluate cu": ["cut-off"],
    "stop --runs-dir others ": ["another"], "train lunar": ["lunarlander"],
    "train my-": ["my-config.yaml", "my-folder/"], "config ./my-folder/": ["./my-folder/deep.yml"],
    "doctor nothing-like-it": [],
}  # fmt: skip
"""What is typed after `stagecoach`, and what a shell offers."""


def test_light_commands_import_nothing_heavy(folder: Path) -> None:
    there = "my-config.yaml my-folder/deep.yml my-folder/notes.txt my-notes.txt others/another/config.yaml"
    for path in there.split():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    asked: list[tuple[list[str], dict[str, str]]] = [
        (command.split(), {}) for command in ("--help", "--version", "runs", "train --help")
    ]
    for typed in COMPLETED:
        words = {"COMP_WORDS": f"stagecoach {typed}", "COMP_CWORD": str(len(typed.split(" ")))}
        asked.append(([], {"_STAGECOACH_COMPLETE": "complete_bash"} | words))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(asked), cwd=folder, capture_output=True, text=True, check=True
    )
    printed, loaded = json.loads(done.stdout)
    assert all(printed[:4]) and loaded == []
    assert dict(zip(COMPLETED, printed[4:], strict=True)) == COMPLETED


def test_list_runs_explains_damaged_run_and_keeps_others(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "a" / "config.yaml").write_text("[1, 2")
    rows = {row.run_id: row for row in list_runs(tmp_path / "runs")}
    assert rows["a"].state == "unreadable" and rows["cut-off"].state == "interrupted"


@pytest.mark.parametrize("command", ["watch", "status", "resume", "evaluate", "checkpoints"])
def test_renamed_folder_of_a_run_is_reported(
    folder: Path, tmp_path: Path, stagecoach: Stagecoach, command: str
) -> None:
    runs = tmp_path / "others"
    shutil.copytree(folder / "runs" / "a", runs / "renamed")
    done = stagecoach(command, "renamed", "--runs-dir", str(runs))
    check_refused(done, f"{runs / 'renamed'} contains the run 'a', so it was copied or renamed", "--runs-dir")
    assert [(row.state, "contains the run 'a'" in row.reason) for row in list_runs(runs)] == [("unreadable", True)]


def test_delete_asks_and_takes_the_run_and_no_other(folder: Path, stagecoach: Stagecoach, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    check_refused(stagecoach("delete", "a"), "would delete run a", "--yes")
    assert (tmp_path / "runs" / "a").exists()
    assert "deleted run a" in stagecoach("delete", "a", "--yes").ok()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"cut-off", "rated"}
    check_refused(stagecoach("delete", "cutoff", "--yes"), "did you mean cut-off?")


def test_delete_takes_what_a_run_has_in_redis_and_in_the_store(
    servers: tuple[str, str], redis_server: RedisServer, stagecoach: Stagecoach, tmp_path: Path, unique_run_id: str
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    config = minimal_config(
        runs_dir=str(tmp_path / "runs"), redis={"url": servers[0]}, store={"url": f"file://{store}"}
    )
    names = [f"{unique_run_id}-a", f"{unique_run_id}-ab"]
    for name in names:
        Run.start(config, name, inline=True).wait(100)
    with redis_server.client() as client:

        def there() -> list[bool]:
            return [any(client.scan_iter(f"{RunKeys(name).prefix}*")) for name in names]

        assert there() == [True, True]
        stagecoach("delete", names[0], "--yes").ok()
        assert there() == [False, True]
    assert {path.partition("/")[0] for path in contents(store)} == {names[1]}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [names[1]]


def test_force_begins_a_run_anew(folder: Path, stagecoach: Stagecoach, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs", tmp_path / "runs")
    train = ("train", "config.yaml", "--inline", "--force")
    check_refused(stagecoach(*train), "--run-id")
    again = (*train, "--run-id", "a")
    check_refused(stagecoach(*again, "--or-resume"), "--force replaces a run and --or-resume continues it")
    data = ("algorithm.name=bc", "--set", "dataset.path=runs/a/s3/stagecoach/a")
    for sets in (("initialize_from=a",), ("policies.default.initialize_from=a/best",), data):
        check_refused(stagecoach(*again, "--set", *sets), "--force would delete run 'a'", sets[-1].partition("=")[0])
    check_refused(stagecoach(*again, "--set", "environment.id=no_such:thing"), "environment.id=no_such:thing")
    check_refused(stagecoach(*again, "--set", "initialize_from=nowhere"), "no run 'nowhere'")
    servers = ("--set", "redis.url=redis://127.0.0.1:9", "--set", "store.url=s3://bucket/runs")
    far = ("train", "config.yaml", "--force", "--run-id", "a", "--address", "http://127.0.0.1:9", *servers)
    check_refused(stagecoach(*far), "nothing answers at http://127.0.0.1:9")
    assert (tmp_path / "runs/a/s3").exists(), "it goes when all is known to be well"
    stagecoach(*again).ok()
    assert json.loads((tmp_path / "runs/a/s3/stagecoach/a/.finished").read_text())["version"] == 2


def test_presets_are_the_examples_by_name(stagecoach: Stagecoach) -> None:
    listed = {row["name"]: row for row in stagecoach("presets", "--json").json()}
    assert {"cartpole", "own_environment"} <= set(listed) and "bitflip" not in listed
    assert all(row["about"] for row in listed.values())
    assert "CartPole-v1" in stagecoach("config", "cartpole").out
    check_refused(stagecoach("train", "cartpool"), "no file cartpool", "did you mean cartpole?")
    check_refused(stagecoach("train", "nothing"), "no file nothing in /", "presets: a2c, ")


def test_version_is_the_projects(stagecoach: Stagecoach) -> None:
    content = tomllib.loads((SOURCE / "pyproject.toml").read_text())
    assert stagecoach("--version").out == f"stagecoach {content['project']['version']}\n"


def test_slower_of_two_attaches_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The race cannot be made to order: the other one has the run at the moment that it is taken up."""
    watched: list[object] = []

    def taken_up(*_: object, **__: object) -> NoReturn:
        raise RunLive("run 'my-run' is live already")

    status = SimpleNamespace(state=RunStatus.INTERRUPTED)
    handle = SimpleNamespace(
        live=False, folder=SimpleNamespace(remote=None), take_up=taken_up, status=lambda accounting: status
    )
    monkeypatch.setattr(Run, "attach", lambda *_, **__: handle)
    monkeypatch.setattr(foreground, "watch", watched.append)
    before = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(app, ["attach", "my-run"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (done.exit_code, watched) == (0, [handle]), done.output
    assert "Ctrl-C ends the run" in done.output


def test_delete_changes_nothing_when_the_store_refuses(
    stagecoach: Stagecoach, servers: tuple[str, str], config: Callable[..., Config], unique_run_id: str
) -> None:
    with closing(StoreFaults(servers[1])) as proxy:
        store = {"url": f"s3://{BUCKET}", "endpoint_url": proxy.url, "retries": 0}
        run = Run.start(config(redis={"url": servers[0]}, store=store), unique_run_id, inline=True)
        assert run.wait(120).reason == "exhausted"
        before = run.checkpoint_store().store.keys("")
        proxy.fail(refusal(403, "AccessDenied"), "DELETE")
        told = stagecoach("delete", unique_run_id, "--yes")
        check_refused(told, "s3:DeleteObject", "nothing was deleted")
        assert run.checkpoint_store().store.keys("") == before and run.folder.path.exists()
        assert stagecoach("status", unique_run_id).ok()
        proxy.heal()
        assert "deleted run" in stagecoach("delete", unique_run_id, "--yes").ok()
        assert not run.folder.path.exists()
