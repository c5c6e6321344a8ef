"""The end-to-end benchmark, small: a real run, worker and learner take turns."""

from __future__ import annotations

import os

import pytest

from benchmarks.suite.end_to_end_cases import cases
from benchmarks.suite.moving_square import make
from benchmarks.suite.pinning import two_cores
from tests.benchmarks.conftest import MeasureQuickly

pytestmark = pytest.mark.timeout(400)
ALGORITHMS = [
    "vectors: PPO",
    "lockstep: PPO",
    "vectors: APPO",
    "vectors: DQN",
    "vectors: SAC",
    "images: PPO",
    "images: DQN",
]


def test_a_case_has_its_four_lines(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("end-to-end", "lockstep: PPO")
    names = ("acting alone", "learning alone", "one after the other", "end to end")
    assert [line.what for line in result.measures] == [f"lockstep: PPO, {name}" for name in names]
    acting, learning, bound, whole = (line.samples for line in result.measures)
    assert all(len(samples) == 1 and min(samples) > 0 for samples in (acting, learning, bound, whole))
    assert bound == pytest.approx([1 / (1 / a + 1 / b) for a, b in zip(acting, learning, strict=True)])
    assert result.measures[3].against == "lockstep: PPO, one after the other" and result.measures[3].aim == 0.95
    assert [remark.partition(":")[0] for remark in result.remarks if "processor time" in remark]


def test_all_that_is_claimed_is_among_the_cases() -> None:
    found = cases()
    assert [case.name for case in found] == ALGORITHMS
    assert [case.overlaps for case in found] == [name != "lockstep: PPO" for name in ALGORITHMS]
    assert all(case.config.algorithm.learning_rate.start < 1e-9 for case in found)
    assert {case.name for case in found if case.memory} == {"vectors: DQN", "vectors: SAC", "images: DQN"}


def test_the_image_environment_is_one_that_gymnasium_accepts_and_its_frames_move() -> None:
    environment = make()
    first, _ = environment.reset(seed=3)
    again, _ = make().reset(seed=3)
    assert (first == again).all() and environment.observation_space.contains(first)
    frames = [environment.step(step % 4) for step in range(200)]
    assert any((frame[0] != first).any() for frame in frames)
    assert [frame[2] for frame in frames] == [False] * 199 + [True]
    assert {frame[1] for frame in frames} == {0.0, 1.0}


def test_the_trainer_has_a_core_of_its_own_where_there_are_two() -> None:
    cores = two_cores()
    assert {cores.trainer, cores.others} <= os.sched_getaffinity(0)
    assert cores.apart == (len(os.sched_getaffinity(0)) > 1)
