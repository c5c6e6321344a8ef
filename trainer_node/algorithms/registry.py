"""Which class an algorithm's section means."""

from __future__ import annotations

import importlib
from typing import Any

from shared.algorithm_configs.section import AlgorithmConfig
from shared.policies.policy import Policy
from shared.user_code import import_object
from trainer_node.algorithms.algorithm import Algorithm, Setting

_BUILT_IN = {
    "a2c": "A2C",
    "appo": "APPO",
    "bc": "BC",
    "cql": "CQL",
    "ddpg": "DDPG",
    "dqn": "DQN",
    "impala": "IMPALA",
    "iql": "IQL",
    "ppo": "PPO",
    "rainbow": "Rainbow",
    "sac": "SAC",
    "td3": "TD3",
}
"""Name of the algorithm, which is also its module's → its class."""


def make_algorithm(policy: Policy, config: AlgorithmConfig, setting: Setting) -> Algorithm:
    """What learns `policy`; raises `ConfigError` for a user's algorithm that cannot be imported."""
    made: Any
    if ":" in config.name:
        made = import_object(config.name, "algorithm.name", kind="Class")
    else:
        made = getattr(importlib.import_module(f"trainer_node.algorithms.{config.name}"), _BUILT_IN[config.name])
    algorithm: Algorithm = made(policy, config.resolved(), setting)
    return algorithm
