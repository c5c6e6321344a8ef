"""Which memory a config section asks for."""

from __future__ import annotations

from shared import memory_config
from shared.spaces import PolicySpaces
from trainer_node.memories.balanced import BalancedMemory
from trainer_node.memories.goal_rewards import goal_reward
from trainer_node.memories.hindsight import HindsightMemory
from trainer_node.memories.prioritised import PrioritisedMemory
from trainer_node.memories.replay import ReplayMemory


def make_memory(config: memory_config.MemoryConfig, spaces: PolicySpaces, steps: int, slots: int) -> ReplayMemory:
    """An empty memory for fragments of `steps` × `slots`; raises `ConfigError` for spaces that it is not for."""
    size = (spaces, steps, slots, config.capacity)
    if isinstance(config, memory_config.PrioritisedMemory):
        return PrioritisedMemory(*size, alpha=config.alpha, epsilon=config.epsilon)
    if isinstance(config, memory_config.HindsightMemory):
        return HindsightMemory(
            *size,
            strategy=config.strategy,
            relabelled_fraction=config.relabelled_fraction,
            reward=goal_reward(config),
        )
    if isinstance(config, memory_config.BalancedMemory):
        return BalancedMemory(*size, classes=config.classes)
    return ReplayMemory(*size)
