"""Making environments from the config, and describing their spaces as data."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import re
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rollout_worker.envpool_environments import is_envpool, make_envpool, make_envpool_vector
from rollout_worker.vector import numbers
from shared.config import Config, EnvironmentConfig
from shared.errors import ConfigError, EnvironmentFailure, EnvironmentUnusable, OtherApi, UnsupportedSpace
from shared.extras import with_extra
from shared.spaces import EnvironmentDescription, Leaf, PolicySpaces, SpaceSpec
from shared.user_code import import_object, place

SINGLE_AGENT = "default"
"""The name of the only agent of a gymnasium environment."""


def describe_environment(config: Config) -> EnvironmentDescription:
    """Makes one environment, reads its agents and spaces, and closes it.

    Raises `EnvironmentUnusable`, `UnsupportedSpace`, or `ConfigError` for agents without a policy.
    """
    env = make(config.environment)
    try:
        return describe(config, env)
    finally:
        with contextlib.suppress(Exception):  # it is not needed any more
            env.close()


def describe(config: Config, env: Any) -> EnvironmentDescription:
    """What `describe_environment` returns, of an environment that is there; raises as that does."""
    try:
        if config.environment.api == "pettingzoo":
            found = {agent: (env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents}
        else:
            found = {SINGLE_AGENT: (env.observation_space, env.action_space)}
    except Exception as error:
        raise EnvironmentUnusable(
            f"{config.environment.id} does not tell its spaces ({type(error).__name__}: {error}); expected an "
            f"observation_space and an action_space; set both in __init__ (PettingZoo: methods that take an agent)"
        ) from None
    for agent, pair in found.items():
        for space, name in zip(pair, ("observation_space", "action_space"), strict=True):
            if not isinstance(space, spaces.Space):
                whose = f" of {agent}" if config.environment.api == "pettingzoo" else ""
                raise EnvironmentUnusable(
                    f"{config.environment.id}: its {name}{whose} is {space!r:.60}; expected a space of "
                    f"gymnasium.spaces, such as Box(-1, 1, (3,)) or Discrete(2); set it in __init__"
                )
    unknown = sorted(set(config.agents) - set(found))
    if unknown:
        raise ConfigError(f"agents names {unknown}, but the environment has {sorted(found)}")
    agents: dict[str, str] = {}
    policies: dict[str, PolicySpaces] = {}
    for agent, (observation, action) in found.items():
        try:
            policy_id = agents[agent] = config.policy_of(agent)
        except KeyError:
            raise ConfigError(
                f"agent {agent!r} is mapped to no policy; add agents.{agent}: one of {sorted(config.policies)}"
            ) from None
        described = PolicySpaces(describe_space(observation), describe_space(action))
        if policies.setdefault(policy_id, described) != described:
            raise ConfigError(
                f"agents of policy {policy_id!r} have different spaces; give {agent!r} a policy of its own"
            )
    unused = sorted(set(config.policies) - set(policies))
    if unused:
        raise ConfigError(f"policies {unused} have no agent; the environment's agents are {sorted(found)}")
    return EnvironmentDescription(agents, policies)


def make(config: EnvironmentConfig, **overrides: Any) -> Any:
    """One environment (a gymnasium `Env` or a PettingZoo parallel environment), wrapped as configured.

    `overrides` (such as `render_mode`) replace config kwargs. Raises `EnvironmentUnusable` with the cause.
    """
    kwargs = {**config.kwargs, **overrides}
    if is_envpool(config.id):
        env: Any = make_envpool(config.id, config.max_episode_steps, kwargs)
    elif is_factory(config.id):
        env = _call(_imported(config.id, "environment.id"), kwargs, config.id)
    elif config.api == "pettingzoo":
        env = _in_pettingzoo(config.id, kwargs)
    else:
        limit: dict[str, Any] = {"max_episode_steps": -1} if config.max_episode_steps else {}  # instead of its own
        env = _registered(lambda: gym.make(config.id, **limit, **kwargs), config.id)
    _refuse_other_api(env, config)
    for wrapper in config.wrappers:
        given = _tuples(wrapper.kwargs) if wrapper.path.startswith("gymnasium.") else wrapper.kwargs
        env = _call(_imported(wrapper.path, "environment.wrappers"), {"env": env, **given}, wrapper.path)
    if config.max_episode_steps and config.api == "gymnasium" and not is_envpool(config.id):
        env = gym.wrappers.TimeLimit(env, config.max_episode_steps)  # outermost: wrappers may repeat or skip steps
    return env


def _tuples(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Gymnasium's wrappers ask for tuples, which YAML does not have."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in kwargs.items()}


def _refuse_other_api(env: Any, config: EnvironmentConfig) -> None:
    in_turns = hasattr(env, "agent_iter")  # PettingZoo's AEC, where one agent acts after another
    parallel = hasattr(env, "possible_agents") and not in_turns
    if parallel if config.api == "pettingzoo" else isinstance(env, gym.Env):
        return
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(env).__mro__}
    expected = {"gymnasium": "a gymnasium.Env", "pettingzoo": "a PettingZoo parallel environment"}[config.api]
    hint = "; it returned nothing: return the environment" if env is None else ""
    if in_turns:
        hint = (
            "; it is an AEC environment, whose agents act in turns: return pettingzoo.utils.aec_to_parallel(env) "
            "(if its metadata say is_parallelizable), with environment.api=pettingzoo"
        )
    elif parallel:
        hint = "; it is a PettingZoo parallel environment: set environment.api=pettingzoo"
    elif ("pettingzoo", "ParallelEnv") in bases or (
        config.api == "pettingzoo" and hasattr(env, "agents") and not isinstance(env, gym.Env)
    ):
        hint = "; it has no possible_agents: set it in __init__ to the names of all agents that there may ever be"
    elif isinstance(env, gym.Env):
        hint = "; it is a gymnasium.Env: set environment.api=gymnasium"
    elif hasattr(env, "reset") and hasattr(env, "step") and not any(package == "gym" for package, _ in bases):
        hint = f"; derive {type(env).__name__} from gymnasium.Env, and call super().reset(seed=seed) in its reset()"
    elif any(package == "gym" for package, _ in bases):
        hint = "; it is one of old Gym, which nobody maintains: derive it from gymnasium.Env, or wrap it with shimmy"
    raise (OtherApi if parallel else EnvironmentUnusable)(
        f"{config.id} returned a {type(env).__name__}; environment.api={config.api} expects {expected}{hint}"
    )


def evaluation_environment(config: Config, episodes: int | None = None) -> EnvironmentConfig:
    """The training environment with the evaluation's arguments and wrappers, and its copies, of which there are no more
    than episodes; never native, whose episodes blend."""
    evaluation = config.evaluation
    return config.environment.model_copy(
        update={
            "num_envs": min(evaluation.num_envs, episodes or evaluation.episodes),
            "kwargs": {**config.environment.kwargs, **evaluation.kwargs},
            "wrappers": config.environment.wrappers if evaluation.wrappers is None else evaluation.wrappers,
            "vectorization": "sync",
        }
    )


def check_evaluation(config: Config, description: EnvironmentDescription) -> None:
    """Makes the evaluation's environment, and refuses one in which the policies could not act."""
    played = config.model_copy(update={"environment": evaluation_environment(config)})
    found = describe_environment(played)
    if _arrays(found) != _arrays(description):
        raise ConfigError(
            f"the evaluation's environment (evaluation.wrappers, evaluation.kwargs) has other spaces than the one of "
            f"training: {_arrays(found)}, expected {_arrays(description)}"
        )


