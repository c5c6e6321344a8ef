"""RLlib's example `env_connecting_to_rllib_w_tcp_client.py` and its client, with notes of what is taken and learned.

`train` and `play` run in the peer's own virtual environment; both unpickle classes of this module.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.external.env_runner_server_for_external_inference import EnvRunnerServerForExternalInference
from ray.rllib.env.external.rllink import RLlink, get_rllink_message, send_rllink_message
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from benchmarks.contest.programs.numbered_steps import NumberedSteps, number_of

BATCH = 256


def _note(**fields: Any) -> None:
    with (Path(os.environ["NOTES"]) / "events.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


class Server(EnvRunnerServerForExternalInference):  # type: ignore[misc]
    """Notes its process."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if given.get("worker_index"):
            _note(server=os.getpid())


class Learner(PPOTorchLearner):  # type: ignore[misc]
    """Notes the steps of each update, and its process."""

    def update(self, *given: Any, **fields: Any) -> Any:
        """Updates."""
        data = fields["training_data"]
        episodes = data.episodes or [its for part in ray.get(data.episodes_refs) for its in part]
        steps = [number_of(seen) for its in episodes for seen in its.get_observations(slice(0, len(its)))]
        _note(update=steps, trainer=os.getpid())
        return super().update(*given, **fields)


class Notes(RLlibCallback):  # type: ignore[misc]
    """Notes iterations that are complete, and those that a checkpoint begins with."""

    def on_train_result(self, *, result: dict[str, Any], **_: Any) -> None:
        """Notes it."""
        _note(result=result["training_iteration"])

    def on_checkpoint_loaded(self, *, algorithm: Any, **_: Any) -> None:
        """Notes it."""
        _note(loaded=algorithm.iteration)


def train(folder: str, port: int) -> None:
    """Trains by Ray Tune, which starts a trial that died again from its newest checkpoint; one for each iteration."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=2 * 10**8)
    signal.signal(signal.SIGTERM, lambda *_: (ray.shutdown(), os._exit(0)))
    config: Any = PPOConfig()
    box = gym.spaces.Box(float("-inf"), float("inf"), (4,), np.float32)
    # The first remote server listens at the port after this one.
    config.environment(
        observation_space=box, action_space=gym.spaces.Discrete(2), env_config={"port": port - 1}
    )  # fmt: skip
    config.env_runners(env_runner_cls=Server, num_env_runners=1)
    config.training(train_batch_size_per_learner=BATCH, minibatch_size=64, num_epochs=10, learner_class=Learner)
    config.callbacks(Notes)
    run = tune.RunConfig(
        storage_path=folder, name="run", failure_config=tune.FailureConfig(max_failures=-1),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=2),
    )  # fmt: skip
    tune.Tuner("PPO", param_space=config, run_config=run).fit()


def play(folder: str, port: int) -> None:
    """Plays as the example's client does, until the connection ends."""
    while True:
        link = socket.socket()
        try:
            link.connect(("localhost", port))
            break
        except ConnectionRefusedError:
            time.sleep(0.2)

    def ask(kind: Any, **fields: Any) -> dict[str, Any]:
        send_rllink_message(link, {"type": kind.name} | fields)
        body: dict[str, Any] = get_rllink_message(link)[1]
        return body

    ask(RLlink.PING)
    module = pickle.loads(ask(RLlink.GET_CONFIG)["config"]).get_rl_module_spec().build()  # noqa: S301
    module.set_state(ask(RLlink.GET_STATE)["state"]["rl_module"])
    world, random = NumberedSteps(Path(folder)), np.random.default_rng()
    seen = world.reset()
    episodes: list[Any] = [SingleAgentEpisode(observations=[np.array(seen, np.float32)])]
    while True:
        with torch.no_grad():
            logits = module.forward_exploration({"obs": torch.tensor([seen])})["action_dist_inputs"][0].numpy()
        chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        action = int(random.choice(2, p=chances / chances.sum()))
        extra = {"action_dist_inputs": logits, "action_logp": float(np.log(chances[action]))}
        seen, over = world.step()
        observation = np.array(seen, np.float32)
        episodes[-1].add_env_step(observation, action, 1.0, terminated=over, extra_model_outputs=extra)
        if sum(map(len, episodes)) == BATCH:
            sent = [its.get_state() for its in episodes]
            answer = ask(RLlink.EPISODES_AND_GET_STATE, episodes=sent, timesteps=BATCH)
            module.set_state(answer["state"]["rl_module"])
            episodes = [] if over else [episodes[-1].cut()]
        if over:
            seen = world.reset()
            episodes.append(SingleAgentEpisode(observations=[np.array(seen, np.float32)]))
