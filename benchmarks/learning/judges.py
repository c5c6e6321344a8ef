"""Exact judges of games: how much a best response wins of a policy, which lines of play it loses, and matches.

What is judged is a `Strategy`, observations to probabilities; `strategy(policy)` makes one of a `DeployedPolicy`.
Exploitability is NashConv / 2 for two players: what a best response wins a game, averaged over both seats (of a
zero-sum game whose value is 0 for the mean of both seats). That is OpenSpiel's convention too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pettingzoo import AECEnv

from benchmarks.learning.games import Poker, kuhn, leduc
from stagecoach.shared.deployment.deployed_policy import DeployedMixture, DeployedPolicy

Array: TypeAlias = NDArray[Any]
Strategy: TypeAlias = Callable[[Any], Array]
"""A batch of observations, nested as the space is (`observation` `[B, …]`, `action_mask` `[B, A]`) → probabilities
`[B, A]`."""
Player: TypeAlias = Callable[[Any, np.random.Generator], Any]
"""As a scripted player of a league: an observation and a generator → an action."""

_LINES = [*np.arange(9).reshape(3, 3).tolist(), *np.arange(9).reshape(3, 3).T.tolist(), [0, 4, 8], [2, 4, 6]]
_POKER: dict[str, Callable[[], Poker]] = {"kuhn_poker": kuhn, "leduc_poker": leduc}


def uniform(seen: Mapping[str, Array]) -> Array:
    """Each legal action alike."""
    mask = seen["action_mask"] > 0
    return np.asarray(mask / mask.sum(axis=1, keepdims=True))


def strategy(policy: DeployedPolicy) -> Strategy:
    """What a policy of one Discrete action does in training: its distribution."""

    def of(seen: Any) -> NDArray[np.float64]:
        columns = {name: torch.from_numpy(array) for name, array in policy._columns(seen).items()}
        with torch.inference_mode():
            params = policy._policy.action_parameters(columns)
            one = policy._policy.spaces.action.column_names("action")[0]
            choices = policy._policy.spaces.action.leaves[0].nvec[0]
            chosen = [{one: torch.full((len(params),), choice)} for choice in range(choices)]
            logs = [policy._policy.distribution.log_prob(params, each) for each in chosen]
        probabilities: NDArray[np.float64] = torch.stack(logs, dim=1).exp().double().numpy()
        return probabilities

    return of


def greedy(of: Strategy) -> Strategy:
    """The most probable action, the first of equals: what `act` does."""

    def best(seen: Mapping[str, Array]) -> Array:
        probabilities = of(seen)
        chosen: Array = np.eye(probabilities.shape[1])[probabilities.argmax(axis=1)]
        return chosen

    return best


# Tic-tac-toe: all boards.

Board: TypeAlias = tuple[int, ...]
"""Nine squares as PettingZoo numbers them: 0 empty, else the seat's number, 1 or 2."""


def won(board: Board) -> int:
    """Who has three in a row; 0 for nobody."""
    return next((board[a] for a, b, c in _LINES if board[a] and board[a] == board[b] == board[c]), 0)


def over(board: Board) -> bool:
    return bool(won(board)) or 0 not in board


def after(board: Board, square: int, seat: int) -> Board:
    return (*board[:square], seat, *board[square + 1 :])


@functools.cache
def _boards(seat: int) -> list[Board]:
    """Where it is this seat's turn."""
    last: set[Board] = {(0,) * 9}
    found = set(last)
    for ply in range(8):
        last = {after(board, square, 1 + ply % 2) for board in last for square in range(9) if not board[square]}
        last = {board for board in last if not over(board)}
        found |= last
    return sorted(board for board in found if 1 + (9 - board.count(0)) % 2 == seat)


def seen_of(boards: Sequence[Board], seat: int) -> dict[str, Array]:
    """What PettingZoo's tic-tac-toe shows to the seat whose turn it is."""
    squares = np.array(boards, np.int8).reshape(-1, 3, 3)
    planes = np.stack([squares == seat, squares == 3 - seat], axis=-1).astype(np.int8)
    return {"observation": planes, "action_mask": (squares == 0).reshape(-1, 9).astype(np.int8)}


