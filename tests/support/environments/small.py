"""Small environments whose numbers can be computed manually, used in configs as
`tests.support.environments.small:X`.

They are classes or functions at module level, so that processes that gymnasium spawns can import them too.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

Array = np.ndarray[Any, Any]
Told = tuple[Any, float, bool, bool, dict[str, Any]]
"""Result of `step`."""
Ends = Literal["terminated", "truncated", "never"]
MODULE = "tests.support.environments.small"
TRIED = Path("/proc/self/comm").read_text() == "trial\n"
"""True in the process that checks an environment before a run: there they behave, so that they fail in the run."""


class Small(gym.Env[Any, Any]):
    """Ends after `length` steps; `observe` and `reward` say what each is worth."""

    length: int = 1
    ends: Ends = "terminated"

    def observe(self) -> Any:
        raise NotImplementedError

    def reward(self, action: Any) -> float:
        return 1.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> Told:
        self._steps += 1
        over = self._steps == self.length
        ends = over and self.ends == "terminated", over and self.ends == "truncated"
        return self.observe(), self.reward(action), *ends, {}


class Counting(Small):
    """Observes (steps of this episode, episodes before it); pays 1, 2, 3 …; ends after `length` steps."""

    observation_space = spaces.Box(-1000.0, 1000.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self, length: int = 3, ends: Ends = "terminated",
        fails: Literal["", "reset", "step", "action", "exit", "leave", "crash"] = "", fails_at: int = 0,
        message: str = "the gripper is stuck", render_mode: str | None = None,
    ) -> None:  # fmt: skip
        self.length, self.ends = length, ends
        self.fails_at, self.message = fails_at, message
        self.fails = "" if TRIED else fails
        self.render_mode = render_mode
        self._steps, self._episodes = 0, -1

    def observe(self) -> Array:
        return np.array([self._steps, self._episodes], np.float32)

    def reward(self, action: Any) -> float:
        return float(self._steps)

    def _fail(self, place: str, count: int) -> None:
        if self.fails == place and count >= self.fails_at:
            raise ValueError(self.message)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._episodes += 1
        self._fail("reset", self._episodes)
        return super().reset(seed=seed)

    def step(self, action: int) -> Told:
        self._fail("step", self._steps)
        self._fail("action", int(action) - 1)
        if self.fails in ("exit", "leave") and self._steps >= self.fails_at:
            os._exit(3 if self.fails == "exit" else 0)
        if self.fails == "crash" and self._steps >= self.fails_at:
            ctypes.string_at(0)
        told = super().step(action)
        info = told[-1]
        info |= {"depth": 10.0 * self._steps, "note": "text is no metric"}
        if self._steps == self.length:
            info["is_success"] = self._episodes % 2 == 1
        return told


class LengthOfSeed(Counting):
    """Runs episodes of 2 steps more than the first seed."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self._episodes < 0:
            self.length = 2 + (seed or 0)
        return super().reset(seed=seed, options=options)


