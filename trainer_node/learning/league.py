"""The league as a fold over the experience log: payoffs, ratings, snapshots, and the table of who plays whom.

Ratings are OpenSkill's Plackett-Luce model (Weng and Lin 2011) with the library's defaults, one per player and seat,
and Elo as in ML-Agents: it begins at 1200, and a match moves it by result − expectation (K = 1).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from openskill.models import PlackettLuce

from stagecoach.shared.config.league import first_learner
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Counters, Duration, Phase
from stagecoach.shared.experience.fragment import EpisodeRecord, FragmentHeader, MatchRecord
from stagecoach.shared.experience.spaces import EnvironmentDescription, PlainData
from stagecoach.shared.league.table import Learner, MatchTable, PlayerRef, player_hash, sides_of, snapshot_id
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.trainer_node.learning.fold import Fold

_MODEL = PlackettLuce()
_ELO, _ELO_SCALE = 1200.0, 400.0
_FORFEITS_ALLOWED = 20
ALL = ""
"""Stands for all opponents but itself, since its last snapshot."""


@dataclass
class Rating:
    """A player's strength in one policy's seats, from matches against others."""

    mu: float = _MODEL.mu
    sigma: float = _MODEL.sigma
    elo: float = _ELO
    matches: int = 0
    forfeits: int = 0

    @property
    def ordinal(self) -> float:
        """The one number: the player is better than this with a probability of 0.999 (mu − 3 sigma)."""
        return self.mu - 3 * self.sigma


@dataclass(frozen=True)
class Snapshot:
    id: str
    policy: str
    sha256: str
    env_steps: int
    """Steps that the learner had played."""
    weights: str = ""
    """Hash of the policy without its number of updates."""


@dataclass
class Standing:
    """Counters of a learner's own play, and its form against each opponent."""

    played: Counters = field(default_factory=Counters)
    snapshot_at: Counters = field(default_factory=Counters)
    began_at: Counters = field(default_factory=Counters)
    resets: int = 0
    former: int = -1
    """Newest version that may have acted with weights from before the last reset."""
    form: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Opponent → matches, and its win rate (a draw is half a win) over about the last `snapshot.min_games`."""


@dataclass
class LeagueState(PlainData):
    """All that the league is; `trainer/league.json` of a checkpoint."""

    learners: dict[str, Standing]
    snapshots: list[Snapshot] = field(default_factory=list)
    """Oldest first."""
    ratings: dict[str, dict[str, Rating]] = field(default_factory=dict)
    """Policy id of the seat → player id → rating."""
    payoff: dict[str, dict[str, dict[int, tuple[int, int, int, float]]]] = field(default_factory=dict)
    """Player → opponent → side that the player took → matches, wins, draws, sum of its side's returns. The row of
    current weights is that since the last snapshot; with a snapshot it becomes the snapshot's."""
    forfeits: dict[str, int] = field(default_factory=dict)
    version: int = 0
    """The newest policy version that has acted what was taken."""


