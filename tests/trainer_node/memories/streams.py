"""Experience as workers make it, step by step, and beside it the same steps as plain objects to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from shared.fragment import expected_columns
from shared.spaces import Array, Columns, Leaf, PolicySpaces, SpaceSpec
from trainer_node.memories.replay import ReplayMemory

VECTOR = SpaceSpec((Leaf("", "box", (2,), "float32"),), 0)
CHOICE = SpaceSpec((Leaf("", "discrete", (), "int64", (3,), (0,)),), 0)
GOAL = SpaceSpec(
    tuple(Leaf(name, "box", (2,), "float32") for name in ("achieved_goal", "desired_goal", "observation")),
    {"dict": {"achieved_goal": 0, "desired_goal": 1, "observation": 2}},
)
PLAIN = PolicySpaces(VECTOR, CHOICE)
GOALS = PolicySpaces(GOAL, CHOICE)


@dataclass
class Step:
    """One slot's step, as it truly was."""

    number: int
    """Of its own; stands in the observation, so that a batch tells which step it is."""
    obs: dict[str, Array]
    action: int
    reward: float
    log_prob: float
    terminated: bool
    truncated: bool
    mask: bool
    led_to: dict[str, Array] = field(default_factory=dict)
    """The observation after it; empty where it terminated and that is not known."""
    after: Step | None = None
    """The step that its episode goes on with."""


@dataclass
class Made:
    """A fragment, and its steps `[T][S]`."""

    source: str
    columns: Columns
    steps: list[list[Step]]
    follows: int | None
    """Number (of all made) of the fragment that it goes on from; None where that was lost."""


class Stream:
    """Makes fragments of random episodes for several sources; some are lost on the way, with a gap behind them."""

    def __init__(self, seed: int, spaces: PolicySpaces, steps: int, slots: int) -> None:
        self.random = np.random.default_rng(seed)
        self.spaces, self.steps, self.slots = spaces, steps, slots
        self.ends, self.absent, self.lost, self.sources, self.last_known = 0.15, 0.1, 0.1, 2, 0.6
        self.made: list[Made] = []
        self._numbers = 0
        self._standing: dict[str, list[Step]] = {}
        self._last: dict[str, int] = {}

    def fragments(self, count: int) -> list[Made]:
        """The next ones that arrive."""
        return [self._fragment() for _ in range(count)]

    def _step(self) -> Step:
        self._numbers += 1
        random, number = self.random, self._numbers
        obs = {
            leaf.column("obs"): random.normal(size=leaf.shape).astype(np.float32)
            for leaf in self.spaces.observation.leaves
        }
        obs[self.spaces.observation.leaves[-1].column("obs")][0] = number
        end, cut = random.random(2) < self.ends
        reward, log_prob = (float(value) for value in random.normal(size=2).astype(np.float32))
        present = bool(random.random() >= self.absent)
        return Step(
            number, obs, int(random.integers(3)), reward, log_prob,
            bool(end and present), bool(cut and present), present,
        )  # fmt: skip

    def _fragment(self) -> Made:
        source = f"w{self.random.integers(self.sources)}:0.0"
        if source in self._standing and self.random.random() < self.lost:
            self._walk(source)
            self._last.pop(source, None)
        steps = self._walk(source)
        made = Made(source, self._columns(steps, self._standing[source]), steps, self._last.get(source))
        self._last[source] = len(self.made)
        self.made.append(made)
        return made

    def _walk(self, source: str) -> list[list[Step]]:
        now = self._standing.get(source) or [self._step() for _ in range(self.slots)]
        rows = []
        for _ in range(self.steps):
            following = [self._step() for _ in range(self.slots)]
            for step, after in zip(now, following, strict=True):
                if step.truncated or (step.terminated and self.random.random() < self.last_known):
                    step.led_to = self._step().obs
                elif not step.terminated:
                    step.led_to = after.obs
                    step.after = after if step.mask and after.mask else None
            rows.append(now)
            now = following
        self._standing[source] = now
        return rows

    def _columns(self, steps: list[list[Step]], bootstrap: list[Step]) -> Columns:
        columns: Columns = {}
        for name, (shape, dtype) in expected_columns(self.spaces, self.steps, self.slots).items():
            values = self._values(name, steps, bootstrap)
            columns[name] = np.array(values, dtype).reshape(tuple(len(values) if n == -1 else n for n in shape))
        return columns

    def _values(self, name: str, steps: list[list[Step]], bootstrap: list[Step]) -> list[object]:
        final = [
            (t, s) for t, row in enumerate(steps) for s, step in enumerate(row)
            if (step.terminated or step.truncated) and step.led_to
        ]  # fmt: skip
        if name.startswith("obs"):
            return [[step.obs[name] for step in row] for row in steps]
        if name.startswith("bootstrap_"):
            return [step.obs[name.removeprefix("bootstrap_")] for step in bootstrap]
        if name.startswith("final_obs"):
            return [steps[t][s].led_to[name.removeprefix("final_")] for t, s in final]
        if name == "final_index":
            return list(final)
        return [[getattr(step, name) for step in row] for row in steps]


def known(held: list[Made], all_made: list[Made]) -> dict[int, Step]:
    """The steps that a memory of these fragments may draw, by number; episodes end where their next fragment lacks."""
    places = {id(made) for made in held}
    present = {step.number for made in held for row in made.steps for step in row}
    joined = {
        step.number for made in held if made.follows is not None and id(all_made[made.follows]) in places
        for step in made.steps[0]
    }  # fmt: skip
    inner = {step.number for made in held for row in made.steps[1:] for step in row}
    found = {}
    for made in held:
        for row in made.steps:
            for step in row:
                after = step.after
                goes_on = after is not None and after.number in present and after.number in joined | inner
                found[step.number] = replace(step, after=after if goes_on else None)
    for step in found.values():
        step.after = found[step.after.number] if step.after else None
    return {number: step for number, step in found.items() if step.mask}


def numbers(observations: Columns) -> Array:
    """Which steps these observations are of."""
    name = list(observations)[-1]
    return observations[name][..., 0].astype(np.int64)


def n_steps(step: Step, n: int, gamma: float) -> tuple[float, float, dict[str, Array] | None]:
    """Reward, discount and what is bootstrapped from, of up to `n` steps: as slowly as it is written in a book."""
    total, factor = 0.0, 1.0
    for number in range(n):
        total += factor * step.reward
        factor *= gamma
        if step.terminated:
            return total, 0.0, step.led_to or None
        if step.after is None or number == n - 1:
            return total, factor, step.led_to
        step = step.after
    raise AssertionError("n is at least 1")


def fill(memory: ReplayMemory, experience: Iterable[tuple[str, Columns]]) -> int:
    """Adds all fragments, given as source and columns; answers how many transitions the memory then holds."""
    for source, columns in experience:
        memory.add(source, columns)
    return len(memory)