def _table(of: Strategy, seat: int) -> dict[Board, Array]:
    return dict(zip(_boards(seat), of(seen_of(_boards(seat), seat)), strict=True))


def lost_lines(of: Strategy, seat: int) -> int:
    """In how many lines of play it loses, of all that the other side can play and it plays with some probability."""
    moves = _table(of, seat)

    @functools.cache
    def lost(board: Board, turn: int) -> int:
        if over(board):
            return int(won(board) == 3 - seat)
        legal = [square for square in range(9) if not board[square] and (turn != seat or moves[board][square] > 0)]
        return sum(lost(after(board, square, turn), 3 - turn) for square in legal)

    return lost((0,) * 9, 1)


def tic_tac_toe_exploitability(of: Strategy) -> float:
    """What a best response wins, averaged over its seats: 0 for perfect play, 0.960 for uniform play."""

    def value(seat: int) -> float:
        """Of the best response to the policy in this seat."""
        moves = _table(of, seat)

        @functools.cache
        def best(board: Board, turn: int) -> float:
            if over(board):
                return {0: 0.0, seat: -1.0, 3 - seat: 1.0}[won(board)]
            values = {square: best(after(board, square, turn), 3 - turn) for square in range(9) if not board[square]}
            if turn != seat:
                return max(values.values())
            return float(sum(moves[board][square] * its for square, its in values.items()))

        return best((0,) * 9, 1)

    return (value(1) + value(2)) / 2


# Poker: OpenSpiel's best response.


def observed(game: Poker, state: Any) -> dict[str, Array]:
    """What our environment shows of a state of OpenSpiel to whose turn it is. Legal actions are the same in the same
    order."""
    replay(game, state)
    return game.observe(game.agent_selection)


def replay(game: Poker, state: Any) -> None:
    """Plays the history of OpenSpiel's state."""
    at, moves = state.get_game().new_initial_state(), state.history()
    cards, actions = [], []
    for move in moves:
        if at.is_chance_node():
            cards.append(move)
        else:
            actions.append(at.legal_actions().index(move))
        at.apply_action(move)
    unseen = [card for card in range(6) if card not in cards]
    game.reset(options={"cards": (cards + unseen)[:3]})
    for index in actions:
        game.step(np.flatnonzero(game.observe(game.agent_selection)["action_mask"])[index])


def deployed_exploitability(name: str, policy: DeployedPolicy) -> float:
    """As `exploitability`, of what `load_policy` returns, a league's mean strategy included."""
    if not isinstance(policy, DeployedMixture):
        return exploitability(name, strategy(policy))
    return exploitability(name, *map(strategy, policy.members), weights=policy.weights)


def exploitability(name: str, *of: Strategy, weights: Sequence[float] = ()) -> float:
    """`kuhn_poker` or `leduc_poker`: NashConv / 2 in chips a game; uniform play has 0.458 and 2.374. Of several: of one
    who draws one of them for each game, as a league's mean strategy does, by default each alike."""
    import pyspiel
    from open_spiel.python.algorithms import exploitability as open_spiel
    from open_spiel.python.policy import TabularPolicy

    spiel, game = pyspiel.load_game(name), _POKER[name]()
    table = TabularPolicy(spiel)
    shown = [observed(game, state) for state in table.states]
    seen = {key: np.stack([each[key] for each in shown]) for key in shown[0]}
    played = np.zeros((len(of), *table.action_probability_array.shape))
    for member, probabilities in zip(played, (each(seen) for each in of), strict=True):
        for row, state in enumerate(table.states):
            member[row, state.legal_actions()] = probabilities[row, np.flatnonzero(seen["action_mask"][row])]
    for row, state in enumerate(table.states):
        chosen = (_reached(table, state, played) * np.array(weights or 1.0) + 1e-12) @ played[:, row]
        table.action_probability_array[row] = chosen / chosen.sum()
    return float(open_spiel.exploitability(spiel, table))


def _reached(table: Any, state: Any, played: Array) -> Array:
    """`[M]`: how probable its own actions on the way to this state are, for each of the strategies."""
    at, reached = state.get_game().new_initial_state(), np.ones(len(played))
    for action in state.history():
        if not at.is_chance_node() and at.current_player() == state.current_player():
            reached *= played[:, table.state_lookup[at.information_state_string()], action]
        at.apply_action(action)
    return reached


