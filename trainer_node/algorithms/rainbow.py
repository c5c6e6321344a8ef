"""Rainbow (Hessel et al. 2018): DQN whose section has all extensions switched on."""

from __future__ import annotations

from trainer_node.algorithms.dqn import DQN


class Rainbow(DQN):
    """Learns one policy, as DQN does; `RainbowConfig` says with what."""
