"""The configuration of a run: frozen, strict, every field with its unit and the reason for its default.

Comes in: a YAML file, environment variables `STAGECOACH__SECTION__FIELD`, `--set section.field=value`. Goes out: one
validated `Config`. The later source wins: command line > environment > file > default (shared/config/loading.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from stagecoach.shared.config.algorithms.registry import with_algorithm_defaults
from stagecoach.shared.config.compatibility import check_sections_together
from stagecoach.shared.config.environment import EnvironmentConfig
from stagecoach.shared.config.league import LeagueConfig
from stagecoach.shared.config.section import leaves
from stagecoach.shared.config.sections import ConfigFields

_DECIDES_LEARNING: Any = {
    "seed": True,
    "environment": EnvironmentConfig.model_fields.keys() - {"failures_allowed", "step_deadline_seconds"},
    "policies": True,
    "agents": True,
    "league": True,
    "algorithm": True,
    "dataset": {"sha256", "only_heatup"},
    "demonstrations": {"sha256"},
    "rollout": {"fragment_steps", "complete_episodes", "fragments_per_update", "max_policy_lag"},
    "heatup": True,
    "initialize_from": True,
    "trainer": {"torch_threads", "matmul_precision", "precision", "compile", "ranks"},
    "metrics": {"window_episodes"},
}
"""The fields behind `Config.hash`: all roles of a run must agree on them, and a resume may not change them. Sums depend
on threads, matrix products and ranks, and each checkpoint holds a window of episodes."""
_LATER: dict[str, Any] = {
    "hierarchy": None,
    "options": None,
    "hindsight_actions": False,
    "missed_penalty": None,
    "uniform": 0.0,
    "info_columns": [],
    "action_mask": "auto",
    "episode_ends": "all",
    "parameters": {},
    "parameters_by": "options",
    "layer_norm": False,
    "weight_decay": 0.0,
    "normalize_values": False,
    "critic_observes": "own",
    "algorithm": None,
    "trainable": True,
    "initialize_from": None,
}
"""Of the environment, algorithms and their sections `_WITHIN`, and policies: not in the hash at these defaults."""
_WITHIN = ("replay_buffer", "exploration")


_LATER_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("dqn", "rainbow"), ("behavioral_cloning", "reward_signals")),
    **dict.fromkeys(("sac", "td3", "ddpg", "cql"), ("reward_signals",)),
}
"""Algorithm → its fields that came later than itself, and are left out where they are None."""


class Config(ConfigFields):
    """A run's whole config; one whose sections contradict each other does not exist."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_algorithm(cls, data: Any) -> Any:
        """What is not said is as `AlgorithmConfig.defaults` has it, and stands so in a resolved config."""
        return with_algorithm_defaults(data) if isinstance(data, Mapping) else data

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        check_sections_together(self)
        return self

    def hash(self) -> str:
        """SHA-256 of what decides the learning (not where, by how many, or until when it runs): 64 hex digits."""
        return hashlib.sha256(json.dumps(self._deciding(), sort_keys=True).encode()).hexdigest()

    def decides_otherwise(self, other: Config) -> list[str]:
        """The fields by which this config's hash is another than that of `other`, with dots."""
        mine, theirs = (leaves(config._deciding()) for config in (self, other))
        return sorted(path for path in mine | theirs if mine.get(path) != theirs.get(path))

    def _deciding(self) -> dict[str, Any]:
        """Without fields that came later and are at their defaults: such a run keeps the hash that it always had."""
        data = self.model_dump(mode="json", include=_DECIDES_LEARNING)
        algorithms = [data["algorithm"], *(its["algorithm"] or {} for its in data["policies"].values())]
        within = [its[name] for its in algorithms for name in _WITHIN if isinstance(its.get(name), dict)]
        within.append(data["environment"]["hierarchy"] or {})
        for section in (data["environment"], data["algorithm"], *data["policies"].values(), *within):
            for name, default in _LATER.items():
                if name in section and section[name] == default:
                    del section[name]
        for policy in data["policies"].values():
            if policy["cnn"] == "auto":  # the default was `nature`, and is that network wherever there could be one
                policy["cnn"] = "nature"
        of_policies = [its["algorithm"] for its in data["policies"].values() if its.get("algorithm")]
        for section in (data["algorithm"], *of_policies):
            for name in _LATER_OF.get(section["name"], ()):
                if section[name] is None:
                    del section[name]
        if any(character in agent for agent in self.agents for character in "*?["):  # the first pattern that fits
            data["agents"] = list(data["agents"].items())
        if not self.rollout.complete_episodes:
            del data["rollout"]["complete_episodes"]
        if self.league is None:
            del data["league"]
        else:
            data["league"]["forfeits_allowed"] = LeagueConfig().forfeits_allowed  # it decides an event alone
            for player in data["league"]["fixed"].values():
                if player["weight"] == 1:  # it came later
                    del player["weight"]
        if any(its.measure == "progress" for entry in self.environment.parameters.values() for its in entry.criteria):
            data["progress_of"] = self.stop_at.env_steps
        return data
