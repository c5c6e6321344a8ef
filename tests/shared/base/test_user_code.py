"""The user's modules are found last; what is missing, hidden or broken is told, with the extra that brings it."""

from __future__ import annotations

import importlib.abc
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from stagecoach.coordinator.catalog.checkpoint_lookup import require_recorder
from stagecoach.coordinator.cli.curves.plot import require_matplotlib
from stagecoach.coordinator.lifecycle.ray_job import job_client
from stagecoach.coordinator.studies.suggestions import require_optuna
from stagecoach.rollout_worker.environments.factory import make_environment
from stagecoach.shared.base.code_version import SOURCE
from stagecoach.shared.base.errors import ConfigError, UserError
from stagecoach.shared.base.user_code import EXTRAS, extend_imports, import_object, install, with_extra
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from stagecoach.shared.config.sections import MetricsConfig
from stagecoach.shared.datasets.read import read_hdf5
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.trainer_node.export import require_onnx
from stagecoach.trainer_node.metrics.writers import check_writers

NOTHING = EnvironmentDescription({}, {})


def environment(name: str, **kwargs: str) -> Callable[[], object]:
    return lambda: make_environment(EnvironmentConfig(id=name, kwargs=kwargs))


ASKED: dict[str, tuple[str, Callable[[], object]]] = {
    "cluster": ("ray.job_submission", lambda: job_client("http://127.0.0.1:1")),
    "pettingzoo": ("pettingzoo", lambda: import_object("pettingzoo.sisl.pursuit_v5:parallel_env", "environment.id")),
    "games": ("lbforaging", lambda: import_object("lbforaging.foraging:ForagingEnv", "environment.id")),
    "box2d": ("Box2D", environment("LunarLander-v3")),
    "mujoco": ("mujoco", environment("HalfCheetah-v5")),
    "robotics": ("gymnasium_robotics", environment("gymnasium_robotics:FetchReach-v4")),
    "minatar": ("minatar", lambda: import_object("minatar.gym:BaseEnv", "environment.id")),
    "atari": ("ale_py", environment("ale_py:ALE/Breakout-v5")),
    "envpool": ("envpool", environment("envpool:CartPole-v1")),
    "data": ("h5py", lambda: read_hdf5(Path("data.hdf5"), NOTHING)),
    "onnx": ("onnx", require_onnx),
    "plot": ("matplotlib", require_matplotlib),
    "tune": ("optuna", require_optuna),
    "video": ("moviepy", require_recorder),
    "wandb": ("wandb", lambda: check_writers(MetricsConfig.model_validate({"writers": ["wandb"]}))),
    "mlflow": ("mlflow", lambda: check_writers(MetricsConfig.model_validate({"writers": ["mlflow"]}))),
    "trackio": ("trackio", lambda: check_writers(MetricsConfig.model_validate({"writers": ["trackio"]}))),
}
LOOKED_FOR = ("onnx", "wandb", "mlflow", "trackio")
"""Not imported."""


class Without(importlib.abc.MetaPathFinder):
    """As if this module were not installed."""

    def __init__(self, hidden: str) -> None:
        self._hidden = hidden

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == self._hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("extra", EXTRAS)
def test_missing_module_error_names_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, ask = ASKED[extra]
    loaded = (hidden, f"{hidden}.", f"gymnasium.envs.{extra}")
    for name in [name for name in sys.modules if name == hidden or name.startswith(loaded[1:])]:
        monkeypatch.delitem(sys.modules, name)
    if extra in LOOKED_FOR:
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.setattr(sys, "meta_path", [Without(hidden), *sys.meta_path])
    with pytest.raises(UserError) as refused:
        ask()
    assert install(extra) in str(refused.value)
    assert "gymnasium[" not in str(refused.value) and "\n" not in str(refused.value)


def test_extras_equal_those_of_the_package() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('No pygame, run `pip install "gymnasium[toy-text]"`', "No pygame; {video} brings it"),
        ("Namespace ALE not found. Install it?", "Namespace ALE not found. Install it?; {atari} brings it"),
        ("No module named 'own_game'", "No module named 'own_game'"),
        ("No module named 'mpe2'", "No module named 'mpe2'; pip install mpe2 brings it"),
        ("No module named 'pygame'; {video} brings it", "No module named 'pygame'; {video} brings it"),
    ],
)  # fmt: skip
def test_extra_hint_is_added_once(said: str, expected: str) -> None:
    extras = {extra: install(extra) for extra in EXTRAS}
    assert with_extra(said.format(**extras)) == expected.format(**extras)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_extend_imports_puts_user_folders_last_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sys.path.insert(0, "")
    extend_imports([str(tmp_path), "."])
    extend_imports([str(tmp_path)])
    assert sys.path[-1] == str(tmp_path)
    assert [entry for entry in sys.path if Path(entry or ".").resolve() == tmp_path] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise ValueError('low is\\nmore than high')", r"it raised ValueError: low is more than high \(at .*\.py:2\)"),
        ("import no_such_simulator", r"it raised ModuleNotFoundError: No module named 'no_such_simulator' \(at .*:2\)"),
        ("raise SystemExit('no license')", r"it raised SystemExit: no license \(at .*:2\)"),
        ("other = 1", "has no attribute 'make'; expected package.module:name"),
    ],
)
def test_import_error_names_user_file_and_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "rover.py").write_text(f"\n{text}")
    extend_imports([str(tmp_path)])
    sys.modules.pop("rover", None)
    with pytest.raises(ConfigError, match=words):
        import_object("rover:make", "environment.id")
    sys.modules.pop("rover", None)
