"""What every learning algorithm is: tensors and config only.

No Redis, store or clock: what it learns follows from its state, the experience and the counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.policies.policy import Policy
from shared.spaces import Columns
from shared.steps import Counters
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.share import Share
from trainer_node.demonstrations import Demonstrations
from trainer_node.reward_scaling import RewardFilter


@dataclass(frozen=True)
class Setting:
    """What an algorithm is told beside its policy and its section."""

    device: torch.device
    seed: int
    """All its randomness follows from this and the number of the update."""
    fragment_steps: int
    slots: int
    """Of each fragment: T and S."""
    rewards: RewardFilter | None = None
    """Where rewards are normalised: an algorithm with a memory does so as it draws; others get them normalised."""
    demonstrations: Demonstrations | None = None
    """What is to be imitated, where the run has any."""
    precision: str = "float32"
    """Of the networks, as `trainer.precision` has it."""
    compile: bool = False
    """As `trainer.compile` has it."""
    fragments: int = 1
    """Of each update: K."""

    @property
    def transitions(self) -> int:
        """Of a full update."""
        return self.fragments * self.fragment_steps * self.slots


class Algorithm(Protocol):
    """Learns one policy. Its constructor takes `(policy, config, setting)`."""

    policy: Policy
    share: Share
    """What of each minibatch is learnt from here; the rest by the other ranks."""

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """One update from K fragments of equal T; answers the metrics. `counters` include these fragments."""
        ...

    def observe(self, experience: Sequence[Experience]) -> None:
        """What is done with experience that is not learnt from (heat-up): normalisers and memory take it in."""
        ...

    def state(self) -> Columns:
        """All that the next update depends on, beside the policy and the contents of the memory, as named arrays."""
        ...

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`; raises `KeyError`, `IndexError` or `ValueError` where it is another network's."""
        ...


class Remembering(Algorithm, Protocol):
    """An algorithm with a replay memory."""

    memory_fragments: int
    """How many fragments the memory holds when it is full."""

    def remember(self, experience: Sequence[Experience]) -> None:
        """Puts back what the memory held, oldest first, once `load_state` was called: nothing else changes."""
        ...
