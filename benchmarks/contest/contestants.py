"""Who takes part, and with which settings: the same task for all, and each one's own knobs, of which the best is taken.

What is common to a task: environment, algorithm, batch, passes, minibatches and layers, on the same two processor
cores. Observations and returns are not normalized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OURS, STABLE_BASELINES3, TORCHRL, RLLIB = "Stagecoach", "Stable-Baselines3", "TorchRL", "RLlib"
SETTINGS_AS_OURS = f"{STABLE_BASELINES3}, settings as ours"
WITHOUT_END = 10**9
_PROGRAMS = "benchmarks.contest.programs"
_RUNS = {
    STABLE_BASELINES3: (f"{_PROGRAMS}.stable_baselines3_runs", "stable_baselines3"),
    TORCHRL: (f"{_PROGRAMS}.torchrl_loops", "torchrl"),
    RLLIB: (f"{_PROGRAMS}.rllib_ppo", "rllib"),
    OURS: (f"{_PROGRAMS}.stagecoach_run", None),
}


@dataclass(frozen=True)
class Task:
    """A task that all contestants train, and its batch sizes."""

    name: str
    environment: str
    algorithm: str
    envs: int
    steps: int
    """Steps of each environment in a batch. SAC then takes one gradient step per transition."""
    minibatch: int
    layers: tuple[int, ...]
    epochs: int = 4
    native: bool = False
    """The environment's own vector form, not a list of plain ones."""

    @property
    def batch(self) -> int:
        """Transitions in it."""
        return self.envs * self.steps


CARTPOLE = Task("CartPole-v1, SyncVectorEnv", "CartPole-v1", "ppo", 64, 64, 1024, (64, 64))
NATIVE = Task("CartPole-v1, own vector form", "CartPole-v1", "ppo", 64, 64, 1024, (64, 64), native=True)
CHEETAH_PPO = Task("HalfCheetah-v5, PPO 64×64", "HalfCheetah-v5", "ppo", 8, 256, 256, (64, 64))
CHEETAH_SAC = Task("HalfCheetah-v5, SAC 256×256", "HalfCheetah-v5", "sac", 4, 8, 256, (256, 256), epochs=1)
IMAGES = Task("84×84×4 images, PPO", "images", "ppo", 8, 128, 256, ())
HEATUP, CAPACITY = 256, 100_000
"""SAC: env steps before the first gradient step, and transitions in its replay buffer."""


@dataclass(frozen=True)
class Contestant:
    """A library with one of its algorithms."""

    name: str
    library: str = OURS
    speed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Knobs → settings, all of the same task; the fastest is taken."""
    program: str = ""
    """The module that trains with it, if not its library's."""
    source: str = ""
    """Source of its settings, if they differ from the task's."""

    @property
    def module(self) -> str:
        """The module that trains with it."""
        return self.program or _RUNS[self.library][0]

    @property
    def peer(self) -> str | None:
        """Name of the peer whose virtual environment it needs; None for this one."""
        return _RUNS[self.library][1]


def contestants(task: Task) -> list[Contestant]:
    """All that can take the task, Stagecoach first."""
    lag, name = {"ppo": 1, "sac": 2}[task.algorithm], task.algorithm.upper()
    found = [Contestant(f"Stagecoach {name}, policy lag {lag}", speed=stagecoach(task, lag))]
    if task is CARTPOLE:
        found.append(Contestant("Stagecoach PPO, lockstep", speed=stagecoach(task, 0)))
    found.append(Contestant(f"Stable-Baselines3 {name}", STABLE_BASELINES3, stable_baselines3(task)))
    if not task.native:  # TorchRL refuses a vector that resets with the next step
        found.append(Contestant(f"TorchRL {name}", TORCHRL, torchrl(task)))
    if task.environment == "CartPole-v1":
        found.append(Contestant(f"RLlib {name}", RLLIB, rllib(task)))
    return found