class OlderGenerator(Counting):
    """Draws from NumPy's older generator, which takes no seed of more than 32 bits, and hands it to a simulator whose
    seeds are a C `int`; pays what was drawn."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._drawn = float(np.random.RandomState(seed).random())
        if seed is not None:
            struct.pack("i", seed)
        return super().reset(seed=seed, options=options)

    def reward(self, action: Any) -> float:
        return self._drawn


def end_this_process(columns: dict[str, Array]) -> dict[str, Array]:
    """Transform of experience that ends the trainer."""
    os._exit(4)


class StartsAProcess(Counting):
    """Keeps in a file what the environment of a process is that it starts."""

    def __init__(self, path: str) -> None:
        super().__init__()
        Path(path).write_text(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)


class StartsAChild(Counting):
    """Starts a process and ends it in `close` by a signal, as many simulators do."""

    def __init__(
        self, by: str = "fork", number: int = signal.SIGTERM, thread: bool = False, stubborn: str = ""
    ) -> None:
        """Ignores `terminate()` if the file `stubborn` exists."""
        super().__init__(length=4)
        self._number = number
        start = threading.Thread(target=self._start, args=(by, bool(stubborn) and Path(stubborn).exists()))
        start.start() if thread else start.run()
        if thread:
            start.join()

    def _start(self, by: str, ignores: bool) -> None:
        if by == "popen":
            self.child: Any = subprocess.Popen(["sleep", "3600"])
            return
        context: Any = multiprocessing.get_context(by)
        ready, told = context.Pipe()
        self.child = context.Process(target=_serve, args=(told, ignores))
        self.child.start()
        if ignores or by != "fork" or self._number == signal.SIGINT:  # one that is forked may not have begun yet
            ready.recv()

    def close(self) -> None:
        os.kill(self.child.pid, self._number)
        self.child.wait() if isinstance(self.child, subprocess.Popen) else self.child.join()


def _serve(told: Any, ignores: bool) -> None:
    if ignores:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.disable()  # Python drops a KeyboardInterrupt that comes in a callback of its collector; hypothesis has one
    told.send(0)
    time.sleep(3600)


class FailsAFewTimes(Counting):
    """Raises in its second step until it has done so `times` times; the tally is a file, so it outlives restarts."""

    def __init__(self, tally: str, times: int, place: Literal["start", "reset", "step", "close"] = "step") -> None:
        super().__init__(length=4)
        self._tally, self._times, self._place = Path(tally), times, place

    def _fail(self, place: str, count: int) -> None:
        done = len(self._tally.read_text()) if self._tally.exists() else 0
        if not TRIED and place == self._place and done < self._times and (place != "step" or count >= 1):
            self._tally.write_text("x" * (done + 1))
            self.fail(f"failure number {done + 1}")

    def fail(self, message: str) -> None:
        raise ValueError(message)


class Hangs(FailsAFewTimes):
    """Hangs for ever instead, also in its start; with `locks` as native code that does not give up Python's lock."""

    def __init__(
        self, tally: str, times: int, place: Literal["start", "reset", "step", "close"] = "step", locks: bool = False
    ) -> None:
        super().__init__(tally, times, place)
        self._locks = locks
        self._fail("start", 0)

    def close(self) -> None:
        self._fail("close", 0)

    def hang(self, message: str) -> None:
        while True:
            ctypes.PyDLL(None).sleep(3600) if self._locks else time.sleep(1)

    fail = hang


class Hostile(Counting):
    """Pays 3e38 once, in its second episode, and has a name in `info` that is no UTF-8."""

    def reward(self, action: Any) -> float:
        return 3e38 if self._episodes == 1 and self._steps == 1 else super().reward(action)

    def step(self, action: int) -> Told:
        told = super().step(action)
        told[-1][os.fsdecode(b"caf\xe9")] = 3e38
        return told


class OddInfo(Counting):
    """Tells things in its info that no array holds; of its copies in a process every second tells a fraction."""

    _copies = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self._copy = next(self._copies)

    def step(self, action: int) -> tuple[Any, ...]:
        *result, info = super().step(action)
        mixed = 1 if self._copy % 2 == 0 else 0.25
        odd = {"object": lambda: None, "digits": 10**400, 5: "five", "array": np.zeros(3), "nan": np.nan}
        return *result, info | odd | {"mixed": mixed, "note": "text" if self._copy else 3}


class Spoils(Counting):
    """Returns unusable data from its fourth step on, except while it is checked."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what, self._left = "" if TRIED else what, 4
        if what == "choice":
            self.observation_space = spaces.Discrete(5, start=-1)  # type: ignore[assignment]

    def observe(self) -> Any:
        self._left -= 1
        if isinstance(self.observation_space, spaces.Discrete):
            return 7 if self._left < 0 and self._what else 3
        last = np.nan if self._left < 0 and self._what == "observation" else 1.0
        return np.array([self._steps, last], np.float32)

    def step(self, action: int) -> tuple[Any, ...]:
        observation, reward, *rest = super().step(action)
        if self._left < 0 and self._what == "shape":
            observation = np.zeros(3, np.float32)
        if self._left < 0 and self._what == "exit":
            sys.exit("the license is over")
        spoiled = {"reward": np.inf, "None": None} if self._left < 0 else {}
        return observation, spoiled.get(self._what, reward), *rest


class Noise(Small):
    """Observes random numbers drawn from its seed; pays the first; ends after 5 steps by truncation."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    length, ends = 5, "truncated"

    def observe(self) -> Array:
        self._seen = self.np_random.normal(size=3).astype(np.float32)
        return self._seen

    def reward(self, action: Array) -> float:
        assert self.action_space.contains(action), action
        return float(self._seen[0])


