"""Stagecoach for programs: everything that code of yours imports comes from here.

`stagecoach.train`, `Run`, `load_config`, `load_policy`, `read_experience`, and for algorithms and policies of your own
`Algorithm`, `AlgorithmConfig`, `register_policy` and the parts that the examples are made of. The packages behind it
(`stagecoach.coordinator`, `.rollout_worker`, `.trainer_node`, `.shared`) are private: their names may change.

A name is imported when it is first used, so `import stagecoach` alone loads neither torch nor Ray.
"""

import ast
import difflib
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run
    from stagecoach.coordinator.run_access.train import train
    from stagecoach.coordinator.studies.study import Study, tune
    from stagecoach.rollout_worker.environments.factory import make_environment
    from stagecoach.rollout_worker.exploration.base import Exploration
    from stagecoach.rollout_worker.sampling.director import EpisodeDirector
    from stagecoach.shared.base.errors import StagecoachError
    from stagecoach.shared.config.algorithms.base import AlgorithmConfig, BatchOfUpdate
    from stagecoach.shared.config.algorithms.off_policy import SACConfig, TD3Config
    from stagecoach.shared.config.algorithms.on_policy import A2CConfig, PPOConfig
    from stagecoach.shared.config.algorithms.q_learning import DQNConfig
    from stagecoach.shared.config.loading import load_config
    from stagecoach.shared.config.run_config import Config
    from stagecoach.shared.config.sections import PolicyConfig
    from stagecoach.shared.deployment.deployed_policy import DeployedPolicy, load_policy
    from stagecoach.shared.experience.counters import Counters
    from stagecoach.shared.experience.spaces import Columns, PolicySpaces, SpaceSpec
    from stagecoach.shared.policies.actor_critic import ActorCritic, RecurrentActorCritic
    from stagecoach.shared.policies.continuous import Actor, Deterministic, SquashedGaussian
    from stagecoach.shared.policies.distributions import ActionDistribution, Categorical, DiagonalGaussian
    from stagecoach.shared.policies.encoders import Encoder, ObservationNormalizer
    from stagecoach.shared.policies.masks import masked
    from stagecoach.shared.policies.policy import Policy
    from stagecoach.shared.policies.q_network import QNetwork, RecurrentQNetwork
    from stagecoach.shared.policies.registry import register_policy
    from stagecoach.shared.storage.log_archive import read_experience
    from stagecoach.trainer_node.learning.algorithms.a2c import A2C
    from stagecoach.trainer_node.learning.algorithms.dqn import DQN
    from stagecoach.trainer_node.learning.algorithms.off_policy import Lesson, Minibatch
    from stagecoach.trainer_node.learning.algorithms.ppo import PPO
    from stagecoach.trainer_node.learning.algorithms.sac import SAC
    from stagecoach.trainer_node.learning.algorithms.td3 import TD3
    from stagecoach.trainer_node.learning.building_blocks.advantages import Trajectories, gae
    from stagecoach.trainer_node.learning.building_blocks.compilation import compiled
    from stagecoach.trainer_node.learning.building_blocks.interface import (
        Algorithm,
        Experience,
        Setting,
        Shard,
        side_by_side,
        update_seed,
    )
    from stagecoach.trainer_node.learning.building_blocks.optimization import Adam
    from stagecoach.trainer_node.learning.fold import Fold
    from stagecoach.trainer_node.learning.replay_buffers.prioritized import PrioritizedReplayBuffer
    from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer
    from stagecoach.trainer_node.learning.reward_signals.base import RewardSignal, Rows
    from stagecoach.trainer_node.metrics.writers import Callback, MetricWriter, WrittenRun

_MODULES = {
    alias.name: str(statement.module)
    for statement in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
}
"""Name → module, from the imports above: what type checkers read and what is imported are one list."""

__all__ = [
    "A2C", "DQN", "PPO", "SAC", "TD3", "A2CConfig", "ActionDistribution", "Actor", "ActorCritic", "Adam",
    "Algorithm", "AlgorithmConfig", "BatchOfUpdate", "Callback", "Categorical", "Columns", "Config", "Counters",
    "DQNConfig", "DeployedPolicy", "Deterministic", "DiagonalGaussian", "Encoder", "EpisodeDirector", "Experience",
    "Exploration", "Fold", "Lesson", "MetricWriter", "Minibatch", "ObservationNormalizer", "PPOConfig", "Policy",
    "PolicyConfig", "PolicySpaces", "PrioritizedReplayBuffer", "QNetwork", "RecurrentActorCritic",
    "RecurrentQNetwork", "ReplayBuffer", "RewardSignal", "Rows", "Run", "SACConfig", "Setting", "Shard",
    "SpaceSpec", "SquashedGaussian", "StagecoachError", "Study", "TD3Config", "Trajectories", "WrittenRun", "compiled",
    "gae", "load_config", "load_policy", "make_environment", "masked", "read_experience", "register_policy",
    "side_by_side", "train", "tune", "update_seed",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        names: dict[str, str] = importlib.import_module("stagecoach.shared.base.foreign_names").FOREIGN_NAMES
        close = difflib.get_close_matches(name, __all__, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(__all__)}"
        raise AttributeError(f"module 'stagecoach' has no attribute {name!r}; {names.get(name, hint)}")
    found = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__
