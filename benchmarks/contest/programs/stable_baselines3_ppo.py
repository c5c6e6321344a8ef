"""PPO of Stable-Baselines3, in the peer's own virtual environment. Settings: `threads`, `num_envs`, `seed`, and `ppo`,
the arguments of its PPO (a value ["linear", start] falls to 0 at the end of `total_env_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside, or has trained `total_env_steps`."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv

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
    environments = make_vec_env("CartPole-v1", settings["num_envs"], settings["seed"], vec_env_cls=DummyVecEnv)
    layers, activation = settings["hidden_sizes"], {"tanh": torch.nn.Tanh}[settings["activation"]]
    model = PPO(
        "MlpPolicy", environments, device="cpu", seed=settings["seed"], stats_window_size=WINDOW_EPISODES,
        policy_kwargs={"net_arch": {"pi": layers, "vf": layers}, "activation_fn": activation},
        **{name: _scheduled(value) for name, value in settings["ppo"].items()},
    )  # fmt: skip
    model.learn(settings["total_env_steps"], callback=Telling())


def _scheduled(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    start: float = value[1]
    falls: Callable[[float], float] = lambda remaining: remaining * start  # noqa: E731
    return falls


if __name__ == "__main__":
    train(*given())
