"""Deep deterministic policy gradient (Lillicrap et al. 2016).

It is TD3 with one critic, without delay and without noise on the targets, which `DDPGConfig` says.
"""

from __future__ import annotations

from trainer_node.algorithms.td3 import TD3


class DDPG(TD3):
    """Learns one policy."""
