"""`stagecoach evaluate`: plays a checkpoint of a run, or one in a folder, and answers its scores."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.find import find_checkpoint
from coordinator.trust import require_trust
from rollout_worker.evaluation import CONFIRMING, evaluate_policies, evaluation_seed
from rollout_worker.making import describe_environment, evaluation_environment, make
from shared.config import Config, WrapperConfig
from shared.errors import EnvironmentUnusable, headline
from shared.extras import install, with_extra
from shared.policies.codec import decode_policy
from shared.user_code import extend_imports


@dataclass(frozen=True)
class Evaluation:
    """What was played, and how it went."""

    checkpoint: str
    scores: dict[str, Any]
    videos: tuple[Path, ...] = ()


def evaluate(
    target: str,
    runs_dir: Path,
    episodes: int | None = None,
    video: Path | None = None,
    *,
    show: bool = False,
    stochastic: bool = False,
    trust_config: bool = False,
) -> Evaluation:
    """Plays `target`: a run (its promoted checkpoint, else its best, else its newest), `RUN/NAME`, or a folder.

    The starts are those by which the best checkpoint was confirmed: its score comes out again, and any other is played
    from starts that its own score does not come from.

    `show` renders for people, as fast as the environment does that; `stochastic` draws actions as in training.

    With `video`, each episode is recorded there as MP4. With `trust_config`, a config that was not made on this machine
    may name code to import. Raises `UserError` where one does without, `CheckpointNotFound`, `CheckpointDamaged`,
    `EnvironmentUnusable`.
    """
    found = find_checkpoint(target, runs_dir)
    config, name = found.config, found.name
    require_trust(config, found.made_here, trust_config, target)
    extend_imports((os.getcwd(), *found.import_path))
    config.algorithm.resolved()
    checkpoint = found.store.load(name, only="policy.safetensors")
    policies = {key.partition("/")[0]: decode_policy(data)[0] for key, data in checkpoint.objects.items()}
    description = describe_environment(config)
    if stochastic:
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"greedy": False})})
    if video is not None:
        _require_recorder()
        config = _with_video(_rendered(config, "rgb_array", "--video"), video, name)
    elif show:
        config = _rendered(config, "human", "play")
    seed = evaluation_seed(config, name, CONFIRMING)
    scores = evaluate_policies(config, description, policies, seed, episodes).as_dict()
    videos = _videos(video, name, int(scores["episodes"])) if video is not None else ()
    return Evaluation(name, scores, videos)


def _not_drawing(made: Any, mode: str) -> str | None:
    """Why nothing could be seen of it; None where something can."""
    named = (getattr(made, "metadata", None) or {}).get("render_modes")
    if named and mode not in named:
        return f"its metadata names only render_modes={list(named)}"
    if (found := getattr(made, "render_mode", None)) != mode:
        return f"it has render_mode={found!r} after it was made with that; keep the argument as self.render_mode"
    if mode == "rgb_array":
        made.reset(seed=0)
        frame = made.render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            shape = f" of shape {frame.shape}" if isinstance(frame, np.ndarray) else ""
            return f"render() returned {type(frame).__name__}{shape}, expected an array of height × width × 3"
    return None


def _videos(folder: Path, name: str, episodes: int) -> tuple[Path, ...]:
    """The recordings of the episodes that count; the environment began one more after the last."""
    (folder / f"{name}-episode-{episodes}.mp4").unlink(missing_ok=True)
    return tuple(path for index in range(episodes) if (path := folder / f"{name}-episode-{index}.mp4").exists())


def _require_recorder() -> None:
    """Gymnasium's recorder needs it, and says so only after the first episode."""
    try:
        import moviepy  # noqa: F401
    except ImportError:
        raise EnvironmentUnusable(f"--video needs moviepy: {install('video')}") from None


def _with_video(config: Config, folder: Path, name: str) -> Config:
    """Every episode recorded."""
    recorder = WrapperConfig(
        path="gymnasium.wrappers:RecordVideo",
        kwargs={
            "video_folder": str(folder),
            "episode_trigger": lambda _: True,
            "name_prefix": name,
            "disable_logger": True,
        },
    )
    wrappers = (recorder, *evaluation_environment(config).wrappers)
    evaluation = config.evaluation.model_copy(update={"wrappers": wrappers})
    return config.model_copy(update={"evaluation": evaluation})


def _rendered(config: Config, mode: str, command: str) -> Config:
    """One environment at a time, which draws what happens; raises `EnvironmentUnusable` where it cannot."""
    name, kwargs = config.environment.id, {**config.evaluation.kwargs, "render_mode": mode}
    if mode == "rgb_array" and config.environment.api == "pettingzoo":
        raise EnvironmentUnusable(
            f"{command} records Gymnasium environments only, and {name} is a PettingZoo one; `stagecoach play` shows it"
        )
    made = None
    try:
        made = make(evaluation_environment(config), **kwargs)
        problem = _not_drawing(made, mode)
    except Exception as error:
        problem = with_extra(headline(error))
    finally:
        if made is not None:
            made.close()
    if problem is not None:
        raise EnvironmentUnusable(f"{command} needs an environment that draws with render_mode={mode!r}: {problem}")
    evaluation = config.evaluation.model_copy(update={"num_envs": 1, "kwargs": kwargs})
    return config.model_copy(update={"evaluation": evaluation})
