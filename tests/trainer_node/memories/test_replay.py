"""The uniform memory: what is drawn is what was acted, n-step returns and sequences, and it is restored bit for bit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.archive import Archive, read_experience
from shared.experience_log import LogEntry
from shared.fragment import Fragment, FragmentHeader, encode
from shared.object_store import FileStore
from shared.spaces import Columns
from shared.steps import Phase
from tests.trainer_node.memories.streams import GOALS, PLAIN, Made, Step, Stream, fill, known, n_steps, numbers
from trainer_node.memories.batch import Batch
from trainer_node.memories.replay import ReplayMemory

shapes = given(
    seed=st.integers(0, 10_000),
    steps=st.integers(1, 7),
    slots=st.integers(1, 3),
    places=st.integers(1, 5),
    made=st.integers(1, 12),
)
Memory = TypeVar("Memory", bound=ReplayMemory)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def filled(stream: Stream, places: int, made: int) -> tuple[ReplayMemory, dict[int, Step]]:
    """A memory of so many places that has seen so many fragments, and the steps that it should know."""
    memory = ReplayMemory(stream.spaces, stream.steps, stream.slots, places * stream.steps * stream.slots)
    fill(memory, [(item.source, item.columns) for item in stream.fragments(made)])
    return memory, known(stream.made[-places:], stream.made)


def check(batch: Batch, steps: dict[int, Step], n: int, gamma: float) -> None:
    """Every row of a batch against the step it says it is."""
    for row, number in enumerate(numbers(batch.observations)):
        step = steps[int(number)]
        reward, discount, led_to = n_steps(step, n, gamma)
        assert batch.reward[row] == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert batch.discount[row] == pytest.approx(discount, rel=1e-6)
        assert (batch.actions["action"][row], batch.log_prob[row]) == (step.action, step.log_prob)
        for name, array in batch.observations.items():
            assert np.array_equal(array[row], step.obs[name])
            assert led_to is None or np.array_equal(batch.next_observations[name][row], led_to[name])


@quick
@shapes
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_drawn_is_what_was_acted(n: int, seed: int, steps: int, slots: int, places: int, made: int) -> None:
    memory, truth = filled(Stream(seed, PLAIN, steps, slots), places, made)
    assert len(memory) == len(truth)
    if truth:
        batch = memory.sample(50, np.random.default_rng(seed), n_step=n, gamma=0.9)
        check(batch, truth, n, 0.9)
        assert {array.dtype for array in (batch.reward, batch.discount, batch.log_prob, batch.weight)} == {
            np.dtype(np.float32)
        }


def test_nested_observations_keep_their_names() -> None:
    memory, truth = filled(Stream(3, GOALS, 5, 2), 3, 8)
    batch = memory.sample(64, np.random.default_rng(0), n_step=2, gamma=0.99)
    check(batch, truth, 2, 0.99)
    assert set(batch.next_observations) == {"obs.achieved_goal", "obs.desired_goal", "obs.observation"}


def long_episode() -> Stream:
    stream = Stream(1, PLAIN, 4, 2)
    stream.ends = stream.absent = stream.lost = 0.0
    return stream


def test_returns_go_on_across_fragments_that_others_come_between() -> None:
    stream = long_episode()
    memory, truth = filled(stream, 8, 8)
    assert any(a.source != b.source for a, b in zip(stream.made, stream.made[1:], strict=False))
    batch = memory.sample(200, np.random.default_rng(0), n_step=6, gamma=1.0)
    check(batch, truth, 6, 1.0)
    across = [n_steps(truth[int(number)], 5, 1.0)[0] for number in numbers(batch.observations)]
    assert not np.allclose(batch.reward, across)


def test_a_lost_fragment_cuts_the_return() -> None:
    stream = long_episode()
    first, lost, third = stream.fragments(1)[0], None, None
    while lost is None or third is None:
        item = stream.fragments(1)[0]
        if item.source == first.source:
            lost, third = (item, third) if lost is None else (lost, item)
    memory = ReplayMemory(PLAIN, 4, 2, 100)
    fill(memory, [(item.source, item.columns) for item in (first, third)])
    batch = memory.sample(100, np.random.default_rng(0), n_step=9, gamma=1.0)
    check(batch, known([first, third], stream.made), 9, 1.0)
    ends = {int(number) for number in numbers(batch.next_observations)}
    assert ends == {step.number for step in lost.steps[0]} | {
        int(number) for number in third.columns["bootstrap_obs"][:, 0]
    }


def test_another_life_of_a_worker_does_not_go_on_with_the_last() -> None:
    first, second = ([item for item in long_episode().fragments(9) if item.source == "w0:0.0"])[:2]
    memory = ReplayMemory(PLAIN, 4, 2, 100)
    fill(memory, [("w0:0.0", first.columns), ("w0:1.0", second.columns)])
    bootstraps = numbers(memory.sample(100, np.random.default_rng(0), n_step=9, gamma=1.0).next_observations)
    assert set(bootstraps) == {
        int(number) for item in (first, second) for number in item.columns["bootstrap_obs"][:, 0]
    }


def test_what_came_from_others_is_not_gone_on_with_however_equal_it_looks() -> None:
    made = long_episode().fragments(1)[0].columns
    alike = made | {"obs": np.zeros_like(made["obs"]), "bootstrap_obs": np.zeros_like(made["bootstrap_obs"])}
    memory = ReplayMemory(PLAIN, 4, 2, 16)
    fill(memory, [(source, alike) for source in ("a", "b", "b", "a")])  # the first of a is no more when it goes on
    assert memory.ring.following.tolist() == [-1, -1] and memory.ring.preceding.tolist() == [-1, -1]
    fill(memory, [("a", alike)])
    assert memory.ring.following.tolist() == [-1, 0] and memory.ring.preceding.tolist() == [1, -1]


def test_every_transition_is_as_probable() -> None:
    memory, truth = filled(Stream(5, PLAIN, 6, 3), 4, 9)
    draws = 400 * len(truth)
    drawn = Counter(numbers(memory.sample(draws, np.random.default_rng(7), gamma=1.0).observations).tolist())
    assert set(drawn) == set(truth)
    squares = sum((drawn[number] - 400) ** 2 / 400 for number in truth)
    assert squares < len(truth) + 5 * (2 * len(truth)) ** 0.5  # χ²: mean k, variance 2k


def test_equal_generators_draw_the_same() -> None:
    memory, _ = filled(Stream(5, PLAIN, 6, 3), 4, 9)
    one, two = (memory.sample(32, np.random.default_rng(3), gamma=0.9, n_step=2) for _ in range(2))
    assert arrays(one).keys() == arrays(two).keys()
    assert all(np.array_equal(array, arrays(two)[name]) for name, array in arrays(one).items())


def arrays(batch: Any) -> Columns:
    """A batch or sequences, flat."""
    flat: Columns = {}
    for name, value in vars(batch).items():
        flat |= {f"{name}/{key}": array for key, array in value.items()} if isinstance(value, dict) else {name: value}
    return flat


@quick
@shapes
def test_sequences_stay_in_one_episode(seed: int, steps: int, slots: int, places: int, made: int) -> None:
    memory, truth = filled(Stream(seed, PLAIN, steps, slots), places, made)
    if not truth:
        return
    found = memory.sample_sequences(20, 5, np.random.default_rng(seed))
    which = numbers(found.observations)
    for column in range(20):
        step: Step | None = truth[int(which[0, column])]
        for row in range(5):
            assert found.valid[row, column] == (step is not None)
            if step is None:
                continue
            assert which[row, column] == step.number
            assert found.reward[row, column] == np.float32(step.reward)
            assert (found.terminated[row, column], found.truncated[row, column]) == (step.terminated, step.truncated)
            assert (found.actions["action"][row, column], found.log_prob[row, column]) == (step.action, step.log_prob)
            if step.led_to:
                assert np.array_equal(found.next_observations["obs"][row, column], step.led_to["obs"])
            step = step.after


def contents(memory: ReplayMemory) -> Columns:
    """Everything that a memory of fragments holds, by name."""
    ring = memory.ring
    places = {name: array for name, array in vars(ring).items() if isinstance(array, np.ndarray)}
    kept = list(range(max(0, ring.added - ring.fragments), ring.added))
    flat = {
        name: array[[number % ring.fragments for number in kept]] for name, array in places.items() if array.ndim != 1
    }
    for name, array in (ring._columns | ring._observations).items():
        flat[name] = array[[number % ring.fragments for number in kept]]
    return flat | {"following": ring.following, "preceding": ring.preceding} | memory.state()


def restored(memory: ReplayMemory, fresh: Memory, made: list[Made]) -> Memory:
    """`fresh`, with what `memory` holds put back as a checkpoint and the log's archive do."""
    fresh.load_state({name: array.copy() for name, array in memory.state().items()})
    fill(fresh, [(item.source, item.columns) for item in made[-memory.fragments :]])
    return fresh


