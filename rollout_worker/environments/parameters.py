"""Parameters of episodes: drawn when an episode begins, and applied to its environment."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stagecoach.rollout_worker.environments.vector_env import call_layers, holder, layers
from stagecoach.shared.base.errors import EnvironmentUnusable
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.parameters import Drawn, ParameterTable, Value

_SHOWN = 20


class EpisodeParameters:
    """Draws the parameters of one sampler's episodes (a director: sampling/director.py)."""

    def __init__(self, table: ParameterTable, num_envs: int) -> None:
        self.table = table
        self.now: list[Drawn] = [Drawn({}, {})] * num_envs

    def begin(self, environment: int, episode: int, seed: int) -> None:
        self.now[environment] = Drawn(self.table.draw(seed), self.table.lessons)

    def accepts(self, running: Sequence[Mapping[str, Any]]) -> bool:
        try:
            return len([Drawn.from_dict(its) for its in running]) == len(self.now)
        except (TypeError, ValueError):
            return False

    def take_up(self, running: Sequence[Mapping[str, Any]], states: Mapping[str, Any]) -> None:
        for environment, its in enumerate(running):
            self.now[environment] = Drawn.from_dict(its)

    def trace(self) -> list[dict[str, Any]]:
        return [drawn.as_dict() for drawn in self.now]

    def judged(self, environment: int, record: EpisodeRecord) -> EpisodeRecord:
        record.parameters, record.lessons = dict(self.now[environment].values), dict(self.now[environment].lessons)
        return record


class Parameterized:
    """Applies parameters to one environment, as `environment.parameters_by` says."""

    def __init__(self, by: str, remake: Callable[[Mapping[str, Value]], Any]) -> None:
        """Rebuilds the environment with `remake`, which takes parameters as arguments."""
        self._by, self._remake = by, remake
        self._made_with: Mapping[str, Value] | None = None
        self._calls: dict[str, Any] = {}
        """Method → argument of its last call, for environments that are rebuilt."""

    def call_layers(self, env: Any, name: str, value: Any) -> bool:
        """Calls `vector_env.call_layers`, again on an environment that is rebuilt, before its first reset."""
        self._calls[name] = value
        return call_layers(env, name, value)

    def prepare(self, env: Any, values: Mapping[str, Value]) -> tuple[Any, dict[str, Any]]:
        """Returns the environment to reset, and reset options. Raises `EnvironmentUnusable` for unknown parameters."""
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
            for name, value in self._calls.items():
                call_layers(env, name, value)
        return env, {}


def _holder(env: Any, name: str) -> Any:
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
