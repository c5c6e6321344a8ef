"""What is asked for and cannot be done: one line on stderr that names what was found, what was expected and what to do;
exit code 2; nothing started, nothing written, nothing overwritten.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
import yaml

from coordinator.cli import app
from coordinator.services import BUCKET
from tests.conftest import RedisServer
from tests.coordinator.terminal import Stagecoach, check_refused
from tests.end_to_end.command_line import CommandLine, Ended

ENVIRONMENTS = "tests.environments_for_tests"

REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "misspelt environment": (["environment.id=CartPoel-v1"], ["CartPoel-v1", "CartPole", "module:factory"]),
    "environment of no package": (["environment.id=nowhere.at_all:make"], ["nowhere.at_all:make", "No module named"]),
    "module without that factory": ([f"environment.id={ENVIRONMENTS}:Nothing"], ["Nothing"]),
    "factory that fails": ([f"environment.id={ENVIRONMENTS}:broken_factory"], ["no such mesh: arm.stl"]),
    "factory of something else": ([f"environment.id={ENVIRONMENTS}:not_an_environment"], ["int"]),
    "unsupported space": ([f"environment.id={ENVIRONMENTS}:Graphs"], ["Text", "expected Box"]),
    "misspelt key": (["rollout.wokers=3"], ["rollout.wokers", "rollout.workers"]),
    "misspelt section": (["rolout.workers=3"], ["rolout", "rollout"]),
    "out of bounds": (["rollout.workers=0"], ["rollout.workers", "0"]),
    "no number": (["rollout.workers=many"], ["rollout.workers", "'many'"]),
    "no assignment": (["rollout.workers"], ["section.field=value", "'rollout.workers'"]),
    "combination": (["algorithm.minibatch_size=999"], ["algorithm.minibatch_size=999", "rollout.fragment_steps=8"]),
    "would never end": (["stop_at.updates=null"], ["stop_at"]),
    "log too small": (
        ["rollout.max_log_bytes=1048576", "environment.num_envs=4000"], ["rollout.max_log_bytes=1048576", "Raise it"],
    ),
    "wrapper of nothing": (["environment.wrappers=[nowhere:Wrapper]"], ["nowhere"]),
    "secret in the config": (["redis.url=redis://:hunter2@localhost"], ["STAGECOACH_REDIS_PASSWORD"]),
    "Redis that is not there": (["redis.url=redis://127.0.0.1:1"], ["127.0.0.1:1", "does not answer", "redis.url"]),
    "store folder that is not there": (["store.url=file:///nowhere/at/all"], ["/nowhere/at/all", "store.url"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(stagecoach: Stagecoach, tmp_path: Path, case: str) -> None:
    settings, words = REFUSED[case]
    done = stagecoach("train", "config.yaml", "--run-id", "a", *(f"--set={setting}" for setting in settings))
    check_refused(done, *words)
    assert "hunter2" not in done.err and "starting" not in done.out
    assert not (tmp_path / "runs").exists()


def test_a_redis_that_refuses_the_password(
    stagecoach: Stagecoach, redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "config.yaml", "--run-id", "a", "--set", f"redis.url={redis_server.url}"]
    for password in ("hunter2", None):
        if password:
            monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", password)
        else:
            monkeypatch.delenv("STAGECOACH_REDIS_PASSWORD")
        done = stagecoach(*arguments)
        check_refused(done, "refuses the credentials", "STAGECOACH_REDIS_PASSWORD")
        assert "hunter2" not in done.err
    assert not (tmp_path / "runs").exists()


def test_a_store_that_is_not_there_or_refuses_or_has_no_such_bucket(
    stagecoach: Stagecoach, s3_servers: dict[str, tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)

    def train(bucket: str, at: str, secret_key: str) -> Ended:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret_key)
        settings = [f"--set=store.url=s3://{bucket}", f"--set=store.endpoint_url={at}", "--set=store.retries=0"]
        return stagecoach("train", "config.yaml", "--run-id", "a", *settings)

    refused = train(BUCKET, endpoint, "hunter2")
    check_refused(refused, BUCKET, "refuses", "AWS_ACCESS_KEY_ID")
    assert "hunter2" not in refused.err
    check_refused(train("no-such-bucket", endpoint, secret), "no-such-bucket", "create it")
    check_refused(train(BUCKET, "http://127.0.0.1:1", secret), "http://127.0.0.1:1", "does not answer")
    assert not (tmp_path / "runs").exists()


def test_a_config_file_that_is_not_there_or_is_no_config(stagecoach: Stagecoach, tmp_path: Path) -> None:
    check_refused(stagecoach("train", "nowhere.yaml"), "nowhere.yaml", "stagecoach init")
    (tmp_path / "broken.yaml").write_text("environment: {id: CartPole-v1\n")
    check_refused(stagecoach("train", "broken.yaml"), "broken.yaml", "not valid YAML", "line 2")
    (tmp_path / "list.yaml").write_text("- environment\n")
    check_refused(stagecoach("train", "list.yaml"), "list.yaml", "mapping", "list")
    (tmp_path / "empty.yaml").write_text("{}\n")
    check_refused(stagecoach("train", "empty.yaml"), "environment is missing")
    check_refused(stagecoach("train", str(tmp_path)), str(tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("run_id", ["a b", "../a", "", "-x y", "a" * 65])
def test_a_run_id_that_could_be_no_folder(stagecoach: Stagecoach, tmp_path: Path, run_id: str) -> None:
    check_refused(stagecoach("train", "config.yaml", f"--run-id={run_id}"), "run id", "expected 1 to 64")
    assert not (tmp_path / "runs").exists()


def test_a_run_that_exists_is_not_overwritten(stagecoach: Stagecoach, tmp_path: Path) -> None:
    done = stagecoach("train", "config.yaml", "--run-id", "a", "--inline")
    assert done.code == 0 and "starting the roles …" in done.out and "Ray" not in done.out
    before = contents(tmp_path)
    check_refused(stagecoach("train", "config.yaml", "--run-id", "a", "--inline"), "'a' exists", "stagecoach resume a")
    assert contents(tmp_path) == before
    check_refused(stagecoach("resume", "a", "--inline", "--set=seed=2"), "seed cannot change", "start a new run")
    check_refused(stagecoach("resume", "a", "--inline", "--set=rollout.wokers=2"), "rollout.workers")
    check_refused(stagecoach("resume", "a", "--inline", "--drop=7-0..5-0"), "--drop 7-0..5-0: expected a position")
    assert contents(tmp_path) == before
    check_refused(stagecoach("evaluate", "a/9_Step-9.ckpt"), "9_Step-9.ckpt", "there are: 0_Step-0.ckpt")
    check_refused(stagecoach("scale", "a", "3"), "not live", "stagecoach resume a")
    check_refused(stagecoach("stop", "a"), "not live", "stagecoach resume a")
    assert contents(tmp_path) == before


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_resume_that_would_end_at_once(stagecoach: Stagecoach, tmp_path: Path) -> None:
    assert stagecoach("train", "config.yaml", "--run-id", "a", "--inline").code == 0
    check_refused(stagecoach("resume", "a", "--inline"), "2 updates", "stop_at.updates=2", "--set stop_at.updates=")
    finished = json.loads((tmp_path / "runs" / "a" / "s3" / BUCKET / "a" / ".finished").read_text())
    assert finished["reason"] == "exhausted"


@pytest.mark.parametrize("command", ["status", "watch", "scale", "stop", "resume", "checkpoints", "evaluate"])
def test_a_run_that_is_not_there(stagecoach: Stagecoach, tmp_path: Path, command: str) -> None:
    rest = ["2"] if command == "scale" else []
    check_refused(stagecoach(command, "nobody", *rest), "no run 'nobody'", "runs there: 0")
    assert not (tmp_path / "runs").exists()


def test_a_scale_to_nothing(stagecoach: Stagecoach) -> None:
    assert stagecoach("train", "config.yaml", "--run-id", "a", "--inline").code == 0
    check_refused(stagecoach("scale", "a", "0"), "at least 1", "stagecoach stop a")
    check_refused(stagecoach("scale", "a", "auto", "--min", "0"), "--min 0: expected at least 1")
    check_refused(stagecoach("scale", "a", "3", "--max", "4"), "a number or bounds, not both")
    check_refused(stagecoach("scale", "a", "auto"), "not live", "stagecoach resume a")
    assert "say how many" in stagecoach("scale", "a").err


def test_init_writes_a_config_that_trains_and_overwrites_none(stagecoach: Stagecoach, tmp_path: Path) -> None:
    assert stagecoach("init", "mine.yaml").code == 0
    written = (tmp_path / "mine.yaml").read_text()
    assert stagecoach("config", "mine.yaml").code == 0
    assert written.count("#") > 50
    check_refused(stagecoach("init", "mine.yaml"), "mine.yaml exists")
    assert (tmp_path / "mine.yaml").read_text() == written
    check_refused(stagecoach("init", "nowhere/mine.yaml"), "cannot write nowhere/mine.yaml")


def test_config_prints_what_is_resolved_and_the_schema(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH__ROLLOUT__WORKERS", "5")
    monkeypatch.setenv("STAGECOACH__SEED", "5")
    resolved = yaml.safe_load(stagecoach("config", "config.yaml", "--set", "seed=7").out)
    assert (resolved["seed"], resolved["rollout"]["workers"], resolved["environment"]["num_envs"]) == (7, 5, 2)
    assert "rollout" in json.loads(stagecoach("config").out)["properties"]


def test_an_environment_that_raises_fails_the_run_in_one_line(stagecoach: Stagecoach, tmp_path: Path) -> None:
    settings = [f"--set=environment.id={ENVIRONMENTS}:Counting", "--set=environment.kwargs={fails: step, fails_at: 1}"]
    done = stagecoach("train", "config.yaml", "--run-id", "a", "--inline", *settings)
    check_failed(done, tmp_path, "raised ValueError in step: the gripper is stuck")
    for shown in (stagecoach("runs"), stagecoach("status", "a")):
        assert (shown.code, shown.err) == (0, "")
        assert "the gripper is stuck" in " ".join(shown.out.replace("│", " ").split())
        assert "Traceback" not in shown.out


def test_nan_that_comes_only_later_ends_the_run_as_the_environments_fault_and_is_in_no_log(
    stagecoach: Stagecoach, tmp_path: Path
) -> None:
    settings = [f"--set=environment.id={ENVIRONMENTS}:Spoils", "--set=environment.kwargs.what=observation"]
    done = stagecoach("train", "config.yaml", "--run-id", "a", "--inline", *settings)
    assert (done.code, done.err.count("\n")) == (2, 1), done
    assert "run a failed: environment: " in done.err and "it holds NaN" in done.err
    finished = json.loads((tmp_path / "runs" / "a" / "s3" / BUCKET / "a" / ".finished").read_text())
    assert finished["failure"] == "environment" and finished["ledger"]["total"]["dropped"] == {}


def check_failed(done: Ended, folder: Path, text: str) -> None:
    assert (done.code, done.err.count("\n")) == (2, 1), done
    assert "run a failed: environment: " in done.err
    assert text in done.err
    assert "starting it again" in done.out  # within its limits
    logs = "".join(path.read_text() for path in (folder / "runs" / "a" / "logs").glob("*.log"))
    assert "Traceback" in logs
    assert "in _fail" in logs
    finished = json.loads((folder / "runs" / "a" / "s3" / BUCKET / "a" / ".finished").read_text())
    assert finished["reason"].startswith("failed: ")
    assert text in finished["reason"]
    assert "\n" not in finished["reason"]
    assert "Traceback" not in done.out


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_an_environment_that_raises_at_once_is_restarted_within_limits_by_ray_too(tmp_path: Path) -> None:
    terminal = CommandLine(tmp_path)
    config = terminal.write_config(
        environment={
            "id": f"{ENVIRONMENTS}:Counting", "kwargs": {"fails": "reset"}, "num_envs": 4, "failures_allowed": 1,
        },
        rollout={"workers": 2, "fragment_steps": 32, "fragments_per_update": 2, "restarts_allowed": 1},
    )  # fmt: skip
    try:
        done = terminal.run("train", config, "--run-id", "a")
        check_failed(done, tmp_path, "raised ValueError in reset: the gripper is stuck")
        assert "no rollout worker is left" in done.err
        for worker in ("worker-0", "worker-1"):
            assert f"{worker} is given up: it failed 2 times in a row" in done.out
        terminal.check_nothing_left()
    finally:
        terminal.close()


def test_every_command_helps_with_an_example(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    commands = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert set(commands) >= {
        "train", "status", "watch", "runs", "scale", "stop", "resume", "checkpoints", "evaluate", "init", "config",
        "doctor",
    }  # fmt: skip
    assert {"train", "stop"} <= set(stagecoach("--help").out.split())
    for command in commands:
        done = stagecoach(command, "--help")
        assert done.code == 0
        assert f"Example: stagecoach {command}" in done.out.replace("`", ""), done.out


@pytest.mark.parametrize(("module", "command"), [("coordinator.cli", ["runs"]), ("torch", ["train", "cartpole"])])
def test_ctrl_c_while_it_imports_is_told_in_one_word(module: str, command: list[str], tmp_path: Path) -> None:
    """The signal comes just as `module` is looked for."""
    code = f"""
import importlib.abc, os, signal, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["stagecoach", *{command}]
from coordinator.start import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


@pytest.mark.parametrize("arguments", [["frobnicate"], ["train"], ["scale", "a", "many"], ["status", "a", "--nosuch"]])
def test_a_command_line_that_is_none(stagecoach: Stagecoach, arguments: list[str]) -> None:
    done = stagecoach(*arguments)
    assert done.code == 2
    assert "Usage: " in done.err and "--help" in done.err
    assert not os.path.exists("runs")
