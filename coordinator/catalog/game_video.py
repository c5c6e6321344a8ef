"""Episodes of PettingZoo environments as MP4 files, as `gymnasium.wrappers.RecordVideo` makes them of its own."""

from pathlib import Path
from typing import Any

_FRAMES_PER_SECOND = 10


def recorded(env: Any, folder: str, prefix: str) -> Any:
    """`env`, which draws with render_mode=rgb_array, with a file `PREFIX-episode-N.mp4` for each episode."""
    from moviepy import ImageSequenceClip  # of the extra `video`
    from pettingzoo.utils.wrappers import BaseParallelWrapper, BaseWrapper  # of the extra `pettingzoo`

    base: Any = BaseWrapper if hasattr(env, "agent_iter") else BaseParallelWrapper
    rate = (getattr(env, "metadata", None) or {}).get("render_fps", _FRAMES_PER_SECOND)
    frames, files = list[Any](), list[Path]()

    def write() -> None:
        if len(frames) > 1:
            files.append(Path(folder) / f"{prefix}-episode-{len(files)}.mp4")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            ImageSequenceClip(frames, fps=rate).write_videofile(str(files[-1]), logger=None)
        frames.clear()

    class Recorded(base):  # type: ignore[misc]
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