def stagecoach(task: Task, lag: int) -> dict[str, dict[str, Any]]:
    """One worker or two; the trainer's threads; the learner compiled or not. Of checkpoints, and the evaluations that
    come with them, there is the first one only, since the others write none."""
    found = {}
    for workers, threads, compiled in ((1, 1, False), (2, 1, False), (2, 2, False), (1, 1, True), (2, 1, True)):
        environment: dict[str, Any] = {"id": task.environment, "num_envs": task.envs // workers}
        if task.environment == "images":
            environment["id"] = f"{_PROGRAMS}.images:make"
        if task.native:
            environment["vectorization"] = "native"
        policy: dict[str, Any] = {"hidden_sizes": list(task.layers), "activation": "tanh"}
        if task.algorithm == "ppo":
            algorithm: dict[str, Any] = {"name": "ppo", "epochs": task.epochs, "minibatch_size": task.minibatch}
            policy |= {"cnn": "nature", "share_encoder": True} if task.environment == "images" else {}
        else:
            algorithm = {"name": "sac", "minibatch_size": task.minibatch, "gradient_steps_per_env_step": 1.0,
                         "replay_buffer": {"kind": "uniform", "capacity": CAPACITY}}  # fmt: skip
            policy["activation"] = "relu"
        config: dict[str, Any] = {
            "environment": environment,
            "policies": {"default": policy},
            "algorithm": algorithm,
            "rollout": {
                "workers": workers, "fragment_steps": task.steps, "fragments_per_update": workers,
                "max_policy_lag": lag,
            },
            "trainer": {"device": "cpu", "torch_threads": threads, "compile": compiled},
            "evaluation": {"episodes": 1, "num_envs": 1},
            "checkpoint": {"every": "100000 updates"}, "stop_at": {"env_steps": WITHOUT_END},
        }  # fmt: skip
        if task.algorithm == "sac":
            config["heatup"] = f"{HEATUP} env_steps"
        name = f"{workers} worker{'s' * (workers > 1)}, {_threads(threads)}{', compiled' * compiled}"
        found[name] = {"config": config}
    return found


def stable_baselines3(task: Task) -> dict[str, dict[str, Any]]:
    """One process, as its docs advise for cheap environments, or one for each environment; PyTorch's threads."""
    if task.algorithm == "ppo":
        arguments: dict[str, Any] = {"n_steps": task.steps, "batch_size": task.minibatch, "n_epochs": task.epochs}
        network: dict[str, Any] = {"net_arch": {"pi": list(task.layers), "vf": list(task.layers)}}
        network["activation_fn"] = "Tanh"
    else:
        arguments = {"batch_size": task.minibatch, "buffer_size": CAPACITY, "learning_starts": HEATUP,
                     "train_freq": task.steps, "gradient_steps": -1}  # fmt: skip
        network = {"net_arch": list(task.layers)}
    images = task.environment == "images"
    common = {
        "algorithm": task.algorithm, "environment": task.environment, "policy": "CnnPolicy" if images else "MlpPolicy",
        "num_envs": task.envs, "total_env_steps": WITHOUT_END, "policy_kwargs": {} if images else network,
        "arguments": arguments,
    }  # fmt: skip
    vectors = ["native"] if task.native else ["dummy"] if task.envs > 8 else ["dummy", "subproc"]
    return {
        f"{vector} vector, {_threads(threads)}": {"vector": vector, "threads": threads, **common}
        for vector in vectors
        for threads in (1, 2)
    }


def torchrl(task: Task) -> dict[str, dict[str, Any]]:
    """Its collector in the learner's process or in two; PyTorch's threads; update and policy compiled or not."""
    common = {
        "algorithm": task.algorithm, "environment": task.environment, "num_envs": task.envs, "steps": task.steps,
        "layers": list(task.layers), "minibatch": task.minibatch, "epochs": task.epochs, "heatup": HEATUP,
        "capacity": CAPACITY, "gradient_steps_per_env_step": 1.0, "total_env_steps": WITHOUT_END, "arguments": {},
    }  # fmt: skip
    found = {}
    for collectors, threads, compiled in ((1, 1, False), (1, 2, False), (2, 2, False), (1, 1, True)):
        name = f"{collectors} collector{'s' * (collectors > 1)}, {_threads(threads)}{', compiled' * compiled}"
        found[name] = {"collectors": collectors, "threads": threads, "compile": compiled, **common}
    return found


def rllib(task: Task) -> dict[str, dict[str, Any]]:
    """Env runners in the driver's process or two of their own, as its docs have them for one machine."""
    found = {}
    for runners in (0, 2):
        found[f"{runners} env runners"] = {
            "environment": task.environment,
            "processes": runners + 1,
            "env_runners": {
                "num_env_runners": runners, "num_envs_per_env_runner": task.envs // max(1, runners),
                "rollout_fragment_length": task.steps,
                "gym_env_vectorize_mode": "vector_entry_point" if task.native else "sync",
            },
            "training": {
                "train_batch_size_per_learner": task.batch, "minibatch_size": task.minibatch,
                "num_epochs": task.epochs,
            },
            "model": {"fcnet_hiddens": list(task.layers), "fcnet_activation": "tanh", "vf_share_layers": False},
        }  # fmt: skip
    return found


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"
