"""The config's section for the environment that is acted in."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stagecoach.shared.config.environments.hierarchy import HierarchyConfig
from stagecoach.shared.config.environments.parameters import ParameterField
from stagecoach.shared.config.schema.section import OFF, Section, short_for


class WrapperConfig(Section):
    """One environment wrapper, applied in the order of the list."""

    path: str
    """Import path `package.module:Wrapper`, for example `gymnasium.wrappers:TimeLimit`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the wrapper."""


BY_PATH = short_for("path", str)
InfoName = Annotated[str, Field(pattern=r"^[A-Za-z][\w./-]*$", max_length=100)]


class EnvironmentConfig(Section):
    """The environment that the rollout workers step."""

    id: str = Field(min_length=1)
    """A registered gymnasium id (`CartPole-v1`); `envpool:TASK`, a task of EnvPool (for `vectorization: native`; with
    `kwargs: {num_threads: 4}` on four cores); or `module:factory`, a callable that returns an environment."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the environment or the factory."""
    api: Literal["gymnasium", "pettingzoo"] = "gymnasium"
    """`pettingzoo` for a PettingZoo environment (several agents, at the same time or in turns): a factory, or a name in
    its registry."""
    wrappers: tuple[Annotated[WrapperConfig, BY_PATH], ...] = ()
    """Wrappers by import path, innermost first; a plain string is a wrapper without arguments."""
    num_envs: int = Field(8, ge=1, le=4096)
    """Environment copies in each worker (N); 8 gives the network a batch worth its overhead on a CPU."""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """`sync`: one after another in the worker; `async`: a process each (slow environments); `native`: the environment's
    own vectorized version (a factory gets `num_envs`; without it, it makes a single one)."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Truncate episodes after this many steps of the agent, whatever wrappers make of one (with a frame skip of 4 it is
    four of the game's); the default is what the environment registers, in steps of its own."""
    action_mask: Annotated[Literal["auto", "observation", "info", "off"], OFF] = "auto"
    """Where legal actions are told: in the observation's `action_mask` (`auto`: if it has such an entry, which has to
    have the action's size; `off`: it is observed like anything else), or in `info["action_mask"]` of each step and
    reset (docs/ACTION_MASKS.md)."""
    episode_ends: Literal["all", "any"] = "all"
    """Of several agents: `all` goes on until the environment has no agent left; with `any` an episode is over as soon
    as one agent is done, and truncated for the others."""
    parameters: dict[str, ParameterField] = {}
    """What is drawn anew for each episode, by name: a value or a sampler, lessons, or levels that are replayed
    (docs/CURRICULUM.md)."""
    parameters_by: Literal["options", "attributes", "rebuild"] = "options"
    """How the environment gets them: by `reset(options={…})`; as attributes of its own or of the outermost wrapper that
    has one, set before the reset; or as arguments of an environment that is made anew when they change."""
    info_columns: tuple[InfoName, ...] = ()
    """Numbers of each step's `info`, by name, that travel with the experience as columns `info/NAME`: for transforms,
    own algorithms, the archive and figures, not for the policy (docs/ENVIRONMENTS.md). NaN where a step tells none."""
    hierarchy: HierarchyConfig | None = None
    """Levels of one agent over a Gymnasium environment: upper ones give lower ones goals (docs/HIERARCHY.md)."""
    failures_allowed: int = Field(3, ge=0)
    """How often in a row an environment may raise, without a fragment (or an evaluation) between, before its process
    gives up. Counted by progress: a slow environment is given up as surely as a fast one."""
    step_deadline_seconds: float = Field(120.0, ge=1)
    """One step, reset, start or close of a process's environments that takes longer is taken for hung, and the process
    is replaced; the evaluator's as well. With `--inline` only a close is watched, and the environments are given up.
    Much more than any healthy step takes: nothing else is lost by waiting."""

    @property
    def several_agents(self) -> bool:
        """Whether agents are told apart by name: those of PettingZoo, or the levels of a hierarchy."""
        return self.api == "pettingzoo" or self.hierarchy is not None

    @field_validator("info_columns")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} more than once; expected each name once")
        return names
