"""Sections of replay buffers: capacity and sampling."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stagecoach.shared.config.schema.section import OWN_KIND, Distances, Schedule, ScheduleField, Section, by_kind
from stagecoach.shared.experience.counters import Counters


class MemorySection(Section):
    """Fields of every replay buffer."""

    capacity: int = Field(100_000, ge=1)
    """Number of newest transitions that are kept, rounded up to whole fragments; each agent of a policy counts. 100 000
    is enough for classic control; a million is usual for images (7 GB for 84×84 gray images, stacked or not: each frame
    is stored once if `rollout.fragment_steps` is at least the stack's length)."""

    def importance(self, counters: Counters) -> float:
        """Returns β of the importance weights; has no effect without priorities."""
        return 1.0


class UniformReplay(MemorySection):
    """Samples transitions uniformly."""

    kind: Literal["uniform"] = "uniform"


class PrioritizedReplay(MemorySection):
    """Samples transitions with large TD errors more often (Schaul et al. 2016, proportional)."""

    kind: Literal["prioritized"] = "prioritized"
    alpha: float = Field(0.6, ge=0, le=1)
    """Exponent of the priorities: 0 is uniform; 0.6 as in the paper (0.5 in Rainbow)."""
    beta: ScheduleField = Schedule(start=0.4)
    """Exponent of the importance weights; in the paper `{kind: linear, start: 0.4, end: 1, over: …}`."""
    epsilon: float = Field(1e-6, gt=0)
    """Constant added to each TD error, so that no priority is 0."""

    def importance(self, counters: Counters) -> float:
        """Returns β at these counters."""
        return self.beta.value(counters)


class HindsightReplay(MemorySection):
    """Relabels most transitions with goals that were achieved later (hindsight experience replay, Andrychowicz et al.
    2017). For environments that observe `achieved_goal` and `desired_goal`."""

    kind: Literal["hindsight"] = "hindsight"
    strategy: Literal["future", "final", "episode"] = "future"
    """Source of the new goal: any later step of the episode (best in the paper), its last step, or any step."""
    relabeled_fraction: float = Field(0.8, ge=0, le=1)
    """Share of relabeled transitions; the paper's k = 4 is k/(k+1) = 0.8."""
    reward: str = "sparse"
    """Reward of relabeled transitions: `sparse` (0 within `threshold`, else −1), or `module:function`, which maps
    `(achieved [B, …], desired [B, …])` to `(reward [B], terminated [B])`."""
    threshold: Distances = 0.05
    """Largest Euclidean distance at which `sparse` counts a goal as reached; 0.05 as in the robotics tasks. A list
    holds a limit per element."""
    terminates: bool = False
    """Terminates the episode where the goal is reached; set it as the environment does."""
    hindsight_actions: bool = False
    """Relabels actions of an upper level of a hierarchy with the goal that the level below achieved (Levy et al. 2019),
    so that learning assumes optimal lower levels."""
    missed_penalty: float | None = Field(None, gt=0)
    """Cost of a missed goal under `hierarchy.test_subgoals`, after which the episode ends; use 1 / (1 − gamma) or more
    (docs/guides/hierarchy.md). Applies to transitions that are not relabeled."""


class BalancedReplay(MemorySection):
    """Samples each class of transitions equally often, however rare it is."""

    kind: Literal["balanced"] = "balanced"
    classes: Literal["action", "reward_sign"] = "action"
    """Class of a transition: its discrete action, or the sign of its reward."""


class OwnReplay(MemorySection):
    """Custom replay buffer (docs/how-to/own-replay-buffer.md)."""

    kind: str = Field(OWN_KIND, pattern=r"^[\w.]+:\w+$")
    """Import path of a class that derives from `stagecoach.ReplayBuffer`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, in addition to spaces and sizes."""


ReplayBufferConfig = UniformReplay | PrioritizedReplay | HindsightReplay | BalancedReplay | OwnReplay
if TYPE_CHECKING:
    ReplayBufferField = ReplayBufferConfig
else:
    ReplayBufferField = by_kind(ReplayBufferConfig)
"""A replay buffer's section as a config field."""
