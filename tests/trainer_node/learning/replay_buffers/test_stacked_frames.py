"""Frames stored once: every memory draws exactly what it would from whole stacks, whatever the data, and holds less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.shared.experience.fragment import expected_columns
from stagecoach.shared.experience.spaces import Array, Columns, Leaf, PolicySpaces, SpaceSpec
from stagecoach.trainer_node.learning.replay_buffers import storage
from stagecoach.trainer_node.learning.replay_buffers.observation_column import ObservationColumn, RowPool
from stagecoach.trainer_node.learning.replay_buffers.prioritized import PrioritizedReplayBuffer
from stagecoach.trainer_node.learning.replay_buffers.stacked_frames import FrameStacks, is_stacked, may_be_stacked
from stagecoach.trainer_node.learning.replay_buffers.uniform import BalancedReplayBuffer, ReplayBuffer
from tests.support.learning.streams import ONE_OF_THREE, arrays, assert_same, quick


def images(stack: int, side: int) -> PolicySpaces:
    """Stacked gray images beside a vector, as a dict."""
    leaves = (Leaf("camera", "box", (stack, side, side), "uint8"), Leaf("speed", "box", (2,), "float32"))
    return PolicySpaces(SpaceSpec(leaves, {"dict": {"camera": 0, "speed": 1}}), ONE_OF_THREE)


@dataclass
class Camera:
    """Fragments of several sources, with resets of every kind, lost fragments and cuts."""

    seed: int
    steps: int
    slots: int
    stack: int = 4
    side: int = 8
    resets: float = 0.1
    lost: float = 0.1
    frames: int = 5
    """Different ones: few, so that equal ones meet by chance."""
    _standing: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.spaces = images(self.stack, self.side)
        self._known = self.random.integers(0, 256, (self.frames, self.side, self.side), np.uint8)

    def fragments(self, count: int) -> Iterator[tuple[str, Columns]]:
        """Source and columns."""
        for _ in range(count):
            source = f"w{self.random.integers(2)}:0.0"
            if self.random.random() < self.lost:
                self._standing.pop(source, None)
            yield source, self._fragment(source)

    def _frame(self) -> Array:
        found: Array = self._known[self.random.integers(self.frames)]
        return found

    def _reset(self) -> Array:
        kind, first = self.random.integers(3), self._frame()
        if kind == 0:
            return np.array([first] * self.stack)
        before = [np.zeros_like(first) if kind == 1 else self._frame() for _ in range(self.stack - 1)]
        return np.array([*before, first])

    def _after(self, now: Array) -> Array:
        return np.array([*now[1:], self._frame()])

    def _fragment(self, source: str) -> Columns:
        random, shape = self.random, (self.steps, self.slots)
        now = self._standing.get(source)
        rows = [np.array([self._reset() for _ in range(self.slots)]) if now is None else now]
        terminated, truncated = random.random(shape) < self.resets / 2, random.random(shape) < self.resets / 2
        final, finals = truncated | (terminated & (random.random(shape) < 0.5)), []
        for step in range(self.steps):
            ended = np.flatnonzero(final[step])
            finals += [self._reset() if random.random() < 0.3 else self._after(rows[-1][slot]) for slot in ended]
            over = terminated[step] | truncated[step]
            rows.append(
                np.array([self._reset() if end else self._after(row) for row, end in zip(rows[-1], over, strict=True)])
            )
        self._standing[source] = rows[-1]
        made = {"obs.camera": np.array(rows[:-1]), "bootstrap_obs.camera": rows[-1]}
        made["final_obs.camera"] = np.array(finals, np.uint8).reshape(-1, self.stack, self.side, self.side)
        made |= {"terminated": terminated, "truncated": truncated, "mask": random.random(shape) > 0.05}
        made["final_index"] = np.argwhere(final).astype(np.int32)
        for name, (full, dtype) in expected_columns(self.spaces, self.steps, self.slots).items():
            size = tuple(len(finals) if number == -1 else number for number in full)
            made.setdefault(name, (random.integers(0, 3, size) * ("speed" not in name)).astype(dtype))
        return made


def twice(make: Callable[[], ReplayBuffer]) -> tuple[ReplayBuffer, ReplayBuffer]:
    """A memory that takes stacks apart, and one that doesn't."""
    with patch.object(storage, "may_be_stacked", lambda leaf, steps: False):
        whole = make()
    return make(), whole


def same_draws(one: ReplayBuffer, other: ReplayBuffer, seed: int) -> None:
    """Of batches, bit for bit."""
    if not len(other):
        return
    for n_step in (1, 3):
        drawn = [memory.sample(40, np.random.default_rng(seed), gamma=0.9, n_step=n_step) for memory in (one, other)]
        assert_same(arrays(drawn[0]), arrays(drawn[1]))
        errors = np.random.default_rng(seed).normal(size=40)
        for memory, batch in zip((one, other), drawn, strict=True):
            memory.update_priorities(batch.row, errors)


