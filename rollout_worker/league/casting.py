"""Casting: the players in the seats of each environment's episode, and the outcomes of their matches."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagecoach.rollout_worker.environments.vector_env import OUTCOME
from stagecoach.rollout_worker.league.opponents import Forfeit, Mixture, Network, Opponents, Player, Random
from stagecoach.rollout_worker.league.stacked import Stacked
from stagecoach.rollout_worker.sampling.director import Part, Running
from stagecoach.shared.base.errors import EnvironmentFailure, SharedObjectUnusable
from stagecoach.shared.base.printable import printable
from stagecoach.shared.experience.fragment import EpisodeRecord, MatchRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.league.matchmaking import Match, draw
from stagecoach.shared.league.table import MatchTable, PlayerRef
from stagecoach.shared.policies.policy import Policy

_LOGGER = logging.getLogger("stagecoach.worker")


_STREAM = 0x6D656D626572
"""Sets the draws of mixtures apart from all others that follow from the same seed."""
_ALL_DRAWS = 100
"""Number of draws in a row from the first match on that is reported."""


class Casting:
    """Director that seats players. A slot is a seat: agent's number within its policy × N + environment."""

    def __init__(
        self, description: EnvironmentDescription, num_envs: int, table: MatchTable, opponents: Opponents,
        emit: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`emit` writes an event: how outcomes are judged."""
        self._description, self._count, self._opponents, self._emit = description, num_envs, opponents, emit
        self._table = table
        self._refs = dict(table.players)
        """Players of all tables so far: an episode may outlast the table that it was drawn from."""
        self.matches: list[Match | None] = [None] * num_envs
        self._seeds = [0] * num_envs
        self._forfeits: list[dict[str, str]] = [{} for _ in range(num_envs)]
        """Player → reason of its forfeit in the running match, in the order of the forfeits."""
        self._forfeited: Counter[str] = Counter()
        self._judged: set[bool] = set()
        self._draws = 0
        groups = {group: [its for its, of in description.agents.items() if of == group] for group in description.seated}
        self._numbers = {agent: number for its in groups.values() for number, agent in enumerate(its)}
        sizes = {group: num_envs * description.slots(group) for group in groups}
        self._players = {group: np.full(size, "", object) for group, size in sizes.items()}
        self._learns = {group: np.zeros(size, np.bool_) for group, size in sizes.items()}
        self.states: dict[str, Tensor] = {}
        """`GROUP@PLAYER` → state of a recurrent opponent, `[S, state size]`."""
        self._stacks: dict[str, Stacked] = {}

    def use(self, table: MatchTable) -> None:
        self._table = table
        self._refs |= table.players

    def begin(self, environment: int, episode: int, seed: int) -> None:
        self.seat(environment, draw(self._table, environment, episode, seed), seed)

    def accepts(self, running: Running) -> bool:
        try:
            refs = [PlayerRef.from_dict(ref) for match in running for ref in match["refs"].values()]
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        return len(running) == self._count and all(map(self._opponents.allows, refs))

    def take_up(self, running: Running, states: Mapping[str, Array]) -> None:
        for environment, match in enumerate(running):
            self._refs |= {player: PlayerRef.from_dict(ref) for player, ref in match["refs"].items()}
            self.seat(environment, Match(match["learner"], match["side"], tuple(match["players"])), match["seed"])
            self._forfeits[environment] = dict(match["forfeits"])
        for name, array in states.items():
            if "@" in name:
                mine = self._seats_of(name)
                self.states[name] = torch.zeros(len(mine), *array.shape[1:])
                self.states[name][torch.from_numpy(mine)] = torch.from_numpy(array.copy())

    def remembered(self) -> dict[str, Array]:
        """Returns `GROUP@PLAYER` → state of a recurrent opponent in its seats, `[R, state size]`."""
        return {name: state.cpu().numpy()[self._seats_of(name)] for name, state in self.states.items()}

    def objects(self) -> set[str]:
        named = {player for match in self.matches if match is not None for player in match.players}
        return {self._refs[player].sha256 for player in named if player in self._refs}

    def trace(self) -> list[dict[str, Any]]:
        return [
            vars(match)
            | {"refs": {name: self._refs[name].as_dict() for name in match.players if name in self._refs}}
            | {"forfeits": lost, "seed": seed}
            for match, lost, seed in zip(self.matches, self._forfeits, self._seeds, strict=True)
            if match is not None
        ]

    def seat(self, environment: int, match: Match, seed: int) -> None:
        """Begins an episode with this match. If the learner meets its own current weights, both sides learn. The member
        of a mixture follows from the episode's `seed`: its seats have `PLAYER#NUMBER`, a draw from [0, 1)."""
        self.matches[environment], self._forfeits[environment], self._seeds[environment] = match, {}, seed
        learner = match.players[match.side]
        for side, agents in enumerate(self._table.sides):
            seated = player = match.players[side]
            if player in self._refs and self._refs[player].kind == "mixture":
                seated = f"{player}#{np.random.default_rng([seed, _STREAM, side]).random()!r}"
            for agent in agents:
                group, slot = self._description.agents[agent], self._numbers[agent] * self._count + environment
                self._players[group][slot] = seated
                self._learns[group][slot] = match.players[side] == learner
        # states of other players are useless, and each fragment's trace would hold them
        self.states = {name: its for name, its in self.states.items() if self._seats_of(name).any()}

    def learning(self, group: str, policy_id: str) -> Array:
        return np.asarray((self._players[group] == policy_id) & self._learns[group])

    def forget(self, group: str, over: Array) -> None:
        """Clears states in the slots where `over` `[S]` an agent has ended; it may rejoin the same episode."""
        for name, state in self.states.items():
            if name.split("@", 1)[0] == group:
                state[torch.from_numpy(over)] = 0.0

    def _seated(self) -> set[str]:
        """Returns the SHA-256 of all seated players: the store may have deleted them."""
        players = {seated.partition("#")[0] for its in self._players.values() for seated in its.tolist()}
        return {self._refs[player].sha256 for player in players if player in self._refs}

    def _seats_of(self, name: str) -> Array:
        group, player = name.split("@", 1)
        return np.asarray(self._players[group] == player)

    def parts(self, group: str, rows: Array) -> Iterator[Part]:
        """Yields the players of the slots `rows` of a policy's seats, in the order of their ids."""
        players = self._players[group][rows]
        for player in sorted(set(players.tolist())):
            its = rows[players == player]
            yield Part(player, its, self._learns[group][its])

    def act(
        self, parts: Sequence[Part], group: str, observations: Columns, policy: Policy, generator: torch.Generator,
        actions: Columns,
    ) -> None:  # fmt: skip
        together: dict[str, list[tuple[Part, Player]]] = {}
        for part in parts:
            player = self._player(part.player, group, policy)
            together.setdefault(player.likeness or part.player, []).append((part, player))
        for likeness, its in together.items():
            rows = [part.rows for part, _ in its]
            if len(its) == 1:
                acted = self._alone(*its[0], group, observations, policy, generator)
            else:
                networks = [player for _, player in its if isinstance(player, Network)]
                if likeness not in self._stacks:
                    self._stacks[likeness] = Stacked(networks[0].policy)
                weights = [player.weights for player in networks]
                acted = self._stacks[likeness].act(weights, rows, observations, generator, networks[0].acting)
            for name, array in acted.items():
                actions[name][np.concatenate(rows)] = array

    def _player(self, seated: str, group: str, policy: Policy) -> Player:
        player, _, number = seated.partition("#")
        try:
            spaces = self._description.policies[group]
            found = self._opponents.get(self._refs[player], group, spaces, policy, self._seated)
            return found.member(float(number)) if isinstance(found, Mixture) else found
        except SharedObjectUnusable as error:
            if player in self._table.players:
                raise
            why = f"{player} has left the league in mid-episode, and cannot be loaded any more"
            raise EnvironmentFailure(f"{why}\n{error}") from None

    def _alone(
        self, part: Part, player: Player, group: str, observations: Columns, policy: Policy, generator: torch.Generator
    ) -> Columns:
        if player.state_size:
            key, none = f"{group}@{part.player}", torch.zeros(len(self._learns[group]), player.state_size)
            player.state = self.states.get(key, none).to(generator.device)
            actions = player.act(observations, part.rows, generator)
            self.states[key] = player.state
            return actions
        if not player.one_by_one:
            return player.act(observations, part.rows, generator)
        acted = []
        for row in part.rows:
            alone, lost = np.array([row]), self._forfeits[int(row) % self._count]
            try:
                if part.player in lost:
                    raise Forfeit
                acted.append(player.act(observations, alone, generator))
            except Forfeit as why:
                lost.setdefault(part.player, printable(" ".join(str(why).split()), 200))
                acted.append(Random(policy).act(observations, alone, generator))
        return {name: np.concatenate([its[name] for its in acted]) for name in acted[0]}

    def judged(self, environment: int, record: EpisodeRecord) -> EpisodeRecord:
        match, lost = self.matches[environment], self._forfeits[environment]
        assert match is not None
        named = [[f"{agent}.{OUTCOME}" for agent in side] for side in self._table.sides]
        told = [[record.metrics[name] for name in side if name in record.metrics] for side in named]
        odd = [value for side in told for value in side if not 0 <= value <= 1]
        by_environment = not odd and all(told)  # one agent of each side is enough: others may have ended before
        if by_environment not in self._judged:
            self._judged.add(by_environment)
            self._emit(f"outcomes of matches are judged {self._how(told, odd)}")
        if by_environment:
            scores = [*map(fmean, told)]
        else:
            scores = [fmean(record.agent_returns[agent] for agent in side) for side in self._table.sides]
        if lost:  # it has lost to all others, in each of its seats
            scores = [-math.inf if its in lost else score for its, score in zip(match.players, scores, strict=True)]
        shares = _compared(scores) if lost or not by_environment else scores
        outcome = tuple(0.0 if its in lost else share for its, share in zip(match.players, shares, strict=True))
        for loser, why in lost.items():
            self._forfeited[loser] += 1
            if (count := self._forfeited[loser]).bit_count() == 1:  # 1, 2, 4 …: there may be thousands
                _LOGGER.warning("a match is lost by forfeit, %s: %s (its forfeit %d here)", loser, why, count)
        said = "\n".join(f"{loser}: {why}" for loser, why in lost.items())
        decided = len(set(outcome)) > 1 or self._draws < 0
        self._draws = -1 if decided else self._draws + 1
        if self._draws == _ALL_DRAWS:
            self._emit(
                f"all of the first {_ALL_DRAWS} matches of a worker are draws, so ratings mean nothing: set "
                f"info[{OUTCOME!r}], or pay the sides differently"
            )
        return replace(record, match=MatchRecord(match.learner, match.side, match.players, outcome, said))

    def _how(self, told: Sequence[Sequence[float]], odd: Sequence[float]) -> str:
        returns = "by comparing the sides' returns"
        if odd:
            return f"{returns}, since info[{OUTCOME!r}] was {odd[0]:g}; expected 0 to 1"
        if all(told):
            return f"by the environment's info[{OUTCOME!r}]"
        if not any(told):
            return f"{returns}, since no agent had a number in info[{OUTCOME!r}]"
        side = list(self._table.sides[[bool(its) for its in told].index(False)])
        return f"{returns}, since no agent of side {side} had a number in info[{OUTCOME!r}]"


def _compared(returns: Sequence[float]) -> list[float]:
    """Returns the share of the others that each side has beaten; an equal return (but for rounding) counts half."""

    def beats(mine: float, other: float) -> float:
        return 0.5 if math.isclose(mine, other, rel_tol=1e-9, abs_tol=1e-9) else float(mine > other)

    return [(sum(beats(mine, other) for other in returns) - 0.5) / (len(returns) - 1) for mine in returns]
