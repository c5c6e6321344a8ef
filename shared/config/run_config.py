"""The configuration of a run: frozen, strict, every field with its unit and the reason for its default.

Sources: a YAML file, environment variables `STAGECOACH__SECTION__FIELD`, `--set section.field=value`. The later source
wins: command line > environment > file > default (shared/config/loading.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import model_validator

from stagecoach.shared.config.algorithms.registry import with_algorithm_defaults, without_algorithm_defaults
from stagecoach.shared.config.compatibility import check_sections_together
from stagecoach.shared.config.environments.environment import EnvironmentConfig
from stagecoach.shared.config.league_compatibility import check_stops, seating
from stagecoach.shared.config.schema.plain_data import Change, changed, changes_of, plain
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.config.sections import ConfigFields

_DECIDES_LEARNING: Any = {
    "seed": True,
    "environment": EnvironmentConfig.model_fields.keys() - {"failures_allowed", "step_deadline_seconds", "code_sha256"},
    "policies": True,
    "agents": True,
    "league": True,
    "folds": True,
    "algorithm": True,
    "dataset": {"sha256", "only_heatup"},
    "demonstrations": {"sha256"},
    "rollout": {"fragment_steps", "complete_episodes", "fragments_per_update", "max_policy_lag"},
    "heatup": True,
    "initialize_from": True,
    "fork_from": True,
    "trainer": {"torch_threads", "matmul_precision", "precision", "compile", "ranks"},
    "metrics": {"window_episodes"},
}
"""The fields behind `Config.hash`: all roles of a run must agree on them, and a resume may not change them. Sums depend
on threads, matrix products and ranks, and each checkpoint holds a window of episodes."""


class Config(ConfigFields):
    """A run's whole config; construction rejects contradictions between sections."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_algorithm(cls, data: Any) -> Any:
        """Completes the data with the algorithm's defaults, which also appear in the resolved config."""
        return with_algorithm_defaults(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        check_sections_together(self)
        return self

    def replace(self, field: str | Mapping[str, Any], value: Any = None) -> Self:
        """Returns a new config in which fields have other values.

        Args:
            field: A dotted field, `"rollout.workers"`, or a mapping of dotted fields to values. A whole section is
                replaced by a dict; `"algorithm"` also by a name.
            value: The field's new value.

        Returns:
            A new validated config. With another algorithm, fields that had the former one's defaults get those of the
            new one.

        Raises:
            ConfigError: A field is unknown, or a value does not fit.
        """
        return self.changed(changes_of({field: value} if isinstance(field, str) else field))

    def changed(self, changes: Iterable[Change]) -> Self:
        """Returns a new config with these changes; raises `ConfigError` for mistakes in them."""
        found = changed(type(self), without_algorithm_defaults(plain(self)), changes)
        if found.environment.id == self.environment.id:  # what the section carries beside its fields
            object.__setattr__(found.environment, "__pydantic_private__", self.environment.__pydantic_private__)
        return found

    def hash(self) -> str:
        """Returns the SHA-256 of the fields that decide learning (not placement, scale or end): 64 hex digits."""
        return hashlib.sha256(json.dumps(self._deciding(), sort_keys=True).encode()).hexdigest()

    def seating(self, agents: Mapping[str, str]) -> tuple[tuple[tuple[str, ...], ...], dict[str, str]]:
        """Sides and seats as an `EnvironmentDescription` has them, of `agents` (→ policy); raises `ConfigError`."""
        return seating(self, agents)

    def check_stops(self, agents: Mapping[str, str]) -> None:
        """Raises `ConfigError` where `stop_at.mean_return` adds up the returns of several sides."""
        check_stops(self, agents)

    def decides_otherwise(self, other: Config) -> list[str]:
        """Returns the dotted fields in which the hashed part differs from that of `other`."""
        mine, theirs = (leaves(config._deciding()) for config in (self, other))
        return sorted(path for path in mine | theirs if mine.get(path) != theirs.get(path))

    def _deciding(self) -> dict[str, Any]:
        data = self.model_dump(mode="json", include=_DECIDES_LEARNING)
        if any(character in agent for agent in self.agents for character in "*?["):  # the first pattern that fits
            data["agents"] = list(data["agents"].items())
        if self.environment.spaces is None:  # the hash of such a run is older than the field
            del data["environment"]["spaces"]
        if self.fork_from is None:  # likewise
            del data["fork_from"]
        if any(its.measure == "progress" for entry in self.environment.parameters.values() for its in entry.criteria):
            data["progress_of"] = self.stop_at.env_steps
        return data
