"""PettingZoo games made for the tests: agents that come and go at random, at the same time or in turns."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec

MODULE = "tests.support.environments.games"
NAMES = ["ann", "bob", "cy"]


class _Coming:
    """Common base: the agents that are present, and their observations from a seeded generator."""

    def __init__(self, boxes: bool = False) -> None:
        super().__init__()
        self._boxes = boxes

    metadata = {"name": "coming", "is_parallelizable": False}
    possible_agents = NAMES
    render_mode: Any = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1e6, 1e6, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1, 1, (1,), np.float32) if self._boxes else spaces.Discrete(3)

    def _start(self, seed: int | None) -> None:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents = [name for name in NAMES if self.random.random() < 0.7] or [NAMES[0]]
        self.steps = 0
        self.luck = float(self.random.random())
        self.until = int(self.random.integers(3, 12))

    def seen(self, agent: str) -> Any:
        return np.array([NAMES.index(agent), self.steps, self.luck], np.float32)


class AllAtOnce(_Coming, ParallelEnv):  # type: ignore[misc]
    """Parallel: in each step agents may end, leave without a word, be born, or be born again."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._start(seed)
        return {agent: self.seen(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), (sorted(actions), self.agents)
        self.steps += 1
        acting, over = list(self.agents), self.steps >= self.until
        rewards = {agent: float(actions[agent]) + self.steps / 10 for agent in acting}
        drawn = {agent: self.random.random() for agent in NAMES}
        terminated = {agent: over or drawn[agent] < 0.1 for agent in acting}
        truncated = {agent: not terminated[agent] and drawn[agent] < 0.2 for agent in acting}
        left = [agent for agent in acting if not terminated[agent] and not truncated[agent] and drawn[agent] > 0.05]
        born = [agent for agent in NAMES if agent not in acting and drawn[agent] < 0.4 and not over]
        self.agents = [] if over else [agent for agent in NAMES if agent in left + born]
        seen = {agent: self.seen(agent) for agent in {*acting, *self.agents}}
        return seen, rewards, terminated, truncated, {agent: {} for agent in acting}


class _Paying(ParallelEnv):  # type: ignore[misc]
    """Pays all of three agents 1, 10 and 100 at the end of its three steps."""

    metadata = {"name": "paying", "is_parallelizable": True}
    possible_agents = NAMES
    render_mode = None

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1, 1, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _seen(self) -> dict[str, Any]:
        return {agent: np.zeros(1, np.float32) for agent in NAMES}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self._pay = list(NAMES), 0.1
        return self._seen(), {agent: {} for agent in NAMES}

    def step(self, actions: dict[str, Any]) -> Any:
        self._pay *= 10
        self.agents = [] if (over := self._pay > 99) else list(NAMES)
        each, on = dict.fromkeys(NAMES, self._pay), dict.fromkeys(NAMES, False)
        return self._seen(), each, dict.fromkeys(NAMES, over), on, {agent: {} for agent in NAMES}


def paid_by_cycle() -> AECEnv:
    """Plays in turns by PettingZoo's own wrapper, which keeps an agent's results until the end of the cycle."""
    return parallel_to_aec(_Paying())


class Told(AllAtOnce):
    """The same, with a state of its own."""

    state_space = spaces.Box(-1e6, 1e6, (2 + len(NAMES),), np.float32)

    def state(self) -> Any:
        return np.array([self.steps, self.luck, *(name in self.agents for name in NAMES)], np.float32)


class Aimed(AllAtOnce):
    """A choice beside boxes, and an entry `entry` that forbids the choice 1, or is no mask at all."""

    def __init__(self, entry: str = "action_mask", size: int = 3) -> None:
        super().__init__()
        self._entry, self._size = entry, size

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        entry = spaces.Box(0, 1, (self._size,), np.int8)
        return spaces.Dict({"seen": super().observation_space(agent), self._entry: entry})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"aim": spaces.Box(-1, 1, (2,), np.float32), "choice": spaces.Discrete(3)})

    def seen(self, agent: str) -> Any:
        return {"seen": super().seen(agent), self._entry: np.array([1, 0, 1], np.int8)[: self._size]}

    def step(self, actions: dict[str, Any]) -> Any:
        return super().step({agent: action["choice"] for agent, action in actions.items()})


