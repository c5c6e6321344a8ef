"""PPO or SAC of Stable-Baselines3, in the peer's own virtual environment. Settings: `algorithm` (ppo, sac),
`environment`, `policy`, `threads`, `num_envs`, `vector` (dummy, subproc, native), `seed`, `total_env_steps`, `window`,
`policy_kwargs`, and `arguments`, those of its class (a value ["linear", start] falls to 0 at the end). With `keep` (a
folder and how many env steps apart) it writes checkpoints with its CheckpointCallback and continues from the newest
one that is there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contest.programs.images import environment
from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside, or has trained `total_env_steps`."""
    import torch
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback

    class Telling(BaseCallback):
        """Tells at the beginning of each rollout: what came before it is learned."""

        episodes = 0

        def _on_rollout_start(self) -> None:
            returns = [episode["r"] for episode in self.model.ep_info_buffer or ()]
            tell(self.num_timesteps, self.episodes, sum(returns) / len(returns) if returns else None)

        def _on_step(self) -> bool:
            self.episodes += int(self.locals["dones"].sum())
            return True

    torch.set_num_threads(settings["threads"])
    environments = _environments(settings)
    algorithm: Any = {"ppo": PPO, "sac": SAC}[settings["algorithm"]]
    callbacks: list[BaseCallback] = [Telling()]
    keep = settings.get("keep")
    newest = _newest(Path(keep["folder"])) if keep else None
    if keep:
        calls = keep["every_env_steps"] // settings["num_envs"]
        callbacks.append(CheckpointCallback(calls, keep["folder"], save_replay_buffer=settings["algorithm"] == "sac"))
    if newest is not None:
        model = algorithm.load(newest, environments, device="cpu")
    else:
        policy_kwargs = dict(settings["policy_kwargs"])
        if "activation_fn" in policy_kwargs:
            policy_kwargs["activation_fn"] = getattr(torch.nn, policy_kwargs["activation_fn"])
        model = algorithm(
            settings["policy"], environments, device="cpu", seed=settings["seed"], policy_kwargs=policy_kwargs,
            stats_window_size=settings.get("window", WINDOW_EPISODES),
            **{name: _scheduled(value) for name, value in settings["arguments"].items()},
        )  # fmt: skip
    left = settings["total_env_steps"] - model.num_timesteps
    model.learn(left, callback=callbacks, reset_num_timesteps=newest is None)
    tell.end(model.num_timesteps, [value.numpy() for value in model.policy.state_dict().values()])


def _environments(settings: dict[str, Any]) -> Any:
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    if settings["vector"] == "native":
        return _native(settings)
    made: Any = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[settings["vector"]]
    name = settings["environment"]
    given = partial(environment, name) if name == "images" else name
    return make_vec_env(given, settings["num_envs"], settings["seed"], vec_env_cls=made)


def _native(settings: dict[str, Any]) -> Any:
    """The environment's own vector form as one of SB3's: what a user of SB3 has to write. An episode's end is followed
    by a step that resets, as gymnasium does it, and is trained on as if it were one of the next episode."""
    import gymnasium as gym
    from stable_baselines3.common.vec_env import VecEnv

    class Native(VecEnv):
        def __init__(self) -> None:
            self.vector = gym.make_vec(
                settings["environment"], settings["num_envs"], vectorization_mode="vector_entry_point"
            )
            super().__init__(settings["num_envs"], self.vector.single_observation_space,
                             self.vector.single_action_space)  # fmt: skip
            self.acted: Any = None
            self.infos: list[dict[str, Any]] = [{} for _ in range(settings["num_envs"])]

        def reset(self) -> Any:
            return self.vector.reset(seed=settings["seed"])[0].copy()

        def step_async(self, actions: Any) -> None:
            self.acted = actions

        def step_wait(self) -> Any:
            seen, reward, terminated, truncated, _ = self.vector.step(self.acted)
            return seen.copy(), reward.copy(), terminated | truncated, self.infos

        def close(self) -> None:
            self.vector.close()

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [getattr(self.vector, attr_name, None)] * self.num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            setattr(self.vector, attr_name, value)

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            return []

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

    return Native()


def _newest(folder: Path) -> Path | None:
    """A file that was cut short is passed over: its callback writes where it will be read from."""
    import zipfile

    steps = {path: int(found[1]) for path in folder.glob("*.zip") if (found := re.search(r"_(\d+)_steps", path.name))}
    whole = [path for path in steps if zipfile.is_zipfile(path)]
    return max(whole, key=lambda path: steps[path]) if whole else None


def _scheduled(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    start: float = value[1]
    falls: Callable[[float], float] = lambda remaining: remaining * start  # noqa: E731
    return falls


if __name__ == "__main__":
    train(*given())
