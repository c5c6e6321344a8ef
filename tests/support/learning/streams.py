"""Experience as workers make it, step by step, beside it the same steps as plain objects, and replay buffers of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.shared.experience.fragment import expected_columns
from stagecoach.shared.experience.spaces import Array, Columns, Leaf, PolicySpaces, SpaceSpec
from stagecoach.trainer_node.learning.building_blocks.interface import Experience
from stagecoach.trainer_node.learning.replay_buffers.uniform import Batch, ReplayBuffer

Memory = TypeVar("Memory", bound=ReplayBuffer)
quick = settings(max_examples=60, derandomize=True)
shapes = given(
    seed=st.integers(0, 10_000), steps=st.integers(1, 7), slots=st.integers(1, 3), places=st.integers(1, 5),
    made=st.integers(1, 12),
)  # fmt: skip

VECTOR = SpaceSpec((Leaf("", "box", (2,), "float32"),), 0)
ONE_OF_THREE = SpaceSpec((Leaf("", "discrete", (), "int64", (3,), (0,)),), 0)
GOAL = SpaceSpec(
    tuple(Leaf(name, "box", (2,), "float32") for name in ("achieved_goal", "desired_goal", "observation")),
    {"dict": {"achieved_goal": 0, "desired_goal": 1, "observation": 2}},
)
PLAIN = PolicySpaces(VECTOR, ONE_OF_THREE)
GOALS = PolicySpaces(GOAL, ONE_OF_THREE)


@dataclass
class Step:
    """One slot's step, as it truly was."""

    number: int
    """Number of a step; part of the observation, so that a batch tells which step it is."""
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


def streamed(count: int, seed: int = 0, **shares: float) -> list[Experience]:
    """The first fragments of a stream; `shares` (such as `ends`) replace those of the stream."""
    stream = Stream(seed, PLAIN, 4, 3)
    for name, value in shares.items():
        setattr(stream, name, value)
    return [Experience(made.source, made.columns) for made in stream.fragments(count)]


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
    """Steps that these observations belong to."""
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


def fill(memory: ReplayBuffer, made: Iterable[Made | Experience]) -> None:
    for item in made:
        memory.add(item.source, item.columns)


def restored(memory: ReplayBuffer, fresh: Memory, made: list[Made]) -> Memory:
    """`fresh`, with what `memory` holds put back as a checkpoint and the log's archive do."""
    fresh.load_state({name: array.copy() for name, array in memory.state().items()})
    fill(fresh, made[-memory.fragments :])
    return fresh


def arrays(batch: Any) -> Columns:
    """A batch or sequences, flat."""
    flat: Columns = {}
    for name, value in vars(batch).items():
        flat |= {f"{name}/{key}": array for key, array in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def contents(memory: ReplayBuffer) -> Columns:
    """Everything that a memory of fragments holds: of all rows what they are and what follows them, and its state."""
    ring = memory.ring
    rows = np.arange(min(ring.added, ring.fragments) * ring.rows_each)
    names = ("reward", "terminated", "truncated", "mask", *ring.spaces.action.column_names("action"))
    found = {name: ring.column(name, rows) for name in names} | ring.observations(rows)
    known = rows[~ring.next_unknown(rows)]
    found |= {f"next {name}": array for name, array in ring.next_observations(known).items()}
    links = {"following": ring.following.copy(), "preceding": ring.preceding.copy()}
    links |= {"next rows": ring.next_rows(rows), "known": known, "numbers": ring.numbers(rows)}
    return found | links | memory.state()


def assert_same(one: Columns, other: Columns) -> None:
    """Names, dtypes, shapes and every byte."""
    assert one.keys() == other.keys()
    for name, array in other.items():
        assert one[name].dtype == array.dtype and np.array_equal(one[name], array, equal_nan=True), name


def assert_drawn_from(batch: Batch, steps: dict[int, Step], n: int, gamma: float) -> None:
    """Every row of a batch is the step that it says it is."""
    for row, number in enumerate(numbers(batch.observations)):
        step = steps[int(number)]
        reward, discount, led_to = n_steps(step, n, gamma)
        assert batch.reward[row] == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert batch.discount[row] == pytest.approx(discount, rel=1e-6)
        assert batch.actions["action"][row] == step.action
        for name, array in batch.observations.items():
            assert np.array_equal(array[row], step.obs[name])
            assert led_to is None or np.array_equal(batch.next_observations[name][row], led_to[name])