class Unseeded(Noise):
    """Takes a seed, and then its numbers from elsewhere."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.np_random = np.random.default_rng()
        return self.observe(), {}


class Stumbles(Noise):
    """Raises in a step where one of its numbers is large, wherever and whenever that is."""

    def reward(self, action: Array) -> float:
        if self._seen.max() > 2.0:
            raise ValueError("stumbled")
        return super().reward(action)


OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-2.0, 2.0, (3,), np.float32),
    "matrix": spaces.Box(-2.0, 2.0, (2, 3), np.float64),
    "scalar": spaces.Box(-2.0, 2.0, (), np.float32),
    "bytes": spaces.Box(0, 255, (4,), np.uint8),
    "discrete": spaces.Discrete(5, start=-2),
    "multi_discrete": spaces.MultiDiscrete([3, 2, 4]),
    "multi_binary": spaces.MultiBinary((2, 2)),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "dict": spaces.Dict({
        "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8), "joints": spaces.Box(-1.0, 1.0, (4,), np.float32),
        "mode": spaces.Discrete(3),
    }),
    "tuple": spaces.Tuple(
        (spaces.Discrete(3), spaces.Dict({"x": spaces.Box(0.0, 1.0, (2,)), "y": spaces.MultiBinary(3)}))
    ),
}  # fmt: skip
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(4, start=10),
    "multi_discrete": spaces.MultiDiscrete([3, 2]),
    "multi_discrete_matrix": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multi_binary": spaces.MultiBinary(4),
    "box": spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 0.5], np.float32)),
    "box64": spaces.Box(-0.1, 0.1, (2,), np.float64),
    "dict": spaces.Dict({"move": spaces.Box(-0.1, 0.1, (2, 2), np.float32), "jump": spaces.Discrete(2)}),
    "tuple": spaces.Tuple((spaces.MultiDiscrete([2, 2]), spaces.Dict({"a": spaces.Discrete(3, start=1)}))),
}


class AnySpaces(Small):
    """Any observation and action space of the tables above; refuses an action that is not in its space."""

    def __init__(self, observation: str, action: str, length: int = 4) -> None:
        self.observation_space = copy.deepcopy(OBSERVATIONS[observation])
        self.action_space = ACTIONS[action]
        self.length, self.ends = length, "truncated"

    def observe(self) -> Any:
        return self.observation_space.sample()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.observation_space.seed(seed)
        return super().reset(seed=seed)

    def reward(self, action: Any) -> float:
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not in {self.action_space}")
        return 1.0


class Target(Small):
    """Pays −(action − 0.5)² in episodes of one step."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)

    def observe(self) -> Array:
        return np.ones(1, np.float32)

    def reward(self, action: Array) -> float:
        return -float((action[0] - 0.5) ** 2)


class Doorstep(Small):
    """Starts on the doorstep (0), is inside (1) from the first step on, is paid 1 for each step begun inside.

    An episode ends after two steps, in the way that `ends` says.
    """

    observation_space = spaces.Discrete(2)
    length = 2

    def __init__(self, ends: Ends, boxes: bool = False) -> None:
        self.ends = ends
        self.action_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (1,)) if boxes else spaces.Discrete(2)

    def observe(self) -> int:
        return min(self._steps, 1)

    def reward(self, action: Any) -> float:
        return float(self._steps > 1)


class Lever(Small):
    """Pays 1 for action 1 in episodes of one step."""

    observation_space = spaces.Box(-1.0, 1.0, (1,))
    action_space = spaces.Discrete(2)

    def observe(self) -> Array:
        return np.zeros(1, np.float32)

    def reward(self, action: Any) -> float:
        return float(action)


class Cue(Small):
    """Shows at first which action pays 1 at the last of four steps, and then only which step it is."""

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Discrete(2)
    length = 4

    def observe(self) -> Array:
        if self._steps == 0:
            self._right = int(self.np_random.integers(2))
        return np.array([self._steps / 4, 2.0 * self._right - 1.0 if self._steps == 0 else 0.0], np.float32)

    def reward(self, action: Any) -> float:
        return float(self._steps == self.length and action == self._right)


