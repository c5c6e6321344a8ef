"""Replay buffers: how many transitions stay, and which are drawn."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from stagecoach.shared.config.schema.section import OWN_KIND, Distances, Schedule, ScheduleField, Section, by_kind
from stagecoach.shared.experience.counters import Counters


class MemorySection(Section):
    """The fields that every memory has."""

    capacity: int = Field(100_000, ge=1)
    """Transitions that stay, the newest ones, rounded up to whole fragments (with several agents of one policy, an env
    step is as many). 100 000 is enough for classic control; a million is usual for images: of 84×84 gray ones 7 GB,
    stacked or not (of stacked ones each frame is stored once, if `rollout.fragment_steps` is at least their number)."""

    def importance(self, counters: Counters) -> float:
        """β of the importance weights (`sample(beta=…)`); without priorities it counts for nothing."""
        return 1.0


class UniformReplay(MemorySection):
    """Every transition is as probable as any other."""

    kind: Literal["uniform"] = "uniform"


class PrioritizedReplay(MemorySection):
    """Transitions that were predicted badly are drawn more often (Schaul et al. 2016, proportional)."""

    kind: Literal["prioritized"] = "prioritized"
    alpha: float = Field(0.6, ge=0, le=1)
    """How much priorities count: 0 is uniform; 0.6 as in the paper (0.5 in Rainbow)."""
    beta: ScheduleField = Schedule(start=0.4)
    """How much of the bias is corrected by weights: in the paper `{kind: linear, start: 0.4, end: 1, over: …}`."""
    epsilon: float = Field(1e-6, gt=0)
    """Added to the size of each TD error, so that what is predicted well is drawn again some day."""

    def importance(self, counters: Counters) -> float:
        """β at these counters."""
        return self.beta.value(counters)


class HindsightReplay(MemorySection):
    """For goal environments (observations with `achieved_goal` and `desired_goal`): most transitions are drawn as if
    what was achieved later had been the goal (Andrychowicz et al. 2017)."""

    kind: Literal["hindsight"] = "hindsight"
    strategy: Literal["future", "final", "episode"] = "future"
    """Where the other goal comes from: any later step of the episode (best in the paper), its last one, or any."""
    relabeled_fraction: float = Field(0.8, ge=0, le=1)
    """Share of transitions that get another goal; k/(k+1), 0.8 is the paper's k = 4."""
    reward: str = "sparse"
    """The reward for reaching a goal: `sparse` (0 within `threshold`, else −1), or `module:function`, which answers
    `(achieved [B, …], desired [B, …])` with `(reward [B], terminated [B])`."""
    threshold: Distances = 0.05
    """Greatest distance (Euclidean) at which `sparse` counts a goal as reached; 0.05 as in the robotics tasks. Of a
    list, each element's own."""
    terminates: bool = False
    """Whether `sparse` ends the episode where the goal is reached, as the environment does or does not."""
    hindsight_actions: bool = False
    """For an upper level of a hierarchy: learn as if it had asked for the goal that the level below achieved (Levy et
    al. 2019), so that the lower levels look as if they were perfect already."""
    missed_penalty: float | None = Field(None, gt=0)
    """With `hierarchy.test_subgoals`: a tested goal that was missed costs this much, and nothing follows it; as
    docs/HIERARCHY.md says, 1 / (1 − gamma) or more. Of each such transition, what is not relabeled is learned so."""


class BalancedReplay(MemorySection):
    """Every class of transitions has an equal share of what is drawn, however rare it is."""

    kind: Literal["balanced"] = "balanced"
    classes: Literal["action", "reward_sign"] = "action"
    """What a transition's class is: its discrete action, or whether its reward is negative, zero or positive."""


class OwnReplay(MemorySection):
    """A replay buffer of your own (docs/PYTHON.md)."""

    kind: str = Field(OWN_KIND, pattern=r"^[\w.]+:\w+$")
    """The path of a class that derives from `stagecoach.ReplayBuffer`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the class is made with, beside spaces and sizes."""


ReplayBufferConfig = UniformReplay | PrioritizedReplay | HindsightReplay | BalancedReplay | OwnReplay
if TYPE_CHECKING:
    ReplayBufferField = ReplayBufferConfig
else:
    ReplayBufferField = by_kind(ReplayBufferConfig)
"""A memory's section as a config field."""
