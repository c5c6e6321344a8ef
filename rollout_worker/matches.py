"""Matches outside of training: between any two players, and of a league's learners against its fixed players."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np
import torch

from stagecoach.rollout_worker.environments.factory import evaluation_environment
from stagecoach.rollout_worker.environments.seeding import episode_seed
from stagecoach.rollout_worker.environments.vector_env import Step
from stagecoach.rollout_worker.exploration.base import no_actions
from stagecoach.rollout_worker.league.casting import Casting
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.playing import play_episodes
from stagecoach.rollout_worker.watchdog import Watchdog
from stagecoach.shared.base.errors import SharedObjectUnusable
from stagecoach.shared.config.league import MEAN_RETURN, LeagueConfig, first_learner
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Duration
from stagecoach.shared.experience.fragment import LARGEST_SHOWN, MatchRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.league.matchmaking import Match
from stagecoach.shared.league.table import MatchTable, PlayerRef, player_hash, sides_of
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.storage.object_store import ObjectStore
from stagecoach.shared.storage.shared_objects import read_shared_object


def playable(seats: Sequence[str], own: Collection[str], others: Collection[str]) -> list[int]:
    """Returns the sides of `seats` for a player that fits `own`, if another that fits `others` takes the rest."""
    return [
        side
        for side, seat in enumerate(seats)
        if seat in own and all(each in others for other, each in enumerate(seats) if other != side)
    ]


@dataclass(frozen=True)
class Played:
    match: MatchRecord
    returns: tuple[float, ...]
    """Mean return of each side's agents."""


def play_sides(
    config: Config, description: EnvironmentDescription, players: Mapping[str, PlayerRef],
    fits: Sequence[Collection[str]], *, opponents: Opponents, policies: Mapping[str, Policy], games: int, seed: int,
    watchdog: Watchdog | None = None,
) -> dict[int, tuple[Played, ...]]:  # fmt: skip
    """Plays `games` games of two `players` for each side that the first can take; the other takes all other sides.
    `fits` are the policies whose seats each can take. Returns the games by side."""
    sides, seats = sides_of(config.league.sides if config.league else (), description.agents)
    (mine, theirs), table, played = players, MatchTable(sides, seats, {}, dict(players)), {}
    for side in playable(seats, *fits):
        lineup = [mine if other == side else theirs for other in range(len(seats))]
        seeds = seed, episode_seed(seed, 1 + side)  # each side has its own random stream
        played[side] = play_match(
            config, description, table, lineup, opponents=opponents, policies=policies, games=games, seeds=seeds,
            watchdog=watchdog,
        )  # fmt: skip
    return played


@torch.inference_mode()
def play_match(
    config: Config, description: EnvironmentDescription, table: MatchTable, lineup: Sequence[str], *,
    opponents: Opponents, policies: Mapping[str, Policy], games: int, seeds: tuple[int, int],
    watchdog: Watchdog | None = None,
) -> tuple[Played, ...]:  # fmt: skip
    """Plays `games` games with the players of `lineup`, one per side, from `table.players`. `seeds` are for the starts,
    which are equal for all players, and for actions; `policies` are any with these spaces."""
    copies = evaluation_environment(config, games).num_envs
    casting, generator = Casting(description, copies, table, opponents, lambda text: None), torch.Generator()
    generator.manual_seed(seeds[1])

    def act(group: str, observations: Columns, acts: Array) -> Columns:
        actions = no_actions(description.policies[group].action, len(acts))
        parts = list(casting.parts(group, np.flatnonzero(acts)))
        with nullcontext() if watchdog is None else watchdog.during("the players of a match"):
            casting.act(parts, group, observations, policies[group], generator, actions)
        return actions

    def stepped(step: Step) -> None:
        for group, its in step.policies.items():
            casting.forget(group, its.over)

    begins = [count() for _ in range(copies)]

    def begun(index: int) -> None:
        casting.seat(index, Match("", 0, tuple(lineup)), episode_seed(seeds[1] + index, next(begins[index])))

    records = play_episodes(
        config, description, seeds[0], Duration(games, "episodes"), act, begun=begun, stepped=stepped,
        judged=casting.judged, watchdog=watchdog,
    )  # fmt: skip
    return tuple(
        Played(its.match, tuple(fmean(its.agent_returns[agent] for agent in side) for side in table.sides))
        for its in records if its.match is not None
    )  # fmt: skip