class Faulty(AllAtOnce):
    """Both observe a number and a mask, and from some step on there is something wrong with what `bob` sees or gets."""

    possible_agents = NAMES[:2]

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind, self._count = kind, 0

    def _start(self, seed: int | None) -> None:
        super()._start(seed)
        self.agents, self.until = NAMES[:2], 8

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"seen": super().observation_space(agent), "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def seen(self, agent: str) -> Any:
        self._count += 1
        found = {"seen": super().seen(agent), "action_mask": np.array([1, 0, 1], np.int8)}
        wrong: dict[str, Any] = {
            "nan": {"seen": found["seen"] * np.nan}, "stuck": {"action_mask": np.zeros(3, np.int8)},
            "short": {"seen": found["seen"][:1]}, "scalar": {"seen": 0.5}, "short mask": {"action_mask": np.ones(1)},
        }  # fmt: skip
        return found | (wrong.get(self._kind, {}) if agent == "bob" and self._count > 20 else {})

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, terminated, _, infos = super().step(actions)
        if self._kind == "reward" and self._count > 20:
            rewards["bob"] = float("nan")
        over = self.steps >= self.until
        self.agents = [] if over else NAMES[:2]
        seen |= {agent: self.seen(agent) for agent in self.agents if agent not in seen}
        return seen, rewards, dict.fromkeys(terminated, over), dict.fromkeys(terminated, False), infos