def _arrays(description: EnvironmentDescription) -> dict[str, Any]:
    """What each agent sees and does, without the bounds of what it sees."""
    shown = {
        policy_id: [(leaf.path, leaf.shape, leaf.dtype, leaf.nvec) for leaf in spaces.observation.leaves]
        for policy_id, spaces in description.policies.items()
    }
    return {
        agent: (shown[policy_id], description.policies[policy_id].action.leaves)
        for agent, policy_id in description.agents.items()
    }


def make_native(config: EnvironmentConfig) -> gym.vector.VectorEnv[Any, Any, Any]:
    """The environment's own vectorised version, with `num_envs` copies."""
    if config.wrappers:
        raise ConfigError("environment.vectorization=native cannot apply environment.wrappers; use sync or async")
    if is_envpool(config.id):
        return make_envpool_vector(config.id, config.num_envs, config.max_episode_steps, config.kwargs)
    if is_factory(config.id):
        made = _call(_imported(config.id, "environment.id"), {"num_envs": config.num_envs, **config.kwargs}, config.id)
        if not isinstance(made, gym.vector.VectorEnv):
            raise EnvironmentUnusable(
                f"{config.id} returned a {type(made).__name__}; native expects a gymnasium VectorEnv"
            )
        return made
    spec = _registered(lambda: gym.spec(config.id), config.id)
    if spec.vector_entry_point is None:
        raise ConfigError(
            f"{config.id} has no vectorised version of its own; use environment.vectorization: sync or async"
        )
    limit: dict[str, Any] = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
    vector: gym.vector.VectorEnv[Any, Any, Any] = _registered(
        lambda: gym.make_vec(
            config.id, config.num_envs, vectorization_mode="vector_entry_point", **limit, **config.kwargs
        ),
        config.id,
    )
    return vector


