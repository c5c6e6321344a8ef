"""Environments that a program gives as objects: a class, a function, an id that it has registered with Gymnasium.

What any process can import becomes `module:Name`. Anything else is `object:NAME` in the config, with a digest of its
code; the object itself stays in this process, and reaches Ray's actors as an argument.
"""

import hashlib
import importlib.machinery
import inspect
import sys
import sysconfig
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import cloudpickle
import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from stagecoach.rollout_worker.environments.factory import registering_module
from stagecoach.shared.base.errors import ConfigError, headline
from stagecoach.shared.base.user_code import misfit
from stagecoach.shared.config.environments.environment import OBJECT, EnvironmentConfig
from stagecoach.shared.config.run_config import Config

_GIVE = "give its class, or a function that makes one"


def section_of(thing: Any, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns the fields of `environment` for a class, a callable, an `EnvSpec` or an id, called with `kwargs`; and the
    object where they do not say it all. Raises `ConfigError` for anything else, or if it needs other arguments."""
    if isinstance(thing, str):
        spec = gym.registry.get(thing)
        if spec is None or str(spec.entry_point).startswith("gymnasium."):
            return {"id": thing}, None
        if (module := registering_module(thing)) is not None:
            return {"id": f"{module}:{thing}"}, None
        thing = spec
    _check(thing, kwargs)
    if isinstance(thing, type | FunctionType) and (path := import_path(thing)) is not None:
        return {"id": path}, None
    return {"id": OBJECT + _name(thing), "code_sha256": digest(thing)}, thing


def with_object(config: Config, thing: Any) -> Config:
    """Returns the config of an existing run with the object of its environment, if any; raises `ConfigError`."""
    if thing is None:
        return config
    environment = config.environment
    if not environment.id.startswith(OBJECT):
        raise ConfigError(f"environment.id={environment.id} is not an object; leave environment out")
    if isinstance(thing, str):
        if (spec := gym.registry.get(thing)) is None:
            raise ConfigError(
                f"environment={thing!r} is not registered with Gymnasium in this process; register it first"
            )
        thing = spec
    _check(thing, environment.kwargs)
    environment = environment.model_copy(update={"code_sha256": digest(thing)})
    environment.hold(thing)
    return config.model_copy(update={"environment": environment})


def _check(thing: Any, kwargs: Mapping[str, Any]) -> None:
    name = _name(thing)
    if isinstance(thing, EnvSpec):
        return
    if isinstance(thing, gym.Env | gym.vector.VectorEnv) or (hasattr(thing, "reset") and not isinstance(thing, type)):
        spec = getattr(thing, "spec", None)  # of a wrapped one that of the whole
        give = f"give its id, {spec.id!r}" if spec is not None and spec.id in gym.registry else _GIVE
        raise ConfigError(f"environment: {name} is an instance, but each worker makes its own; {give}")
    if isinstance(thing, type) and issubclass(thing, gym.vector.VectorEnv):
        raise ConfigError(
            f"environment: {name} is a vector environment; {_GIVE} of a single one (environment.num_envs)"
        )
    if not callable(thing) or (isinstance(thing, type) and not (hasattr(thing, "reset") and hasattr(thing, "step"))):
        raise ConfigError(f"environment: {name} is not an environment (no reset and step); {_GIVE}")
    if why := misfit(thing, **kwargs):
        one = {"config", "env_config"} & inspect.signature(thing).parameters.keys() - kwargs.keys()
        give = f"env_kwargs={{{one.pop()!r}: {dict(kwargs) or '{…}'}}}" if one else "env_kwargs, or a lambda"
        raise ConfigError(f"environment: {name} cannot be called with {dict(kwargs)}: {why}; give {give}")


def _name(thing: Any) -> str:
    if isinstance(thing, EnvSpec):
        return thing.id
    named = thing.func if isinstance(thing, partial) else thing
    return str(getattr(named, "__name__", type(named).__name__)).strip("<>")


def import_path(thing: Any) -> str | None:
    """`module:Name` if a process with our `sys.path` would import this very object by it."""
    module, name = sys.modules.get(getattr(thing, "__module__", None) or ""), getattr(thing, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not thing:
        return None
    return f"{module.__name__}:{name}" if _importable(module.__name__) else None


def _importable(name: str) -> bool:
    top = name.partition(".")[0]
    found = importlib.machinery.PathFinder.find_spec(top)
    return found is not None and found.origin == getattr(sys.modules.get(top), "__file__", None)


def pack(thing: Any) -> bytes:
    """Returns the object's bytes for another process of this run; raises `ConfigError` if it cannot be sent."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    by_value = module is not None and module.__name__ != "__main__" and not _importable(module.__name__)
    try:
        if by_value:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(thing))
    except Exception as error:  # whatever its parts raise
        raise ConfigError(
            f"environment {_name(thing)} cannot be sent to workers: {headline(error)}; create what it holds in its "
            f"__init__, or use inline=True"
        ) from None
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def unpack(config: EnvironmentConfig, packed: bytes | None) -> None:
    """Gives the section of a role's process its object. The bytes come from Ray, which carries code anyway."""
    if packed is not None:
        config.hold(cloudpickle.loads(packed))


def digest(thing: Any) -> str:
    """SHA-256 of an object's compiled code, and of what it uses of its own module. Comments do not count."""
    parts: list[str] = []
    seen: set[int] = set()
    own = getattr(thing.func if isinstance(thing, partial) else thing, "__module__", None)
    left = [thing]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        if isinstance(item, EnvSpec):
            left += [item.entry_point, item.max_episode_steps, item.kwargs]
        elif isinstance(item, partial):
            left += [item.func, item.args, item.keywords]
        elif isinstance(item, Mapping):
            left += [part for name in sorted(item, key=str) for part in (name, item[name])]
        elif isinstance(item, list | tuple):
            left += item
        elif isinstance(item, staticmethod | classmethod):
            left.append(item.__func__)
        elif isinstance(item, property):
            left += [item.fget, item.fset]
        elif isinstance(item, CodeType):
            names = (*item.co_names, *item.co_varnames)
            left += [item.co_code.hex(), names, item.co_consts]
        elif isinstance(item, FunctionType) and item.__module__ == own:
            seen.add(id(item))
            used = {name: item.__globals__.get(name) for name in _names(item.__code__)}
            left += [item.__code__, item.__defaults__, item.__kwdefaults__, used, _cells(item)]
        elif isinstance(item, type) and item.__module__ == own:
            seen.add(id(item))
            own_parts = {name: part for name, part in vars(item).items() if name not in _OF_CLASSES}
            left += [item.__bases__, own_parts]
        elif isinstance(item, frozenset | set):
            left.append(sorted(map(repr, item)))
        else:
            plain = isinstance(item, str | bytes | int | float | complex | None)
            parts.append(repr(item) if plain else str(getattr(item, "__qualname__", type(item).__qualname__)))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


_OF_CLASSES = ("__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__")
"""Entries of a class that its code does not decide."""


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(item) for item in code.co_consts if isinstance(item, CodeType)))


def _cells(function: Callable[..., Any]) -> list[Any]:
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not bound yet
            found.append(None)
    return found


def own_folders() -> tuple[str, ...]:
    """Folders of `sys.path` that hold the program's modules, not Python's or installed packages."""
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    folders = (Path(entry or ".").resolve() for entry in sys.path)
    names = ("site-packages", "dist-packages", "lib-dynload")
    return tuple(
        str(folder) for folder in folders if folder.is_dir() and folder not in installed and folder.name not in names
    )
