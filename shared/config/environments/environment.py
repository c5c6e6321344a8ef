"""The section of the environment."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.environments.hierarchy import HierarchyConfig
from stagecoach.shared.config.environments.parameters import ParameterField
from stagecoach.shared.config.schema.section import OFF, Section, short_for


class WrapperConfig(Section):
    """One environment wrapper, applied in the order of the list."""

    path: str
    """Import path `package.module:Wrapper`, for example `gymnasium.wrappers:TimeLimit`."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the wrapper."""


class AgentSpacesConfig(Section):
    """Spaces of one agent as data: each has its Gymnasium class as `type`, and that class's arguments."""

    observation: dict[str, Any]
    """Observation space, such as `{type: Box, low: -1, high: 1, shape: [4]}`."""
    action: dict[str, Any]
    """Action space, such as `{type: Discrete, n: 2}`."""


class SpacesConfig(Section):
    """Spaces as data: `observation` and `action` of a single agent, or `agents`."""

    observation: dict[str, Any] | None = None
    """Observation space, such as `{type: Box, low: -1, high: 1, shape: [4]}`."""
    action: dict[str, Any] | None = None
    """Action space, such as `{type: Discrete, n: 2}`."""
    agents: dict[str, AgentSpacesConfig] = {}
    """Spaces by the agent's name, if there are several."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        single = [self.observation is not None, self.action is not None]
        if all(single) == bool(self.agents) or any(single) != all(single):
            raise ValueError("expected an observation and an action, or agents with both of each")
        return self


OBJECT = "object:"
"""Prefix of the id of an environment that a program gave as an object."""
BY_PATH = short_for("path", str)
InfoName = Annotated[str, Field(pattern=r"^[A-Za-z][\w./-]*$", max_length=100)]


class EnvironmentConfig(Section):
    """The environment that the rollout workers step."""

    id: str = Field(min_length=1)
    """A registered gymnasium id (`CartPole-v1`); an EnvPool task, `envpool:TASK` (for `vectorization: native`; with
    `kwargs: {num_threads: 4}` on four cores); or `module:factory`, a callable that returns an environment; or
    `object:NAME`, which a program gave to `stagecoach.train` as an object (docs/how-to/python.md)."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments for the environment or the factory."""
    api: Literal["gymnasium", "pettingzoo", "external"] = "gymnasium"
    """`pettingzoo` for a PettingZoo environment (parallel or AEC): a factory, or a name in its registry. `external` for
    environments in other programs, which connect to the workers' gateways (docs/guides/gateway.md); `id` is then any
    name."""
    spaces: SpacesConfig | None = None
    """Observation and action space, or those of several agents, for `api: external`."""
    wrappers: tuple[Annotated[WrapperConfig, BY_PATH], ...] = ()
    """Wrappers by import path, innermost first; a plain string is a wrapper without arguments."""
    num_envs: int = Field(8, ge=1, le=4096)
    """Environments per worker (N); 8 gives the network an efficient batch on a CPU."""
    vectorization: Literal["sync", "async", "native"] = "sync"
    """`sync`: sequential in the worker; `async`: a process each (slow environments); `native`: the environment's own
    vectorized version (a factory gets `num_envs`, and returns a single environment without it)."""
    max_episode_steps: int | None = Field(None, ge=1)
    """Truncates episodes after this many agent steps, counted outside all wrappers (with a frame skip of 4, it is four
    times as many game steps). The default is the registered limit, in the environment's own steps."""
    action_mask: Annotated[Literal["auto", "observation", "info", "off"], OFF] = "auto"
    """Source of legal actions: the observation's `action_mask`, or `info["action_mask"]` of each step and reset. `auto`
    uses an observed `action_mask`, which must match the action's size; `off` treats it as an ordinary observation
    (docs/guides/action-masks.md)."""
    episode_ends: Literal["all", "any"] = "all"
    """End of episodes with several agents: `all` waits until no agent is left; `any` ends with the first agent that is
    done, and truncates the others."""
    parameters: dict[str, ParameterField] = {}
    """Parameters drawn for each episode, by name: a value or a sampler, lessons, or replayed levels
    (docs/guides/curriculum.md)."""
    parameters_by: Literal["options", "attributes", "rebuild"] = "options"
    """Transfer to the environment: by `reset(options={…})`; as attributes of the environment or of the outermost
    wrapper that has them, set before the reset; or as arguments, which rebuilds the environment when they change."""
    info_columns: tuple[InfoName, ...] = ()
    """Numbers of each step's `info`, by name, recorded as columns `info/NAME`: for transforms, custom algorithms, the
    archive and metrics, but not for the policy (docs/guides/environments.md). NaN in steps without the number."""
    hierarchy: HierarchyConfig | None = None
    """Hierarchy of levels, where upper levels set goals for lower levels (docs/guides/hierarchy.md)."""
    failures_allowed: int = Field(3, ge=0)
    """Consecutive failures of an environment, without a fragment (or an evaluation) in between, before its process
    fails. Counted by progress, so that slow and fast environments are treated alike."""
    step_deadline_seconds: float = Field(120.0, ge=1)
    """Time limit of one step, reset, start or close of the environments of a worker or the evaluator, after which the
    process is replaced. With `--inline` only a close is limited, and the environments are abandoned. Choose much more
    than a healthy step takes; waiting has no other cost."""

    code_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the code of an `object:NAME`, written by `stagecoach.train`; a resume with other code warns."""
    _object: Any = PrivateAttr(None)
    """The class, function or `EnvSpec` of an `object:NAME`; never part of the config as data."""
    _packed: bytes | None = PrivateAttr(None)

    def hold(self, thing: Any, packed: bytes | None = None) -> None:
        """Sets the object behind `object:NAME`, and its bytes for other processes."""
        self._object, self._packed = thing, packed

    @property
    def packed_object(self) -> bytes | None:
        return self._packed

    @property
    def given_object(self) -> Any:
        """The object behind `object:NAME`; None for other ids. Raises `ConfigError` if this process has none."""
        if self.id.startswith(OBJECT) and self._object is None:
            raise ConfigError(
                f"environment.id={self.id} is an object of the program that started the run, and no config holds it; "
                f"give it from Python: Run.resume(RUN, environment=…), Run.attach(RUN).evaluate(environment=…), "
                f"stagecoach.train(…, config=…)"
            )
        return self._object

    @property
    def several_agents(self) -> bool:
        """Agents have names: those of PettingZoo or of a client's game, or the levels of a hierarchy."""
        clients = self.spaces is not None and bool(self.spaces.agents)
        return self.api == "pettingzoo" or clients or self.hierarchy is not None

    @field_validator("info_columns")
    @classmethod
    def _each_once(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{', '.join(twice)} more than once; expected each name once")
        return names

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        by_options = not self.parameters or self.parameters_by == "options"
        for field, given, remedy in (
            (f"wrappers={[wrapper.path for wrapper in self.wrappers]}", self.wrappers, ""),
            ("action_mask=info", self.action_mask == "info", ", or an environment that observes its action_mask"),
            ("hierarchy" if self.hierarchy else "api=pettingzoo", self.several_agents, ""),
            (f"parameters_by={self.parameters_by}", not by_options, ", or parameters_by=options"),
        ):
            if given and self.vectorization == "native":
                why = "whose environment holds all copies at once"
                raise ValueError(f"{field} with vectorization=native, {why}; use sync or async{remedy}")
        if (self.api == "external") != (self.spaces is not None):
            raise ValueError(
                f"api={self.api} with{'out' if self.spaces is None else ''} spaces: an environment in another program "
                f"needs both; set api=external and spaces, or neither"
            )
        for field in ("wrappers", "kwargs", "max_episode_steps", "hierarchy"):
            if self.api == "external" and getattr(self, field):
                raise ValueError(f"{field} with api=external: the client has the environment; set it there")
        if self.api == "external" and (self.vectorization != "sync" or self.action_mask == "info"):
            raise ValueError("api=external: leave out vectorization, and observe a mask as `action_mask`")
        if self.parameters and self.id.startswith("envpool:"):
            raise ValueError("parameters: not supported by EnvPool; use sync or async Gymnasium environments")
        if self.api != "pettingzoo" and self.episode_ends != "all":
            raise ValueError(
                f"episode_ends={self.episode_ends} with api={self.api}: it is for episodes of several agents; leave it "
                f"out, or set api=pettingzoo"
            )
        return self
