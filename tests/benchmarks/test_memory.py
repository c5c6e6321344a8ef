"""The memory benchmark, quickly: what it measures is there, and the sizes are those of what was put in."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.suite.memory_filling import fragments, spaces_of
from tests.benchmarks.conftest import MeasureQuickly


@pytest.mark.timeout(400)
def test_lines_of_memories_and_draws(measure_quickly: MeasureQuickly) -> None:
    found = measure_quickly("memory", "Atari", "uniform", "hindsight", "draw")
    lines = {measure.what: measure for measure in found.measures}
    images = next(line for name, line in lines.items() if "Atari" in name)
    assert images.against in lines and images.aim == 1.10 and images.better == "less"
    assert found.ratios(images)[0] > 0.9  # not less than its frames
    small = [line for name, line in lines.items() if name.startswith("a transition of")]
    assert len(small) == 2 and all(line.samples[0] > 29 for line in small)
    draw = next(line for name, line in lines.items() if name.startswith("draw"))
    assert found.ratios(draw)[0] > 0
    assert {measure.unit for measure in found.measures} == {"GB", "B", "ms"}


@pytest.mark.parametrize("kind", ["images", "goals", "vector"])
def test_what_is_put_in_goes_on_where_its_source_was_left(kind: str) -> None:
    made = fragments(spaces_of(kind), 16, 2)
    found = [next(made) for _ in range(4)]
    (first, before), (third, after) = found[0], found[2]
    assert first == third
    for name in [name for name in before if name.startswith("obs")]:
        assert np.array_equal(before[f"bootstrap_{name}"], after[name][0])


@pytest.mark.timeout(300)
def test_sizes_of_the_processes_of_a_run(measure_quickly: MeasureQuickly) -> None:
    found = measure_quickly("memory", "PPO: ")
    sizes = {measure.what: measure.samples[0] for measure in found.measures}
    for role in ("trainer", "worker", "coordinator", "Redis", "S3 server", "Ray"):
        assert 1 < sizes[f"PPO: {role} at work"] < 10_000
        assert sizes[f"PPO: {role} at the start"] <= sizes[f"PPO: {role} at work"]
