"""Episodes of Gymnasium's and PettingZoo's environments as MP4 files."""

import glob
from pathlib import Path
from typing import Any

import gymnasium as gym

_FRAMES_PER_SECOND = 10


def recordings(folder: Path, prefix: str) -> list[Path]:
    """Existing files of episodes, unordered."""
    return list(folder.glob(f"{glob.escape(prefix)}-episode-*.mp4"))


def write_video(env: Any, frames: list[Any], path: Path) -> None:
    """Writes the frames, as fast as the environment's metadata say."""
    from moviepy import ImageSequenceClip  # of the extra `video`

    rate = (getattr(env, "metadata", None) or {}).get("render_fps", _FRAMES_PER_SECOND)
    path.parent.mkdir(parents=True, exist_ok=True)
    ImageSequenceClip(frames, fps=rate).write_videofile(str(path), logger=None)


def recorded(env: Any, folder: str, prefix: str) -> Any:
    """Wraps `env` (render_mode=rgb_array) to write `PREFIX-episode-N.mp4` for each episode.

    N counts existing files, since the environment may be rebuilt for each episode (`environment.parameters_by`).
    """
    frames = list[Any]()

    def write() -> None:
        if len(frames) > 1:
            path = Path(folder) / f"{prefix}-episode-{len(recordings(Path(folder), prefix))}.mp4"
            write_video(env, frames, path)
        frames.clear()

    class Recorded(_wrapper_for(env)):  # type: ignore[misc]
        def reset(self, *arguments: Any, **options: Any) -> Any:
            write()
            told = super().reset(*arguments, **options)
            frames.append(self.render())
            return told

        def step(self, action: Any) -> Any:
            told = super().step(action)
            frames.append(self.render())
            return told

        def close(self) -> None:
            write()
            super().close()

    return Recorded(env)


def _wrapper_for(env: Any) -> Any:
    if isinstance(env, gym.Env):
        return gym.Wrapper
    from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper  # of the extra `pettingzoo`

    return BaseWrapper if hasattr(env, "agent_iter") else BaseParallelWrapper
