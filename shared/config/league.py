"""Sections of a league: matchmaking, snapshots and other opponents."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Section, short_for
from stagecoach.shared.experience.counters import AT_LEAST_ONE, Duration, DurationField, OwnPlay
from stagecoach.shared.league.table import PlayerKind

MEAN_RETURN = "mean_return"
"""Value of `checkpoint.best_by` in a league."""
_SHARE = short_for("share", int, float)
_PlayerName = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$", max_length=100)]


class ResetConfig(Section):
    """Conditions for resetting a learner to its initial weights (as for AlphaStar's exploiters)."""

    win_rate: float | None = Field(None, gt=0, le=1)
    """Win rate against the current weights of its opponents, over `snapshot.min_games` matches, at which it resets."""
    or_after: Annotated[OwnPlay, AT_LEAST_ONE] | None = None
    """Amount of its own play since the last reset, in `env_steps` or `episodes`, after which it resets."""


class LearnerConfig(Section):
    """A learner of the league."""

    policy: str
    """Policy id of the learner."""
    plays: tuple[str, ...] = ()
    """Policy whose agents' seats it takes if no agent is mapped to its own. Its opponents are then the current weights
    and snapshots of the other sides' policies only: `[main]` for an exploiter of `main` that has all sides; where
    `attack` plays against `defend`, `[defend]` for an exploiter of `attack`."""
    reset: ResetConfig | None = None
    """Reset to the initial weights; by default never. A snapshot joins the league first."""

    @property
    def seat(self) -> str:
        """Policy id whose agents' seats it takes."""
        return self.plays[0] if self.plays else self.policy

    @model_validator(mode="after")
    def _one_seat(self) -> Self:
        if len(self.plays) > 1:
            raise ValueError(f"plays={list(self.plays)}: a learner takes the seats of one policy; name one")
        if self.reset is not None and self.reset.win_rate is None and self.reset.or_after is None:
            raise ValueError("reset is empty and would never happen; give reset.win_rate or reset.or_after")
        return self


class SnapshotConfig(Section):
    """Conditions for adding a snapshot of a learner's weights to the league; the initial weights are always added."""

    every: Annotated[OwnPlay, AT_LEAST_ONE] | None = Duration(50_000, "env_steps")
    """Amount of the learner's own play between snapshots, in `env_steps` or `episodes`; `null` for `win_rate` only."""
    win_rate: float | None = Field(None, gt=0, le=1)
    """Win rate against others since its last snapshot, over `min_games` matches, at which it takes one."""
    min_games: int = Field(100, ge=1)
    """Minimum number of matches for a win rate; also the window of PFSP's win rates."""
    at_most_every: OwnPlay = Duration(0, "env_steps")
    """Minimum of its own play between two snapshots by `win_rate`."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.at_most_every.amount and self.win_rate is None:
            raise ValueError(f"at_most_every={str(self.at_most_every)!r} bounds snapshots by win_rate; give that too")
        return self


class PastConfig(Section):
    """Opponents among earlier snapshots."""

    share: float = Field(0.5, ge=0, le=1)
    """Share of the seats."""
    choose: Literal["uniform", "recent", "pfsp"] = "uniform"
    """Sampling of snapshots. `uniform`; `recent`: of n, the newest is n times as likely as the oldest; `pfsp`: weighted
    by (1 − x)², where x is the learner's win rate against each (prioritized fictitious self-play, Vinyals et al.
    2019)."""
    window: int = Field(10, ge=1)
    """Number of newest snapshots of each policy to sample from, in addition to the first, which keeps ratings from
    drifting."""


class FixedShareConfig(Section):
    """Opponents among `league.fixed`."""

    share: float = Field(0.0, ge=0, le=1)
    """Share of the seats for all fixed players, divided by their `weight`."""


class OpponentsConfig(Section):
    """Opponents of the learner; the shares add up to 1. A seat without a snapshot or fixed player goes to current
    weights."""

    latest: float = Field(0.5, ge=0, le=1)
    """Share of the seats for the current weights of the seat's own policy."""
    past: Annotated[PastConfig, _SHARE] = PastConfig()
    """Earlier snapshots; a number sets their share."""
    fixed: Annotated[FixedShareConfig, _SHARE] = FixedShareConfig()
    """Players of `league.fixed`; a number sets their share."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        total = self.latest + self.past.share + self.fixed.share
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"latest={self.latest:g}, past.share={self.past.share:g} and fixed.share={self.fixed.share:g} add up "
                f"to {total:g}, expected 1; change one of them"
            )
        return self


class FixedPlayerConfig(Section):
    """A fixed player. `kind`, `sha256` and `seats` are filled in when the run starts."""

    source: str = Field(min_length=1)
    """Source of the player, which is copied into this run's store: `random`; `module:function`, a scripted player;
    `RUN[/CHECKPOINT][#POLICY]`, where RUN may be `s3://bucket/prefix/RUN` (accessed like this run's store), or a
    checkpoint's folder; `RUN#PLAYER`, a snapshot of that run's league; `RUN#mean`, its mean strategy; or a file
    `….onnx`."""
    weight: float = Field(1.0, gt=0, le=1000)
    """Sampling weight among the fixed players."""
    kind: PlayerKind | None = None
    """Kind of the player, determined by its source."""
    sha256: str = ""
    """SHA-256 of its bytes in the store (not of a function)."""
    seats: tuple[str, ...] = ()
    """Policies whose seats it fits."""


def first_learner(learners: Mapping[str, LearnerConfig]) -> LearnerConfig:
    """Returns the learner whose rating represents the run: the first by name, of those without `plays` if there are
    any."""
    return min(learners.items(), key=lambda its: (its[1].seat != its[1].policy, its[0]))[1]


class LeagueConfig(Section):
    """Self-play against current weights, snapshots and fixed players (docs/guides/league.md)."""

    sides: tuple[tuple[str, ...], ...] = ()
    """Agents of each side; a side's agents share one policy. By default each agent is a side."""
    learners: dict[_PlayerName, LearnerConfig] = {}
    """Learners by name. By default each trainable policy learns."""
    snapshot: SnapshotConfig = SnapshotConfig()
    opponents: OpponentsConfig = OpponentsConfig()
    fixed: dict[_PlayerName, Annotated[FixedPlayerConfig, short_for("source", str)]] = {}
    """Fixed players, name → source."""
    players: int = Field(200, ge=2)
    """Maximum number of snapshots of all policies; beyond it the oldest leave, except the first of each policy."""
    swap_every: Annotated[DurationField, AT_LEAST_ONE] | None = None
    """Interval, in the run's counters, at which training passes to the next learner (ML-Agents' `team_change`). By
    default all learn, match by match."""

    @property
    def functions(self) -> frozenset[str]:
        """Scripted players. No other code runs for a player, whatever a match table or an action trace names."""
        return frozenset(player.source for player in self.fixed.values() if player.kind == "function")

    @model_validator(mode="after")
    def _can_be_played(self) -> Self:
        agents = [agent for side in self.sides for agent in side]
        if twice := sorted({agent for agent in agents if agents.count(agent) > 1}):
            raise ValueError(f"sides: {twice} more than once; each agent is on one side")
        if self.sides and (len(self.sides) < 2 or not all(self.sides)):
            raise ValueError(f"sides={[list(side) for side in self.sides]}: expected two or more, each with an agent")
        policies = [learner.policy for learner in self.learners.values()]
        if twice := sorted({policy for policy in policies if policies.count(policy) > 1}):
            raise ValueError(f"learners: {twice} learn more than once; give each learner a policy of its own")
        if self.snapshot.every is None and self.snapshot.win_rate is None:
            raise ValueError("snapshot: without every and win_rate none is ever taken; give one of them")
        if self.opponents.fixed.share and not self.fixed:
            raise ValueError(
                f"opponents.fixed.share={self.opponents.fixed.share:g} with no player in league.fixed; add one, "
                f"such as random: random, or set the share to 0"
            )
        return self
