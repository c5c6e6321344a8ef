"""Environments from the config, and one-line errors if one cannot be created."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Any

import gymnasium as gym
import pytest

from stagecoach.rollout_worker.environments.factory import (
    evaluation_environment,
    is_factory,
    make_environment,
    make_native,
)
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable, UserError
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from tests.conftest import minimal_config
from tests.support.environments.small import MODULE, Counting


def environment(**fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"num_envs": 2} | fields)


NATIVE: dict[str, Any] = {"id": "CartPole-v1", "vectorization": "native"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id": "CartPoole-v1"}, "'CartPoole-v1'.*an environment of your own is given as module:factory"),
        ({"id": "nowhere_at_all:make"}, "No module named 'nowhere_at_all'; expected"),
        ({"id": f"{MODULE}:absent"}, "no attribute 'absent'"),
        ({"id": f"{MODULE}:"}, "environment.id=.*: expected package.module:factory"),
        ({"id": f"{MODULE}:broken_factory"}, "FileNotFoundError: no such mesh: arm.stl"),
        ({"id": f"{MODULE}:Counting", "kwargs": {"lenght": 3}}, "keyword argument 'lenght'"),
        ({"id": "CartPole-v1", "kwargs": {"gravity": 1}}, "unexpected keyword argument 'gravity'"),
        ({"id": f"{MODULE}:not_an_environment"}, "returned a int.*expects a gymnasium.Env"),
        ({"id": f"{MODULE}:Counting", "api": "pettingzoo"}, "Counting.*a PettingZoo environment"),
        ({"id": f"{MODULE}:Chase"}, "Chase.*api=gymnasium expects a gymnasium.Env"),
        (
            {"id": "CartPole-v1", "wrappers": [f"{MODULE}:broken_wrapper"]},
            "broken_wrapper cannot be created: TypeError: this wrapper wants images",
        ),
        ({"id": "CartPole-v1", "wrappers": ["gymnasium.wrappers:Nope"]}, "no attribute 'Nope'"),
        ({"id": "CartPole-v1", "wrappers": ["nope"]}, "wrappers=nope: expected package.module"),
        ({"id": "ALE/Nope-v5"}, "ALE"),
        ({"id": "MiniGrid-Empty-5x5-v0"}, "write environment.id: minigrid:MiniGrid-Empty-5x5-v0"),
        ({"id": "BabyAI-GoToObj-v0"}, "minigrid:BabyAI-GoToObj-v0.*pip install minigrid"),
        (NATIVE | {"id": "MountainCarContinuous-v0"}, "no vectorized version of its own; use .*sync or async"),
        (NATIVE | {"id": "CartPoole-v1"}, "CartPoole-v1"),
        (NATIVE | {"id": f"{MODULE}:Counting"}, "unexpected keyword argument 'num_envs'"),
        (NATIVE | {"parameters": {"low": -0.1}}, "begins episodes by itself .*NEXT_STEP.* only the first episodes"),
        (NATIVE | {"kwargs": {"gravity": 1}}, "unexpected keyword argument 'gravity'"),
    ],
)  # fmt: skip
def test_make_environment_names_error_in_one_line(fields: dict[str, Any], message: str) -> None:
    kind = ConfigError if "sync or async" in message else EnvironmentUnusable
    with pytest.raises(kind, match=message) as caught:
        (make_native if "vectorization" in fields else make_environment)(environment(**fields))
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


def test_make_environment_reports_error_of_user_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_broken_module.py").write_text("def make():\n    return 1 +\n")
    (tmp_path / "users_raising_module.py").write_text("raise RuntimeError('license expired')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, found in {"users_broken_module": "SyntaxError", "users_raising_module": "license expired"}.items():
        with pytest.raises(EnvironmentUnusable, match=found):
            make_environment(environment(id=f"{name}:make"))


def test_make_environment_accepts_id_factory_and_class() -> None:
    registered = make_environment(environment(id="CartPole-v1", max_episode_steps=7))
    assert registered.spec.max_episode_steps == 7
    made = make_environment(environment(id=f"{MODULE}:Counting", kwargs={"length": 9}))
    assert isinstance(made, Counting) and made.length == 9
    assert make_environment(environment(id=f"{MODULE}:Counting", kwargs={"length": 9}), length=5).length == 5
    limited = make_environment(environment(id=f"{MODULE}:Counting", max_episode_steps=2))
    assert isinstance(limited, gym.wrappers.TimeLimit)


def test_factory_paths_exclude_gymnasium_module_ids() -> None:
    assert is_factory("my_package.envs:make_arm") and is_factory("envs:Arm")
    assert not is_factory("my_package:Arm-v0") and not is_factory("CartPole-v1") and not is_factory("ALE/Pong-v5")


def test_missing_pettingzoo_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(EnvironmentUnusable, match=r"needs PettingZoo .*'stagecoach-rl\[games\]' brings it"):
        make_environment(environment(id="classic/tictactoe-v3", api="pettingzoo"))


def test_atari_id_without_module_names_full_id() -> None:
    """Runs in another process, since importing ale_py registers its ids."""
    pytest.importorskip("ale_py")
    code = (
        "from stagecoach.rollout_worker.environments.factory import make_environment\n"
        "from stagecoach.shared.config.environments.environment import EnvironmentConfig\n"
        "make_environment(EnvironmentConfig(id='ALE/Pong-v5'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "write environment.id: ale_py:ALE/Pong-v5" in said and "pip install" not in said


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "SameStep"])
def test_native_id_accepts_module_and_autoreset_mode(mode: str) -> None:
    pytest.importorskip("ale_py")
    config = environment(id="ale_py:ALE/Pong-v5", vectorization="native", kwargs={"autoreset_mode": mode})
    with closing(make_native(config)) as made:
        assert made.metadata["autoreset_mode"].value.lower() == mode.replace("_", "").lower()
    with closing(make_environment(config)) as single:
        assert single.action_space.n == 6
    played = evaluation_environment(minimal_config(environment=config.model_dump()))
    assert "autoreset_mode" not in played.kwargs