def is_factory(name: str) -> bool:
    """Whether `module:factory` is meant (gymnasium's own `module:Name-v0` imports a module, then makes an id)."""
    return ":" in name and not re.search(r"-v\d+$", name) and not is_envpool(name)


def _imported(path: str, field: str) -> Callable[..., Any]:
    found: Callable[..., Any] = import_object(path, field, EnvironmentUnusable, "factory")
    return found


def _in_pettingzoo(name: str, kwargs: dict[str, Any]) -> Any:
    """The parallel environment that PettingZoo knows by this name; raises `EnvironmentUnusable`."""
    if not _is_in_pettingzoo(name):
        close = difflib.get_close_matches(name, _names_in_pettingzoo(), 3)
        expected = " or ".join([*close, "module:function, such as pettingzoo.sisl.pursuit_v5:parallel_env"])
        raise EnvironmentUnusable(f"PettingZoo knows no parallel environment {name!r}; expected {expected}")
    return _call(partial(importlib.import_module("pettingzoo").make, "parallel", name), kwargs, name)


def _is_in_pettingzoo(name: str) -> bool:
    return re.sub(r"_(v\d+)$", r"-\1", name) in _names_in_pettingzoo()


def _names_in_pettingzoo() -> tuple[str, ...]:
    """None where it is not installed, or older than its registry (1.26)."""
    try:
        return tuple(getattr(importlib.import_module("pettingzoo"), "parallel_registry", ()))
    except ImportError:
        return ()


def _registered(make_it: Callable[[], Any], name: str) -> Any:
    try:
        return make_it()
    except gym.error.DependencyNotInstalled as error:
        raise EnvironmentUnusable(f"{name} needs a package that is missing: {with_extra(str(error))}") from None
    except gym.error.Error as error:
        hint = "" if ":" in name else "; a user's own environment is given as module:factory"
        if _is_in_pettingzoo(name):
            raise OtherApi(f"{name}: it is a PettingZoo parallel environment: set environment.api=pettingzoo") from None
        raise EnvironmentUnusable(f"unknown or unusable environment {name!r}: {with_extra(str(error))}{hint}") from None
    except Exception as error:
        raise _unusable(name, error) from error


def _call(factory: Callable[..., Any], kwargs: dict[str, Any], name: str) -> Any:
    try:
        return factory(**kwargs)
    except (Exception, SystemExit) as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception | SystemExit) -> EnvironmentUnusable:
    return EnvironmentUnusable(f"{name} cannot be made: {type(error).__name__}: {with_extra(str(error))}{place(error)}")


PAST, RETURN = "stagecoach_past", "stagecoach_return"
"""An option of `reset` and an entry of its info: actions to do again, and what they have brought."""


