"""Games of the kit's own, from their rules: Kuhn and Leduc poker, rock-paper-scissors; connect four as pictures without
mirror images; and level-based foraging as a PettingZoo environment. How a match of ours has ended is told in the last
`info`: `outcome` is 1, 0.5 or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils import BaseWrapper

FOLD, CALL, RAISE = range(3)
"""A call of nothing is a check."""
PLAYERS = ["player_0", "player_1"]


def told(gain: float) -> dict[str, float]:
    """The last `info` of a side that has gained so much."""
    return {"outcome": float(np.sign(gain)) / 2 + 0.5}


class Alike:
    """Gives all agents the same spaces."""

    _space: spaces.Space[Any]
    _choices: spaces.Discrete

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._choices


class Poker(Alike, AECEnv):  # type: ignore[misc]
    """Limit poker for two with one card each, and a public one where there is a second round.

    A player observes, as ones and zeros: its seat, its card's rank, the public card's rank, and every action so far by
    round, which is all that it may know (an information state). Rewards are chips. A card `c` has the rank
    `c // suits`; `reset(options={"cards": [0, 3, 1]})` deals these (first, second, public).
    """

    metadata = {"name": "poker", "is_parallelizable": False}
    possible_agents = PLAYERS
    render_mode = None

    def __init__(
        self, ranks: int, suits: int, raise_by: Sequence[int], most_raises: int, *, pass_or_bet: bool = False
    ) -> None:
        """`raise_by` has an entry for each round, in chips; the ante is one chip. `pass_or_bet`: two actions instead of
        three, where two are legal at each turn; to pass is to check or to fold, to bet is to raise or to call."""
        super().__init__()
        self._ranks, self._suits, self._raise_by, self._most_raises = ranks, suits, tuple(raise_by), most_raises
        self._numbers = 2 + 2 * ranks + len(raise_by) * (most_raises + 2) * 3
        choices = 2 if pass_or_bet else 3
        self._space = spaces.Dict(
            observation=spaces.Box(0, 1, (self._numbers,), np.int8), action_mask=spaces.Box(0, 1, (choices,), np.int8)
        )
        self._choices = spaces.Discrete(choices)
        self._draw = np.random.default_rng()

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if seed is not None:
            self._draw = np.random.default_rng(seed)
        dealt = (options or {}).get("cards")
        drawn = self._draw.permutation(self._ranks * self._suits)[:3] if dealt is None else dealt
        self._cards = [int(card) // self._suits for card in drawn]
        self._history: list[list[int]] = [[]]
        self._paid = [1, 1]
        self.agents = list(PLAYERS)
        self.agent_selection = PLAYERS[0]
        self.rewards, self._cumulative_rewards = dict.fromkeys(PLAYERS, 0.0), dict.fromkeys(PLAYERS, 0.0)
        self.terminations, self.truncations = dict.fromkeys(PLAYERS, False), dict.fromkeys(PLAYERS, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in PLAYERS}

    def legal(self) -> list[int]:
        """Actions of whose turn it is, in their order."""
        facing = self._paid[0] != self._paid[1]
        raises = self._history[-1].count(RAISE) < self._most_raises
        return [FOLD] * facing + [CALL] + [RAISE] * raises

    def _choosable(self) -> list[int]:
        """What the action space calls the legal ones."""
        return self.legal() if self._choices.n == 3 else [0, 1]

    def observe(self, agent: str) -> dict[str, Any]:
        seat, ranks, length = PLAYERS.index(agent), self._ranks, self._most_raises + 2
        shown = np.zeros(self._numbers, np.int8)
        shown[[seat, 2 + self._cards[seat]]] = 1
        if len(self._history) > 1:
            shown[2 + ranks + self._cards[2]] = 1
        for number, made in enumerate(self._history):
            for place, action in enumerate(made):
                shown[2 + 2 * ranks + (number * length + place) * 3 + action] = 1
        mask = np.zeros(self._choices.n, np.int8)
        if agent == self.agent_selection and not any(self.terminations.values()):
            mask[self._choosable()] = 1
        return {"observation": shown, "action_mask": mask}

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        choosable, seat = self._choosable(), PLAYERS.index(self.agent_selection)
        assert action in choosable, f"action {action}: expected one of {choosable}"
        action = self.legal()[choosable.index(int(action))]
        self._history[-1].append(action)
        if action != FOLD:
            self._paid[seat] = max(self._paid) + (action == RAISE) * self._raise_by[len(self._history) - 1]
        if action == FOLD:
            self._end(1 - seat)
        elif action == CALL and len(self._history[-1]) > 1:
            if len(self._history) == len(self._raise_by):
                self._end(self._winner())
            else:
                self._history.append([])
        self.agent_selection = PLAYERS[0] if not self._history[-1] else PLAYERS[1 - seat]
        self._accumulate_rewards()

    def _winner(self) -> int | None:
        """A pair with the public card, else the higher rank; None where both have the same."""
        first, second, *public = self._cards
        if first == second:
            return None
        pair = public[:1] if len(self._raise_by) > 1 else []
        return int(pair == [second] or (pair != [first] and second > first))

    def _end(self, winner: int | None) -> None:
        for seat, agent in enumerate(PLAYERS):
            gain = 0 if winner is None else min(self._paid) * (1 if seat == winner else -1)
            self.rewards[agent], self.terminations[agent], self.infos[agent] = float(gain), True, told(gain)


def kuhn() -> Poker:
    """Kuhn poker (Kuhn 1950): three cards, one bet of one chip."""
    return Poker(3, 1, [1], 1, pass_or_bet=True)


def leduc() -> Poker:
    """Leduc poker (Southey et al. 2005): six cards of three ranks, two rounds of two raises, of two and of four."""
    return Poker(3, 2, [2, 4], 2)


class Unmirrored(BaseWrapper):  # type: ignore[misc]
    """Shows a board `[H, W, planes]` of ones and zeros as a picture, booleans of the same shape, and a board and its
    mirror image as one: of the two the one whose bytes come first. A column that is chosen in the image is the mirrored
    one on the board. So half as many boards have to be learned."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        parts = super().observation_space(agent).spaces
        return spaces.Dict({**parts, "observation": spaces.Box(0, 1, parts["observation"].shape, np.bool_)})

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self._as_image: dict[str, bool] = {}

    def observe(self, agent: str) -> Any:
        seen = super().observe(agent)
        board, mask = seen["observation"].astype(np.bool_), seen["action_mask"]
        image = np.ascontiguousarray(board[:, ::-1])
        self._as_image[agent] = image.tobytes() < board.tobytes()
        if self._as_image[agent]:
            board, mask = image, np.ascontiguousarray(mask[::-1])
        return {"observation": board, "action_mask": mask}

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if action is not None:
            if agent not in self._as_image:
                self.observe(agent)
            if self._as_image[agent]:
                action = self.action_space(agent).n - 1 - int(action)
        self._as_image = {}
        super().step(action)


