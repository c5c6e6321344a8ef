"""An algorithm and a policy from outside the repository: trained, resumed exactly, evaluated, refused when wrong."""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.base.code_version import SOURCE
from stagecoach.shared.base.errors import UserError
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy, load_policy
from tests.support.learning.own_algorithm import TEXT
from tests.support.processes.command_line import CONFIG, Ended, Stagecoach, check_refused
from tests.support.runs.checkpoints import upload_in

pytestmark = pytest.mark.timeout(240)
MODULE = "my_pkg.my_algo"
BANDIT = {"name": f"{MODULE}:Bandit", "step": 0.05}


@pytest.fixture
def code(stagecoach: Stagecoach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of a package of the user's own, in the folder of `stagecoach`."""
    package = tmp_path / "my_pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_algo.py").write_text(TEXT)
    for name in ("my_pkg", MODULE):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return package / "my_algo.py"


def write_config(folder: Path, algorithm: Any, **rollout: Any) -> Path:
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump(CONFIG | {"algorithm": algorithm, "rollout": CONFIG["rollout"] | rollout}))
    return path


def check_exact(train: Callable[..., Ended], stagecoach: Stagecoach, halfway: int, whole: int) -> None:
    """What was interrupted after `halfway` updates and resumed has learned what one run of all updates has."""
    for run_id, updates in (("whole", whole), ("half", halfway)):
        train("--run-id", run_id, "--inline", f"--set=stop_at.updates={updates}").ok()
    stagecoach("resume", "half", "--inline", f"--set=stop_at.updates={whole}").ok()
    assert final_policy("half") == final_policy("whole")


def final_policy(run_id: str) -> bytes:
    store = Path("runs") / run_id / "s3" / BUCKET / run_id
    final = json.loads((store / ".finished").read_text())["final"]
    return (upload_in(store / "checkpoints" / final) / "default" / "policy.safetensors").read_bytes()


@pytest.mark.exhaustive
def test_own_algorithm_trains_resumes_exactly_and_evaluates(stagecoach: Stagecoach, code: Path) -> None:
    write_config(code.parent.parent, BANDIT)
    check_exact(partial(stagecoach, "train", "own.yaml", "--set=checkpoint.every=2 updates"), stagecoach, 3, 6)
    assert Path("runs/whole/metrics/train.csv").read_text().count("train/seen") == 1
    assert stagecoach("evaluate", "whole", "--json").json()["episodes"] == 1
    stagecoach("status", "whole").ok()


@pytest.mark.exhaustive
def test_builtin_algorithm_with_hooks_resumes_exactly(stagecoach: Stagecoach, tmp_path: Path) -> None:
    for name in ("count_bonus.py", "count_bonus.yaml"):
        shutil.copy(SOURCE / "examples" / name, tmp_path)
    settings = (
        "heatup=256 env_steps", "stop_at.mean_return=null", "evaluation.episodes=1", "checkpoint.every=5 updates",
        "rollout.max_policy_lag=0",  # with lag, what is in flight at the end was acted by older versions
    )  # fmt: skip
    train = partial(stagecoach, "train", "count_bonus.yaml", *(f"--set={setting}" for setting in settings))
    check_exact(train, stagecoach, 5, 12)
    metrics = list(csv.DictReader(Path("runs/half/metrics/train.csv").read_text().splitlines()))
    bonuses = [float(row["train/bonus"]) for row in metrics if row["train/bonus"]]
    assert len(bonuses) > 1 and 0 < bonuses[-1] < bonuses[0] <= 1, "what is seen again is worth less"


@pytest.mark.exhaustive
def test_own_exploration_and_replay_buffer_resume_exactly(stagecoach: Stagecoach, tmp_path: Path) -> None:
    for name in ("own_exploration.py", "own_exploration.yaml"):
        shutil.copy(SOURCE / "examples" / name, tmp_path)
    settings = (
        "evaluation.episodes=1", "stop_at.mean_return=null", "heatup=256 env_steps",
        "rollout.max_policy_lag=0", "rollout.workers=1",  # fragments come in one order, of one version each
    )  # fmt: skip
    lighter = [f"--set={setting}" for setting in settings]
    check_exact(partial(stagecoach, "train", "own_exploration.yaml", *lighter), stagecoach, 4, 8)
    stagecoach(
        "train", "own_exploration.yaml", *lighter, "--run-id=plain", "--inline", "--set=stop_at.updates=8",
        "--set=algorithm.replay_buffer.kwargs.of=1",
    ).ok()  # fmt: skip
    assert final_policy("plain") != final_policy("whole"), "which transitions are drawn counts"


