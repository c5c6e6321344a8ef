"""Lookup of checkpoints by run, name, folder or URL, and their evaluation.

A config from another machine, or from an exported checkpoint, names code to import; whoever could write there could
name any function of any module. Such code runs only with consent (`require_trust`).
"""

import os
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from stagecoach.coordinator.catalog.game_video import recorded, recordings
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.rollout_worker.environments.description import check_recorded, describe_environment
from stagecoach.rollout_worker.environments.factory import evaluation_environment, make_environment
from stagecoach.rollout_worker.environments.objects import with_object
from stagecoach.rollout_worker.evaluator import CONFIRMING, evaluation_seed, scores_of
from stagecoach.rollout_worker.playing import evaluate_policies
from stagecoach.shared.base.errors import (
    CheckpointNotFound,
    EnvironmentUnusable,
    ObjectMissing,
    RunNotFound,
    UserError,
    headline,
)
from stagecoach.shared.base.user_code import extend_imports, install, with_extra
from stagecoach.shared.config.environments.environment import OBJECT, WrapperConfig
from stagecoach.shared.config.loading import load_config, parse_config, parse_yaml
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.config.sections import EvaluationConfig
from stagecoach.shared.config.services import StoreConfig
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.league.table import kind_of
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import import_policies
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.runtime.launch import RESOLVED_CONFIG
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS, CONFIG, MANIFEST, MARKS, Checkpoint, CheckpointStore
from stagecoach.shared.storage.object_store import FileStore, access_at, open_folder

POLICY_OBJECT = "policy.safetensors"
_PLAYED = {"environment": True, "evaluation": True, "policies": True, "algorithm": True, "league": {"fixed": True}}
_GIVEN = "environment.kwargs.", "evaluation.kwargs.", "environment.parameters.", "evaluation.parameters."
_PLAYER = re.compile(r"league\.fixed\.[^.]+\.source")
_EXPECTED = "a run's id, RUN/NAME, s3://bucket/prefix/RUN, or a checkpoint's or a run's folder (also as file:///…)"


@dataclass(frozen=True)
class Found:
    config: Config
    store: CheckpointStore
    name: str
    import_path: tuple[str, ...]
    """Folders of the run's own modules."""
    made_here: bool
    """True if the config was created on this machine; else its code needs consent (`require_trust`)."""


def find_checkpoint(target: str, runs_dir: Path, access: StoreConfig | None = None) -> Found:
    """Finds a checkpoint: of a run (its promoted, else best, else newest one), `RUN/NAME`, or in a folder.

    NAME may be `best`, `latest`, `final` or `promoted`. A folder is a checkpoint's or a run's, exported or in a file
    store, or `s3://bucket/prefix/RUN[/NAME]`, reached as `access` says. Raises `RunNotFound` or `CheckpointNotFound`.
    """
    whole, sign, policy_id = target.partition("#")
    if sign and not Path(target).exists():
        raise CheckpointNotFound(
            f"{target}: a checkpoint is played with all its policies, and each has its own score; leave "
            f"#{policy_id} out: {whole}"
        )
    scheme, separator, rest = target.partition("://")
    if scheme == "s3" and separator:
        return _in_bucket(target.rstrip("/"), access)
    if separator and scheme != "file":
        raise CheckpointNotFound(f"cannot read checkpoints from {target}; expected {_EXPECTED}")
    folder = Path(rest if separator else target).expanduser().resolve()
    if (folder / MANIFEST).is_file():  # of an upload
        folder = folder.parent
    if any(folder.glob(f"*/{MANIFEST}")):
        return _in_folder(folder.parent.parent, folder.name)
    if (folder / CHECKPOINTS).is_dir():
        return _in_folder(folder)
    if (folder / RESOLVED_CONFIG).is_file():  # of a run of this machine
        target, runs_dir = folder.name, folder.parent
    elif folder.is_dir() and not (runs_dir.expanduser() / target.partition("/")[0] / RESOLVED_CONFIG).is_file():
        raise CheckpointNotFound(f"{folder} holds no checkpoint ({MANIFEST} is missing); expected {_EXPECTED}")
    elif separator or target.startswith(("/", ".", "~")):
        raise CheckpointNotFound(f"folder {folder} does not exist; expected {_EXPECTED}")
    run_id, _, name = target.partition("/")
    run = RunFolder.find(run_id, runs_dir)
    config = run.config()
    store = run.checkpoint_store(config)
    return Found(config, store, store.preferred(name), run.import_path(), run.made_here)


