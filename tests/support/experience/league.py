"""Leagues for tests: their configs, their learner, and records of matches drawn from their tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Counters, Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, FragmentHeader, MatchRecord
from stagecoach.shared.league.matchmaking import draw
from stagecoach.shared.league.table import MatchTable
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.league import League
from tests.support.experience.fragments import describe

_SPACES = (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2))
EXPLOITED: dict[str, Any] = {
    "learners": {"main": {"policy": "main"}, "exploiter": {"policy": "exploiter", "plays": ["main"]}}
}
"""Two learners of one seat."""


def league_config(league: dict[str, Any], policies: tuple[str, ...] = ("main",), /, **sections: Any) -> Config:
    """Spec of a game of two agents, `main-0` and `main-1`, with the policy `main`."""
    agents = {"main-0": "main", "main-1": "main"}
    return parse_config(
        {
            "environment": {"id": "tests.none:made", "api": "pettingzoo"}, "stop_at": {"updates": 9},
            "policies": {name: {"hidden_sizes": [4]} for name in policies}, "agents": agents, "league": league,
        } | sections
    )  # fmt: skip


def league_of(config: Config, agents: Mapping[str, str] | None = None) -> tuple[League, dict[str, Policy]]:
    whole = describe({"main": _SPACES}, agents=2)
    if agents is not None:
        whole = dataclasses.replace(whole, agents=dict(agents))
    seats = {learner.policy: learner.seat for learner in config.league_learners.values()}
    description = dataclasses.replace(
        whole, policies=dict.fromkeys(config.policies, whole.policies["main"]), seats=seats
    )
    policies = build_policies(description.policies, config.policies, config.algorithm, seed=3)
    return League(config, description, policies), policies


def change(policy: Policy) -> None:
    """Other weights, as an update makes them."""
    for parameter in policy.parameters():
        parameter.data.add_(0.01)


def record(table: MatchTable, number: int, result: float, length: int = 7, **fields: Any) -> EpisodeRecord:
    """The episode `number`, drawn from the table; the learner's `result` is 1, 0.5 or 0."""
    match = draw(table, environment=number % 3, episode=number // 3, seed=number)
    outcome = [1 - result] * len(match.players)
    outcome[match.side] = result
    told: dict[str, Any] = {
        "learner": match.learner,
        "side": match.side,
        "players": match.players,
        "outcome": tuple(outcome),
    } | fields
    returns = {agent: 2 * share for side, share in zip(table.sides, outcome, strict=True) for agent in side}
    return EpisodeRecord(result, length, agent_returns=returns, match=MatchRecord(**told))


def acted(league: League, version: int) -> None:
    """The league observes a fragment of this policy version, in which no episode ended."""
    league.observe_fragment(FragmentHeader("run", "worker-0", 0, 0, Phase.TRAIN, {"main": version}, 1, 1), Counters())


def season(league: League, policies: dict[str, Policy], results: list[float]) -> None:
    """An episode for each result, an update after every fourth; each version acts until the next one."""
    newest = league.now.version + 1
    for number, result in enumerate(results):
        acted(league, newest + number // 4)
        league.observe_episode(record(league.table(Counters(env_steps=7 * number)), number, result), Counters())
        if number % 4 == 3:
            for policy in policies.values():
                change(policy)
            league.after_update(policies, number)