@pytest.mark.parametrize(
    ("part", "section", "said"),
    [
        ("exploration", {"kind": "theirs:Missing"}, "algorithm.exploration.kind=theirs:Missing cannot be imported"),
        ("exploration", {"kind": "theirs:Buffer"}, "expected a subclass of stagecoach.Exploration, found"),
        ("exploration", {"kind": "theirs:Acts"}, "theirs:Acts: expected a method `act`, as stagecoach.Exploration has"),
        (
            "exploration",
            {"kind": "theirs:Acts", "kwargs": {"a": 1}},
            "cannot be created with {'a': 1}: it raised TypeError: ",
        ),
        ("replay_buffer", {"kind": "theirs:Acts"}, "expected a subclass of stagecoach.ReplayBuffer, found"),
        ("replay_buffer", {"kind": "theirs:Buffer"}, "cannot be created with {}: it raised ValueError: too small"),
    ],
    ids=str,
)
def test_unusable_own_class_is_refused_before_start(
    stagecoach: Stagecoach, tmp_path: Path, part: str, section: Any, said: str
) -> None:
    (tmp_path / "theirs.py").write_text(
        "from stagecoach import Exploration, ReplayBuffer\nclass Acts(Exploration): pass\n"
        "class Buffer(ReplayBuffer):\n    def __init__(self, *sizes): raise ValueError('too small')\n"
    )
    write_config(tmp_path, {"name": "dqn", part: section})
    check_refused(stagecoach("train", "own.yaml", "--inline"), said)


def test_error_in_own_algorithm_names_file_and_line(stagecoach: Stagecoach, code: Path) -> None:
    """To drop log entries would not help: the next update meets the same bug. With the code corrected it continues."""
    lines = code.read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if "self._seen += len(reward)" in line)
    mended, lines[number - 1] = lines[number - 1], '        self._seen += {}["a table"]'
    code.write_text("\n".join(lines))
    write_config(code.parent.parent, BANDIT)
    failed = stagecoach("train", "own.yaml", "--run-id", "a", "--inline", "--set=stop_at.updates=2")
    assert failed.code == 1
    for said in (f"KeyError: 'a table'; at {code}:{number}; correct that code", "`stagecoach resume a` continues"):
        assert said in failed.err
    assert "--drop" not in failed.err
    code.write_text(code.read_text().replace(lines[number - 1], mended))
    for name in ("my_pkg", MODULE):
        sys.modules.pop(name, None)
    stagecoach("resume", "a", "--inline").ok()


BAD = """
import numpy as np
import torch
from stagecoach import Exploration, ReplayBuffer

class Acts(Exploration):
    def __init__(self, gives):
        self._gives = gives
    def act(self, policy, observations, generator):
        params = policy.exploring_parameters(observations, generator)
        chosen = torch.full((len(params),), 9) if self._gives == "nine" else policy.distribution.mode(params)["action"]
        return {} if self._gives == "none" else {"action": chosen[: None if self._gives == "nine" else 1]}, params

class Draws(ReplayBuffer):
    def __init__(self, *sizes, gives):
        super().__init__(*sizes)
        self._gives = gives
    def draw(self, count, generator, beta):
        rows, weights = super().draw(count, generator, beta)
        if self._gives == "raise":
            raise ValueError("boom")
        return (rows[:3], weights) if self._gives == "few" else (rows - 10**6, weights)
"""


@pytest.mark.parametrize(
    ("part", "gives", "said"),
    [
        ("exploration", "none", "act gave None as 'action'; expected a tensor [2]"),
        ("exploration", "one", "act gave shape [1] as 'action'; expected a tensor [2]"),
        ("exploration", "nine", "act gave [9, 9] in 'action'; expected 0 to less than (2,)"),
        ("replay_buffer", "raise", "draw raised ValueError: boom (at "),
        ("replay_buffer", "few", "draw gave rows [3] of int64 and weights [32]; expected 32 whole numbers"),
        ("replay_buffer", "far", "draw gave row -"),
    ],
)
def test_own_class_errors_name_the_field(
    stagecoach: Stagecoach, tmp_path: Path, part: str, gives: str, said: str
) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    kind = {"exploration": "bad:Acts", "replay_buffer": "bad:Draws"}[part]
    algorithm = {"name": "dqn", "minibatch_size": 32, part: {"kind": kind, "kwargs": {"gives": gives}}}
    path = write_config(tmp_path, algorithm)
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"heatup": "128 env_steps"}))
    done = stagecoach("train", "own.yaml", "--run-id", "odd", "--inline")
    assert done.code != 0
    assert f"algorithm.{part}.kind={kind}: {said}" in " ".join(done.err.split()), done.err


@pytest.mark.parametrize(
    ("algorithm", "more", "said"),
    [
        (f"{MODULE}:Nothing", {}, [f"algorithm.name={MODULE}:Nothing cannot be imported", "package.module:Class"]),
        ("nowhere.at_all:Algo", {}, ["nowhere", "importable from the config's folder"]),
        (f"{MODULE}:WithoutConfig", {}, ["has no `Config`", "AlgorithmConfig"]),
        ({"name": f"{MODULE}:Bandit", "stpe": 1}, {}, ["unknown key algorithm.stpe; did you mean algorithm.step?"]),
        ({"name": f"{MODULE}:Bandit", "step": "far"}, {}, ["algorithm.step: expected a number, found 'far'"]),
        (f"{MODULE}:Bandit", {"max_policy_lag": 1}, ["the bandit wants rollout.max_policy_lag=0"]),
    ],
)  # fmt: skip
def test_own_algorithm_refusals_are_one_line(
    code: Path, algorithm: Any, more: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = code.parent.parent
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UserError) as refused:
        check(load_config(write_config(folder, algorithm, **more), environ={}))
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in said), str(refused.value)