class League(Fold):
    """A run's league; at first each learner's initial weights are its only snapshot."""

    name = "league"

    def __init__(self, config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy]) -> None:
        assert config.league is not None
        self._config, self._learners, self._lag = config.league, config.league_learners, config.rollout.max_policy_lag
        self._sides, self._seats = sides_of(self._config.sides, description.agents)
        self._fixed = {
            name: PlayerRef(player.kind or "random", player.sha256, player.source, player.seats)
            for name, player in sorted(self._config.fixed.items())
        }
        self.now = LeagueState({name: Standing() for name in sorted(self._learners)})
        self.resettable = sorted(its.policy for its in self._learners.values() if its.reset is not None)
        self._new: dict[str, bytes] = {}
        """SHA-256 → snapshots of the last update."""
        self._acted_by = 0
        self._told: set[str] = set()
        self._resets: list[str] = []
        self._why: dict[str, str] = {}
        """Player → why it forfeited last."""
        for name in sorted(self._learners):
            self._take_snapshot(name, policies, 0)

    def state(self) -> dict[str, Any]:
        return self.now.as_dict()

    def load_state(self, state: Mapping[str, Any]) -> None:
        found = LeagueState.from_dict(state)
        if set(found.learners) != set(self._learners):
            raise ValueError(f"its league has the learners {sorted(found.learners)}, expected {sorted(self._learners)}")
        self.now, self._new = found, {}

    def observe_fragment(self, header: FragmentHeader, counters: Counters) -> None:
        """Observes the fragment's matches, except in warm-up, which acts at random."""
        if header.phase is Phase.TRAIN:
            self._acted_by, self.now.version = header.version, max(header.version, self.now.version)
            super().observe_fragment(header, counters)

    def observe_episode(self, record: EpisodeRecord, counters: Counters) -> None:
        """Counts and rates one match, unless a player is not in the league (any more). One that ended under a version
        from before the reset of one of its learners counts only in the own play of the learner it was drawn for."""
        match = record.match
        if match is None or not self._knows(match):
            return
        standing, own = self.now.learners[match.learner], match.players[match.side]
        standing.played.env_steps += record.length
        standing.played.episodes += 1
        formers = [
            self.now.learners[name].former for name, its in self._learners.items() if its.policy in match.players
        ]
        if self._acted_by <= max(formers, default=-1):
            return
        for player, why in match.forfeited.items():
            self._why[player] = why
            self.now.forfeits[player] = self.now.forfeits.get(player, 0) + 1
            for seat in {seat for seat, its in zip(self._seats, match.players, strict=True) if its == player}:
                self.now.ratings.setdefault(seat, {}).setdefault(player, Rating()).forfeits += 1
        agents = self._sides[match.side]
        gained = math.fsum(record.agent_returns.get(agent, 0.0) for agent in agents) / len(agents)
        for side, player in enumerate(match.players):
            if side == match.side:
                continue
            result = match.result(match.side, side)
            cells = self.now.payoff.setdefault(own, {}).setdefault(player, {})
            games, wins, draws, returns = cells.get(match.side, (0, 0, 0, 0.0))
            cells[match.side] = games + 1, wins + (result == 1), draws + (result == 0.5), returns + gained
            if player != own:
                for opponent in (player, ALL):  # a mean that begins with a win and a loss, and forgets what is old
                    games, rate = standing.form.get(opponent, (0, 0.5))
                    window = min(games + 3, max(self._config.snapshot.min_games, 3))
                    standing.form[opponent] = games + 1, rate + (result - rate) / window
        self._rate(match)

    def _knows(self, match: MatchRecord) -> bool:
        learner, sides = self._learners.get(match.learner), len(self._seats)
        if learner is None or not len(match.players) == len(match.outcome) == sides or match.side >= sides:
            return False
        taken = {snapshot.id for snapshot in self.now.snapshots}
        current = {*self._seats, *(each.policy for each in self._learners.values())}
        known = all(player in current or player in taken or player in self._fixed for player in match.players)
        return known and match.players[match.side] == learner.policy and self._seats[match.side] == learner.seat

    def _rate(self, match: MatchRecord) -> None:
        places = list(zip(self._seats, match.players, strict=True))
        if len(set(places)) < len(places):
            return
        ratings = [self.now.ratings.setdefault(seat, {}).setdefault(player, Rating()) for seat, player in places]
        before = [rating.elo for rating in ratings]
        ranks = [1.0 + sum(other > mine for other in match.outcome) for mine in match.outcome]
        rated = _MODEL.rate([[_MODEL.rating(mu=each.mu, sigma=each.sigma)] for each in ratings], ranks=ranks)
        for rating, (new,) in zip(ratings, rated, strict=True):
            rating.mu, rating.sigma, rating.matches = new.mu, new.sigma, rating.matches + 1
        for side in range(len(places)):
            if side != match.side:
                expected = 1 / (1 + math.pow(10, (before[side] - before[match.side]) / _ELO_SCALE))
                change = (match.result(match.side, side) - expected) / (len(places) - 1)
                ratings[match.side].elo += change
                ratings[side].elo -= change

    def after_update(self, policies: Mapping[str, Policy], updates: int) -> list[str]:
        """Takes the snapshots that are due; returns the policies of the learners whose reset is."""
        self._new, begin_again = {}, []  # by now a trainer has stored what there was
        for name, learner in sorted(self._learners.items()):
            standing = self.now.learners[name]
            reset = self._reset_due(name)
            if reset or self._snapshot_due(standing):
                self._take_snapshot(name, policies, updates)
            if reset:
                played = standing.played.env_steps - standing.began_at.env_steps
                self._resets.append(
                    f"{name} begins again with its initial weights after {played:,} env steps (reset "
                    f"{standing.resets + 1}); what it was is a snapshot"
                )
                standing.began_at, standing.form = replace(standing.played), {}
                standing.resets += 1
                standing.former = self.now.version + self._lag  # the present version is not above that
                self.now.ratings[learner.seat][learner.policy] = Rating()
                begin_again.append(learner.policy)
        return begin_again

    def _snapshot_due(self, standing: Standing) -> bool:
        config, (games, rate) = self._config.snapshot, standing.form.get(ALL, (0, 0.0))
        if config.every is not None and _passed(config.every, standing.played, standing.snapshot_at):
            return True
        strong = config.win_rate is not None and games >= config.min_games and rate >= config.win_rate
        return strong and _passed(config.at_most_every, standing.played, standing.snapshot_at)

    def _reset_due(self, name: str) -> bool:
        standing, least = self.now.learners[name], self._config.snapshot.min_games
        if (reset := self._learners[name].reset) is None:
            return False
        won = False
        if reset.win_rate is not None and (current := self._current(name)):
            met = [standing.form.get(policy_id, (0, 0.0)) for policy_id in current]
            won = all(games >= least and rate >= reset.win_rate for games, rate in met)
        return won or (reset.or_after is not None and _passed(reset.or_after, standing.played, standing.began_at))

    def _take_snapshot(self, name: str, policies: Mapping[str, Policy], updates: int) -> None:
        """Adds the learner's weights and rating to the league; the oldest snapshot may have to leave."""
        state, learner = self.now, self._learners[name]
        standing, policy_id = state.learners[name], learner.policy
        standing.snapshot_at = replace(standing.played)
        standing.form.pop(ALL, None)
        weights = player_hash(encode_policy(policies[policy_id], 0))
        data = encode_policy(policies[policy_id], updates)
        sha256 = player_hash(data)
        player = snapshot_id(policy_id, sha256)
        if any(its.id == player or (its.policy, its.weights) == (policy_id, weights) for its in state.snapshots):
            return  # nothing was learned since
        self._new[sha256] = data
        state.snapshots.append(Snapshot(player, policy_id, sha256, standing.played.env_steps, weights))
        ratings = state.ratings.setdefault(learner.seat, {})
        ratings[player] = replace(ratings.setdefault(policy_id, Rating()))
        if row := state.payoff.pop(policy_id, None):
            state.payoff[player] = row
        first = {snapshot.policy: snapshot for snapshot in reversed(state.snapshots)}
        others = [snapshot for snapshot in state.snapshots if first[snapshot.policy] is not snapshot]
        for snapshot in others[: max(0, len(state.snapshots) - self._config.players)]:
            self._remove(snapshot)

    def _remove(self, snapshot: Snapshot) -> None:
        self.now.snapshots.remove(snapshot)
        self.now.payoff.pop(snapshot.id, None)
        known: list[dict[str, Any]] = [*self.now.payoff.values(), *self.now.ratings.values()]
        for row in (*known, *(standing.form for standing in self.now.learners.values())):
            row.pop(snapshot.id, None)

    def table(self, train: Counters) -> MatchTable:
        """Returns who may play whom from now on; `swap_every` counts by the counters `train`."""
        names, every = sorted(self._learners), self._config.swap_every
        if every is not None:
            names = [names[every.index(train) % len(names)]]
        learners, drawn = {}, set[str]()
        for name in names:
            learner = self._learners[name]
            own = tuple(side for side, seat in enumerate(self._seats) if seat == learner.seat)
            opponents = {seat: self._opponents(name, seat) for seat in self._met(learner.seat)}
            learners[name] = Learner(learner.policy, own, opponents)
            drawn |= {player for each in opponents.values() for player, _ in each}
        seats = {learner.policy: learner.seat for learner in self._learners.values()}
        players = {
            item.id: PlayerRef("policy", item.sha256, f"{item.policy} at step {item.env_steps}", (seats[item.policy],))
            for item in self.now.snapshots if item.id in drawn
        }  # fmt: skip
        players |= {name: ref for name, ref in self._fixed.items() if name in drawn}
        return MatchTable(self._sides, self._seats, learners, players)

    def _met(self, seat: str) -> list[str]:
        """Returns the policies whose seats are on other sides than one of this policy."""
        return sorted(other for other, count in Counter(self._seats).items() if other != seat or count > 1)

    def _drawn(self, name: str) -> set[str]:
        return {its for seat in self._met(self._learners[name].seat) for its, _ in self._opponents(name, seat)}

    def _current(self, name: str) -> set[str]:
        return self._drawn(name) & {*self._seats} - {self._learners[name].policy}

    def _opponents(self, name: str, seat: str) -> tuple[tuple[str, float], ...]:
        opponents = self._config.opponents
        past, fixed = self._past(name, seat), dict[str, float]()
        if not self._learners[name].plays:  # else it meets that policy alone
            fixed = {id_: self._config.fixed[id_].weight for id_, ref in self._fixed.items() if seat in ref.seats}
        found = {
            seat: opponents.latest + (0 if past else opponents.past.share) + (0 if fixed else opponents.fixed.share)
        }
        for share, weights in ((opponents.past.share, past), (opponents.fixed.share, fixed)):
            total = math.fsum(weights.values())
            found |= {player: share * weight / total for player, weight in weights.items()}
        return tuple((player, probability) for player, probability in found.items() if probability > 0)

    def _past(self, name: str, seat: str) -> dict[str, float]:
        """Returns the weights of the snapshots that `name` may meet in `seat`, oldest first."""
        config, learner, met = self._config.opponents.past, self._learners[name], set[str]()
        for policy_id in (each.policy for each in self._learners.values() if each.seat == seat):
            if policy_id == seat or learner.policy == learner.seat:  # else it exploits the seat's own policy
                of_it = [snapshot.id for snapshot in self.now.snapshots if snapshot.policy == policy_id]
                met |= {of_it[0], *of_it[-config.window :]}
        ids = [snapshot.id for snapshot in self.now.snapshots if snapshot.id in met]
        if config.choose == "uniform":
            return dict.fromkeys(ids, 1.0)
        if config.choose == "recent":
            return {player: float(rank) for rank, player in enumerate(ids, 1)}
        form = self.now.learners[name].form
        rates = {player: form.get(player, (0, 0.5))[1] for player in ids}
        weights = {player: math.pow(1 - rate, 2.0) for player, rate in rates.items()}
        return weights if any(weights.values()) else dict.fromkeys(ids, 1.0)

    def new_objects(self) -> dict[str, bytes]:
        return self._new

    def objects(self) -> list[str]:
        fixed = (ref.sha256 for ref in self._fixed.values() if ref.sha256)
        return sorted({*(snapshot.sha256 for snapshot in self.now.snapshots), *fixed})

    def rating(self, policy_id: str) -> float:
        """Returns the ordinal of a learning policy, by default the first learner's."""
        named = {its.policy: its.seat for its in self._learners.values()}
        policy_id = policy_id or first_learner(self._learners).policy
        return self.now.ratings[named[policy_id]][policy_id].ordinal

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, learner in sorted(self._learners.items()):
            standing = self.now.learners[name]
            rating = self.now.ratings[learner.seat][learner.policy]
            its = {
                "rating": rating.ordinal, "elo": rating.elo, "win_rate": standing.form.get(ALL, (0, 0.5))[1],
                "matches": standing.played.episodes, "resets": standing.resets,
                "snapshots": sum(snapshot.policy == learner.policy for snapshot in self.now.snapshots),
                "forfeits": sum(self.now.forfeits.values()),
            }  # fmt: skip
            found |= {f"{key}/{learner.policy}": value for key, value in its.items()}
        return found

    def drain_events(self) -> list[str]:
        """Returns a line for each reset; and once in a process, where fixed players are not met, for each learner that
        never meets the policy it `plays`, and for each player that has forfeited many matches."""
        lines = self._resets
        self._resets = []
        if self._config.fixed and not self._config.opponents.fixed.share and "" not in self._told:
            self._told.add("")
            named = ", ".join(sorted(self._config.fixed))
            lines.append(f"fixed players are met in evaluations alone ({named}): league.opponents.fixed is 0")
        if self._config.opponents.fixed.share and "fixed" not in self._told:
            self._told.add("fixed")
            drawn = set[str]().union(*map(self._drawn, self._learners))
            lines += [
                f"fixed player {name} is never drawn: it fits the seats of {', '.join(ref.seats)}, where no learner "
                f"meets a fixed player"
                for name, ref in self._fixed.items() if name not in drawn
            ]  # fmt: skip
        for name, learner in sorted(self._learners.items()):
            counts = learner.reset is not None and learner.reset.win_rate is not None
            if counts and (key := f"reset {name}") not in self._told and not self._current(name):
                self._told.add(key)
                lines.append(
                    f"league.learners.{name}.reset.win_rate is never reached: it counts matches against current "
                    f"weights, and no share of its opponents is left for them (league.opponents.latest)"
                )
            key = f"learner {name}"
            if learner.plays and key not in self._told and learner.seat not in (met := self._met(learner.seat)):
                self._told.add(key)
                whom = " and ".join(met)
                lines.append(f"{name} takes the seats of {learner.seat}, where it meets {whom} alone (plays)")
        for player, count in sorted(self.now.forfeits.items()):
            if count > _FORFEITS_ALLOWED and player not in self._told:
                self._told.add(player)
                found = f"player {player} has forfeited {count:,} matches"
                lines.append(f"{found}, the last one: {self._why.get(player, 'it raised, or chose what it may not')}")
        return lines


