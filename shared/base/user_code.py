"""Imports of the user's own modules and of optional packages.

The user's modules come after everything that is installed, so that none of them replaces a library that Stagecoach
needs.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from stagecoach.shared.base.errors import ConfigError, UserCodeError, UserError, place

Made = TypeVar("Made")
IMPORT_PATH = "import_path.json"
"""File in a run's folder with the folders of the user's own modules at the start of the run."""
EXTRAS = {
    "cluster": ("ray[default]",),
    "pettingzoo": ("pettingzoo",),
    "games": ("pyspiel", "open_spiel", "lbforaging"),
    "box2d": ("Box2D", "box2d"),
    "mujoco": ("mujoco",),
    "robotics": ("gymnasium_robotics",),
    "minatar": ("minatar", "MinAtar"),
    "atari": ("ale_py", "ALE", "cv2", "atari"),
    "envpool": ("envpool",),
    "data": ("h5py",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
    "plot": ("matplotlib",),
    "tune": ("optuna",),
    "video": ("moviepy", "pygame", "classic_control", "toy_text", "other"),
}
"""Extra of pyproject.toml → modules, namespaces of environments, and extras of gymnasium that it brings."""
_OF_NO_EXTRA = ("mpe2",)
_LONGEST = 200
"""Characters of a return value in a message."""
_MISSING = re.compile(r"gymnasium\[([\w-]+)\]|No module named '(\w+)|Namespace (\w+) not found")
_ADVICE = re.compile(r", (you can install it by )?run `pip install.*?gymnasium\[.*?`")


def install(extra: str) -> str:
    if extra not in EXTRAS:
        raise KeyError(extra)
    return f"pip install 'stagecoach-rl[{extra}]'"


def with_extra(said: str) -> str:
    """An error's text in one line; where it names something missing that an extra brings, with how to install that."""
    said = " ".join(said.split())
    name = "".join(next(iter(_MISSING.findall(said)), "")).replace("-", "_")
    extra = next((extra for extra, brings in EXTRAS.items() if name in brings), None)
    if name in _OF_NO_EXTRA:
        return f"{said}; pip install {name} brings it"
    if extra is None or install(extra) in said:
        return said
    return f"{_ADVICE.sub('', said).rstrip('. ')}; {install(extra)} brings it"


def extend_imports(folders: Iterable[str]) -> None:
    """Makes the modules in these folders importable, after everything that is installed."""
    own = {Path(folder).resolve() for folder in folders}
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() not in own]
    sys.path += [str(folder) for folder in sorted(own)]


def import_object(path: str, field: str, error: type[UserError] = ConfigError, kind: str = "name") -> Any:
    """`package.module:name` → the object; raises `error` with the config field, and `kind` as what was expected."""
    module, _, name = path.partition(":")
    places = "the config's folder or the working directory (a program of yours: from sys.path)"
    expected = f"expected package.module:{kind}, importable from {places}"
    if not name:
        raise error(f"{field}={path}: {expected}{meant_path(path)}")
    try:
        return getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as failed:
        said, at = with_extra(str(failed)), place(failed)
        if at or not isinstance(failed, (ImportError, AttributeError, ValueError)):
            raise error(f"{field}={path} cannot be imported: it {raised(failed)}") from failed
        raise error(f"{field}={path} cannot be imported: {said}; {expected}") from None


def meant_path(text: str) -> str:
    """Returns a hint for `package.module.name`, which is written with a colon before the name; else nothing."""
    dotted = re.fullmatch(r"([A-Za-z_]\w*(?:\.\w+)*)\.([A-Za-z_]\w*)", text)
    return f"; did you mean {dotted[1]}:{dotted[2]}?" if dotted else ""


def import_class(path: str, field: str, base: type[Made], advice: str = "") -> type[Made]:
    """Returns the subclass of `base` that `module:Class` names; raises `ConfigError`, which ends with `advice`."""
    found = import_object(path, field, kind="Class")
    if not (isinstance(found, type) and issubclass(found, base)):
        said = f"expected a subclass of stagecoach.{base.__name__}, found {found!r}"
        raise ConfigError(f"{field}={path}: {said}{f'; {advice}' if advice else ''}")
    return found


def make_own(path: str, field: str, base: type[Made], /, *arguments: Any, **kwargs: Any) -> Made:
    """Creates an object of the subclass of `base` that `module:Class` names; raises `ConfigError`."""
    own = import_class(path, field, base)
    try:
        return own(*arguments, **kwargs)
    except Exception as failed:
        raise ConfigError(f"{field}={path} cannot be created with {kwargs}: it {raised(failed)}") from failed


def misfit(function: Callable[..., Any], *arguments: Any, **kwargs: Any) -> str:
    """Returns why `function` does not accept these arguments; empty if it does, or has no signature to inspect."""
    try:
        inspect.signature(function).bind(*arguments, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return ""


def raised(error: BaseException) -> str:
    """Returns the type, text and place of an error in the user's code."""
    return f"raised {type(error).__name__}: {with_extra(str(error))}{place(error)}"


@contextmanager
def calling(what: str) -> Iterator[None]:
    """Raises errors of the user's method as `UserCodeError` with `what`, its field and name."""
    try:
        yield
    except (Exception, SystemExit) as failed:
        raise UserCodeError(f"{what} {raised(failed)}") from failed


def unusable(what: str, found: Any, expected: str) -> UserCodeError:
    """The error for a return value of the user's method `what`."""
    shown = f"{list(found.shape)} of {found.dtype}" if hasattr(found, "shape") else repr(found)
    shown = shown if len(shown) <= _LONGEST else shown[:_LONGEST] + "…"
    return UserCodeError(f"{what} returned {shown}; expected {expected}")
