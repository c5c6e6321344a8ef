"""A run's league as its newest checkpoint has it, and games between any two players of runs (`stagecoach match`)."""

import json
import math
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from stagecoach.coordinator.catalog.checkpoint_lookup import find_checkpoint, require_trust
from stagecoach.coordinator.catalog.fixed_players import find_player
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.matches import play_sides, playable
from stagecoach.shared.base.errors import CheckpointDamaged, UserError
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.services import StoreConfig
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.league.table import PlayerRef, kind_of, sides_of
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.object_store import access_at
from stagecoach.shared.storage.players import LEAGUE
from stagecoach.trainer_node.learning.league import LeagueState, standings, wilson


def league_of(checkpoints: CheckpointStore, config: Config) -> dict[str, Any]:
    """Standings of a league at its newest checkpoint.

    Raises `UserError` where the run has no league, `CheckpointNotFound`, `CheckpointDamaged`, or what the store raises.
    """
    if config.league is None:
        raise UserError(
            f"run {checkpoints.run_id!r} has no league; `league:` in its config makes one (docs/guides/league.md)"
        )
    found = checkpoints.load(checkpoints.resolve("latest"), only=LEAGUE)
    try:
        state = LeagueState.from_dict(json.loads(found.objects[LEAGUE]))
    except (KeyError, ValueError) as error:
        raise CheckpointDamaged(f"{found.manifest.name} has no readable {LEAGUE} ({type(error).__name__})") from None
    return {"checkpoint": found.manifest.name, **standings(state, sorted(config.league.fixed))}


@dataclass(frozen=True)
class Result:
    """Outcome of a match, for the first player against the second."""

    games: int
    wins: int
    draws: int
    by_side: list[dict[str, Any]]
    mean_return: float
    """Mean return of the first player's side, over its agents."""
    return_error: float
    """Standard error of `mean_return`; 0 for one game."""
    forfeits: dict[str, int]
    """Forfeits by `first` and `second`."""
    may_repeat: bool
    """True if neither player is known to draw actions: games from one start then repeat, and the interval is too
    narrow."""

    def as_dict(self) -> dict[str, Any]:
        rate = (self.wins + 0.5 * self.draws) / self.games
        interval = wilson(self.games, self.wins, self.draws)
        return vars(self) | {"losses": self.games - self.wins - self.draws, "win_rate": rate, "interval": interval}


def match(
    first: str, second: str, games: int, runs_dir: Path, seed: int = 0, *, greedy: bool = False,
    trust_config: bool = False, endpoint_url: str | None = None,
) -> Result:  # fmt: skip
    """Plays at least `games` games in the environment of the first player that belongs to a run.

    Each side that the first player can take gets as many, from the same starts. Policies draw actions unless `greedy`.
    Raises `UserError` if neither player belongs to a run, or one fits no seat.
    """
    access = access_at(endpoint_url)
    config, description = _environment_of((first, second), runs_dir, trust_config, access)
    sides, seats = sides_of(config.league.sides if config.league else (), description.agents)
    if len(sides) < 2:
        raise UserError(f"{config.environment.id} has one agent; a match needs two sides")
    policies = build_policies(description.policies, config.policies, config.algorithm, 0, description.slots)
    held: dict[str, bytes] = {}
    players: dict[str, PlayerRef] = {}
    draws = False
    for name, source in (("first", first), ("second", second)):
        players[name], data = find_player("", source, runs_dir, description, access)
        held[players[name].sha256] = data
        draws |= _draws(players[name], data, greedy)
    fits = {name: set(ref.seats) for name, ref in players.items()}
    each = -(-games // max(1, len(playable(seats, *fits.values()))))
    opponents = Opponents(held.__getitem__, {ref.source for ref in players.values()}, greedy=greedy)
    played = play_sides(
        config, description, players, list(fits.values()), opponents=opponents, policies=policies, games=each, seed=seed
    )
    if not played:
        raise UserError(
            f"{first} and {second} cannot play each other in {config.environment.id}, whose seats are "
            f"{', '.join(sorted(set(seats)))}: {first} fits {_named(fits['first'])}, {second} fits "
            f"{_named(fits['second'])}; name players of one game"
        )
    by_side: list[dict[str, Any]] = []
    returns: list[float] = []
    for side, matches in played.items():
        results = [its.match.result(side) for its in matches]
        returns += [its.returns[side] for its in matches]
        told = {"games": len(results), "wins": results.count(1.0), "draws": results.count(0.5)}
        by_side.append({"side": list(sides[side]), **told})
    lost = Counter(player for matches in played.values() for its in matches for player in its.match.forfeited)
    forfeits = {name: lost[name] for name in players}
    total = {name: sum(its[name] for its in by_side) for name in ("games", "wins", "draws")}
    error = stdev(returns) / math.sqrt(len(returns)) if len(returns) > 1 else 0.0
    return Result(
        **total, by_side=by_side, mean_return=fmean(returns), return_error=error, forfeits=forfeits,
        may_repeat=not draws,
    )  # fmt: skip


def _draws(player: PlayerRef, data: bytes, greedy: bool) -> bool:
    """Returns whether a player draws its actions, or its strategy; False for scripted players."""
    if player.kind != "policy":
        return player.kind in ("random", "mixture")
    return not greedy and decode_policy(data)[0].distribution.draws


def _named(seats: set[str]) -> str:
    return ", ".join(sorted(seats)) or "none"


def _environment_of(
    sources: tuple[str, str], runs_dir: Path, trusted: bool, access: StoreConfig
) -> tuple[Config, EnvironmentDescription]:
    extend_imports((os.getcwd(),))
    for source in sources:
        if kind_of(source) == "policy":
            target = source.partition("#")[0]
            found = find_checkpoint(target, runs_dir, access)
            require_trust(found.config, found.made_here, trusted, target)
            extend_imports(found.import_path)
            return found.config, describe_environment(found.config)
    raise UserError(
        f"neither {sources[0]} nor {sources[1]} belongs to a run, which defines the environment; name one that does"
    )
