"""PPO, APPO or IMPALA of RLlib, on its new API stack, in the peer's own virtual environment. Settings: `algorithm`
(ppo, appo, impala), `env_runners`, `training`, `learners` and `reporting`, the arguments of its config's methods of
these names, `model`, those of its DefaultModelConfig, `processes` (for how many Ray is to have
room), and `seed`.

The env steps are those acted, as RLlib reports them: where its learner falls behind, some may never be learned from.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside."""
    import ray
    from ray.rllib.algorithms.appo import APPOConfig
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.ppo import PPOConfig

    cores = len(os.sched_getaffinity(0))
    ray.init(address="local", num_cpus=max(cores, settings["processes"]), include_dashboard=False, log_to_driver=False)
    config: Any = {"ppo": PPOConfig, "appo": APPOConfig, "impala": IMPALAConfig}[settings["algorithm"]]()
    algorithm = _configured(config, settings).build_algo()
    while True:
        acted = algorithm.train().get("env_runners", {})  # empty until its first episodes have come in
        if "num_env_steps_sampled_lifetime" in acted:
            env_steps, episodes = acted["num_env_steps_sampled_lifetime"], acted.get("num_episodes_lifetime", 0)
            tell(int(env_steps), int(episodes), acted.get("episode_return_mean"))


def _configured(config: Any, settings: dict[str, Any]) -> Any:
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    return (
        config.environment("CartPole-v1")
        .env_runners(**settings["env_runners"])
        .training(**settings["training"])
        .learners(**settings["learners"])
        .rl_module(model_config=DefaultModelConfig(**settings["model"]))
        .reporting(metrics_num_episodes_for_smoothing=WINDOW_EPISODES, **settings["reporting"])
        .debugging(seed=settings["seed"], log_level="ERROR")
    )


if __name__ == "__main__":
    train(*given())