# Rock-paper-scissors.


def throws(of: Strategy) -> Array:
    """The mixed strategy `[3]`."""
    return np.asarray(of(np.ones((1, 1), np.float32))[0])


def throws_exploitability(mixed: Array) -> float:
    """What a best response wins of it: 0 for a third each, 1 for always the same."""
    return float((np.roll(mixed, 1) - np.roll(mixed, -1)).max())


# Matches.


def random_player(observation: Any, random: np.random.Generator) -> int:
    """A legal action."""
    return int(random.choice(np.flatnonzero(observation["action_mask"])))


def greedy_player(policy: DeployedPolicy) -> Player:
    return lambda observation, random: policy.act(observation)


_SQUARES = np.array([[1 << 7 * column + 5 - row for column in range(7)] for row in range(6)], np.int64)
"""The bit of each square: a column has 7, of which the seventh stays empty."""
_COLUMNS = [0b111111 << 7 * column for column in range(7)]
_BOTTOMS = [1 << 7 * column for column in range(7)]


def _drops(taken: int) -> dict[int, int]:
    """Where a disk falls, as a bit, by the columns that are not full."""
    return {
        column: (taken & full) + bottom
        for column, (full, bottom) in enumerate(zip(_COLUMNS, _BOTTOMS, strict=True))
        if taken & full != full
    }


def _four(disks: int) -> bool:
    return any((pairs := disks & disks >> by) & pairs >> 2 * by for by in (1, 6, 7, 8))


def _worth(mine: int, theirs: int, plies: int) -> int:
    """1 if whose turn it is wins within so many plies, whatever the other side does, -1 if it loses, else 0."""
    legal = _drops(mine | theirs)
    if any(_four(mine | bit) for bit in legal.values()):
        return 1
    if plies == 1 or not legal:
        return 0
    worst = 1
    for bit in legal.values():
        worst = min(worst, _worth(theirs, mine | bit, plies - 1))
        if worst < 0:
            break
    return -worst


def _minimax(observation: Any, random: np.random.Generator, plies: int) -> int:
    mine, theirs = (int(_SQUARES[observation["observation"][..., plane] > 0].sum()) for plane in (0, 1))
    legal = _drops(mine | theirs)
    worth = {
        column: 1 if _four(mine | bit) else -_worth(theirs, mine | bit, plies - 1) for column, bit in legal.items()
    }
    best = max(worth.values())
    return int(random.choice([column for column, found in worth.items() if found == best]))


def minimax(observation: Any, random: np.random.Generator) -> int:
    """Connect four, two plies deep: wins if it can, else does not let the other side win with its next move; draws
    among equals. A scripted player for `league.fixed`."""
    return _minimax(observation, random, 2)


def minimax_of_four_plies(observation: Any, random: np.random.Generator) -> int:
    """Plays like `minimax`, four plies deep, so it also makes and stops double threats."""
    return _minimax(observation, random, 4)


def careless(observation: Any, random: np.random.Generator) -> int:
    """Plays connect four as `minimax` does, but every other move at random: a scripted player that has threats where
    that one has none."""
    return random_player(observation, random) if random.random() < 0.5 else minimax(observation, random)


def match(make: Callable[[], AECEnv], player: Player, other: Player, pairs: int, seed: int = 0) -> tuple[int, int, int]:
    """Won, drawn and lost of `2 * pairs` games; both games of a pair have the same seed and swapped seats."""
    env, results = make(), [0, 0, 0]
    for pair in range(pairs):
        for seat in (0, 1):
            random = np.random.default_rng([seed, pair])
            env.reset(seed=int(random.integers(1 << 31)))
            mine, total = env.possible_agents[seat], 0.0
            for agent in env.agent_iter():
                observation, reward, terminated, truncated, _ = env.last()
                total += float(reward) if agent == mine else 0.0
                acting = player if agent == mine else other
                env.step(None if terminated or truncated else acting(observation, random))
            results[1 - int(np.sign(total))] += 1
    return results[0], results[1], results[2]
