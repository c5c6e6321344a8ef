"""The config's section for hierarchies of one agent: levels (upper ones choose goals, lower ones are paid for reaching
them), or options (a controller chooses by which of several rewards the same network is paid, and for how long)."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Distances, Numbers, Section


class LevelConfig(Section):
    """One level of a hierarchy: a policy, and, of all but the top one, what directs it."""

    policy: str
    """The policy that acts here; also the name of the level's agent. Each level has a policy of its own."""
    every: int | None = Field(None, ge=1)
    """How many actions of its own the level has for one directive, before the level above gives another one. Needed
    below the top; the top level acts until the episode ends."""
    of: str = "achieved_goal"
    """The leaf of the environment's observation that goals refer to. A single array is the leaf `observation`."""
    elements: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Which elements of that (flattened) leaf make up a goal; all by default."""
    low: Numbers | None = None
    """Least goal: a number, or one for each element; by default the leaf's own bound."""
    high: Numbers | None = None
    """Greatest goal, likewise."""
    threshold: Distances = 0.05
    """When a goal is achieved: within this Euclidean distance, or, of a list, within each element's own."""
    reward: Literal["sparse", "distance", "environment"] | None = None
    """What one of its actions brings: `sparse`, 0 if its goal is achieved then, else -1; `distance`, minus what is left
    to the goal; `environment`, the sum of the environment's rewards meanwhile. By default `environment` for the top
    level, `sparse` below it. With a sparse top level the episode ends where its goal is achieved."""


class OptionsConfig(Section):
    """Options with one controller, all in one policy (Henaff et al. 2025, "Scalable Option Learning", SOL)."""

    rewards: tuple[str, ...] = Field(min_length=1)
    """An option for each: what it is paid for each step. `module:function` of the observation before, the action, the
    observation after it and the step's `info`, which returns a number; or the name of a number in `info`; or
    `environment`, the environment's own reward. The controller is always paid the latter."""
    lengths: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8, 16, 32, 64, 128), min_length=1)
    """For how many steps an option may last; the controller chooses one of these each time."""

    @property
    def names(self) -> list[str]:
        """The options' names: of a function its own."""
        return [reward.rpartition(":")[2] for reward in self.rewards]

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        for field, values in (("rewards", self.names), ("lengths", [str(length) for length in self.lengths])):
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"{field}: found {twice[0]!r} more than once; name each option and length once")
        return self


class HierarchyConfig(Section):
    """Levels of one agent, each a policy of its own, or options of one policy (docs/HIERARCHY.md)."""

    levels: tuple[LevelConfig, ...] = Field((), max_length=8)
    """From top to bottom, two or more; the bottom one acts in the environment."""
    options: OptionsConfig | None = None
    """Instead of levels: a controller that chooses among options, for PPO, APPO, A2C and IMPALA."""
    test_subgoals: float = Field(0.0, ge=0, le=1)
    """Probability that all levels below act greedily for a goal, to test it (Levy et al. 2019, 0.3 there). A level with
    `replay_buffer.missed_penalty` learns from the goals that were missed then."""

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
        """What the level of this number (0: top) is paid by."""
        level = self.levels[number]
        return level.reward or ("sparse" if number else "environment")

    def actions_within(self, number: int) -> int:
        """How many actions of the environment one action of this level may take."""
        return math.prod(level.every or 1 for level in self.levels[number + 1 :])

    def turns_within(self, number: int) -> int:
        """How many actions of any level one action of this level may take, its own counted."""
        below = self.levels[number + 1 :]
        return 1 + (below[0].every or 1) * self.turns_within(number + 1) if below else 1
