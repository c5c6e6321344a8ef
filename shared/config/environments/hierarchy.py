"""Sections of hierarchies of one agent: levels (upper levels choose goals for lower levels), or options (a controller
chooses which of several rewards the same network receives, and for how long)."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Distances, Numbers, Section


class LevelConfig(Section):
    """One level of a hierarchy: a policy and, below the top, its goals."""

    policy: str
    """Policy of the level, and the name of the level's agent. Each level has its own policy."""
    every: int | None = Field(None, ge=1)
    """Number of actions for one goal, after which the level above sets the next. Required below the top; the top level
    acts until the episode ends."""
    of: str = "achieved_goal"
    """Leaf of the environment's observation that goals refer to. A single array is the leaf `observation`."""
    elements: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Elements of that (flattened) leaf that form a goal; all by default."""
    low: Numbers | None = None
    """Lower bound of goals: a number, or one per element; by default the leaf's own bound."""
    high: Numbers | None = None
    """Upper bound of goals, likewise."""
    threshold: Distances = 0.05
    """Euclidean distance within which a goal is achieved; a list holds a limit per element."""
    reward: Literal["sparse", "distance", "environment"] | None = None
    """Reward of one action: `sparse`, 0 if its goal is achieved then, else -1; `distance`, minus the distance to the
    goal; `environment`, the sum of the environment's rewards meanwhile. By default `environment` for the top level,
    `sparse` below it. With a sparse top level, the episode ends when its goal is achieved."""


class OptionsConfig(Section):
    """Options with one controller, all in one policy (Henaff et al. 2025, "Scalable Option Learning", SOL)."""

    rewards: tuple[str, ...] = Field(min_length=1)
    """One option per entry: its reward per step. `module:function` of the observation before, the action, the
    observation after and the step's `info`, which returns a number; the name of a number in `info`; or `environment`.
    The controller always receives the environment's reward."""
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8, 16, 32, 64, 128), min_length=1)
    """Durations in steps that the controller may choose for an option."""

    @property
    def names(self) -> list[str]:
        """Names of the options; for a function, the function's name."""
        return [reward.rpartition(":")[2] for reward in self.rewards]

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        for field, values in (("rewards", self.names), ("lengths", [str(length) for length in self.lengths])):
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"{field}: {twice[0]!r} occurs more than once; name each option and length once")
        return self


class HierarchyConfig(Section):
    """Levels of one agent, each with its own policy, or options of one policy (docs/guides/hierarchy.md)."""

    levels: tuple[LevelConfig, ...] = Field((), max_length=8)
    """Levels from top to bottom, two or more; the bottom level acts in the environment."""
    options: OptionsConfig | None = None
    """Options with a controller instead of levels, for PPO, APPO, A2C and IMPALA."""
    test_subgoals: float = Field(0.0, ge=0, le=1)
    """Probability that all levels below act greedily for a goal, to test it (0.3 in Levy et al. 2019). A level with
    `replay_buffer.missed_penalty` learns from missed goals."""

    @model_validator(mode="after")
    def _levels_fit_together(self) -> Self:
        if self.options is not None and (self.levels or self.test_subgoals):
            raise ValueError(
                "options with levels or test_subgoals: they stand in place of levels; leave one of them out"
            )
        if self.options is not None:
            return self
        if len(self.levels) < 2:
            raise ValueError(f"found {len(self.levels)} levels and no options; give two levels at least, or options")
        names = [level.policy for level in self.levels]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"levels: policy {twice[0]!r} stands on two levels; give each level a policy of its own")
        top, *lower = self.levels
        if top.every is not None:
            raise ValueError(f"levels: {top.policy!r} is the top level, which nothing directs; leave every out")
        for level in lower:
            if level.every is None:
                raise ValueError(
                    f"levels: {level.policy!r} has no `every`, so one directive would last for ever; say how many "
                    f"actions it has for one, such as every: 10"
                )
        return self

    def reward_of(self, number: int) -> str:
        """Returns the reward kind of level `number` (0: top)."""
        level = self.levels[number]
        return level.reward or ("sparse" if number else "environment")

    def actions_within(self, number: int) -> int:
        """Returns the most environment steps that one action of this level may take."""
        return math.prod(level.every or 1 for level in self.levels[number + 1 :])

    def turns_within(self, number: int) -> int:
        """Returns the most actions of all levels during one action of this level, including it."""
        below = self.levels[number + 1 :]
        return 1 + (below[0].every or 1) * self.turns_within(number + 1) if below else 1