class Guarded(gym.Wrapper[Any, Any, Any, Any]):
    """Turns what an environment raises into `EnvironmentFailure`, with its number, the place and the traceback.

    Of its infos it passes on the numbers of an episode's last: nothing else is used, and what is odd in them (an object
    that cannot be pickled, an integer of 400 digits, text beside numbers) would end gymnasium's vectorization.

    With the option `PAST` (a list of actions for each environment) a reset also does these actions.
    """

    def __init__(self, env: gym.Env[Any, Any], index: int) -> None:
        super().__init__(env)
        self._index = index

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        own = {name: value for name, value in (options or {}).items() if name != PAST}
        try:
            observation, _ = self.env.reset(seed=seed, options=own or None)
            total = 0.0
            for action in (options or {}).get(PAST, {self._index: ()})[self._index]:
                observation, reward, terminated, truncated, _ = self.env.step(action)
                total += float(reward)
                if terminated or truncated:
                    break  # it is not the episode that it was: whoever compares will see
            return observation, {RETURN: total} if PAST in (options or {}) else {}
        except (Exception, SystemExit) as error:
            raise failure(self._index, "reset", error) from None

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            told = numbers(info) if terminated or truncated else {}
            return observation, reward, terminated, truncated, told
        except (Exception, SystemExit) as error:
            raise failure(self._index, "step", error) from None


def failure(index: int | None, place: str, error: Exception | SystemExit) -> EnvironmentFailure:
    """The named error for what environment `index` raised (None: a vectorised one, which doesn't say which copy).

    Its first line tells what and where; the traceback follows, for the log.
    """
    trace = "".join(traceback.format_exception(error))
    which = "the vectorised environment" if index is None else f"environment {index}"
    said = " ".join(str(error).split())
    return EnvironmentFailure(f"{which} raised {type(error).__name__} in {place}: {said}\n{trace}")


def describe_space(space: spaces.Space[Any]) -> SpaceSpec:
    """A gymnasium space as data; raises `UnsupportedSpace` for text, graphs and sequences."""
    leaves: list[Leaf] = []
    structure = _describe(space, "", leaves)
    if not leaves:
        raise UnsupportedSpace(f"{space} holds nothing that could be observed or done")
    paths = [leaf.path for leaf in leaves]
    if len(set(paths)) != len(paths):
        raise UnsupportedSpace(f"{space} has keys that become the same column name: {sorted(paths)}")
    return SpaceSpec(tuple(leaves), structure)


def _describe(space: spaces.Space[Any], path: str, leaves: list[Leaf]) -> Any:
    below = f"{path}." if path else ""
    if isinstance(space, spaces.Dict):
        if odd := [key for key in space.spaces if not isinstance(key, str)]:
            raise UnsupportedSpace(f"{space} has the keys {odd}; expected text")
        return {"dict": {str(key): _describe(item, f"{below}{key}", leaves) for key, item in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"tuple": [_describe(item, f"{below}{index}", leaves) for index, item in enumerate(space.spaces)]}
    if 0 in (space.shape or ()):
        where = f"{path}: " if path else ""
        raise UnsupportedSpace(f"{where}{space} has no elements; expected at least one, or leave it out")
    leaves.append(_leaf(space, path))
    return len(leaves) - 1


def _leaf(space: spaces.Space[Any], path: str) -> Leaf:
    if isinstance(space, spaces.Box):
        low, high = _bounds(space.low), _bounds(space.high)
        return Leaf(path, "box", tuple(space.shape), str(space.dtype), low=low, high=high)
    if isinstance(space, spaces.Discrete):
        return Leaf(path, "discrete", (), str(space.dtype), nvec=(int(space.n),), start=(int(space.start),))
    if isinstance(space, spaces.MultiDiscrete):
        nvec = tuple(int(n) for n in space.nvec.flatten())
        start = tuple(int(n) for n in np.broadcast_to(space.start, space.nvec.shape).flatten())
        return Leaf(path, "multi_discrete", tuple(space.nvec.shape), str(space.dtype), nvec=nvec, start=start)
    if isinstance(space, spaces.MultiBinary):
        shape = tuple(int(n) for n in space.shape)
        size = int(np.prod(shape))
        return Leaf(path, "multi_binary", shape, str(space.dtype), nvec=(2,) * size, start=(0,) * size)
    where = f"{path}: " if path else ""
    raise UnsupportedSpace(
        f"{where}{type(space).__name__} spaces are not supported; expected Box, Discrete, MultiDiscrete, MultiBinary, "
        f"Dict or Tuple"
    )


def _bounds(values: Any) -> tuple[float, ...]:
    flat = np.asarray(values, np.float64).flatten()
    return (float(flat[0]),) if flat.size and (flat == flat[0]).all() else tuple(float(value) for value in flat)
