"""`python -m benchmarks.league_cost`: what a turn of a game costs a worker: alone in self-play, and in a league.

Tic-tac-toe, 32 copies in one process, fragments of 64 turns; the cases take turns, so a slow machine is slow for all.
Printed: turns a second, the median over the rounds, and the ratio to plain self-play in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from rollout_worker.environments.description import describe_environment
from rollout_worker.environments.factory import make_vector
from rollout_worker.environments.seeding import SeedLineage
from rollout_worker.exploration.base import Sampling
from rollout_worker.league.casting import Casting
from rollout_worker.league.opponents import Opponents
from rollout_worker.sampling.sampler import Sampler
from shared.config.loading import parse_config
from shared.league.table import Learner, MatchTable, PlayerRef, player_hash, sides_of
from shared.policies.registry import build_policies
from shared.policies.serialization import encode_policy

_COPIES, _TURNS = 32, 64


def _sampler(snapshots: int | None, latest: float) -> tuple[Sampler, dict[str, Any], MatchTable | None]:
    environment = {"api": "pettingzoo", "id": "classic/tictactoe-v3", "num_envs": _COPIES}
    config = parse_config({"environment": environment, "stop_at": {"updates": 1}})
    description = describe_environment(config)
    policies = build_policies(description.policies, config.policies, config.algorithm, 0)
    casting, table = None, None
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
    return Sampler(vector, description, SeedLineage(0, 0, 0, 0), casting=casting), policies, table


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
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (sampler, policies, table) in cases.items():
            started = time.perf_counter()
            sampler.sample(policies, dict.fromkeys(policies, Sampling()), _TURNS, table)
            if number:  # the first loads players
                rates[name].append(_COPIES * _TURNS / (time.perf_counter() - started))
    plain = rates["plain self-play"]
    for name, its in rates.items():
        ratio = statistics.median(mine / other for mine, other in zip(its, plain, strict=True))
        print(f"{name:42} {statistics.median(its):8.0f} turns/s  {ratio:.2f} ×")


if __name__ == "__main__":
    main()