class Overshoots(Small):
    """Terminates after two steps with an observation that is not in its space: NaN, or one choice too many."""

    action_space = spaces.Discrete(2)
    length = 2

    def __init__(self, choices: bool) -> None:
        self._choices = choices
        self.observation_space: spaces.Space[Any] = spaces.Discrete(2) if choices else spaces.Box(-1.0, 1.0, (2,))

    def observe(self) -> Any:
        return self._steps if self._choices else np.array([0.0, np.nan if self._steps == 2 else 0.5], np.float32)


class PaysInOneArray(SyncVectorEnv):
    """Keeps its rewards in one array that a masked reset overwrites, as simulators on a GPU do."""

    def step(self, actions: Any) -> Any:
        observations, paid, *told = super().step(actions)
        self._paid = np.asarray(paid, np.float32)
        return observations, self._paid, *told

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        if options and "reset_mask" in options:
            self._paid[options["reset_mask"]] = 0.0
        return super().reset(seed=seed, options=options)


def counting_vector(
    num_envs: int | None = None, mode: str = "NEXT_STEP", ends: Ends = "truncated", fails_at: int = sys.maxsize
) -> gym.Env[Array, Any] | SyncVectorEnv:
    """One environment where only its spaces are asked for; else vectorized ones, of which number i is 2 + i long."""
    if num_envs is None:
        return Counting()
    message = "the simulator lost its license"
    made = [partial(Counting, 2 + index, ends, "step", fails_at, message) for index in range(num_envs)]
    return PaysInOneArray(made, autoreset_mode=AutoresetMode[mode])


class StartsAgainAtOnce(gym.vector.VectorEnv[Any, Any, Any]):
    """Truncates after 3 steps and resets in the same step, whatever its metadata `says`. `tells` is where it gives the
    last observation; it may also `count` its steps as gymnasium's TimeLimit does. Observes the sum of its actions."""

    def __init__(self, num_envs: int, says: Any, tells: str, pays: float, counts: bool) -> None:
        self.metadata = {} if says is None else {"autoreset_mode": says}
        self.num_envs, self._tells, self._pays, self._counts = num_envs, tells, pays, counts
        self.single_observation_space: Any = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.single_action_space: Any = spaces.Discrete(2)
        self.observation_space = spaces.Box(-np.inf, np.inf, (num_envs, 2), np.float32)
        self.action_space = spaces.MultiDiscrete([2] * num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        self._now, self._steps = np.zeros((self.num_envs, 2), np.float32), np.zeros(self.num_envs, np.int64)
        return self._now.copy(), {}

    def step(self, actions: Any) -> Any:
        self._steps += 1
        self._now += np.stack([np.ones(self.num_envs), actions], axis=1)
        over = self._steps == 3
        info = {self._tells: self._now.copy(), f"_{self._tells}": over} if self._tells and over.any() else {}
        self._now[over], self._steps[over] = 0, 0
        if self._counts:
            self._elapsed_steps = self._steps
        return self._now.copy(), np.full(self.num_envs, self._pays), np.zeros(self.num_envs, np.bool_), over, info


class _Adding(Small):
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)
    length, ends = 3, "truncated"

    def observe(self) -> Any:
        return np.zeros(2, np.float32)


def starts_again_at_once(
    num_envs: int | None = None, says: str | None = None, tells: str = "", pays: float = 1.0, counts: bool = False
) -> Any:
    named = says is not None and says in AutoresetMode.__members__
    mode = AutoresetMode[str(says)] if named else says
    return _Adding() if num_envs is None else StartsAgainAtOnce(num_envs, mode, tells, pays, counts)