def connect_four() -> Unmirrored:
    """PettingZoo's own, without the wrappers that look at each call, which take longer than the game."""
    from pettingzoo.classic.connect_four.connect_four import raw_env

    return Unmirrored(raw_env())


class RockPaperScissors(Alike, ParallelEnv):  # type: ignore[misc]
    """One throw, both unseen: action a beats action a - 1 (of three)."""

    metadata = {"name": "rock_paper_scissors"}
    possible_agents = PLAYERS
    render_mode = None

    def __init__(self) -> None:
        self._space, self._choices = spaces.Box(1, 1, (1,), np.float32), spaces.Discrete(3)

    def _seen(self) -> dict[str, Any]:
        return {agent: np.ones(1, np.float32) for agent in PLAYERS}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(PLAYERS)
        return self._seen(), {agent: {} for agent in PLAYERS}

    def step(self, actions: dict[str, Any]) -> Any:
        gain = (0.0, 1.0, -1.0)[(int(actions[PLAYERS[0]]) - int(actions[PLAYERS[1]])) % 3]
        gains = dict(zip(PLAYERS, (gain, -gain), strict=True))
        self.agents = []
        over, on = dict.fromkeys(PLAYERS, True), dict.fromkeys(PLAYERS, False)
        return self._seen(), gains, over, on, {agent: told(its) for agent, its in gains.items()}


class Foraging(ParallelEnv):  # type: ignore[misc]
    """A task of lbforaging, whose environments take and give tuples. An episode's returns add up to 1 at most."""

    metadata = {"name": "foraging"}
    render_mode = None

    def __init__(self, id: str = "Foraging-8x8-2p-2f-coop-v3") -> None:
        import lbforaging  # noqa: F401 (it registers them)

        self._env = gym.make(id, disable_env_checker=True)
        self.possible_agents = [f"player_{number}" for number in range(len(self._env.action_space))]  # type: ignore[arg-type]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._env.observation_space[self.possible_agents.index(agent)]  # type: ignore[index,no-any-return]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._env.action_space[self.possible_agents.index(agent)]  # type: ignore[index,no-any-return]

    def _each(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.possible_agents, values, strict=True))

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        observations, _ = self._env.reset(seed=seed)
        return self._each(observations), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        made = tuple(int(actions[agent]) for agent in self.possible_agents)
        observations, rewards, over, cut, _ = self._env.step(made)
        if over or cut:
            self.agents = []
        flags = (dict.fromkeys(self.possible_agents, bool(flag)) for flag in (over, cut))
        return self._each(observations), self._each(rewards), *flags, {agent: {} for agent in self.possible_agents}  # type: ignore[arg-type]

    def close(self) -> None:
        self._env.close()


class TwoStepGame(Alike, ParallelEnv):  # type: ignore[misc]
    """The two-step game (Rashid et al. 2018, section 5). The first agent's first action chooses the payoffs of the
    second step: 7 whatever they do, or 8 if both choose 1, 0 if both choose 0, else 1. Each agent is paid half.

    An agent observes, as ones and zeros, the step's state (0 the first, 1 and 2 the second) and its own number.
    """

    metadata = {"name": "two_step_game"}
    possible_agents = PLAYERS
    render_mode = None
    state_space = spaces.Box(0, 1, (3,), np.float32)
    _PAYOFFS = (((7, 7), (7, 7)), ((0, 1), (1, 8)))

    def __init__(self) -> None:
        self._space, self._choices = spaces.Box(0, 1, (5,), np.float32), spaces.Discrete(2)

    def state(self) -> Any:
        return np.eye(3, dtype=np.float32)[self._state]

    def _seen(self) -> dict[str, Any]:
        numbers = np.eye(2, dtype=np.float32)
        return {agent: np.append(self.state(), number) for agent, number in zip(PLAYERS, numbers, strict=True)}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self._state = list(PLAYERS), 0
        return self._seen(), {agent: {} for agent in PLAYERS}

    def step(self, actions: dict[str, Any]) -> Any:
        first, second = (int(actions[agent]) for agent in PLAYERS)
        paid, ended = 0.0, self._state > 0
        if ended:
            paid = self._PAYOFFS[self._state - 1][first][second]
            self.agents = []
        else:
            self._state = 1 + first
        rewards = dict.fromkeys(PLAYERS, paid / 2)
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in PLAYERS}
        return self._seen(), rewards, dict.fromkeys(PLAYERS, ended), dict.fromkeys(PLAYERS, False), infos
