"""The directors of a run, from the tables of its folds. Where a fold has a director of its own, it is registered here:
the league seats players. The tables of all others are parameters of the environment."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.league.casting import Casting
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.parameters import ParameterTable, joined
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.league.table import MatchTable

_LEAGUE = "league"
Tables = Mapping[str, Mapping[str, Any]]
"""Name of a fold → its table, as a version's header has it."""


class RunDirectors:
    """Makes the directors of a worker's samplers, and brings them to the newest tables."""

    def __init__(
        self, config: Config, description: EnvironmentDescription, load: Callable[[str], bytes],
        emit: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        """`load` returns a shared object by its SHA-256; `emit` writes an event of a kind."""
        self._config, self._description, self._load, self._emit = config, description, load, emit
        self._tables: Tables = {}

    def make(self, tables: Tables) -> Directors:
        self._tables, envs = tables, self._config.environment.num_envs
        drawn, seating = _drawn(tables), None
        if self._config.league is not None and _LEAGUE in tables:
            opponents = Opponents(self._load, self._config.league.functions)
            seating = Casting(self._description, envs, _matches(tables), opponents, partial(self._emit, _LEAGUE))
        return Directors(None if drawn is None else EpisodeParameters(drawn, envs), seating)

    def update(self, directors: Directors, tables: Tables) -> None:
        if tables is self._tables:
            return
        self._tables, drawn = tables, _drawn(tables)
        if directors.parameters is not None and drawn is not None:
            directors.parameters.table = drawn
        if directors.seating is not None:
            cast(Casting, directors.seating).use(_matches(tables))


def _matches(tables: Tables) -> MatchTable:
    return MatchTable.from_dict(tables[_LEAGUE])


def _drawn(tables: Tables) -> ParameterTable | None:
    found = [ParameterTable.from_dict(table) for name, table in tables.items() if name != _LEAGUE]
    return joined(found) if found else None