class Painter(Small):
    """CartPole's spaces and a reward of 1 for five steps. It can be drawn as `modes` says, if it keeps its render mode
    and its frames are good; `fails` says whether a step raises."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)
    length = 5

    def __init__(
        self, render_mode: str | None = None, modes: tuple[str, ...] = ("human", "rgb_array"), keeps: bool = True,
        frames: bool = True, fails: bool = False,
    ) -> None:  # fmt: skip
        self.metadata = {"render_modes": list(modes), "render_fps": 30}
        self.render_mode = render_mode if keeps else None
        self._frames, self._fails = frames, fails

    def observe(self) -> Array:
        return np.zeros(4, np.float32)

    def reward(self, action: int) -> float:
        if self._fails:
            raise RuntimeError("no display\nat :0")
        return 1.0

    def render(self) -> Any:
        return np.zeros((8, 8, 3), np.uint8) if self._frames else None


class Talks(Painter):
    def reward(self, action: int) -> float:
        print("step")
        return super().reward(action)


class TellsItsLean(gym.Wrapper[Any, Any, Any, Any]):
    """Adds `depth` to CartPole's info: the lean of the pole, when it leans to the right."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, *result, info = self.env.step(action)
        lean = float(observation[2])
        return observation, *result, info | ({"depth": lean} if lean > 0 else {})


class AddOne(gym.RewardWrapper[Any, Any]):
    def __init__(self, env: gym.Env[Any, Any], amount: float = 1.0) -> None:
        super().__init__(env)
        self._amount = amount

    def reward(self, reward: Any) -> float:
        return float(reward) + self._amount


PHASES = ("untold", "heatup", "train", "test")


class TellsPhase(Small):
    """Pays the number of the phase that it was told, in two steps."""

    observation_space, action_space, length = Counting.observation_space, Counting.action_space, 2
    phase = "untold"

    def set_phase(self, phase: str) -> None:
        self.phase = phase

    def observe(self) -> Array:
        return np.zeros(2, np.float32)

    def reward(self, action: Any) -> float:
        return float(PHASES.index(self.phase))