def forget_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported it."""
    monkeypatch.setattr("stagecoach.shared.policies.registry._registered", {})
    for name in ("my_pkg", MODULE):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_own_network_is_loaded_by_class_of_its_config(
    stagecoach: Stagecoach, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are verified, promoted and pruned without it; a config from elsewhere needs trust."""
    stagecoach("train", str(write_config(tmp_path, BANDIT)), "--run-id", "own", "--inline").ok()
    stagecoach("checkpoints", "export", "own", "copy").ok()
    forget_module(monkeypatch)
    for command in ("verify", "promote", "prune"):
        stagecoach("checkpoints", command, "own", *(["latest"] if command == "promote" else [])).ok()
    assert MODULE not in sys.modules
    loads: list[Callable[[], DeployedPolicy]] = [
        lambda: load_policy("runs/own"), Run.attach("own", Path("runs")).policy
    ]  # fmt: skip
    for load in loads:
        assert load().act(np.zeros(4, np.float32)) in (0, 1)
        forget_module(monkeypatch)
    with pytest.raises(UserError, match=rf"needs {MODULE}:Bandit imported and run; .*trust_config=True"):
        load_policy("copy/own")
    assert MODULE not in sys.modules
    told = stagecoach("checkpoints", "export", "own", "onnx", "--onnx")
    assert "no class for policies of kind" not in told.out + told.err and MODULE in sys.modules
    forget_module(monkeypatch)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("stagecoach.coordinator.catalog.run_folder.RunFolder.made_here", False)
        check_refused(stagecoach("checkpoints", "export", "own", "other"), f"{MODULE}:Bandit", "--trust-config")
    assert MODULE not in sys.modules
    monkeypatch.syspath_prepend(tmp_path)
    assert load_policy("copy/own", trust_config=True).version == load_policy("runs/own").version


def test_own_network_is_exported_as_onnx(
    stagecoach: Stagecoach, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a process that has not trained it; the file acts as `load_policy` does, to 1e-5."""
    runtime = pytest.importorskip("onnxruntime")
    for name in ("own_network.py", "own_network.yaml"):
        shutil.copy(SOURCE / "examples" / name, tmp_path)
    settings = ("rollout.workers=1", "evaluation.episodes=1", "stop_at={updates: 3}")
    stagecoach("train", "own_network.yaml", "--run-id=own", "--inline", *(f"--set={each}" for each in settings)).ok()
    stagecoach("checkpoints", "export", "own", "copy").ok()
    monkeypatch.setattr("stagecoach.shared.policies.registry._registered", {})
    with pytest.raises(UserError, match=r"needs own_network:ResidualActorCritic imported and run; .*trust_config=True"):
        load_policy("copy/own")
    assert "default.onnx" in stagecoach("checkpoints", "export", "own", "onnx", "--onnx").ok()
    observations = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    session = runtime.InferenceSession("onnx/default.onnx")
    actions, parameters = session.run(["action", "parameters"], {"obs": observations})
    policy = load_policy("runs/own")
    expected = policy.inspect_batch(observations).probabilities
    assert expected is not None
    chances = np.exp(parameters - parameters.max(axis=1, keepdims=True))
    np.testing.assert_allclose(chances / chances.sum(axis=1, keepdims=True), expected, atol=1e-5)
    assert np.array_equal(policy.act_batch(observations), actions)


def test_own_writer_has_each_row_once_after_resume(stagecoach: Stagecoach, tmp_path: Path) -> None:
    shutil.copy(SOURCE / "examples" / "own_writer.py", tmp_path)
    (tmp_path / "own.yaml").write_text(
        yaml.safe_dump(CONFIG | {"metrics": {"writers": ["csv", "own_writer:SqliteWriter"]}})
    )
    stagecoach("train", "own.yaml", "--run-id=own", "--inline", "--set=stop_at={updates: 2}").ok()
    stagecoach("resume", "own", "--inline", "--set=stop_at.updates=4").ok()
    rows = list(csv.DictReader(Path("runs/own/metrics/train.csv").read_text().splitlines()))
    database = sqlite3.connect("runs/own/metrics/metrics.sqlite")
    written = database.execute(
        "SELECT step, value FROM metrics WHERE stream = 'train' AND name = 'train/policy_loss' ORDER BY step"
    ).fetchall()
    database.close()
    assert len(written) == 4
    assert [value for _, value in written] == pytest.approx([float(row["train/policy_loss"]) for row in rows])