def _in_bucket(target: str, access: StoreConfig | None) -> Found:
    folder, _, last = target.rpartition("/")
    named = last in MARKS or checkpoint_version(last) is not None
    location = folder.removesuffix(f"/{CHECKPOINTS.rstrip('/')}") if named else target
    store, run_id = open_folder(location, access=access)
    store.check()
    try:
        text = store.get(CONFIG).decode(errors="replace")
    except ObjectMissing:
        raise CheckpointNotFound(f"no run is at {location}: {CONFIG} is missing there; expected {_EXPECTED}") from None
    found = CheckpointStore(store, run_id)
    config = parse_config(parse_yaml(text, f"{location}/{CONFIG}"))
    return Found(config, found, found.preferred(last if named else None), (), made_here=False)


def _in_folder(run_folder: Path, name: str | None = None) -> Found:
    if not (path := run_folder / CONFIG).is_file():
        raise CheckpointNotFound(f"{run_folder} is not a run's folder: {path}, which names the environment, is missing")
    config = load_config(path, environ={})
    store = CheckpointStore(FileStore(run_folder.parent, run_folder.name), run_folder.name)
    return Found(config, store, name or store.preferred(), (), made_here=False)


def named_code(config: Config) -> dict[str, str]:
    """Config field → `module:name`, for all code that a config imports.

    That is every text with a colon in the sections that define play and learning, except arguments of environments and
    wrappers, and a league's players that are not scripted.
    """
    data = config.model_dump(mode="json", include=cast(Any, _PLAYED))
    data["environment"]["id"] = data["environment"]["id"].removeprefix("envpool:").removeprefix(OBJECT)
    fields = {field: value for field, value in leaves(data).items() if not field.startswith(_GIVEN)}

    def names_code(field: str, text: str) -> bool:
        return kind_of(text) == "function" if _PLAYER.fullmatch(field) else ":" in text

    found = {field: [text for text in _texts(value) if names_code(field, text)] for field, value in fields.items()}
    return {field: ", ".join(paths) for field, paths in found.items() if paths}


def _texts(value: Any) -> Iterator[str]:
    """Yields the texts of a field, also from a list of sections."""
    if isinstance(value, str):
        yield value
    for item in value if isinstance(value, list) else ():
        yield from _texts(item.get("path") if isinstance(item, dict) else item)


def require_trust(config: Config, made_here: bool, trusted: bool, where: str) -> None:
    """Raises `UserError` if a config from another machine names code to run."""
    named = named_code(config)
    if named and not made_here and not trusted:
        fields = ", ".join(f"{field}={path}" for field, path in named.items())
        raise UserError(
            f"the config of {where} comes from an exported folder or another machine, and playing it would import "
            f"and run {fields}; if you trust it, repeat the command with --trust-config"
        )


@dataclass(frozen=True)
class Evaluation:
    checkpoint: str
    scores: dict[str, Any]
    videos: tuple[Path, ...] = ()


