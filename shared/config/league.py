"""The config's section for a league: who plays whom, which snapshots are taken, and who else is an opponent."""

import math
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.schema.section import Section, short_for
from stagecoach.shared.experience.counters import AT_LEAST_ONE, Duration, DurationField, OwnPlay
from stagecoach.shared.league.table import PlayerKind

MEAN_RETURN = "mean_return"
"""Of `checkpoint.best_by` in a league."""
_SHARE = short_for("share", int, float)
_PlayerName = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$", max_length=100)]


class ResetConfig(Section):
    """When a learner begins again with its initial weights (as AlphaStar's exploiters do)."""

    win_rate: float | None = Field(None, gt=0, le=1)
    """Once it wins this share of its matches against the current weights that it plays, over `snapshot.min_games`."""
    or_after: Annotated[OwnPlay, AT_LEAST_ONE] | None = None
    """After so much of its own play since it last began, in `env_steps` or `episodes`."""


class LearnerConfig(Section):
    """One that learns in the league."""

    policy: str
    """The policy id that learns."""
    plays: tuple[str, ...] = ()
    """The policy whose agents' seats it takes, where no agent is mapped to its own. Its opponents are then the current
    weights and the snapshots of the policies of the other sides alone: `[main]` for one that learns to exploit `main`,
    which has all sides; where `attack` plays against `defend`, `[defend]` for one that learns to exploit `attack`."""
    reset: ResetConfig | None = None
    """When it begins again; by default never. A snapshot of what it had learned joins the league first."""

    @property
    def seat(self) -> str:
        """The policy id whose agents' seats it takes."""
        return self.plays[0] if self.plays else self.policy

    @model_validator(mode="after")
    def _one_seat(self) -> Self:
        if len(self.plays) > 1:
            raise ValueError(f"plays={list(self.plays)}: a learner takes the seats of one policy; name one")
        if self.reset is not None and self.reset.win_rate is None and self.reset.or_after is None:
            raise ValueError("reset is empty and would never happen; give reset.win_rate or reset.or_after")
        return self


class SnapshotConfig(Section):
    """When a learner's weights join the league as a player that does not change; the initial ones always do."""

    every: Annotated[OwnPlay, AT_LEAST_ONE] | None = Duration(50_000, "env_steps")
    """After so much of the learner's own play, in `env_steps` or `episodes`; `null` for by `win_rate` alone."""
    win_rate: float | None = Field(None, gt=0, le=1)
    """Once it wins this share of its matches against others since its last snapshot, over `min_games` of them."""
    min_games: int = Field(100, ge=1)
    """How many matches a win rate needs before it counts; also how far back the win rates of PFSP look."""
    at_most_every: OwnPlay = Duration(0, "env_steps")
    """The least of its own play between two snapshots by `win_rate`."""

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.at_most_every.amount and self.win_rate is None:
            raise ValueError(f"at_most_every={str(self.at_most_every)!r} bounds snapshots by win_rate; give that too")
        return self


class PastConfig(Section):
    """Opponents among earlier snapshots."""

    share: float = Field(0.5, ge=0, le=1)
    """Share of seats that they take."""
    choose: Literal["uniform", "recent", "pfsp"] = "uniform"
    """`uniform`: each alike; `recent`: of n the newest n times as often as the oldest; `pfsp`: by (1 − x)², x being
    the learner's win rate against each (prioritized fictitious self-play, Vinyals et al. 2019)."""
    window: int = Field(10, ge=1)
    """The newest snapshots that are drawn, of each policy; the first one always is, so that ratings do not drift."""


class FixedShareConfig(Section):
    """Opponents among `league.fixed`."""

    share: float = Field(0.0, ge=0, le=1)
    """Share of seats that they take together; each of them by its `weight`."""


class OpponentsConfig(Section):
    """Who takes the seats that the learner does not; the shares add up to 1. A seat for which there is no snapshot or
    no fixed player goes to current weights instead."""

    latest: float = Field(0.5, ge=0, le=1)
    """Share of seats for the current weights of the policy that the seat's agents are mapped to."""
    past: Annotated[PastConfig, _SHARE] = PastConfig()
    """Earlier snapshots; a number is their share."""
    fixed: Annotated[FixedShareConfig, _SHARE] = FixedShareConfig()
    """Players of `league.fixed`; a number is their share."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> Self:
        total = self.latest + self.past.share + self.fixed.share
        if not math.isclose(total, 1.0, abs_tol=1e-6):
            raise ValueError(
                f"latest={self.latest:g}, past.share={self.past.share:g} and fixed.share={self.fixed.share:g} come to "
                f"{total:g}, expected 1; change one of them"
            )
        return self


class FixedPlayerConfig(Section):
    """A player from elsewhere. `kind`, `sha256` and `seats` are filled in when the run starts."""

    source: str = Field(min_length=1)
    """`random`; `module:function`, a scripted player; `RUN[/CHECKPOINT][#POLICY]`, where RUN may be
    `s3://bucket/prefix/RUN` (reached as this run's store is), or a checkpoint's folder;
    `RUN#PLAYER`, a snapshot of that run's league; `RUN#mean`, its mean strategy; or a file `….onnx`. It is copied into
    this run's store."""
    weight: float = Field(1.0, gt=0, le=1000)
    """How often it is drawn beside the other fixed players: twice as often with 2 as with 1."""
    kind: PlayerKind | None = None
    """What it is, by its source."""
    sha256: str = ""
    """Of its bytes in the store (not of a function)."""
    seats: tuple[str, ...] = ()
    """The policies whose seats it fits."""


def first_learner(learners: Mapping[str, LearnerConfig]) -> LearnerConfig:
    """Whose rating stands for a run's where none is named: the first by name, of those without `plays` if there are."""
    return min(learners.items(), key=lambda its: (its[1].seat != its[1].policy, its[0]))[1]


class LeagueConfig(Section):
    """Self-play against current weights, snapshots and fixed players (docs/LEAGUE.md)."""

    sides: tuple[tuple[str, ...], ...] = ()
    """The agents of each side; a side's agents have one policy. By default each agent is a side."""
    learners: dict[_PlayerName, LearnerConfig] = {}
    """By name. By default each trainable policy learns."""
    snapshot: SnapshotConfig = SnapshotConfig()
    opponents: OpponentsConfig = OpponentsConfig()
    fixed: dict[_PlayerName, Annotated[FixedPlayerConfig, short_for("source", str)]] = {}
    """Players that do not learn, name → source."""
    players: int = Field(200, ge=2)
    """Snapshots in the league, of all policies; beyond that the oldest leave, but never the first of a policy."""
    swap_every: Annotated[DurationField, AT_LEAST_ONE] | None = None
    """Only one learner trains at a time, and the next one's turn comes when the run's counters pass a multiple of this
    (ML-Agents' `team_change`). By default all learn, match by match."""

    @property
    def functions(self) -> frozenset[str]:
        """The scripted players. No other code is run for a player, whatever a match table or an action trace names."""
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
