"""Makes environments from the config: by id, by a user's factory or from EnvPool, wrapped as configured."""

import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from stagecoach.rollout_worker.environments import gymnasium_env
from stagecoach.rollout_worker.environments.action_masks import MaskFromInfo
from stagecoach.rollout_worker.environments.copies import Copies, InOwnProcess, OwnProcesses, confine
from stagecoach.rollout_worker.environments.envpool_env import PREFIX, EnvPoolSingle, EnvPoolVector
from stagecoach.rollout_worker.environments.hierarchy import Levels, LevelTurns, Options
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters, Parameterized
from stagecoach.rollout_worker.environments.pettingzoo_env import Parallel, Turns
from stagecoach.rollout_worker.environments.space_data import space_of
from stagecoach.rollout_worker.environments.vector_env import VectorEnvironment, layers
from stagecoach.rollout_worker.environments.wrappers import EpisodicLife
from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable, OtherApi, place
from stagecoach.shared.base.user_code import import_object, install, meant_path, with_extra
from stagecoach.shared.config.environments.environment import EnvironmentConfig, SpacesConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription

T = TypeVar("T")


class Elsewhere(gym.Env[Any, Any]):
    """The spaces of environments that other programs have (`api: external`); it cannot be stepped here."""

    def __init__(self, spaces: SpacesConfig) -> None:
        self.possible_agents = [*spaces.agents]
        self.observation_space: Any
        self.action_space: Any
        if not spaces.agents:
            self.observation_space = space_of(spaces.observation, "environment.spaces.observation")
            self.action_space = space_of(spaces.action, "environment.spaces.action")
            return
        seen, acted = dict[str, gym.Space[Any]](), dict[str, gym.Space[Any]]()
        for name, agent in spaces.agents.items():
            seen[name] = space_of(agent.observation, f"environment.spaces.agents.{name}.observation")
            acted[name] = space_of(agent.action, f"environment.spaces.agents.{name}.action")
        self.observation_space, self.action_space = seen.__getitem__, acted.__getitem__

    def reset(self, **_: Any) -> Any:
        """Raises `EnvironmentUnusable`."""
        raise EnvironmentUnusable(
            "environment.api=external: its clients have the environment, and this process has none"
        )


_AUTORESET = "autoreset_mode"
_REGISTERED_BY = {
    "ALE/": "ale_py", "MiniGrid-": "minigrid", "BabyAI-": "minigrid", "Fetch": "gymnasium_robotics",
    "HandManipulate": "gymnasium_robotics", "AntMaze": "gymnasium_robotics", "PointMaze": "gymnasium_robotics",
    "FrankaKitchen": "gymnasium_robotics", "Adroit": "gymnasium_robotics", "highway-": "highway_env",
    "dm_control/": "shimmy",
}  # fmt: skip
"""Beginning of an id → the module that registers it."""
_PACKAGES = {
    "ale_py": "'stagecoach-rl[atari]'",
    "gymnasium_robotics": "gymnasium-robotics",
    "highway_env": "highway-env",
}
"""Module → its package, if that has another name."""


