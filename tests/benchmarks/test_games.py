"""The kit's games against OpenSpiel and PettingZoo, and its judges against known values and planted faults."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pettingzoo import make

from benchmarks.learning import judges
from benchmarks.learning.games import PLAYERS, Foraging, RockPaperScissors, TwoStepGame, connect_four, kuhn, leduc
from benchmarks.learning.runner import Job, run
from benchmarks.learning.tasks import Task

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its own import of connect four
    from pettingzoo.test import api_test, parallel_api_test

CONNECT_FOUR = functools.partial(make, "aec", "classic/connect_four-v3")
POKER = {"kuhn_poker": kuhn, "leduc_poker": leduc}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of observations with a mask, and that nothing is rendered
@pytest.mark.parametrize("game", POKER.values(), ids=POKER)
def test_poker_is_a_pettingzoo_game(game: Any) -> None:
    api_test(game(), 200)


def test_other_games_are_parallel_environments() -> None:
    parallel_api_test(RockPaperScissors(), 20)
    parallel_api_test(TwoStepGame(), 20)
    pytest.importorskip("lbforaging")
    parallel_api_test(Foraging(), 200)


@pytest.mark.parametrize("name", POKER)
def test_poker_is_that_of_openspiel_in_every_state(name: str) -> None:
    """Turns, legal actions and chips are the same; an information state is one observation, and the other way round."""
    pyspiel = pytest.importorskip("pyspiel")
    game, states = POKER[name](), [pyspiel.load_game(name).new_initial_state()]
    seen: dict[bytes, set[str]] = {}
    told: dict[str, set[bytes]] = {}
    while states:
        state = states.pop()
        states += [state.child(action) for action in state.legal_actions()]
        if state.is_chance_node():
            continue
        judges.replay(game, state)
        if state.is_terminal():
            assert [game.rewards[agent] for agent in PLAYERS] == state.returns()
            gains = {agent: game.infos[agent]["outcome"] for agent in PLAYERS}
            assert [2 * gains[agent] - 1 for agent in PLAYERS] == np.sign(state.returns()).tolist()
            continue
        assert PLAYERS.index(game.agent_selection) == state.current_player()
        assert len(game.legal()) == len(state.legal_actions())
        shown = game.observe(game.agent_selection)["observation"].tobytes()
        seen.setdefault(shown, set()).add(state.information_state_string())
        told.setdefault(state.information_state_string(), set()).add(shown)
    # OpenSpiel tells two cards of one rank apart, which no rule does.
    suits = 2 if name == "leduc_poker" else 1
    assert {len(each) for each in told.values()} == {1}
    assert max(len(each) for each in seen.values()) <= suits**2
    assert len(seen) == {"kuhn_poker": 12, "leduc_poker": 288}[name]


@pytest.mark.parametrize(("name", "known"), [("kuhn_poker", 0.458333), ("leduc_poker", 2.373611)])
def test_uniform_poker_is_as_exploitable_as_is_known(name: str, known: float) -> None:
    pytest.importorskip("pyspiel")
    assert judges.exploitability(name, judges.uniform) == pytest.approx(known, abs=1e-6)


@pytest.mark.parametrize("bluff", [0.0, 0.2, 1 / 3])
def test_kuhn_equilibria_are_not_exploitable(bluff: float) -> None:
    """The first player bets with the jack by `bluff`, with the king three times as often (Kuhn 1950)."""
    pytest.importorskip("pyspiel")

    def equilibrium(seen: Mapping[str, Any], bet_with_queen: float = 0.0) -> Any:
        found = []
        for row in seen["observation"]:
            card, history = int(row[2:5].argmax()), row[8:].reshape(3, 3).argmax(axis=1)[: int(row[8:].sum())].tolist()
            bets = {
                (): [bluff, bet_with_queen, 3 * bluff], (1,): [1 / 3, 0, 1], (2,): [0, 1 / 3, 1],
                (1, 2): [0, bluff + 1 / 3, 1],
            }[tuple(history)]  # fmt: skip
            found.append([1 - bets[card], bets[card]])
        return np.array(found)

    assert judges.exploitability("kuhn_poker", equilibrium) == pytest.approx(0, abs=1e-9)
    faulty = functools.partial(equilibrium, bet_with_queen=1.0)
    assert judges.exploitability("kuhn_poker", faulty) > 0.02


def test_mean_strategy_is_drawn_once_a_game() -> None:
    """Half of the games is one that never bets nor calls, half one that always does: whoever has bet calls."""
    pytest.importorskip("pyspiel")

    def always(which: int) -> judges.Strategy:
        def of(seen: Mapping[str, Any]) -> Any:
            legal = [np.flatnonzero(mask)[which] for mask in seen["action_mask"]]
            return np.eye(2)[legal]

        return of

    meek, bold = always(0), always(-1)
    assert judges.exploitability("kuhn_poker", meek, meek) == judges.exploitability("kuhn_poker", meek)
    mixed = judges.exploitability("kuhn_poker", meek, bold)
    at_each_turn = judges.exploitability("kuhn_poker", lambda seen: (meek(seen) + bold(seen)) / 2)
    assert at_each_turn == pytest.approx(judges.exploitability("kuhn_poker", judges.uniform))
    assert mixed != pytest.approx(at_each_turn)


def test_uniform_tic_tac_toe_exploitability_equals_openspiel() -> None:
    assert judges.tic_tac_toe_exploitability(judges.uniform) == pytest.approx(0.9598296957671957, abs=1e-12)
    # Of all 255,168 games 131,184 are won by the first player and 77,904 by the second.
    assert [judges.lost_lines(judges.uniform, seat) for seat in (1, 2)] == [77_904, 131_184]


def test_boards_are_seen_as_pettingzoo_shows_them() -> None:
    env, random = make("aec", "classic/tictactoe-v3"), np.random.default_rng(0)
    for _ in range(20):
        env.reset()
        board: judges.Board = (0,) * 9
        turn = 1
        while not judges.over(board):
            observation, *_ = env.last()
            ours = judges.seen_of([board], turn)
            assert all((observation[name] == ours[name][0]).all() for name in ours)
            square = judges.random_player(observation, random)
            board, turn = judges.after(board, square, turn), 3 - turn
            env.step(square)
        assert env.rewards["player_1"] == {0: 0, 1: 1, 2: -1}[judges.won(board)]


def test_throws_are_judged_by_their_best_response() -> None:
    assert judges.throws_exploitability(np.full(3, 1 / 3)) == pytest.approx(0)
    assert judges.throws_exploitability(np.eye(3)[1]) == 1
    mixed, env = np.array([0.5, 0.3, 0.2]), RockPaperScissors()
    gains = np.zeros((3, 3))
    for mine in range(3):
        for theirs in range(3):
            env.reset()
            gains[mine, theirs] = env.step({PLAYERS[0]: mine, PLAYERS[1]: theirs})[1][PLAYERS[0]]
    assert judges.throws_exploitability(mixed) == pytest.approx((gains @ mixed).max())


def connect(moves: list[int]) -> Any:
    env = CONNECT_FOUR()
    env.reset()
    for move in moves:
        env.step(move)
    return env.last()[0]


@pytest.mark.parametrize(
    ("moves", "expected"),
    [
        ([3, 0, 3, 0, 3, 1], {3}),  # four in a column, though the other side has two
        ([0, 3, 1, 3, 6, 3], {3}),  # the other side's column is stopped
        ([0, 0, 1, 1, 2, 6], {3}),  # a row
        ([0, 1, 1, 2, 2, 3, 2, 3, 3, 6], {3}),  # a rising diagonal
        ([6, 5, 5, 4, 4, 3, 4, 3, 3, 0], {3}),  # a falling one
    ],
)
def test_minimax_wins_and_does_not_let_win(moves: list[int], expected: set[int]) -> None:
    observation = connect(moves)
    assert {judges.minimax(observation, np.random.default_rng(seed)) for seed in range(20)} == expected


def test_minimax_of_four_plies_sees_two_threats_at_once() -> None:
    """Two in the middle of an open row win with a third beside them; two plies do not see it, from either side."""
    attacks, defends = connect([3, 3, 2, 2]), connect([3, 3, 2])
    drawn = [np.random.default_rng(seed) for seed in range(40)]
    assert {judges.minimax_of_four_plies(attacks, random) for random in drawn} == {1, 4}
    assert {judges.minimax_of_four_plies(defends, random) for random in drawn} == {1, 4}
    assert {judges.minimax(attacks, random) for random in drawn} == set(range(7))


def test_mirrored_boards_share_observation_and_strategy() -> None:
    """Random games beside PettingZoo's own, in which the same columns are taken: what is shown is the board or its
    image, of two mirrored games the same, and the games end alike."""
    random, turned = np.random.default_rng(0), 0
    for _ in range(30):
        whole, mirrored, plain = connect_four(), connect_four(), CONNECT_FOUR()
        for env in (whole, mirrored, plain):
            env.reset()
        while not any(plain.terminations.values()):
            seen, its, board = (env.last()[0] for env in (whole, mirrored, plain))
            assert seen in whole.observation_space(whole.agent_selection)
            for name, axis in (("observation", 1), ("action_mask", 0)):
                assert np.array_equal(seen[name], its[name])
                assert any(np.array_equal(seen[name], each) for each in (board[name], np.flip(board[name], axis)))
            column = int(random.choice(np.flatnonzero(board["action_mask"])))
            image = not np.array_equal(seen["observation"], board["observation"])
            turned += image
            whole.step(6 - column if image else column)
            own = np.array_equal(its["observation"], np.flip(board["observation"], 1))  # its board, as it is
            mirrored.step(6 - column if own else column)
            plain.step(column)
            assert whole.rewards == mirrored.rewards == plain.rewards
            assert whole.terminations == plain.terminations
    assert turned > 100


TINY: dict[str, Any] = {
    "environment": {"api": "pettingzoo", "id": "benchmarks.learning.games:RockPaperScissors", "num_envs": 4},
    "algorithm": {"name": "ppo", "minibatch_size": 32, "epochs": 1},
    "rollout": {"fragment_steps": 8, "fragments_per_update": 1},
    "league": {"snapshot": {"every": "32 env_steps"}},
    "evaluation": {"episodes": 0},
    "checkpoint": {"every": "2 updates"},
}


@pytest.mark.timeout(180)
def test_game_run_is_judged_at_each_checkpoint(tmp_path: Path) -> None:
    task = Task(
        name="throws", algorithm="PPO", environment="throws", judge="rock_paper_scissors", reach=-0.5, within=256,
        reference="0", source="-", minutes=1, config=TINY,
    )  # fmt: skip
    found = run(Job(task, "inline", 1), tmp_path)
    assert found.reason == "exhausted"
    assert len(found.evaluations) > 2
    assert all(-1 <= score < 0 for _, score in found.evaluations)
    assert len({score for _, score in found.evaluations}) > 1
