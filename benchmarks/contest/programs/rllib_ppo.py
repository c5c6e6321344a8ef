"""PPO of RLlib, on its new API stack, in the peer's own virtual environment. Settings: `environment`, `env_runners` and
`training`, the arguments of its config's methods of these names, `model`, those of its DefaultModelConfig, `processes`
(for how many Ray is to have room), `window`, and `seed`.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    cores = len(os.sched_getaffinity(0))
    ray.init(address="local", num_cpus=max(cores, settings["processes"]), include_dashboard=False, log_to_driver=False)
    window = settings.get("window", WINDOW_EPISODES)
    config: Any = PPOConfig().environment(settings["environment"])
    algorithm = (
        config.env_runners(**settings["env_runners"])
        .training(**settings["training"])
        .learners(num_learners=0)
        .rl_module(model_config=DefaultModelConfig(**settings["model"]))
        .reporting(metrics_num_episodes_for_smoothing=window, min_time_s_per_iteration=0)
        .debugging(seed=settings["seed"], log_level="ERROR")
        .build_algo()
    )
    while True:
        acted = algorithm.train().get("env_runners", {})  # empty until its first episodes have come in
        if "num_env_steps_sampled_lifetime" in acted:
            env_steps, episodes = acted["num_env_steps_sampled_lifetime"], acted.get("num_episodes_lifetime", 0)
            tell(int(env_steps), int(episodes), acted.get("episode_return_mean"))


if __name__ == "__main__":
    train(*given())
