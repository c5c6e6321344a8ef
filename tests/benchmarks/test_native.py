"""The benchmark of cheap environments, small: a real worker, Redis and trainer, and each part alone."""

from __future__ import annotations

import pytest

from benchmarks.suite.native import AIM, Alone, Sizes
from tests.benchmarks.conftest import MeasureQuickly

pytestmark = pytest.mark.timeout(300)


def test_every_part_is_measured_with_the_whole_path(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("native", "one layer", "worker")
    found = {line.what: line for line in result.measures}
    whole = "the whole path, one layer of 32"
    assert {whole, "a worker alone, on one core"} <= set(found) and "environments alone, on one core" not in found
    assert found[whole].unit == "env steps/s" and found[whole].aim is None, "small sizes have nothing to reach"
    assert {f"{whole}: {role}" for role in ("worker", "trainer", "redis-server")} <= set(found)
    assert all(len(line.samples) == 1 and line.samples[0] > 0 for line in found.values())
    assert result.settings["config"]["environment"]["vectorization"] == "native" and AIM == 500_000


def test_each_fragment_is_learnt_from_once_more() -> None:
    alone = Alone("two layers of 64, twice", Sizes(num_envs=4, steps=8))
    alone.learn()
    alone.learn()
    assert alone.transitions == 32 and alone.bytes_per_step > 30
    assert alone._learner.counters.train.updates == 2 and alone._learner.counters.train.env_steps <= 64
