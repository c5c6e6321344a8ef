"""What is missing is named with the extra of ours that brings it, whoever finds out."""

from __future__ import annotations

import importlib.abc
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.evaluate import _require_recorder
from coordinator.job import _client
from rollout_worker.making import make
from shared.config import EnvironmentConfig
from shared.datasets import from_hdf5
from shared.errors import UserError
from shared.extras import EXTRAS, install, with_extra
from shared.spaces import PolicySpaces, SpaceSpec
from shared.user_code import SOURCE, import_object
from trainer_node.onnx_export import require_onnx

NOTHING = PolicySpaces(SpaceSpec((), {}), SpaceSpec((), {}))


def environment(name: str, **kwargs: str) -> Callable[[], object]:
    return lambda: make(EnvironmentConfig(id=name, kwargs=kwargs))


ASKED: dict[str, tuple[str, Callable[[], object]]] = {
    "cluster": ("ray.job_submission", lambda: _client("http://127.0.0.1:1")),
    "pettingzoo": ("pettingzoo", lambda: import_object("pettingzoo.sisl.pursuit_v5:parallel_env", "environment.id")),
    "box2d": ("Box2D", environment("LunarLander-v3")),
    "mujoco": ("mujoco", environment("HalfCheetah-v5")),
    "robotics": ("gymnasium_robotics", environment("gymnasium_robotics:FetchReach-v4")),
    "minatar": ("minatar", lambda: import_object("minatar.gym:BaseEnv", "environment.id")),
    "atari": ("ale_py", environment("ale_py:ALE/Breakout-v5")),
    "envpool": ("envpool", environment("envpool:CartPole-v1")),
    "data": ("h5py", lambda: from_hdf5.read(Path("data.hdf5"), NOTHING)),
    "onnx": ("onnx", require_onnx),
    "video": ("moviepy", _require_recorder),
}


class Without(importlib.abc.MetaPathFinder):
    """As if this module were not installed."""

    def __init__(self, hidden: str) -> None:
        self._hidden = hidden

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == self._hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("extra", EXTRAS)
def test_what_is_missing_is_told_with_its_extra(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, ask = ASKED[extra]
    loaded = (hidden, f"{hidden}.", f"gymnasium.envs.{extra}")
    for name in [name for name in sys.modules if name == hidden or name.startswith(loaded[1:])]:
        monkeypatch.delitem(sys.modules, name)
    if extra == "onnx":  # it is only looked for
        monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.setattr(sys, "meta_path", [Without(hidden), *sys.meta_path])
    with pytest.raises(UserError) as refused:
        ask()
    assert install(extra) in str(refused.value)
    assert "gymnasium[" not in str(refused.value) and "\n" not in str(refused.value)


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            'pygame is not installed, run `pip install "gymnasium[toy-text]"`',
            "pygame is not installed; {video} brings it",
        ),
        (
            "Namespace ALE not found. Have you installed the proper package for ALE?",
            "Namespace ALE not found. Have you installed the proper package for ALE?; {atari} brings it",
        ),
        ("No module named 'own_game'", "No module named 'own_game'"),
        ("No module named 'pygame'; {video} brings it", "No module named 'pygame'; {video} brings it"),
    ],
)
def test_others_errors_get_the_extra_once(said: str, expected: str) -> None:
    extras = {extra: install(extra) for extra in EXTRAS}
    assert with_extra(said.format(**extras)) == expected.format(**extras)