@quick
@shapes
def test_it_is_restored_bit_for_bit(seed: int, steps: int, slots: int, places: int, made: int) -> None:
    stream = Stream(seed, PLAIN, steps, slots)
    memory, _ = filled(stream, places, made)
    again = restored(memory, ReplayMemory(PLAIN, steps, slots, places * steps * slots), stream.made)
    for further in range(3):
        found, expected = contents(again), contents(memory)
        assert found.keys() == expected.keys()
        assert [name for name, array in expected.items() if not np.array_equal(found[name], array)] == []
        if len(memory):
            one, two = (
                arrays(item.sample(16, np.random.default_rng(further), gamma=0.9, n_step=3)) for item in (memory, again)
            )
            assert [name for name, array in one.items() if not np.array_equal(two[name], array)] == []
        (item,) = stream.fragments(1)
        memory.add(item.source, item.columns)
        again.add(item.source, item.columns)


def test_it_draws_nothing_before_all_is_put_back() -> None:
    stream = Stream(2, PLAIN, 4, 2)
    memory, _ = filled(stream, 3, 5)
    again = ReplayMemory(PLAIN, 4, 2, 24)
    again.load_state(memory.state())
    again.add(stream.made[2].source, stream.made[2].columns)
    with pytest.raises(RuntimeError, match="2 of the fragments"):
        again.sample(1, np.random.default_rng(0), gamma=1.0)


