"""Episodes' parameters: drawn when an episode begins, and given to its environment."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagecoach.rollout_worker.environments.vector_env import holder, layers, tell
from stagecoach.shared.base.errors import EnvironmentUnusable
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.parameters import Drawn, ParameterTable, Value

_SHOWN = 20


class EpisodeParameters:
    """Of one sampler: what each environment's running episode was drawn."""

    def __init__(self, table: ParameterTable, num_envs: int) -> None:
        self.table = table
        """What is drawn from, from now on."""
        self.now: list[Drawn] = [Drawn({}, {})] * num_envs

    def begin(self, environment: int, seed: int) -> None:
        """An episode begins: its parameters are drawn."""
        self.now[environment] = Drawn(self.table.draw(seed), self.table.lessons)

    def take_up(self, running: Sequence[Mapping[str, Any]]) -> None:
        """Those of running episodes, as `plain` gave them."""
        for environment, its in enumerate(running):
            self.now[environment] = Drawn.from_dict(its)

    def plain(self) -> list[dict[str, Any]]:
        """Those of running episodes, for the action trace."""
        return [drawn.as_dict() for drawn in self.now]

    def noted(self, environment: int, record: EpisodeRecord) -> EpisodeRecord:
        """The record of an episode that ends, with what was drawn for it."""
        record.parameters, record.lessons = dict(self.now[environment].values), dict(self.now[environment].lessons)
        return record


class Parameterized:
    """Gives one environment its parameters, as `environment.parameters_by` says."""

    def __init__(self, by: str, remake: Callable[[Mapping[str, Value]], Any]) -> None:
        """`remake` makes the environment with these arguments."""
        self._by, self._remake = by, remake
        self._made_with: Mapping[str, Value] | None = None
        self._told: dict[str, Any] = {}

    def tell(self, env: Any, name: str, value: Any) -> bool:
        """As `vector_env.tell`; one that is made anew is told too, before its first reset."""
        self._told[name] = value
        return tell(env, name, value)

    def prepare(self, env: Any, values: Mapping[str, Value]) -> tuple[Any, dict[str, Any]]:
        """The environment to reset, and the options for it. Raises `EnvironmentUnusable` for what it does not take."""
        if self._by == "options":
            known = getattr(getattr(env, "unwrapped", env), "reset_options", None)
            if known is not None and (unknown := sorted(set(values) - set(known))):
                raise EnvironmentUnusable(
                    f"environment.parameters: the environment takes no reset option {', '.join(unknown)}; it takes "
                    f"{', '.join(sorted(known)) or 'none'}"
                )
            return env, dict(values)
        if self._by == "attributes":
            for name, value in values.items():
                setattr(_holder(env, name), name, value)
        elif values != self._made_with:
            env.close()
            try:
                env = self._remake(values)
            except EnvironmentUnusable as error:
                taken = inspect.signature(type(getattr(env, "unwrapped", env)).__init__).parameters
                raise EnvironmentUnusable(f"{error}; it takes {', '.join(list(taken)[1:])}") from None
            self._made_with = dict(values)
            for name, value in self._told.items():
                tell(env, name, value)
        return env, {}


def _holder(env: Any, name: str) -> Any:
    """The environment, or the outermost of its wrappers, that has the attribute."""
    if (found := holder(env, {name})) is not None:
        return found
    *_, innermost = layers(env)
    plain = (key for key, its in vars(innermost).items() if isinstance(its, bool | int | float | str))
    has = [key for key in plain if not key.startswith("_")]
    more = f" and {len(has) - _SHOWN} more" if len(has) > _SHOWN else ""
    raise EnvironmentUnusable(
        f"environment.parameters: the environment has no attribute {name}; of numbers and text it has "
        f"{', '.join(sorted(has)[:_SHOWN]) or 'none'}{more}"
    )
