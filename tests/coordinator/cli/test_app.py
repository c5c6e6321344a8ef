"""What is asked for and cannot be done: one line on stderr that names what was found, what was expected and what to do;
exit code 2; nothing started, nothing written, nothing overwritten.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from stagecoach.coordinator.cli.app import app
from stagecoach.coordinator.cli.checkpoints import app as checkpoints
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from tests.support.processes.command_line import Stagecoach, check_refused, contents

ENVIRONMENTS = "tests.support.environments.small"

# one of each way to be refused; tests/shared/config/test_loading.py has the configs, test_environment_trial.py the rest
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "misspelled environment": (["environment.id=CartPoel-v1"], ["CartPoel-v1", "CartPole", "module:factory"]),
    "factory after a dot": (["environment.id=my_envs.make"], ["did you mean my_envs:make?"]),
    "factory that fails": ([f"environment.id={ENVIRONMENTS}:broken_factory"], ["no such mesh: arm.stl"]),
    "metric writer with wrong arguments": (
        ["metrics.writers=[{path: csv, kwargs: {sep: x}}]"], ["metrics.writers=csv does not take", "sep"],
    ),
    "secret in the config": (["redis.url=redis://:hunter2@localhost"], ["STAGECOACH_REDIS_PASSWORD"]),
    "Redis that is not there": (["redis.url=redis://127.0.0.1:1"], ["127.0.0.1:1", "does not answer", "redis.url"]),
    "store folder that is not there": (["store.url=file:///nowhere/at/all"], ["/nowhere/at/all", "store.url"]),
}  # fmt: skip


def finished(tmp_path: Path) -> dict[str, Any]:
    """What is stored of the end of run `a`."""
    end: dict[str, Any] = json.loads((tmp_path / "runs" / "a" / "s3" / BUCKET / "a" / ".finished").read_text())
    return end


@pytest.mark.parametrize("case", REFUSED)
def test_train_refuses(stagecoach: Stagecoach, tmp_path: Path, case: str) -> None:
    settings, words = REFUSED[case]
    done = stagecoach("train", "config.yaml", "--run-id", "a", *(f"--set={setting}" for setting in settings))
    check_refused(done, *words)
    assert "hunter2" not in done.err and "starting" not in done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("run_id", ["a b", "../a", "", "-x y", "a" * 65])
def test_train_refuses_run_id_that_is_not_a_folder_name(stagecoach: Stagecoach, tmp_path: Path, run_id: str) -> None:
    check_refused(stagecoach("train", "config.yaml", f"--run-id={run_id}"), "run id", "expected 1 to 64")
    assert not (tmp_path / "runs").exists()


def test_train_refuses_existing_run(stagecoach: Stagecoach, tmp_path: Path) -> None:
    told = stagecoach("train", "config.yaml", "--run-id", "a", "--inline").ok()
    assert "starting the roles …" in told and "Ray" not in told
    before = contents(tmp_path)
    check_refused(stagecoach("train", "config.yaml", "--run-id", "a", "--inline"), "'a' exists", "stagecoach resume a")
    assert contents(tmp_path) == before
    check_refused(stagecoach("resume", "a", "--inline", "--set=seed=2"), "seed cannot change", "start a new run")
    check_refused(stagecoach("resume", "a", "--inline", "--set=rollout.wokers=2"), "rollout.workers")
    check_refused(stagecoach("resume", "a", "--inline", "--drop=7-0..5-0"), "--drop 7-0..5-0: expected a position")
    assert contents(tmp_path) == before
    check_refused(stagecoach("evaluate", "a/9_Step-9.ckpt"), "9_Step-9.ckpt", "there are: 0_Step-0.ckpt")
    for order in (["scale", "a", "3"], ["scale", "a", "auto"], ["stop", "a"]):
        check_refused(stagecoach(*order), "not live", "stagecoach resume a")
    assert "say how many" in stagecoach("scale", "a").err
    assert contents(tmp_path) == before
    check_refused(stagecoach("resume", "a", "--inline"), "2 updates", "stop_at.updates=2", "--set stop_at.updates=")
    assert finished(tmp_path)["reason"] == "exhausted"


CHECKPOINTS = ["list", "save", "verify", "show", "prune", "promote", "export"]


COMMANDS = ["status", "watch", "scale", "stop", "resume", "checkpoints", "evaluate"]


@pytest.mark.parametrize("command", [*COMMANDS, *(f"checkpoints {command}" for command in CHECKPOINTS)])
def test_commands_refuse_unknown_run(stagecoach: Stagecoach, tmp_path: Path, command: str) -> None:
    rest = {"scale": ["2"], "checkpoints promote": ["latest"], "checkpoints export": ["out"]}.get(command, [])
    check_refused(stagecoach(*command.split(), "nobody", *rest), "no run 'nobody'", "runs there: 0")
    assert not (tmp_path / "runs").exists() and not (tmp_path / "out").exists()


def test_init_writes_a_config_that_trains_and_overwrites_none(stagecoach: Stagecoach, tmp_path: Path) -> None:
    stagecoach("init", "mine.yaml").ok()
    written = (tmp_path / "mine.yaml").read_text()
    assert 20 <= written.count("\n") <= 30 and written.count("#") > 10
    train = "train", "mine.yaml", "--run-id", "a", "--inline", "--set=stop_at.updates=1", "--runs-dir", "elsewhere"
    assert "starting the roles" in stagecoach(*train).ok()
    assert "stop_at" in stagecoach("status", "a", "--runs-dir", "elsewhere").ok()
    check_refused(stagecoach("init", "mine.yaml"), "mine.yaml exists")
    assert (tmp_path / "mine.yaml").read_text() == written
    check_refused(stagecoach("init", "nowhere/mine.yaml"), f"cannot write {tmp_path}/nowhere/mine.yaml: No such file")
    check_refused(stagecoach("init", "other.yaml", "--algorithm", "SAC"), "found 'SAC'; did you mean sac?")
    assert not (tmp_path / "other.yaml").exists()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_init_writes_algorithm_with_its_defaults(algorithm: str, stagecoach: Stagecoach) -> None:
    stagecoach("init", "short.yaml", "--algorithm", algorithm).ok()
    stagecoach("init", "all.yaml", "--algorithm", algorithm, "--all").ok()
    resolved = stagecoach("config", "short.yaml").ok()
    assert resolved == stagecoach("config", "all.yaml").ok() and f"name: {algorithm}" in resolved
    written = Path("short.yaml").read_text()
    assert [name for name in ALGORITHMS[algorithm].model_fields if f"  {name}: " not in written] == []


def test_config_prints_what_is_resolved_and_the_schema(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGECOACH__ROLLOUT__WORKERS", "5")
    resolved = yaml.safe_load(stagecoach("config", "config.yaml", "--set", "seed=7").ok())
    assert (resolved["seed"], resolved["rollout"]["workers"], resolved["environment"]["num_envs"]) == (7, 5, 2)
    assert "rollout" in stagecoach("config").json()["properties"]


def test_failing_environment_fails_run_in_one_line(stagecoach: Stagecoach, tmp_path: Path) -> None:
    settings = [f"--set=environment.id={ENVIRONMENTS}:Counting", "--set=environment.kwargs={fails: step, fails_at: 1}"]
    done = stagecoach("train", "config.yaml", "--run-id", "a", "--inline", *settings)
    assert (done.code, done.err.count("\n")) == (2, 1), done
    text = "raised ValueError in step: the gripper is stuck"
    assert "run a failed: environment: " in done.err and text in done.err
    assert "starting it again" in done.out and "Traceback" not in done.out  # within its limits
    logs = "".join(path.read_text() for path in (tmp_path / "runs" / "a" / "logs").glob("*.log"))
    assert "Traceback" in logs and "in _fail" in logs
    end = finished(tmp_path)
    assert (end["failure"], end["ledger"]["total"]["dropped"]) == ("environment", {})
    assert end["reason"].startswith("failed: ") and text in end["reason"] and "\n" not in end["reason"]
    for shown in (stagecoach("runs"), stagecoach("status", "a")):
        assert "the gripper is stuck" in " ".join(shown.ok().replace("│", " ").split())
        assert "Traceback" not in shown.out and shown.err == ""


def test_every_command_helps_with_an_example(stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) >= {"train", "stop"} <= set(stagecoach("--help").out.split())
    assert {command.name or command.callback.__name__ for command in checkpoints.registered_commands} == {*CHECKPOINTS}  # type: ignore[union-attr]
    below = [f"checkpoints {one}" for one in CHECKPOINTS] + [f"gateway {one}" for one in commands["gateway"].commands]
    for command in [*commands, *below]:
        told = stagecoach(*command.split(), "--help").ok()
        shown = command.replace("checkpoints list", "checkpoints my-run")
        assert f"Example: stagecoach {shown}" in told.replace("`", ""), told


@pytest.mark.parametrize(
    ("module", "command"), [("stagecoach.coordinator.cli.app", ["runs"]), ("torch", ["train", "cartpole"])]
)
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
from stagecoach.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")
