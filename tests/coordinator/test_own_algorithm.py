"""An algorithm and a policy from outside the repository: trained, resumed exactly, evaluated, refused when wrong."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.lifecycle.validation import check
from shared.config.loading import load_config
from shared.errors import UserError
from tests.support.checkpoints import upload_in
from tests.support.command_line import CommandLine
from tests.support.own_algorithm import TEXT

pytestmark = pytest.mark.timeout(240)
MODULE = "my_pkg.my_algo"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal(terminal: CommandLine) -> CommandLine:
    """Stands in a folder with a package of the user's own."""
    package = terminal.folder / "my_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "my_algo.py").write_text(TEXT)
    return terminal


def config_with(terminal: CommandLine, algorithm: Any, updates: int = 6, **more: Any) -> Path:
    data = {
        "environment": {"id": "CartPole-v1", "num_envs": 2},
        "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 2} | more,
        "algorithm": algorithm, "checkpoint": {"every": "2 updates"}, "evaluation": {"episodes": 2},
        "stop_at": {"updates": updates},
    }  # fmt: skip
    path = terminal.folder / "own.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def final_policy(terminal: CommandLine, run_id: str) -> bytes:
    final: str = terminal.marker(run_id, ".finished")["final"]
    folder = upload_in(Path(terminal.store(run_id)) / "checkpoints" / final)
    return (folder / "default" / "policy.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_it_trains_resumes_exactly_and_is_evaluated(terminal: CommandLine) -> None:
    whole = config_with(terminal, {"name": f"{MODULE}:Bandit", "step": 0.05})
    assert terminal.run("train", whole, "--run-id", "whole", "--inline").code == 0
    half = config_with(terminal, {"name": f"{MODULE}:Bandit", "step": 0.05}, updates=3)
    assert terminal.run("train", half, "--run-id", "half", "--inline").code == 0
    done = terminal.run("resume", "half", "--inline", "--set", "stop_at.updates=6")
    assert done.code == 0, done
    assert final_policy(terminal, "half") == final_policy(terminal, "whole")
    assert (terminal.folder / "runs/whole/metrics/train.csv").read_text().count("train/seen") == 1

    scored = terminal.run("evaluate", "whole", "--json")
    assert scored.code == 0 and json.loads(scored.out)["episodes"] == 2, scored
    assert terminal.run("status", "whole").code == 0


@pytest.mark.exhaustive
def test_the_hooks_of_a_built_in_algorithm_are_exact_too(terminal: CommandLine) -> None:
    for name in ("count_bonus.py", "count_bonus.yaml"):
        shutil.copy(ROOT / "examples" / name, terminal.folder)
    config = terminal.folder / "count_bonus.yaml"
    short = ["--set", "heatup=256 env_steps", "--set", "stop_at.mean_return=null", "--set", "evaluation.episodes=1"]
    short += ["--set", "rollout.max_policy_lag=0"]  # with lag, what is in flight at the end was acted by older versions
    for run_id, updates in (("whole", 12), ("half", 5)):
        done = terminal.run(
            "train", config, "--run-id", run_id, "--inline", *short,
            "--set", f"stop_at.updates={updates}", "--set", "checkpoint.every=5 updates",
        )  # fmt: skip
        assert done.code == 0, done
    assert terminal.run("resume", "half", "--inline", "--set", "stop_at.updates=12").code == 0
    assert final_policy(terminal, "half") == final_policy(terminal, "whole")
    figures = list(csv.DictReader((terminal.folder / "runs/half/metrics/train.csv").read_text().splitlines()))
    bonuses = [float(row["train/bonus"]) for row in figures if row["train/bonus"]]
    assert len(bonuses) > 1 and 0 < bonuses[-1] < bonuses[0] <= 1, "what is seen again is worth less"


def test_what_its_update_raises_is_told_with_its_line(terminal: CommandLine) -> None:
    (terminal.folder / "my_pkg" / "my_algo.py").write_text(TEXT.replace("self._seen += ", "self._sene += "))
    config = config_with(terminal, {"name": f"{MODULE}:Bandit", "step": 0.05})
    done = terminal.run("train", config, "--run-id", "odd", "--inline")
    assert done.code == 1
    assert re.search(
        r"Error: run odd failed: AttributeError: .*sene.*; at .*my_algo\.py:\d+; `stagecoach resume odd", done.err
    )


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        (f"{MODULE}:Nothing", {}, [f"algorithm.name={MODULE}:Nothing cannot be imported", "package.module:Class"]),
        ("nowhere.at_all:Algo", {}, ["nowhere", "importable from the config's folder"]),
        (f"{MODULE}:WithoutConfig", {}, ["has no `Config`", "AlgorithmConfig"]),
        ({"name": f"{MODULE}:Bandit", "stpe": 1}, {}, ["unknown key algorithm.stpe; did you mean algorithm.step?"]),
        ({"name": f"{MODULE}:Bandit", "step": "far"}, {}, ["algorithm.step: expected a number, found 'far'"]),
        (f"{MODULE}:Bandit", {"max_policy_lag": 1}, ["the bandit wants rollout.max_policy_lag=0"]),
        ("pop", {}, ["one of a2c,", "td3, package.module:Class", "found 'pop'; did you mean ppo?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(
    terminal: CommandLine, algorithm: Any, more: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(terminal.folder)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    with pytest.raises(UserError) as refused:
        check(load_config(config_with(terminal, algorithm, **more), environ={}))
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in said), str(refused.value)