class FixedPlayers:
    """Evaluates checkpoints against the league's fixed players; without a league all results are empty."""

    def __init__(self, config: Config, store: ObjectStore, emit: Callable[[str], None], watchdog: Watchdog) -> None:
        self._config, self._league, self._store = config, config.league or LeagueConfig(), store
        self._emit, self._watchdog, self._forfeiting = emit, watchdog, set[str]()
        self.rank_by_return = config.checkpoint.best_by == MEAN_RETURN

    def play(
        self, description: EnvironmentDescription, checkpoint: str, stored: Mapping[str, bytes],
        policies: Mapping[str, Policy], seed: int,
    ) -> dict[str, dict[str, float]]:  # fmt: skip
        """Returns the win rate and the mean return of each learner against each fixed player, by `LEARNER/PLAYER`.
        `stored` and `policies` are those of the checkpoint, by policy id."""
        own = {player_hash(data): data for data in stored.values()}
        rates, returns = dict[str, float](), dict[str, float]()
        opponents = Opponents(
            lambda sha256: own[sha256] if sha256 in own else read_shared_object(self._store, sha256),
            self._league.functions,
        )
        for learner, its in sorted(self._config.league_learners.items()):
            current = PlayerRef("policy", player_hash(stored[its.policy]), checkpoint)
            for player, fixed in sorted(self._league.fixed.items()):
                ref = PlayerRef(fixed.kind or "random", fixed.sha256, fixed.source, fixed.seats)
                try:
                    played = play_sides(
                        self._config, description, {its.policy: current, player: ref}, ({its.seat}, fixed.seats),
                        opponents=opponents, policies=policies, games=self._config.evaluation.episodes, seed=seed,
                        watchdog=self._watchdog,
                    )  # fmt: skip
                except SharedObjectUnusable as error:
                    self._emit(f"{checkpoint} is not played: {error}")
                    continue
                if games := [(side, game) for side, matches in played.items() for game in matches]:
                    rates[f"{learner}/{player}"] = fmean(game.match.result(side) for side, game in games)
                    returns[f"{learner}/{player}"] = fmean(game.returns[side] for side, game in games)
                    self._report_forfeits(player, [game.match.forfeited for _, game in games])
        return {"win_rates": rates, "match_returns": returns}

    def _report_forfeits(self, player: str, matches: Sequence[Mapping[str, str]]) -> None:
        """Reports forfeits once per fixed player: a win rate against a player that forfeits means nothing."""
        why = [forfeited[player] for forfeited in matches if player in forfeited]
        if why and player not in self._forfeiting:
            self._forfeiting.add(player)
            self._emit(f"{player} lost {len(why)} of {len(matches)} evaluated matches by forfeit: {why[-1]}")

    def ranked(self, ratings: Mapping[str, Any], against: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
        """Returns a checkpoint's ranking: the rating by `checkpoint.best_by`, or the first learner's mean return."""
        learners, best_by = self._config.league_learners, self._config.checkpoint.best_by
        if not learners:
            return {}
        if self.rank_by_return:
            first = next(name for name, its in learners.items() if its == first_learner(learners))
            gained = [its for pair, its in against["match_returns"].items() if pair.startswith(f"{first}/")]
            ranked_by = f"mean return of {first} against fixed players"
            return {"ranking": fmean(gained) if gained else -LARGEST_SHOWN, "ranked_by": ranked_by}
        known = {learner.policy for learner in learners.values()}
        whose = best_by if best_by in known else first_learner(learners).policy
        return {"ranking": float(ratings[f"league/rating/{whose}"]), "ranked_by": f"rating of {whose}"}
