"""The benchmark of cost against size, small: real runs at some sizes, and the arithmetic beside them."""

from __future__ import annotations

import pytest

from benchmarks.suite.scale import network_config, observation_config, slowest
from benchmarks.wide import wide
from coordinator.preparation import check
from shared.config_sources import parse_config
from shared.policies.registry import build_policies
from tests.benchmarks.conftest import MeasureQuickly

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(("family", "lines", "beyond"), [("workers", 1, 0), ("networks", 2, 1)])
def test_sizes_are_measured_and_worked_out(
    measure_quickly: MeasureQuickly, family: str, lines: int, beyond: int
) -> None:
    result = measure_quickly("scale", family)
    assert len(result.measures) == lines and all(line.samples[0] > 0 for line in result.measures)
    measured, worked_out = result.curves
    assert [size for size, _ in measured.points] == [size for size, _ in worked_out.points][:lines]
    assert len(worked_out.points) == lines + beyond
    assert worked_out.dashed and all(rate > 0 for _, rate in worked_out.points)
    for found in result.settings["points"].values():
        assert {"trainer", "redis-server", "worker"} <= set(found["cores used"]) and found["limit by arithmetic"]


def test_the_slowest_role_or_the_cores_set_the_limit() -> None:
    assert slowest({"worker": 4e-6, "trainer": 1e-6}, 2) == (250_000, "the processor of one worker")
    assert slowest({"worker": 2e-6, "trainer": 1.5e-6, "redis": 1e-6}, 2)[1] == "2 cores for all"


@pytest.mark.parametrize("parameters", [1_000, 100_000])
def test_a_network_is_about_as_large_as_asked_for(parameters: int) -> None:
    config = parse_config(network_config(parameters))
    (policy,) = build_policies(check(config).policies, config.policies, config.algorithm, seed=0).values()
    assert sum(weights.numel() for weights in policy.parameters()) == pytest.approx(parameters, rel=0.1)


@pytest.mark.parametrize("size", [4, 1_000, 1_000_000])
def test_a_fragment_of_observations_is_bounded(size: int) -> None:
    config = parse_config(observation_config(size))
    assert 4 * size * config.rollout.fragment_steps * config.environment.num_envs <= max(4 << 20, 16 * size)


def test_wide_observations_are_shown_in_turns() -> None:
    shown = wide(3, 2)
    first, _ = shown.reset()
    second = shown.step(shown.action_space.sample())[0]
    assert first.shape == second.shape == (2, 3) and (first != second).any()
    assert wide(3).observation_space == shown.single_observation_space  # type: ignore[union-attr]
