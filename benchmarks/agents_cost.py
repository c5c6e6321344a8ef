"""`python -m benchmarks.agents_cost`: what a step costs a worker where there are several agents.

In turns: tic-tac-toe, 32 copies, alone in self-play and in a league; beside them the bare game, played at random by
its own loop. At once: eight copies of a game of four carts, beside 32 of one cart. All in one process, fragments of 64
steps; the cases take turns, so a slow machine is slow for all. Printed: turns (or carts' steps) a second of processor
time, the median over the rounds, and the ratio to the first of its kind in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
from pettingzoo import ParallelEnv

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Sampling
from stagecoach.rollout_worker.league.casting import Casting
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.league.table import Learner, MatchTable, PlayerRef, player_hash, sides_of
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import encode_policy

_COPIES, _TURNS, _AGENTS = 32, 64, 4


def _sampler(snapshots: int | None, latest: float) -> tuple[Sampler, dict[str, Any]]:
    environment = {"api": "pettingzoo", "id": "classic/tictactoe-v3", "num_envs": _COPIES}
    config = parse_config({"environment": environment, "stop_at": {"updates": 1}})
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, 0)
    casting = None
    if snapshots is not None:
        held = {}
        for seed in range(snapshots):
            made = build_policies(description.policies, config.policies, config.algorithm, seed + 1)
            data = encode_policy(made["default"], 0)
            held[player_hash(data)] = data
        players = {sha256[:12]: PlayerRef("policy", sha256) for sha256 in held}
        share = (1 - latest) / max(1, snapshots)
        drawn = (("default", latest), *((name, share) for name in players))
        learners = {"default": Learner("default", (0, 1), {"default": drawn})}
        table = MatchTable(*sides_of((), description.agents), learners, players)
        casting = Casting(description, _COPIES, table, Opponents(held.__getitem__), lambda text: None)
    vector = make_vector(config.environment, description)
    return Sampler(vector, description, SeedLineage(0, 0, 0, 0), directors=Directors(seating=casting)), policies


class Carts(ParallelEnv):  # type: ignore[misc]
    """Four agents with a CartPole each, which begin again as they fall: all of them act in each step."""

    metadata = {"name": "carts"}
    render_mode = None
    possible_agents = [f"cart_{number}" for number in range(_AGENTS)]

    def __init__(self) -> None:
        self._carts = {agent: gymnasium.make("CartPole-v1") for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return self._carts[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self._carts[agent].action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        seeds = [None] * _AGENTS if seed is None else range(seed, seed + _AGENTS)
        seen = {agent: self._carts[agent].reset(seed=its)[0] for agent, its in zip(self.agents, seeds, strict=True)}
        return seen, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, on = {}, {}, dict.fromkeys(self.agents, False)
        for agent, action in actions.items():
            seen[agent], rewards[agent], terminated, truncated, _ = self._carts[agent].step(action)
            if terminated or truncated:
                seen[agent] = self._carts[agent].reset()[0]
        return seen, rewards, on, on, {agent: {} for agent in self.agents}


def _carts(environment: dict[str, Any]) -> tuple[Sampler, dict[str, Any]]:
    config = parse_config({"environment": environment, "stop_at": {"updates": 1}})
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, 0)
    return Sampler(make_vector(config.environment, description), description, SeedLineage(0, 0, 0, 0)), policies


def _bare() -> float:
    """Turns a second of the game's own loop, with random legal moves."""
    env, random, turns, started = pettingzoo.make("aec", "classic/tictactoe-v3"), np.random.default_rng(0), 0, None
    while turns < _COPIES * _TURNS:
        env.reset(seed=0)
        started = started or time.process_time()  # the first reset is the slowest
        for _ in env.agent_iter():
            observation, _, terminated, truncated, _ = env.last()
            over = terminated or truncated
            env.step(None if over else int(random.choice(np.flatnonzero(observation["action_mask"]))))
            turns += not over
    assert started is not None
    return turns / (time.process_time() - started)


def _printed(rates: dict[str, list[float]]) -> None:
    first = next(iter(rates.values()))
    for name, its in rates.items():
        ratio = statistics.median(mine / other for mine, other in zip(its, first, strict=True))
        print(f"{name:42} {statistics.median(its):8.0f} a second  {ratio:.2f} ×")


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    cases = {
        "plain self-play": _sampler(None, 1.0),
        "league, current weights alone": _sampler(0, 1.0),
        "league, half current, half one snapshot": _sampler(1, 0.5),
        "league, half current, half ten snapshots": _sampler(10, 0.5),
    }
    carts = {
        "32 copies of one cart": _carts({"id": "CartPole-v1", "num_envs": _COPIES}),
        "8 copies of four carts, one policy": _carts(
            {"api": "pettingzoo", "id": "benchmarks.agents_cost:Carts", "num_envs": _COPIES // _AGENTS}
        ),
    }
    turns: dict[str, list[float]] = {name: [] for name in cases}
    bare: list[float] = []
    at_once: dict[str, list[float]] = {name: [] for name in carts}
    for number in range(rounds + 1):
        for rates, (name, (sampler, policies)) in [
            *((turns, case) for case in cases.items()),
            *((at_once, case) for case in carts.items()),
        ]:
            started = time.process_time()
            sampler.sample(policies, dict.fromkeys(policies, Sampling()), _TURNS)
            if number:  # the first loads players
                rates[name].append(_COPIES * _TURNS / (time.process_time() - started))
        if number:
            bare.append(_bare())
    _printed(turns | {"the bare game, random moves": bare})
    _printed(at_once)


if __name__ == "__main__":
    main()