def make_vector(
    config: EnvironmentConfig, description: EnvironmentDescription, parameters: EpisodeParameters | None = None
) -> VectorEnvironment:
    """Makes the config's vectorized environment, whose episodes get `parameters`; raises as `make_environment` does."""
    if config.several_agents and config.vectorization == "async":
        one, count = config.model_copy(update={"num_envs": 1}), config.num_envs
        made = [partial(_several, one, description, first=index) for index in range(count)]
        own = [partial(InOwnProcess, its, index, count) for index, its in enumerate(made)]
        return OwnProcesses(_in_processes(own, shared_memory=False), parameters)
    if config.several_agents:
        return _several(config, description, parameters)
    env: gym.vector.VectorEnv[Any, Any, Any]
    if native := config.vectorization == "native":
        env = make_native(config)
    elif config.vectorization == "async":
        env = _in_processes([partial(_in_own_process, config, index) for index in range(config.num_envs)])
    else:
        makers = [lambda index=index: _guarded(config, index) for index in range(config.num_envs)]
        env = Copies(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    return gymnasium_env.GymnasiumEnvironments(env, description, native=native, parameters=parameters)


def _several(
    config: EnvironmentConfig, description: EnvironmentDescription, parameters: EpisodeParameters | None, first: int = 0
) -> VectorEnvironment:
    kind = LevelTurns if config.hierarchy else Turns if description.in_turns else Parallel
    giving = [parameterized(config) for _ in range(config.num_envs)]
    return kind(
        [make_environment(config) for _ in range(config.num_envs)], config, description, parameters, giving, first
    )


def parameterized(config: EnvironmentConfig) -> Parameterized:
    return Parameterized(config.parameters_by, lambda values: make_environment(config, **values))


def _in_processes(own: Sequence[Callable[[], Any]], **options: Any) -> gym.vector.AsyncVectorEnv:
    # spawn: forking a process that has threads can hang it. It would run a script without a `__main__` guard again in
    # each process, and nothing there needs it: objects of `__main__` travel by value.
    program, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        made = gym.vector.AsyncVectorEnv(own, context="spawn", autoreset_mode=AutoresetMode.DISABLED, **options)
    finally:
        sys.modules["__main__"] = program
    # An exception in a process becomes an `EnvironmentFailure`; Gymnasium would log it too, and fail on a '%' in it.
    gym.logger.min_level = gym.logger.ERROR + 1
    return made


def _in_own_process(config: EnvironmentConfig, index: int) -> gymnasium_env.GuardedEnvironment:
    confine()
    return _guarded(config, index)


def _guarded(config: EnvironmentConfig, index: int) -> gymnasium_env.GuardedEnvironment:
    return gymnasium_env.GuardedEnvironment(make_environment(config), index, config.info_columns, parameterized(config))


def make_environment(config: EnvironmentConfig | Config, **overrides: Any) -> Any:
    """Makes one environment as a run uses it: wrapped, with masks in its observations, with its levels or options.

    `config` is the run's, or its section `environment`. Returns a Gymnasium `Env` or a PettingZoo environment; levels
    and options are played as a PettingZoo AEC environment. `overrides` (such as `render_mode`) replace config kwargs.
    Raises `EnvironmentUnusable` with the cause.
    """
    if isinstance(config, Config):
        config = config.environment
    if not isinstance(config, EnvironmentConfig):
        raise ConfigError(f"make_environment takes a run's config or its section environment, found {config!r}")
    given = _of_one(config.kwargs) if config.vectorization == "native" else config.kwargs
    kwargs = {**given, **overrides}
    if config.id.startswith(PREFIX):
        env: Any = EnvPoolSingle(config.id, config.max_episode_steps, kwargs)
    elif (own := config.given_object) is not None and not isinstance(own, EnvSpec):
        env = _call(own, kwargs, config.id)
    elif config.spaces is not None:
        return Elsewhere(config.spaces)
    elif own is None and is_factory(config.id):
        env = _call_imported(config.id, "environment.id", kwargs)
    elif config.api == "pettingzoo":
        env = _in_pettingzoo(config.id, kwargs)
    else:
        limit: dict[str, Any] = {"max_episode_steps": -1} if config.max_episode_steps else {}  # replaces its own
        env = _registered(lambda: gym.make(own or config.id, **limit, **kwargs), config.id)
    _check_api(env, config)
    for wrapper in config.wrappers:
        given = wrapper.kwargs
        if wrapper.path.startswith("gymnasium."):  # requires tuples, which YAML lacks
            given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        env = _call_imported(wrapper.path, "environment.wrappers", {"env": env, **given})
    if config.parameters and any(isinstance(layer, EpisodicLife) for layer in layers(env)):
        raise ConfigError(
            "environment.wrappers has EpisodicLife, whose episodes continue a game that has begun, and "
            "environment.parameters are of a game from its beginning; leave one of them out"
        )
    if config.action_mask == "info" and config.api == "gymnasium":
        env = MaskFromInfo(env)
    if config.max_episode_steps and config.api == "gymnasium" and not config.id.startswith(PREFIX):
        env = gym.wrappers.TimeLimit(env, config.max_episode_steps)  # outermost: wrappers may repeat or skip steps
    if config.hierarchy is not None:
        if (options := config.hierarchy.options) is not None:
            return Options(env, options, config.max_episode_steps, masked=config.action_mask != "off")
        return Levels(env, config.hierarchy, config.max_episode_steps)
    return env


def _check_api(env: Any, config: EnvironmentConfig) -> None:
    several = hasattr(env, "possible_agents")
    if several if config.api == "pettingzoo" else isinstance(env, gym.Env):
        return
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(env).__mro__}
    expected = "a PettingZoo environment" if config.api == "pettingzoo" else "a gymnasium.Env"
    hint = "; it returned nothing: return the environment" if env is None else ""
    if several:
        hint = "; it is a PettingZoo environment: set environment.api=pettingzoo"
    elif bases & {("pettingzoo", "ParallelEnv"), ("pettingzoo", "AECEnv")} or (
        config.api == "pettingzoo" and hasattr(env, "agents") and not isinstance(env, gym.Env)
    ):
        hint = "; it has no possible_agents: set it in __init__ to the names of all agents that there may ever be"
    elif isinstance(env, gym.Env):
        hint = "; it is a gymnasium.Env: set environment.api=gymnasium"
    elif hasattr(env, "reset") and hasattr(env, "step") and not any(package == "gym" for package, _ in bases):
        hint = f"; derive {type(env).__name__} from gymnasium.Env, and call super().reset(seed=seed) in its reset()"
    elif any(package == "gym" for package, _ in bases):
        hint = "; it is one of old Gym, which is not maintained: derive it from gymnasium.Env, or wrap it with shimmy"
    raise (OtherApi if several else EnvironmentUnusable)(
        f"{config.id} returned a {type(env).__name__}; environment.api={config.api} expects {expected}{hint}"
    )


