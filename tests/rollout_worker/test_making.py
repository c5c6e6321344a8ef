"""Making environments, and what a person is told where that cannot work: one line that helps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rollout_worker.making import describe_environment, describe_space, is_factory, make, make_native
from shared.config import EnvironmentConfig
from shared.errors import ConfigError, EnvironmentUnusable, StagecoachError, UnsupportedSpace, UserError
from shared.spaces import EnvironmentDescription, SpaceSpec
from tests.conftest import minimal_config
from tests.environments_for_tests import ACTIONS, MODULE, OBSERVATIONS, AddOne, Counting

CHASE: dict[str, Any] = {"api": "pettingzoo", "id": f"{MODULE}:Chase"}


def environment(**fields: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"num_envs": 2} | fields)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"id": "CartPoole-v1"}, EnvironmentUnusable, "'CartPoole-v1'.*own environment is given as module:factory"),
        ({"id": "nowhere_at_all:make"}, EnvironmentUnusable, "No module named 'nowhere_at_all'; expected"),
        ({"id": f"{MODULE}:absent"}, EnvironmentUnusable, "no attribute 'absent'"),
        ({"id": f"{MODULE}:"}, EnvironmentUnusable, "environment.id=.*: expected package.module:factory"),
        ({"id": f"{MODULE}:broken_factory"}, EnvironmentUnusable, "FileNotFoundError: no such mesh: arm.stl"),
        ({"id": f"{MODULE}:Counting", "kwargs": {"lenght": 3}}, EnvironmentUnusable, "keyword argument 'lenght'"),
        ({"id": "CartPole-v1", "kwargs": {"gravity": 1}}, EnvironmentUnusable, "unexpected keyword argument 'gravity'"),
        ({"id": f"{MODULE}:not_an_environment"}, EnvironmentUnusable, "returned a int.*expects a gymnasium.Env"),
        ({"id": f"{MODULE}:Counting", "api": "pettingzoo"}, EnvironmentUnusable, "Counting.*a PettingZoo parallel"),
        ({"id": f"{MODULE}:Chase"}, EnvironmentUnusable, "Chase.*api=gymnasium expects a gymnasium.Env"),
        (
            {"id": "CartPole-v1", "wrappers": [f"{MODULE}:broken_wrapper"]},
            EnvironmentUnusable, "broken_wrapper cannot be made: TypeError: this wrapper wants images",
        ),
        ({"id": "CartPole-v1", "wrappers": ["gymnasium.wrappers:Nope"]}, EnvironmentUnusable, "no attribute 'Nope'"),
        ({"id": "CartPole-v1", "wrappers": ["nope"]}, EnvironmentUnusable, "wrappers=nope: expected package.module"),
        ({"id": "ALE/Nope-v5"}, EnvironmentUnusable, "ALE"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_told_in_one_line(
    fields: dict[str, Any], kind: type[StagecoachError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        make(environment(**fields))
    assert isinstance(caught.value, UserError) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"id": "MountainCarContinuous-v0"}, ConfigError, "no vectorised version of its own; use .*sync or async"),
        ({"id": "CartPoole-v1"}, EnvironmentUnusable, "CartPoole-v1"),
        (
            {"id": "CartPole-v1", "wrappers": [f"{MODULE}:AddOne"]},
            ConfigError,
            "native cannot apply environment.wrappers",
        ),
        ({"id": f"{MODULE}:Counting"}, EnvironmentUnusable, "unexpected keyword argument 'num_envs'"),
        ({"id": "CartPole-v1", "kwargs": {"gravity": 1}}, EnvironmentUnusable, "unexpected keyword argument 'gravity'"),
    ],
)
def test_what_has_no_native_form_is_told_in_one_line(
    fields: dict[str, Any], kind: type[UserError], message: str
) -> None:
    with pytest.raises(kind, match=message) as caught:
        make_native(environment(vectorization="native", **fields))
    assert "\n" not in str(caught.value)


def test_a_module_with_an_error_of_its_own_is_told_in_one_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_broken_module.py").write_text("def make():\n    return 1 +\n")
    (tmp_path / "users_raising_module.py").write_text("raise RuntimeError('licence expired')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, found in {"users_broken_module": "SyntaxError", "users_raising_module": "licence expired"}.items():
        with pytest.raises(EnvironmentUnusable, match=found):
            make(environment(id=f"{name}:make"))


def test_a_registered_environment_a_factory_and_a_class_are_made() -> None:
    registered = make(environment(id="CartPole-v1", max_episode_steps=7))
    assert registered.spec.max_episode_steps == 7
    made = make(environment(id=f"{MODULE}:Counting", kwargs={"length": 9}))
    assert isinstance(made, Counting) and made.length == 9
    assert make(environment(id=f"{MODULE}:Counting", kwargs={"length": 9}), length=5).length == 5
    limited = make(environment(id=f"{MODULE}:Counting", max_episode_steps=2))
    assert isinstance(limited, gym.wrappers.TimeLimit)


def test_wrappers_stand_around_the_environment_with_their_arguments() -> None:
    paths: list[Any] = [{"path": f"{MODULE}:AddOne", "kwargs": {"amount": 4.0}}, f"{MODULE}:AddOne"]
    env = make(environment(id=f"{MODULE}:Counting", wrappers=paths))
    assert isinstance(env, AddOne) and isinstance(env.env, AddOne) and isinstance(env.unwrapped, Counting)
    env.reset(seed=1)
    assert env.step(0)[1] == 1 + 4 + 1


def test_gymnasiums_own_module_syntax_is_no_factory() -> None:
    assert is_factory("my_package.envs:make_arm") and is_factory("envs:Arm")
    assert not is_factory("my_package:Arm-v0") and not is_factory("CartPole-v1") and not is_factory("ALE/Pong-v5")


@pytest.mark.parametrize("name", [*OBSERVATIONS, *ACTIONS])
def test_a_described_space_gives_back_what_was_sampled(name: str) -> None:
    for space in (table[name] for table in (OBSERVATIONS, ACTIONS) if name in table):
        space.seed(3)
        spec = describe_space(space)
        assert SpaceSpec.from_dict(spec.as_dict()) == spec
        for _ in range(5):
            value = space.sample()
            columns = spec.flatten("obs", value)
            assert set(columns) == set(spec.column_names("obs"))
            for leaf in spec.leaves:
                column = columns[leaf.column("obs")]
                assert column.shape == leaf.shape and column.dtype == leaf.column_dtype
                if leaf.kind != "box":
                    assert (column >= 0).all() and (column < np.reshape(leaf.nvec, leaf.shape)).all()
            back = spec.nest("obs", columns)
            assert space.contains(back) or back == value


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Dict({"said": spaces.Text(5)}),
        spaces.Dict({}),
        spaces.Box(-1, 1, (0,)),
        spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
    ],
)
def test_spaces_that_cannot_be_learnt_from_are_refused(space: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpace):
        describe_space(space)


def test_the_refused_space_is_named_by_its_place() -> None:
    with pytest.raises(UnsupportedSpace, match=r"^talk.1: Text spaces are not supported; expected Box"):
        describe_space(spaces.Dict({"talk": spaces.Tuple((spaces.Discrete(2), spaces.Text(4)))}))


def test_keys_that_become_one_column_are_refused() -> None:
    clash = spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(UnsupportedSpace, match="same column name"):
        describe_space(clash)


def test_a_single_agent_is_described_under_the_one_policy() -> None:
    described = describe_environment(minimal_config())
    assert described.agents == {"default": "default"} and list(described.policies) == ["default"]
    assert EnvironmentDescription.from_dict(described.as_dict()) == described


def test_each_agent_is_described_with_its_policys_spaces() -> None:
    config = minimal_config(
        environment=CHASE, policies={"hunter": {}, "prey": {}}, agents={"cat": "hunter", "mouse": "prey"}
    )
    described = describe_environment(config)
    assert described.agents == {"cat": "hunter", "mouse": "prey"}
    assert described.policies["hunter"].observation.leaves[0].shape == (3,)
    assert described.policies["prey"].action.leaves[0].kind == "box"
    assert described.slots("hunter") == described.slots("prey") == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "agents of policy 'default' have different spaces; give 'mouse' a policy of its own"),
        (
            {"policies": {"a": {}, "b": {}}, "agents": {"cat": "a"}},
            r"agent 'mouse' is mapped to no policy; add agents.mouse",
        ),
        ({"policies": {"a": {}, "b": {}}, "agents": {"cat": "a", "mouse": "a"}}, "different spaces"),
        (
            {"policies": {"a": {}, "b": {}, "c": {}}, "agents": {"cat": "a", "mouse": "b"}},
            r"policies \['c'\] have no agent",
        ),
        ({"agents": {"dog": "default"}}, r"agents names \['dog'\], but the environment has \['cat', 'mouse'\]"),
    ],
)
def test_agents_and_policies_that_do_not_fit_are_told(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        describe_environment(minimal_config(environment=CHASE, **sections))
