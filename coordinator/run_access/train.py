"""`stagecoach.train`: a run from whatever names an environment or a config, started and returned."""

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from stagecoach.coordinator.catalog.run_files import CONFIG
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.environments.objects import import_path, own_folders, section_of
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.printable import printable
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.config.presets import config_file, list_presets, names_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.plain_data import plain
from stagecoach.trainer_node.metrics.writers import Callback


def train(
    what: Any, *, algorithm: str | Mapping[str, Any] | None = None, env_steps: int | None = None,
    workers: int | None = None, seed: int | None = None, env_kwargs: Mapping[str, Any] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None, run_id: str | None = None,
    runs_dir: str | Path | None = None, inline: bool = False,
    callbacks: Sequence[type[Callback] | str | Mapping[str, Any]] = (),
    **fields: Any,
) -> Run:  # fmt: skip
    """Starts a run and returns its handle at once; `run.wait()` blocks until it has ended.

    The run lives in this process. A program that ends before it ends it in order, with a last checkpoint.

    Args:
        what: A preset's name, a config (file, dict or `Config`), or an environment: a Gymnasium id, `module:factory`,
            a class, or a function that makes one.
        algorithm: Its name, or its section as a dict with a `name`.
        env_steps: Steps of training, `stop_at.env_steps`.
        workers: Number of rollout workers, `rollout.workers`.
        seed: The run's seed.
        env_kwargs: Arguments of the environment, `environment.kwargs`.
        config: The config below all this, if `what` is an environment.
        run_id: The run's name, by default the environment's with the time.
        runs_dir: Folder of the runs.
        inline: Put all roles into this process and thread, for a debugger.
        callbacks: Callbacks and metric writers besides the config's: classes of a module, or `module:Class`; with
            arguments `{"path": MyCallback, "kwargs": {"threshold": 400}}`.
        fields: Any other field of the config, dotted: `**{"rollout.fragment_steps": 128}`. A field that names a class
            takes the class itself: `**{"policies.default.network": MyPolicy}`.

    Returns:
        The run, which trains in the background.

    Raises:
        ConfigError: An argument does not fit; nothing was started or written.
        UserError: The run cannot start, for example because the environment is unusable.
    """
    named = {
        "algorithm": algorithm, "stop_at.env_steps": env_steps, "rollout.workers": workers, "seed": seed,
        "environment.kwargs": env_kwargs, "runs_dir": runs_dir,
    }  # fmt: skip
    given = {field: value for field, value in named.items() if value is not None}
    if twice := sorted(given.keys() & fields.keys()):
        raise ConfigError(f"{', '.join(twice)}: given twice, by its short name and by the field's; leave one out")
    every: dict[str, Any] = {**given, **fields}
    given = {field: _path_of(value, field) if isinstance(value, type) else value for field, value in every.items()}
    thing = None
    folders = own_folders()
    extend_imports(folders)
    if isinstance(what, Config | Mapping | Path) or (isinstance(what, str) and names_config(what)):
        if config is not None:
            raise ConfigError(
                f"config={_shown(config)}: {_shown(what)} is a config already; give changes of it as keywords, or an "
                f"environment with config=…"
            )
        config = what
    else:
        kwargs = plain(given.get("environment.kwargs", {}), "env_kwargs")
        if not isinstance(kwargs, dict):
            raise ConfigError(f"env_kwargs: expected a dict of arguments, found {_shown(kwargs)}")
        section, thing = section_of(_known(what, runs_dir) if isinstance(what, str) else what, kwargs)
        given = {f"environment.{name}": value for name, value in {**section, "kwargs": kwargs}.items()} | given
    try:
        made = load_config(config, given)
    except ConfigError as error:
        if any(f"unknown key {name};" in f"{error};" for name in fields if "." not in name):
            raise ConfigError(f'{error}; write a dotted field as **{{"rollout.fragment_steps": 128}}') from None
        raise
    if callbacks:
        several = callbacks if isinstance(callbacks, Sequence) and not isinstance(callbacks, str) else [callbacks]
        writers = [*made.metrics.writers, *map(_writer, several)]
        made = made.replace("metrics.writers", writers)
    if thing is not None:
        made.environment.hold(thing)
    if isinstance(config, str | Path):
        folders = (*folders, str(config_file(config).resolve().parent))
    return Run.start(made, run_id, inline=inline, import_path=folders)


def _writer(callback: Any) -> dict[str, Any]:
    given = callback if isinstance(callback, Mapping) else {"path": callback}
    if isinstance(own := given.get("path"), Callback):
        raise ConfigError(
            f"callbacks: {type(own).__name__} is an instance, but the trainer makes one itself; give the class, with "
            f"arguments as {{'path': {type(own).__name__}, 'kwargs': {{…}}}}"
        )
    return {**given, "path": _path_of(own, "callbacks")}


def _path_of(thing: Any, field: str) -> str:
    """Returns `module:Class` for a class of a module."""
    path = thing if isinstance(thing, str) else import_path(thing)
    if path is None:
        name = getattr(thing, "__name__", _shown(thing))
        raise ConfigError(
            f"{field}: {name} cannot be imported by the run's other processes; give a class of a module, not of the "
            f"program itself or of a notebook's cell"
        )
    return path


def _known(name: str, runs_dir: str | Path | None) -> str:
    """Returns an environment's id that is known here, or that a worker's imports may register."""
    if name in gym.registry or ":" in name or re.search(r"[-_]v\d+$", name):
        return name
    if name.lower() in ALGORITHMS:
        raise ConfigError(
            f"{_shown(name)} is an algorithm; give the environment first: train('CartPole-v1', "
            f"algorithm={name.lower()!r})"
        )
    run_id = Path(name).name
    if (Path(runs_dir or "runs").expanduser() / run_id / CONFIG).is_file():
        raise ConfigError(
            f"{_shown(name)} is a run; Run.resume({run_id!r}) continues it, and initialize_from={run_id!r} starts "
            f"another run with its policies"
        )
    known = [*(preset.name for preset in list_presets()), *gym.registry]
    close = difflib.get_close_matches(name, known, n=1) or difflib.get_close_matches(name.lower(), known, n=1)
    module, _, function = name.rpartition(".")
    guess = f"{module}:{function}" if module else next(iter(close), None)
    hint = f"did you mean {guess}?" if guess else "`stagecoach presets` lists the presets"
    raise ConfigError(f"{_shown(name)} is not a preset, a config file or a registered environment; {hint}")


def _shown(value: Any) -> str:
    return printable(repr(value), 60)