def evaluate(
    target: str, runs_dir: Path, episodes: int | None = None, video: str | Path | None = None, *,
    show: bool = False, stochastic: bool = False, trust_config: bool = False, endpoint_url: str | None = None,
    environment: Any = None,
) -> Evaluation:  # fmt: skip
    """Plays `target`: a run (its promoted checkpoint, else its best, else its newest), `RUN/NAME`, or a folder.

    The starts are those that confirmed the best checkpoint, so its score is reproduced.

    Args:
        video: folder for an MP4 of each episode.
        show: renders for people.
        stochastic: draws actions as in training.
        trust_config: lets a config from another machine name code to import; else that raises `UserError`.
        environment: the object of a run whose environment is one.
    """
    if episodes is not None and episodes < 1:
        raise UserError(f"episodes={episodes}: expected at least 1")
    video = None if video is None else Path(video)
    found = find_checkpoint(target, runs_dir, access_at(endpoint_url))
    config, name = with_object(found.config, environment), found.name
    require_trust(config, found.made_here, trust_config, target)
    extend_imports((os.getcwd(), *found.import_path))
    import_policies(config.policies, config.algorithm)
    checkpoint = found.store.load(name, only=POLICY_OBJECT)
    policies = policies_of(checkpoint)
    description = describe_environment(config)
    changes: dict[str, Any] = {"episodes": episodes or config.evaluation.episodes or EvaluationConfig().episodes}
    changes |= {"env_steps": None} if episodes else {}
    changes |= {"greedy": False} if stochastic else {}
    if video is not None:
        require_recorder()
        recorder = WrapperConfig(path=f"{recorded.__module__}:recorded", kwargs={"folder": str(video), "prefix": name})
        changes |= _drawing(config, "rgb_array", "--video")
        changes |= {"wrappers": (recorder, *evaluation_environment(config).wrappers)}
    elif show:
        changes |= _drawing(config, "human", "play")
    with suppress(RunNotFound):  # an export without the description
        check_recorded(description, found.store.description())
    for former in () if video is None else recordings(video, name):  # only once it can draw
        former.unlink()
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changes)})
    seed = evaluation_seed(config, name, CONFIRMING)
    scores = scores_of(config, evaluate_policies(config, description, policies, seed))
    if video is None:
        return Evaluation(name, scores)
    *files, begun = (video / f"{name}-episode-{index}.mp4" for index in range(int(scores["episodes"]) + 1))
    begun.unlink(missing_ok=True)  # one episode started after the last that counts
    return Evaluation(name, scores, tuple(path for path in files if path.exists()))


def policies_of(checkpoint: Checkpoint) -> dict[str, Policy]:
    """Returns the policies of a checkpoint, of which these objects at least were loaded, by id."""
    objects = checkpoint.objects.items()
    return {key.partition("/")[0]: decode_policy(data)[0] for key, data in objects if key.endswith(POLICY_OBJECT)}


def not_drawing(made: Any, mode: str) -> str | None:
    """Reason that the environment cannot be rendered; None if it can."""
    named = (getattr(made, "metadata", None) or {}).get("render_modes")
    if named and mode not in named:
        return f"its metadata names only render_modes={list(named)}"
    if (found := getattr(made, "render_mode", None)) != mode:
        return f"its render_mode is {found!r}, not the argument; set self.render_mode to the argument"
    if mode == "rgb_array":
        made.reset(seed=0)
        frame = made.render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            shape = f" of shape {frame.shape}" if isinstance(frame, np.ndarray) else ""
            return f"render() returned {type(frame).__name__}{shape}, expected an array of height × width × 3"
    return None


def require_recorder() -> None:
    """Raises `EnvironmentUnusable` without moviepy, which writes the videos."""
    try:
        import moviepy  # noqa: F401
    except ImportError:
        raise EnvironmentUnusable(f"--video needs moviepy: {install('video')}") from None


def _drawing(config: Config, mode: str, command: str) -> dict[str, Any]:
    """Evaluation settings for one environment that renders; raises `EnvironmentUnusable` if it cannot."""
    kwargs = {**config.evaluation.kwargs, "render_mode": mode}
    try:
        with closing(make_environment(evaluation_environment(config), **kwargs)) as made:
            problem = not_drawing(made, mode)
    except Exception as error:
        problem = with_extra(headline(error))
    if problem is not None:
        raise EnvironmentUnusable(f"{command} needs an environment that draws with render_mode={mode!r}: {problem}")
    return {"num_envs": 1, "kwargs": kwargs}
