"""What `end_to_end` trains: an algorithm, an environment, and settings under which acting and learning cost alike.

All have a learning rate of next to nothing. A gradient step costs what it always does, but the policy stays what it
was, and so episodes are equally long (and resets equally frequent) for acting alone, learning alone and both together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config

_LEARNING_RATE = 1e-12
_CARTPOLE = {"id": "CartPole-v1", "num_envs": 64}
_PENDULUM = {"id": "Pendulum-v1", "num_envs": 64}
_IMAGES = {
    "id": "benchmarks.suite.environments:moving_square",
    "wrappers": [{"path": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 4}}],
    "num_envs": 16,
}
_MLP = {"hidden_sizes": [64, 64]}
_CNN = {"cnn": "nature", "hidden_sizes": [], "share_encoder": True}
_GREEDY = {"kind": "epsilon_greedy", "epsilon": 0.1}


@dataclass(frozen=True)
class Case:
    """One line of the benchmark."""

    name: str
    config: Config

    @property
    def overlaps(self) -> bool:
        """Whether workers may act ahead of the learner."""
        return self.config.rollout.max_policy_lag > 0

    @property
    def memory(self) -> int:
        """Transitions of a full replay buffer; 0 where there is none."""
        memory = self.config.algorithm.replay
        return 0 if memory is None else memory.capacity

    @property
    def settings(self) -> dict[str, Any]:
        """What was chosen here; all else is as by default."""
        sections = ("environment", "policies", "algorithm", "rollout", "checkpoint")
        return self.config.model_dump(mode="json", include=set(sections), exclude_unset=True)


def cases() -> list[Case]:
    """In the order in which they are measured."""
    clipped = {"epochs": 4, "minibatch_size": 512}
    vectors = {"fragment_steps": 64, "fragments_per_update": 4}
    images = {"fragment_steps": 16, "fragments_per_update": 2}
    return [
        _case("vectors: PPO", _CARTPOLE, _MLP, {"name": "ppo", **clipped}, vectors),
        _case("lockstep: PPO", _CARTPOLE, _MLP, {"name": "ppo", **clipped}, vectors | {"max_policy_lag": 0}),
        _case("vectors: APPO", _CARTPOLE, _MLP, {"name": "appo", **clipped}, vectors),
        _case("vectors: DQN", _CARTPOLE, _MLP, _dqn(1 / 64, 128, 50_000), {"fragment_steps": 32}),
        _case("vectors: SAC", _PENDULUM, _MLP | {"activation": "relu"}, _sac(), {"fragment_steps": 32}),
        _case("images: PPO", _IMAGES, _CNN, {"name": "ppo", "epochs": 1, "minibatch_size": 128}, images),
        _case("images: DQN", _IMAGES, _CNN, _dqn(1 / 64, 32, 4_096), {"fragment_steps": 16}),
    ]


def _dqn(ratio: float, minibatch_size: int, capacity: int) -> dict[str, Any]:
    return {
        "name": "dqn", "gradient_steps_per_env_step": ratio, "minibatch_size": minibatch_size, "exploration": _GREEDY,
        "replay_buffer": {"kind": "uniform", "capacity": capacity},
    }  # fmt: skip


def _sac() -> dict[str, Any]:
    memory = {"kind": "uniform", "capacity": 50_000}
    return {"name": "sac", "gradient_steps_per_env_step": 1 / 128, "minibatch_size": 128, "replay_buffer": memory}


def _case(
    name: str, environment: dict[str, Any], policy: dict[str, Any], algorithm: dict[str, Any], rollout: dict[str, Any]
) -> Case:
    config = parse_config({
        "environment": environment,
        "policies": {"default": policy},
        "algorithm": {"learning_rate": _LEARNING_RATE, **algorithm},
        "rollout": {
            "workers": 1, "max_policy_lag": 1, "fragments_per_update": 4, "lease_seconds": 600, "silent_seconds": 3600,
            "wait_deadline_seconds": 3600, "max_log_bytes": 1 << 29, **rollout,
        },
        "heatup": "0 env_steps",
        "checkpoint": {"every": "200 updates"},
        "evaluation": {"episodes": 1, "num_envs": 1},
        "trainer": {"device": "cpu"},
        "stop_at": {"updates": 10**9},
    })  # fmt: skip
    return Case(name, config)