def _passed(duration: Duration, now: Counters, before: Counters) -> bool:
    return now.get(duration.unit) - before.get(duration.unit) >= duration.amount


def wilson(games: int, wins: int, draws: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a win rate (a draw is half a win), by default of 95 %; (0, 1) without games."""
    if not games:
        return 0.0, 1.0
    rate, spread = (wins + draws / 2) / games, z * z / games
    middle, half = rate + spread / 2, z * math.sqrt((rate * (1 - rate) + spread / 4) / games)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def standings(state: LeagueState, fixed: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the league as plain data, for `stagecoach league` and the page.

    `players` are rows of ratings, the best first; `payoff` has a row per player that has played as a learner, with an
    entry per opponent: games, wins, draws, rate, its interval, mean return, and per side the counts and sum of returns.
    """
    taken = {snapshot.id: snapshot for snapshot in state.snapshots}
    kinds = dict.fromkeys(fixed, "fixed") | dict.fromkeys(taken, "snapshot")
    players = [
        {
            "player": player, "seat": seat, "kind": kinds.get(player, "current"), "rating": rating.ordinal,
            **vars(rating),
            "env_steps": taken[player].env_steps if player in taken else None,
        }
        for seat, ratings in sorted(state.ratings.items())
        for player, rating in ratings.items()
    ]  # fmt: skip
    rows = {
        player: {opponent: _cell(sides) for opponent, sides in row.items()}
        for player, row in state.payoff.items() if row
    }  # fmt: skip
    return {"players": sorted(players, key=lambda row: (row["seat"], -row["rating"])), "payoff": rows}


def _cell(sides: Mapping[int, tuple[int, int, int, float]]) -> dict[str, Any]:
    games, wins, draws = (sum(int(cell[index]) for cell in sides.values()) for index in range(3))
    mean_return = math.fsum(cell[3] for cell in sides.values()) / games
    low, high = wilson(games, wins, draws)
    rate = (wins + draws / 2) / games
    by_side = {str(side): list(cell) for side, cell in sorted(sides.items())}
    found = {"games": games, "wins": wins, "draws": draws, "rate": rate, "low": low, "high": high}
    return found | {"mean_return": mean_return, "sides": by_side}