def evaluation_environment(config: Config, most: int | None = None) -> EnvironmentConfig:
    """Returns the training environment's section with the evaluation's arguments, wrappers and copies (at most `most`).
    It is never native, since a native environment cannot seed each episode."""
    evaluation, trained = config.evaluation, config.environment
    wrappers = trained.wrappers if evaluation.wrappers is None else evaluation.wrappers
    copies = min(evaluation.num_envs, most or evaluation.asked.amount)
    kwargs = _of_one(trained.kwargs) if trained.vectorization == "native" else trained.kwargs
    changed = {"num_envs": copies, "kwargs": {**kwargs, **evaluation.kwargs}, "wrappers": wrappers}
    return trained.model_copy(update={**changed, "vectorization": "sync"})


def _of_one(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a native version that its single form takes too."""
    return {name: value for name, value in kwargs.items() if name != _AUTORESET}


def make_native(config: EnvironmentConfig) -> gym.vector.VectorEnv[Any, Any, Any]:
    """Makes the environment's own vectorized version; raises `ConfigError` or `EnvironmentUnusable`."""
    made = _made_native(config)
    try:
        mode = gymnasium_env.declared_autoreset(made) or AutoresetMode.NEXT_STEP
    except EnvironmentUnusable:
        made.close()
        raise
    if config.parameters and mode is not AutoresetMode.DISABLED:
        made.close()
        raise EnvironmentUnusable(
            f"{config.id} begins episodes by itself (autoreset_mode={mode.name}), so that environment.parameters would "
            f"reach only the first episodes; use sync or async, or have its metadata say AutoresetMode.DISABLED"
        )
    return made


def _made_native(config: EnvironmentConfig) -> gym.vector.VectorEnv[Any, Any, Any]:
    if config.wrappers:
        raise ConfigError("environment.vectorization=native cannot apply environment.wrappers; use sync or async")
    if config.id.startswith(PREFIX):
        return EnvPoolVector(config.id, config.num_envs, config.max_episode_steps, config.kwargs)
    own = config.given_object
    if is_factory(config.id) and not isinstance(own, EnvSpec):
        kwargs = {"num_envs": config.num_envs, **config.kwargs}
        made = _call_imported(config.id, "environment.id", kwargs) if own is None else _call(own, kwargs, config.id)
        if not isinstance(made, gym.vector.VectorEnv):
            expected = "environment.vectorization=native expects a gymnasium VectorEnv"
            raise EnvironmentUnusable(f"{config.id} returned a {type(made).__name__}; {expected}")
        return made
    spec = own or _registered(lambda: _spec(config.id), config.id)
    if spec.vector_entry_point is None:
        found = f"{config.id} has no vectorized version of its own"
        raise ConfigError(f"{found}; use environment.vectorization: sync or async")
    kwargs = {"max_episode_steps": config.max_episode_steps} if config.max_episode_steps else {}
    kwargs |= {"num_envs": config.num_envs, "vectorization_mode": "vector_entry_point"}
    kwargs |= config.kwargs
    if (mode := str(kwargs.get(_AUTORESET))) in AutoresetMode.__members__:
        kwargs[_AUTORESET] = AutoresetMode[mode]
    return _registered(lambda: gym.make_vec(own or config.id, **kwargs), config.id)


def _spec(name: str) -> gym.envs.registration.EnvSpec:
    """Returns `gym.spec`, also for `module:Name-v0`, which that does not accept."""
    module, _, name = name.rpartition(":")
    if module:
        importlib.import_module(module)
    return gym.spec(name)


def is_factory(name: str) -> bool:
    """Returns whether `name` is `module:factory` or `object:…`, not Gymnasium's `module:Name-v0`, an id."""
    return ":" in name and not re.search(r"-v\d+$", name) and not name.startswith(PREFIX)


def _in_pettingzoo(name: str, kwargs: dict[str, Any]) -> Any:
    if not (known := _names_in_pettingzoo()):
        raise EnvironmentUnusable(
            f"{name} needs PettingZoo 1.26 or newer, which is missing; {install('games')} brings it"
        )
    if (wanted := _as_in_pettingzoo(name)) not in known:
        close = difflib.get_close_matches(name, known, 3)
        expected = " or ".join([*close, "module:function, such as pettingzoo.sisl.pursuit_v5:parallel_env"])
        raise EnvironmentUnusable(f"PettingZoo knows no environment {name!r}; expected {expected}")
    return _call(partial(importlib.import_module("pettingzoo").make, known[wanted], name), kwargs, name)


def _as_in_pettingzoo(name: str) -> str:
    return re.sub(r"_(v\d+)$", r"-\1", name)


def _names_in_pettingzoo() -> dict[str, str]:
    """Returns name → `parallel`, or `aec` for games in turns only; empty if PettingZoo is missing or before 1.26."""
    try:
        package = importlib.import_module("pettingzoo")
    except ImportError:
        return {}
    return {name: api for api in ("aec", "parallel") for name in getattr(package, f"{api}_registry", ())}


def _registered(make_it: Callable[[], T], name: str) -> T:
    try:
        return make_it()
    except gym.error.DependencyNotInstalled as error:
        raise EnvironmentUnusable(f"{name} needs a package that is missing: {with_extra(str(error))}") from None
    except gym.error.Error as error:
        said, hint = str(error), "" if ":" in name else _module_hint(name)
        if not hint.startswith("; write"):
            said = with_extra(said)
        if _as_in_pettingzoo(name) in _names_in_pettingzoo():
            raise OtherApi(f"{name}: it is a PettingZoo environment: set environment.api=pettingzoo") from None
        raise EnvironmentUnusable(f"unknown or unusable environment {name!r}: {said}{hint}") from None
    except Exception as error:
        raise _unusable(name, error) from error


def registering_module(name: str) -> str | None:
    """Returns the module that registers this id when it is imported, of the packages that we know."""
    return next((module for start, module in _REGISTERED_BY.items() if name.startswith(start)), None)


def _module_hint(name: str) -> str:
    module = registering_module(name)
    if module is None:
        return f"; an environment of your own is given as module:factory{meant_path(name)}"
    missing = "" if importlib.util.find_spec(module) else f", and pip install {_PACKAGES.get(module, module)}"
    return f"; write environment.id: {module}:{name}, so that the package is imported{missing}"


def _call_imported(path: str, field: str, kwargs: dict[str, Any]) -> Any:
    return _call(import_object(path, field, EnvironmentUnusable, "factory"), kwargs, path)


def _call(factory: Callable[..., Any], kwargs: dict[str, Any], name: str) -> Any:
    try:
        return factory(**kwargs)
    except (Exception, SystemExit) as error:
        raise _unusable(name, error) from error


def _unusable(name: str, error: Exception | SystemExit) -> EnvironmentUnusable:
    return EnvironmentUnusable(
        f"{name} cannot be created: {type(error).__name__}: {with_extra(str(error))}{place(error)}"
    )
