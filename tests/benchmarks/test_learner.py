"""The learner's benchmark runs, and its lines stand beside their plain loops."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.conftest import MeasureQuickly
from trainer_node.algorithms.compiling import has_compiler


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.timeout(400)
def test_each_algorithm_is_measured_beside_its_plain_loop(measure_quickly: MeasureQuickly) -> None:
    result = measure_quickly("learner", "PPO, minibatch 512", "DQN", "SAC, 64", "TD3", "A2C")
    lines = {measure.what: measure for measure in result.measures}
    assert {"PPO, minibatch 512", "DQN", "DQN, images", "SAC, 64×64", "TD3, 64×64", "A2C, 4096 at once"} <= set(lines)
    assert all(len(line.samples) == 1 and line.samples[0] > 0 for line in lines.values())
    for name in ("PPO, minibatch 512", "DQN", "DQN, images", "SAC, 64×64"):
        assert lines[name].against == f"{name}: plain loop" and lines[name].aim == 1.0
        assert all(math.isfinite(ratio) for ratio in result.ratios(lines[name]))
    if has_compiler():
        assert lines["PPO, minibatch 512: compiled"].against == "PPO, minibatch 512"
    assert lines["TD3, 64×64"].against == ""