def test_an_empty_memory_says_so() -> None:
    with pytest.raises(RuntimeError, match="empty"):
        ReplayMemory(PLAIN, 4, 2, 24).sample(1, np.random.default_rng(0), gamma=1.0)


def test_a_fragment_of_another_shape_is_refused() -> None:
    (item,) = Stream(2, PLAIN, 4, 2).fragments(1)
    with pytest.raises(ValueError, match=r"\(4, 2\).*\(4, 3\)"):
        ReplayMemory(PLAIN, 4, 3, 24).add(item.source, item.columns)


@pytest.mark.parametrize(("capacity", "fragments"), [(1, 1), (8, 1), (9, 2), (100, 13)])
def test_capacity_is_rounded_up_to_whole_fragments(capacity: int, fragments: int) -> None:
    assert ReplayMemory(PLAIN, 4, 2, capacity).fragments == fragments


def test_last_observations_are_kept_as_long_as_their_fragments() -> None:
    stream = Stream(4, PLAIN, 20, 4)
    memory = ReplayMemory(PLAIN, 20, 4, 6 * 80)
    for stream.ends in (0.1, 0.3, 0.9):  # more and more, so that the pool grows while it goes round
        fill(memory, [(item.source, item.columns) for item in stream.fragments(9)])
        for _ in range(3):
            fill(memory, [(item.source, item.columns) for item in stream.fragments(1)])
            batch = memory.sample(300, np.random.default_rng(0), gamma=0.5)
            check(batch, known(stream.made[-6:], stream.made), 1, 0.5)
    assert memory.ring.finals == sum(len(item.columns["final_index"]) for item in stream.made[:-6])


def test_it_is_filled_from_a_runs_archive(tmp_path: Path) -> None:
    stream, entries = Stream(6, PLAIN, 4, 2), []
    for number, item in enumerate(stream.fragments(5), 1):
        worker, _, life = item.source.partition(":")
        header = FragmentHeader("a-run", worker, 0, number, Phase.TRAIN, {"default": 0}, 4, 2, life=life)
        blob = encode(Fragment(header, {"default": item.columns}))
        entries.append(LogEntry(f"{number}-0", worker, 0, number, 8, blob, True))
    Archive(FileStore(tmp_path, "a-run"), "a-run").write("0-0", "5-0", entries)
    memory = ReplayMemory(PLAIN, 4, 2, 100)
    recorded = read_experience(tmp_path / "a-run")
    held = fill(memory, ((f"{i.header.worker_id}:{i.header.life}", i.columns["default"]) for i in recorded))
    truth = known(stream.made, stream.made)
    assert held == len(truth) == len(memory)
    check(memory.sample(100, np.random.default_rng(0), n_step=3, gamma=0.9), truth, 3, 0.9)


def test_what_it_holds_does_not_change_with_what_it_was_given() -> None:
    (item,) = Stream(2, PLAIN, 4, 2).fragments(1)
    memory = ReplayMemory(PLAIN, 4, 2, 24)
    memory.add(item.source, item.columns)
    before = {name: array.copy() for name, array in contents(memory).items()}
    for array in item.columns.values():
        array[:] = 0
    assert all(np.array_equal(array, contents(memory)[name]) for name, array in before.items())


def test_a_transition_has_a_number_of_its_own_that_it_keeps_and_gets_again_when_the_memory_is_put_back() -> None:
    stream = Stream(3, PLAIN, 4, 2)
    items = stream.fragments(11)
    memory, seen = ReplayMemory(PLAIN, 4, 2, 3 * 8), dict[int, int]()
    for count, item in enumerate(items, start=1):
        memory.add(item.source, item.columns)
        rows = np.arange(min(count, 3) * 8)
        ordinals = memory.ring.numbers(rows)
        assert sorted(ordinals) == list(range(max(0, count - 3) * 8, count * 8))
        for step, ordinal in zip(numbers(memory.ring.observations(rows)), ordinals, strict=True):
            assert seen.setdefault(int(step), int(ordinal)) == ordinal
    restored = ReplayMemory(PLAIN, 4, 2, 3 * 8)
    restored.load_state(memory.state())
    for item in items[-3:]:
        restored.add(item.source, item.columns)
    assert np.array_equal(restored.ring.numbers(np.arange(24)), memory.ring.numbers(np.arange(24)))
