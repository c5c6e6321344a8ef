"""Which memory a config section asks for."""

from __future__ import annotations

from shared.memory_config import MemoryConfig, PrioritisedMemory
from shared.spaces import PolicySpaces
from trainer_node.memories import prioritised
from trainer_node.memories.replay import ReplayMemory


def make_memory(config: MemoryConfig, spaces: PolicySpaces, steps: int, slots: int) -> ReplayMemory:
    """An empty memory for fragments of `steps` × `slots`."""
    if isinstance(config, PrioritisedMemory):
        return prioritised.PrioritisedMemory(
            spaces, steps, slots, config.capacity, alpha=config.alpha, epsilon=config.epsilon
        )
    return ReplayMemory(spaces, steps, slots, config.capacity)
