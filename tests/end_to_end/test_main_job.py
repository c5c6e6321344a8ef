"""The main job, as the README's first command runs it: CartPole-v1 to 475 on embedded Redis, S3 and Ray with two
workers; and everything that is true of the run afterwards.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagecoach.shared.protocol.events import confirmed_return
from tests.support.processes.command_line import SOURCE, CommandLine, Ended, check_ledger

RUN = "main-job"
pytestmark = [pytest.mark.timeout(300), pytest.mark.essential]


@pytest.fixture(scope="module")
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    terminal = CommandLine(tmp_path_factory.mktemp("main"))
    yield terminal
    terminal.close()


@pytest.fixture(scope="module")
def trained(terminal: CommandLine) -> Ended:
    """The command, ended."""
    return terminal.run("train", SOURCE / "examples" / "cartpole.yaml", "--run-id", RUN, seconds=240)


@pytest.fixture(scope="module")
def folder(terminal: CommandLine, trained: Ended) -> Path:
    """The run's folder."""
    return terminal.folder / "runs" / RUN


@pytest.fixture(scope="module")
def objects(terminal: CommandLine, trained: Ended) -> Path:
    """The run's part of the bucket: a plain folder."""
    return terminal.store(RUN)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_cartpole_is_solved_as_view_and_summary_say(trained: Ended) -> None:
    assert (trained.code, trained.err) == (0, "")
    for word in ("checkpoint  0_Step-0.ckpt", "evaluation  ", "worker-0 joined", "worker-1 joined", "env steps"):
        assert word in trained.out
    assert f"{RUN}: solved" in trained.out
    for word in ("last evaluation", "best", "trained", "time", "best policy", "use it", "balances"):
        assert word in trained.out.rpartition("summary")[2]


def test_sync_files_describe_the_run_and_ledger_balances(objects: Path) -> None:
    ready, finished, pointer = (read(objects / name) for name in (".ready", ".finished", ".checkpoint"))
    assert ready["checkpoint"] == "0_Step-0.ckpt"
    assert (finished["reason"], finished["run_id"]) == ("solved", RUN)
    assert pointer["latest"] == pointer["final"] == finished["final"]
    train = finished["counters"]["train"]
    assert finished["final"] == f"{finished['version']}_Step-{train['env_steps']}.ckpt"
    assert train["updates"] == finished["version"]
    assert train["episodes"] > 0
    check_ledger(finished)
    assert set(finished["ledger"]) == {"worker-0", "worker-1", "total"}


def test_checkpoint_reached_475(objects: Path) -> None:
    status, pointer = read(objects / "training_status.json"), read(objects / ".checkpoint")
    judged = {entry["name"]: entry["evaluation"] for entry in status["checkpoints"] if entry["evaluation"]}
    confirmed = {name: confirmed_return(evaluation) for name, evaluation in judged.items()}
    assert confirmed[pointer["best"]] == max(value or 0.0 for value in confirmed.values()) >= 475
    assert {status[mark] for mark in ("latest", "best", "final")} <= set(judged)
    assert {evaluation["episodes"] for evaluation in judged.values()} == {20}


def test_secrets_stand_in_one_file_only_the_owner_reads(folder: Path, trained: Ended) -> None:
    holder = folder / "credentials.json"
    assert holder.stat().st_mode & 0o777 == 0o600
    secrets = [secret.encode() for secret in read(holder).values()]
    assert len(secrets) == 3
    files = [path for path in folder.rglob("*") if path.is_file() and path != holder]
    assert len(files) > 20
    told = [str(path) for path in files if any(secret in path.read_bytes() for secret in secrets)]
    assert told == []
    assert not any(secret.decode() in trained.out + trained.err for secret in secrets)


def test_config_metrics_and_logs_are_stored_with_the_run(folder: Path, objects: Path) -> None:
    stored = yaml.safe_load((objects / "config.yaml").read_text())
    assert stored == yaml.safe_load((folder / "config.yaml").read_text())
    assert stored["environment"]["id"] == "CartPole-v1"
    assert stored["rollout"]["max_policy_lag"] == 0  # a default, written out
    with (folder / "metrics" / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {
        "rollout/ep_rew_mean", "rollout/ep_len_mean", "time/fps", "time/env_steps", "train/policy_loss",
        "train/value_loss", "train/approx_kl", "train/learning_rate", "policy/version", "policy/lag_mean",
    }  # fmt: skip
    assert names <= set(rows[0])
    counters = read(objects / ".finished")["counters"]["train"]
    assert len(rows) == counters["updates"]
    assert float(rows[-1]["time/env_steps"]) == counters["env_steps"]
    events = b"".join(path.read_bytes() for path in (folder / "metrics" / "tensorboard").glob("events*"))
    for name in (b"rollout/ep_rew_mean", b"train/policy_loss", b"time/fps"):
        assert name in events
    logs = {path.name for path in (folder / "logs").iterdir()}
    roles = {"coordinator.log", "trainer.log", "evaluator.log", "worker-0.log", "worker-1.log"}
    assert roles | {"redis.log", "s3.log", "ray.log", "ray"} <= logs


def test_nothing_runs_any_more_and_no_temporary_folder_is_left(terminal: CommandLine, folder: Path) -> None:
    terminal.check_nothing_left()
    assert list(terminal.temporary.glob("sc-*")) == []
    assert not (folder / "services.json").exists()


DEPLOYMENT = """
import sys
absent = ["ray", "redis", "boto3", "botocore", "gymnasium"]
absent += [f"stagecoach.{name}" for name in ("coordinator", "rollout_worker", "trainer_node")]
for name in absent:
    sys.modules[name] = None
from stagecoach.shared.deployment.deployed_policy import load_policy
policy = load_policy(sys.argv[1])
for name in absent:
    del sys.modules[name]
import gymnasium
returns = []
for seed in range(10):
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))
        total, over = total + float(reward), terminated or truncated
    returns.append(total)
print(sum(returns) / len(returns))
"""


def test_policy_deploys_without_the_rest(terminal: CommandLine, objects: Path) -> None:
    best = objects / "checkpoints" / read(objects / ".checkpoint")["best"]
    done = subprocess.run(
        [sys.executable, "-c", DEPLOYMENT, str(best)], capture_output=True, text=True, cwd=terminal.folder,
        env={**os.environ, "PYTHONWARNINGS": "ignore"}, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) >= 400