def aims(observation: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    return {"aim": [3.0, -3.0], "choice": 2}


def aims_astray(observation: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
    return {"aim": [0.0, 0.0], "choice": 1}


class InTurns(_Coming, AECEnv):  # type: ignore[misc]
    """AEC: each turn pays all who are there; agents may end in another's turn, and be born again."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self._start(seed)
        self._clear(self.agents)
        self.agent_selection = self.agents[0]

    def _clear(self, agents: list[str]) -> None:
        self.rewards, self._cumulative_rewards = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(agents, False), dict.fromkeys(agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in agents}

    def observe(self, agent: str) -> Any:
        return self.seen(agent)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            assert action is None
            self.agents.remove(agent)
            self._choose()
            return
        self._cumulative_rewards[agent] = 0.0
        self.steps += 1
        over, drawn = self.steps >= self.until, {name: self.random.random() for name in NAMES}
        for name in self.agents:
            self.rewards[name] = self.steps / 10 + (float(np.sum(action)) if name == agent else 0.5)
            self.terminations[name] |= over or drawn[name] < 0.08
            self.truncations[name] |= not self.terminations[name] and drawn[name] < 0.12
        self._accumulate_rewards()
        for name in [name for name in NAMES if name not in self.agents and drawn[name] < 0.4 and not over]:
            self.agents.append(name)
            self.rewards[name] = self._cumulative_rewards[name] = 0.0
            self.terminations[name] = self.truncations[name] = False
            self.infos[name] = {}
        self.after = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self._choose()

    def _choose(self) -> None:
        """Orders agents that have ended first, as PettingZoo does."""
        dead = [name for name in self.agents if self.terminations[name] or self.truncations[name]]
        if self.agents:
            self.agent_selection = (dead or [name for name in (self.after, *self.agents) if name in self.agents])[0]


class _Drawing:
    """Renders a picture of its steps if `frames`."""

    metadata = {"name": "drawing", "is_parallelizable": False, "render_modes": ["rgb_array"], "render_fps": 10}
    steps: int

    def __init__(self, render_mode: str | None = None, frames: bool = True) -> None:
        super().__init__()
        self.render_mode: Any = render_mode
        self._frames = frames

    def render(self) -> Any:
        return np.full((32, 32, 3), 20 * min(self.steps, 12), np.uint8) if self._frames else None


class Painted(_Drawing, AllAtOnce):
    pass


class PaintedInTurns(_Drawing, InTurns):
    pass


class Nim(AECEnv):  # type: ignore[misc]
    """Two players take one, two or three from a pile; who takes the last one wins. Its outcome can be told, or not."""

    metadata = {"name": "nim"}
    possible_agents = ["first", "second"]
    render_mode = None

    def __init__(self, pile: int = 7, tells: bool = False, outcome: float | None = None) -> None:
        super().__init__()
        self._size, self._tells, self._outcome = pile, tells, outcome

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        seen = spaces.Box(0, 1, (self._size + 1,), np.float32)
        return spaces.Dict({"observation": seen, "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self.left, self.agent_selection = self._size, "first"

    def observe(self, agent: str) -> dict[str, Any]:
        seen = np.eye(self._size + 1, dtype=np.float32)[self.left]
        return {"observation": seen, "action_mask": self.legal()}

    def legal(self) -> Any:
        return (np.arange(3) < self.left).astype(np.int8)

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        other = "second" if agent == "first" else "first"
        self._cumulative_rewards[agent] = 0.0
        illegal = action + 1 > self.left
        self.left = max(0, self.left - int(action) - 1)
        if not self.left:
            winner = other if illegal else agent
            self.rewards = {name: 1.0 if name == winner else -1.0 for name in self.agents}
            self.terminations = dict.fromkeys(self.agents, True)
            if self._tells:
                told = {name: float(name == winner) if self._outcome is None else self._outcome for name in self.agents}
                self.infos = {name: {"outcome": outcome} for name, outcome in told.items()}
        self._accumulate_rewards()
        self.agent_selection = other


NIM = {"api": "pettingzoo", "id": f"{MODULE}:Nim"}


def takes_one(observation: dict[str, Any], random: np.random.Generator) -> int:
    return 0


def takes_first(observation: dict[str, Any], random: np.random.Generator) -> int:
    return int(np.flatnonzero(observation["action_mask"])[0])


def says_nothing(observation: dict[str, Any], random: np.random.Generator) -> None:
    return None


def complains(observation: dict[str, Any], random: np.random.Generator) -> int:
    raise ValueError("x" * 1000)


def raises(observation: dict[str, Any], random: np.random.Generator) -> int:
    raise ValueError("no move comes to mind")


def leaves(observation: dict[str, Any], random: np.random.Generator) -> int:
    raise SystemExit(3)


def takes_half(observation: dict[str, Any], random: np.random.Generator) -> float:
    return 0.5


def takes_too_many(observation: dict[str, Any], random: np.random.Generator) -> int:
    return 7


def cheats(observation: dict[str, Any], random: np.random.Generator) -> int:
    """Makes all legal, and takes the last."""
    observation["action_mask"][:] = 1
    return 2


def crosses_out(observation: dict[str, Any], random: np.random.Generator) -> int:
    """Takes a legal one, and marks it as taken."""
    (first, *_) = np.flatnonzero(observation["action_mask"])
    observation["action_mask"][first] = 0
    return int(first)


class Odd(AllAtOnce):
    """`AllAtOnce` with agents that observe nothing or too much, have no reward or no `info`, are unknown or no
    text, or none at the start."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind
        if kind == "numbered":
            self.possible_agents: list[Any] = [1, 2]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seen, infos = super().reset(seed, options)
        if self._kind == "empty":
            self.agents = []
        if self._kind == "wide":
            seen = {agent: np.zeros(5, np.float32) for agent in seen}
        return seen, infos

    def step(self, actions: dict[str, Any]) -> Any:
        seen, *others = super().step(actions)
        if self._kind == "strange":
            self.agents = [*self.agents, "dee"]
            seen["dee"] = self.seen("ann")
        if self._kind == "wordy":
            others[-1] = dict.fromkeys(others[-1], "x")
        if self._kind == "unpaid":  # but those that have left without a word
            others[0] = {agent: its for agent, its in others[0].items() if agent not in self.agents}
        unseen = {"blind": {*self.agents}, "none_at_death": {agent for agent, over in others[1].items() if over}}
        return {agent: None if agent in unseen.get(self._kind, ()) else its for agent, its in seen.items()}, *others


class Telling(InTurns):
    """Two in turns until `until`: each step all are paid 1, and told how many steps there were. One fails, always.
    `leaves`: a game that is over has no agents."""

    def __init__(self, until: int = 6, leaves: bool = False) -> None:
        super().__init__()
        self._until, self._leaves = until, leaves

    possible_agents = NAMES[:2]

    def _start(self, seed: int | None) -> None:
        super()._start(seed)
        self.agents = NAMES[:2]

    def _clear(self, agents: list[str]) -> None:
        super()._clear(agents)
        self._tell()

    def _tell(self) -> None:
        masks = np.eye(3, dtype=np.int8)
        for number, name in enumerate(self.agents):
            self.infos[name] = {"success": number, "score": float(self.steps), "action_mask": masks[number]}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self.steps += 1
        self.rewards = dict.fromkeys(self.agents, 1.0)
        self._accumulate_rewards()
        self._tell()
        self.terminations = dict.fromkeys(self.agents, self.steps >= self._until)
        self.agent_selection = NAMES[self.steps % 2]
        if self._leaves and self.steps >= self._until:
            self.agents = []


class Reused(Telling):
    """The same, with one array for whatever it shows."""

    def observe(self, agent: str) -> Any:
        self._shown = getattr(self, "_shown", np.zeros(3, np.float32))
        self._shown[:] = super().observe(agent)
        return self._shown


class NeverPaid(Telling):
    """The same, but what the second one is paid before its first turn is NaN."""

    def step(self, action: Any) -> None:
        super().step(action)
        if self.steps == 1:
            self._cumulative_rewards[NAMES[1]] = float("nan")


class Trap(AllAtOnce):
    """`ann` sets a trap and falls; in the third step it is paid for it. `bob` is born in the second, and paid then.
    `listed`: who has fallen stays in `agents`."""

    possible_agents = NAMES[:2]

    def __init__(self, listed: bool = False) -> None:
        super().__init__()
        self._listed = listed

    def _start(self, seed: int | None) -> None:
        super()._start(seed)
        self.agents = NAMES[:1]

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        acting, fallen = list(actions), {agent: agent == "ann" or self.steps == 4 for agent in actions}
        rewards = {"ann": float(self.steps == 3), "bob": float(self.steps == 1)}
        self.agents = [] if self.steps == 4 else NAMES[0 if self._listed else 1 : 2]
        return {a: self.seen(a) for a in NAMES[:2]}, rewards, fallen, dict.fromkeys(acting, False), {}


class Leaver(_Coming, ParallelEnv):  # type: ignore[misc]
    """Removes one of two agents in the second step without reporting its end."""

    possible_agents = NAMES[:2]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._start(seed)
        self.agents = NAMES[:2]
        return {agent: self.seen(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        acting = self.agents
        self.agents = NAMES[:1] if self.steps >= 2 else acting
        no, paid = dict.fromkeys(acting, False), dict.fromkeys(acting, 1.0)
        return {agent: self.seen(agent) for agent in acting}, paid, no, no, {agent: {} for agent in acting}


class Pairs(ParallelEnv):  # type: ignore[misc]
    """Two against two for seven steps; each observes its number and the step. `a` is paid. With `falls` one of `b`
    falls at once, and `b` has won in the end, as all are told."""

    metadata = {"name": "pairs"}
    possible_agents = ["a0", "a1", "b0", "b1"]
    render_mode = None

    def __init__(self, falls: bool = False, pays: float = 1.0) -> None:
        self._falls, self._pays = falls, pays

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-10, 10, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _seen(self) -> dict[str, Any]:
        return {agent: np.array([1 + number, 1 + self.steps]) for number, agent in enumerate(self.possible_agents)}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents, self.steps = list(self.possible_agents), 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.steps += 1
        paid = {agent: self._pays if agent < "b" else -self._pays for agent in self.agents}
        over = {agent: self.steps >= 7 or (self._falls and agent == "b0") for agent in self.agents}
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self._falls and self.steps >= 7:
            infos = {agent: {"outcome": float(agent > "b")} for agent in self.possible_agents}
        no, self.agents = dict.fromkeys(self.agents, False), [agent for agent in self.agents if not over[agent]]
        return self._seen(), paid, over, no, infos


class Struck(InTurns):
    """All are there; who has the first turn is struck down in the second, and is told of it after the third."""

    def _start(self, seed: int | None) -> None:
        super()._start(seed)
        self.agents = list(NAMES)

    def step(self, action: Any) -> None:
        self._cumulative_rewards[self.agent_selection] = 0.0
        self.steps += 1
        self.terminations[NAMES[0]] = self.steps >= 2
        self.agent_selection = NAMES[self.steps % 3]


class OutOfTime(Struck):
    """Pays all in each turn, truncates them after six; `clears`: and has no agents any more. `dies`: with the third of
    them dead before its first turn."""

    def __init__(self, clears: bool = False, dies: bool = False) -> None:
        super().__init__()
        self._clears, self._dies = clears, dies

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self.agents.remove(agent)
            self._choose()
            return
        self._cumulative_rewards[agent] = 0.0
        self.steps += 1
        for name in self.agents:
            self._cumulative_rewards[name] += 1.0
        self.after = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self.terminations[NAMES[2]] |= self._dies and self.steps == 1
        if self.steps == 6:
            self.truncations = dict.fromkeys(self.agents, True)
            self.agents = [] if self._clears else self.agents
        self._choose()


class Dropped(Struck):
    """Removes the agent of the first turn after the second, without a last observation."""

    def step(self, action: Any) -> None:
        self._cumulative_rewards[self.agent_selection] = 0.0
        self.steps += 1
        self.agents = NAMES[1:] if self.steps > 1 else self.agents
        self.agent_selection = NAMES[self.steps] if self.steps < 3 else NAMES[1]


class Reborn(Struck):
    """Who has the first turn is gone after the second without a word, and is there again after the third."""

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        self._cumulative_rewards[agent] = 0.0
        self.steps += 1
        for name in self.agents:
            self._cumulative_rewards[name] += 1.0
        if self.steps == 2:
            self.agents = NAMES[1:]
        elif self.steps == 3:
            self.agents, self._cumulative_rewards[NAMES[0]] = list(NAMES), 0.0
        self.agent_selection = NAMES[self.steps % 3]