@quick
@given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 9),
    slots=st.integers(1, 3),
    stack=st.integers(2, 4),
    side=st.sampled_from([8, 9]),
    resets=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    frames=st.sampled_from([1, 3, 1000]),
    places=st.integers(1, 5),
    kind=st.sampled_from(["uniform", "prioritized", "balanced"]),
)
def test_draws_are_those_from_whole_stacks(
    seed: int, steps: int, slots: int, stack: int, side: int, resets: float, frames: int, places: int, kind: str
) -> None:
    camera = Camera(seed, steps, slots, stack, side, resets, frames=frames)

    def make() -> ReplayBuffer:
        size = (camera.spaces, steps, slots, places * steps * slots)
        if kind == "prioritized":
            return PrioritizedReplayBuffer(*size, alpha=0.6, epsilon=1e-6)
        return BalancedReplayBuffer(*size, classes="action") if kind == "balanced" else ReplayBuffer(*size)

    apart, whole = twice(make)
    held: list[tuple[str, Columns]] = []
    for number, item in enumerate(camera.fragments(14)):
        held = [*held, item][-places:]
        for memory in (apart, whole):
            memory.add(*item)
        same_draws(apart, whole, number)
        if number == 9:  # a checkpoint, taken and put back
            again = make()
            again.load_state({name: array.copy() for name, array in apart.state().items()})
            for source, columns in held:
                again.add(source, columns)
            same_draws(again, whole, number)  # and what it learns there is learned by both
            apart = again


def filled(camera: Camera, places: int, made: int) -> ReplayBuffer:
    """A uniform memory of so many places that has seen so many fragments."""
    memory = ReplayBuffer(camera.spaces, camera.steps, camera.slots, places * camera.steps * camera.slots)
    for item in camera.fragments(made):
        memory.add(*item)
    return memory


def test_continued_stack_costs_one_frame_a_step() -> None:
    camera = Camera(1, 8, 2, resets=0.0, lost=0.0, frames=1000)
    for made in (6, 20, 60):
        stacks = filled(camera, 6, made).ring.observed["obs.camera"]
        assert (
            isinstance(stacks, FrameStacks) and stacks.pool.used <= 2 * 2 * 4
        )  # for each source, those before the oldest fragment that is there


def test_reset_that_repeats_its_frame_costs_nothing() -> None:
    camera = Camera(1, 8, 1, resets=0.0, frames=1000)
    memory = ReplayBuffer(camera.spaces, 8, 1, 80)
    source, columns = next(camera.fragments(1))
    columns["obs.camera"][5] = columns["obs.camera"][5, :, -1]
    columns["obs.camera"][6:] = columns["obs.camera"][5]
    columns["bootstrap_obs.camera"][:] = columns["obs.camera"][5]
    memory.add(source, columns)
    stacks = memory.ring.observed["obs.camera"]
    assert isinstance(stacks, FrameStacks) and stacks.pool.used == len(np.unique(columns["obs.camera"][0, 0], axis=0))


def test_colors_are_no_stack() -> None:
    camera = Camera(3, 8, 2, stack=3, resets=1.0, frames=1000)
    memory = filled(camera, 4, 9)
    assert type(memory.ring.observed["obs.camera"]) is ObservationColumn
    assert memory.ring.observations(np.arange(5))["obs.camera"].shape == (5, 3, 8, 8)


@pytest.mark.parametrize(
    ("shape", "dtype", "steps", "expected"),
    [
        ((4, 84, 84), "uint8", 32, True),
        ((4, 84, 84, 3), "uint8", 32, True),
        ((4, 84, 84), "float32", 32, False),
        ((4, 84, 84), "uint8", 3, False),
        ((84, 84, 4), "uint8", 128, False),
        ((1, 84, 84), "uint8", 32, False),
        ((4, 200), "uint8", 32, False),
        ((4, 7, 7), "uint8", 32, False),
    ],
)
def test_only_stacked_images_are_split(shape: tuple[int, ...], dtype: str, steps: int, expected: bool) -> None:
    assert may_be_stacked(Leaf("", "box", shape, dtype), steps) is expected


def test_fragment_of_one_step_shows_no_stack() -> None:
    assert not is_stacked(np.zeros((1, 2, 4, 8, 8), np.uint8))


def test_frame_pool_returns_its_rows_and_reuses_free_ones() -> None:
    pool, random = RowPool((3, 3), np.uint8), np.random.default_rng(0)
    truth: dict[int, tuple[Array, Array]] = {}
    for number in range(300):
        place = int(random.integers(20))
        pool.give_up(place)
        frames = random.integers(0, 256, (int(random.integers(9)), 3, 3), np.uint8)
        truth[place] = pool.put(place, frames), frames
        if number % 50 == 0:
            assert all(np.array_equal(pool.take(where), frames) for where, frames in truth.values())
    assert pool.used == sum(len(frames) for _, frames in truth.values())
    assert len(pool.held) < 20 * 9 * 1.5
