"""One run of Stable-Baselines3, evaluated as ours are: `python -m benchmarks.learning.peer GIVEN.json SHOWN.json`.
Comes in: `PeerSettings` with environment, seed and env steps. Goes out: [env steps, mean return] of each evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any


def train(given: dict[str, Any]) -> list[tuple[int, float]]:
    """Evaluates at the start, every `every` env steps, and at the end with `at_the_end` episodes."""
    import stable_baselines3
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

    shown: list[tuple[int, float]] = []

    def vector(num_envs: int, seed: int, **normalized: Any) -> Any:
        made = make_vec_env(given["environment"], num_envs, seed=seed, env_kwargs=given["kwargs"])
        return VecNormalize(made, **normalized) if given["normalize"] else made

    def evaluate(episodes: int) -> None:
        played = vector(min(episodes, 20), 1_000_000 * (len(shown) + 1) + given["seed"], training=False)
        if given["normalize"]:
            played.norm_reward = False
            sync_envs_normalization(environments, played)
        returns: Any = evaluate_policy(model, played, episodes, deterministic=True, return_episode_rewards=True)[0]
        played.close()
        shown.append((model.num_timesteps, fmean(returns)))

    class Evaluating(BaseCallback):
        """Before a rollout: all that came before it is learned."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= len(shown) * given["every"]:
                evaluate(given["episodes"])

        def _on_step(self) -> bool:
            return True

    torch.set_num_threads(1)
    environments = vector(given["num_envs"], given["seed"], gamma=given["arguments"].get("gamma", 0.99))
    policy_kwargs = dict(given["policy_kwargs"])
    if "activation_fn" in policy_kwargs:
        policy_kwargs["activation_fn"] = getattr(torch.nn, policy_kwargs["activation_fn"])
    model = getattr(stable_baselines3, given["algorithm"])(
        "MlpPolicy", environments, device="cpu", seed=given["seed"], policy_kwargs=policy_kwargs,
        **{name: _scheduled(value) for name, value in given["arguments"].items()},
    )  # fmt: skip
    model.learn(given["env_steps"], callback=Evaluating())
    evaluate(given["at_the_end"])
    return shown


def _scheduled(value: Any) -> Any:
    if isinstance(value, list) and value[0] == "linear":
        return lambda remaining: remaining * value[1]
    return value


if __name__ == "__main__":
    from stagecoach.shared.base.local_disk import replacing

    shown = train(json.loads(Path(sys.argv[1]).read_text()))
    with replacing(Path(sys.argv[2])) as file:
        file.write(json.dumps(shown).encode())