class PhaseWrapper(gym.RewardWrapper[Any, Any]):
    """Ten times the number of its phase on top."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._phase = "untold"

    def set_phase(self, phase: str) -> None:
        self._phase = phase

    def reward(self, reward: Any) -> float:
        return float(reward) + 10 * PHASES.index(self._phase)


class PauseWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """Refuses to be stepped while acting waits; its `info` tells how often acting began."""

    _begun, _paused = 0, False

    def set_paused(self, paused: bool) -> None:
        assert paused is not self._paused, "told twice"
        self._begun, self._paused = self._begun + (not paused), paused

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        assert not self._paused, "a step while acting waits"
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"begun": self._begun}


class _PhaseVector(SyncVectorEnv):
    def set_phase(self, phase: str) -> None:
        for env in self.envs:
            env.unwrapped.phase = phase  # type: ignore[attr-defined]


def phase_vector(num_envs: int | None = None) -> gym.Env[Array, Any] | SyncVectorEnv:
    """Returns a native vector environment with `set_phase`."""
    if num_envs is None:
        return TellsPhase()
    return _PhaseVector([TellsPhase] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


def broken_factory() -> gym.Env[Any, Any]:
    raise FileNotFoundError("no such mesh: arm.stl")


def not_an_environment() -> int:
    return 3


def broken_wrapper(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    raise TypeError("this wrapper wants images")


class Chase:
    """PettingZoo's parallel interface, two agents: `cat` (Discrete) is out first, `mouse` (Box) plays on.

    `cat` terminates after `cat_steps`; `mouse` is truncated after `mouse_steps`. Each is paid 1 per step plus its own
    bonus (cat: 1 for action 1; mouse: minus its action squared). Observations count the agent's steps and, unless told
    otherwise, the episodes.
    """

    metadata = {"name": "chase"}
    possible_agents = ["cat", "mouse"]

    def __init__(self, cat_steps: int = 2, mouse_steps: int = 4, fails_at: int = -1, counts: bool = True) -> None:
        self._limits = {"cat": cat_steps, "mouse": mouse_steps}
        self._fails_at, self._counts, self._episodes = fails_at, counts, -1
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1e6, 1e6, (3,) if agent == "cat" else (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2) if agent == "cat" else spaces.Box(-1.0, 1.0, (1,), np.float32)

    def _observe(self, agents: list[str]) -> dict[str, Array]:
        both = [self._steps, self._episodes if self._counts else 0]
        return {agent: np.array([*both, self._luck] if agent == "cat" else both, np.float32) for agent in agents}

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, dict[str, Any]]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self._steps, self._episodes = 0, self._episodes + 1
        self._luck = float(self._random.uniform())
        return self._observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        assert set(actions) == set(self.agents), f"actions for {sorted(actions)}, alive are {self.agents}"
        if self._steps == self._fails_at:
            raise ValueError("the mouse escaped")
        for agent, action in actions.items():
            assert self.action_space(agent).contains(action), (agent, action)
        self._steps += 1
        acting = list(self.agents)
        bonus = {agent: -(float(a[0]) ** 2) if agent == "mouse" else float(a) for agent, a in actions.items()}
        out = {agent: self._steps >= self._limits[agent] for agent in acting}
        self.agents = [agent for agent in acting if not out[agent]]
        return (
            self._observe(acting),
            {agent: 1.0 + bonus[agent] for agent in acting},
            {agent: out[agent] and agent in ("cat", "owl", "first") for agent in acting},
            {agent: out[agent] and agent in ("mouse", "second") for agent in acting},
            {agent: {} for agent in acting},
        )

    def close(self) -> None:
        """Has nothing to end."""


CHASE = {"api": "pettingzoo", "id": f"{MODULE}:Chase"}
CHASE_POLICIES: dict[str, Any] = {"policies": {"hunter": {}, "prey": {}}, "agents": {"cat": "hunter", "mouse": "prey"}}


class OwlChase(Chase):
    """Chase with `owl`, an agent for three steps with the cat's actions and the mouse's observations."""

    possible_agents = ["cat", "mouse", "owl"]

    def __init__(self, **limits: Any) -> None:
        super().__init__(counts=False, **limits)
        self._limits["owl"] = 3

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return super().action_space("cat" if agent == "owl" else agent)


OWL_CHASE: dict[str, Any] = {
    "environment": {"api": "pettingzoo", "id": f"{MODULE}:OwlChase", "num_envs": 4, "kwargs": {"mouse_steps": 11}},
    "agents": {"cat": "hunter", "m*": "prey", "[!cm]*": "watcher"},
}


class TellsOfTheChase(Chase):
    """The cat tells its steps, 10 each; the mouse its own, 1 each, in odd steps only."""

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        *result, infos = super().step(actions)
        told = {"cat": {"depth": 10.0 * self._steps}, "mouse": {"depth": self._steps} if self._steps % 2 else {}}
        return *result, {agent: told[agent] for agent in infos}


class PhaseChase(Chase):
    """Pays each agent the number of the phase."""

    phase = "untold"

    def set_phase(self, phase: str) -> None:
        self.phase = phase

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        observed, rewards, *rest = super().step(actions)
        return (observed, dict.fromkeys(rewards, float(PHASES.index(self.phase))), *rest)


class SpoilsTheChase(Chase):
    """Rewards the mouse with None, or shows it another shape, from the second step on."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        observations, rewards, *rest = super().step(actions)
        if self._steps > 1 and self._what == "None":
            rewards["mouse"] = None
        if self._steps > 1 and self._what == "shape":
            observations["mouse"] = np.zeros(5, np.float32)
        return observations, rewards, *rest


class Twins(Chase):
    """Two agents with the same spaces, for one policy: observes (steps, number of the agent)."""

    possible_agents = ["first", "second"]

    def __init__(self) -> None:
        super().__init__()
        self._limits = {"first": 2, "second": 3}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1e6, 1e6, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def _observe(self, agents: list[str]) -> dict[str, Array]:
        return {agent: np.array([self._steps, self.possible_agents.index(agent)], np.float32) for agent in agents}


class Leaks(Counting):
    """Keeps `kept` bytes more with each step, and takes its time."""

    def __init__(self, kept: int, seconds: float) -> None:
        super().__init__()
        self._kept, self._seconds = kept, seconds
        self._leaked: list[Array] = []

    def step(self, action: int) -> Told:
        self._leaked.append(np.ones(self._kept, np.uint8))
        time.sleep(self._seconds)
        return super().step(action)


class Slow(Counting):
    """Takes its time for each step, as a simulator does; without using the processor."""

    def __init__(self, seconds: float) -> None:
        super().__init__(length=16)
        self._seconds = seconds

    def step(self, action: int) -> Told:
        time.sleep(self._seconds)
        return super().step(action)
