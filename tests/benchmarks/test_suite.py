"""The benchmarks, small: each runs in a process of its own, as users run it, and its lines say what they are for."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kit.measure import Result, read
from benchmarks.rehearsal import costs
from benchmarks.suite.end_to_end_cases import cases
from benchmarks.suite.framework_cost import CLOCKS, FRAMEWORK, TRAINER_PARTS, WORKER_PARTS
from benchmarks.suite.native import AIM
from stagecoach.trainer_node.learning.building_blocks.compilation import has_compiler

pytestmark = pytest.mark.timeout(400)
Measure = Callable[..., Result]


@pytest.fixture
def measure_quickly(tmp_path: Path) -> Measure:
    """`measure_quickly("limits", "memory: copy")`: one quick round of a benchmark, or of some of its lines.

    Each line has one sample, which is above 0 unless it is a difference.
    """

    def measure(name: str, *only: str) -> Result:
        command = [sys.executable, "-m", "benchmarks", name, "--quick", "--out", str(tmp_path)]
        command += ["--only", *only] if only else []
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        result = read(tmp_path / f"{name}.json")
        assert result.measures
        for line in result.measures:
            assert len(line.samples) == 1 and (line.samples[0] > 0 or "guards" in line.what), line
        return result

    return measure


def test_adoption(measure_quickly: Measure) -> None:
    result = measure_quickly("adoption", "64×64")
    assert {measure.unit for measure in result.measures} == {"ms"}
    found = {measure.what: measure.median for measure in result.measures}
    roles = {what.partition(", ")[2] for what in found}
    assert all(found[f"p50 with encoding, {who}"] >= found[f"p50, {who}"] for who in roles)


def test_gateway(measure_quickly: Measure) -> None:
    result = measure_quickly("gateway", "1 session", "remote")
    assert {measure.unit for measure in result.measures} == {"ms", "1/s", "µs a step"}


def test_checkpoint(measure_quickly: Measure) -> None:
    result = measure_quickly("checkpoint")
    assert {measure.unit for measure in result.measures} >= {"ms", "1/s"}
    assert {len(result.ratios(measure)) for measure in result.measures if measure.against} == {1}


def test_every_step_has_its_cost() -> None:
    found = costs.measure(workers=5, steps=4, envs=2)
    steps = {cost.step for cost in found.costs}
    assert {"claim, granted", "claim, refused", "push", "heartbeat", "publish", "trim"} <= steps
    assert all(cost.redis >= 0 and cost.caller > 0 for cost in found.costs)
    assert all(size > 0 for size in found.sizes.values())


VECTORS = [f"vectors: {name}" for name in ("APPO", "DQN", "SAC")]
ALGORITHMS = ["vectors: PPO", "lockstep: PPO", *VECTORS, "images: PPO", "images: DQN"]


def test_update_case_has_four_lines(measure_quickly: Measure) -> None:
    result = measure_quickly("end-to-end", "lockstep: PPO")
    names = ("acting alone", "learning alone", "one after the other", "end to end")
    assert [line.what for line in result.measures] == [f"lockstep: PPO, {name}" for name in names]
    acting, learning, bound, _ = (line.samples[0] for line in result.measures)
    assert bound == pytest.approx(1 / (1 / acting + 1 / learning))
    assert result.measures[3].against == "lockstep: PPO, one after the other" and result.measures[3].aim == 0.95
    assert [remark.partition(":")[0] for remark in result.remarks if "processor time" in remark]


def test_all_that_is_claimed_is_among_the_cases() -> None:
    found = cases()
    assert [case.name for case in found] == ALGORITHMS
    assert [case.overlaps for case in found] == [name != "lockstep: PPO" for name in ALGORITHMS]
    assert all(case.config.algorithm.learning_rate.start < 1e-9 for case in found)
    assert {case.name for case in found if case.memory} == {"vectors: DQN", "vectors: SAC", "images: DQN"}


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_each_algorithm_is_measured_beside_its_plain_loop(measure_quickly: Measure) -> None:
    result = measure_quickly("learner", "PPO, minibatch 512", "DQN", "SAC, 64", "TD3", "A2C")
    lines = {measure.what: measure for measure in result.measures}
    assert {"PPO, minibatch 512", "DQN", "DQN, images", "SAC, 64×64", "TD3, 64×64", "A2C, 4096 at once"} <= set(lines)
    for name in ("PPO, minibatch 512", "DQN", "DQN, images", "SAC, 64×64"):
        assert lines[name].against == f"{name}: plain loop" and lines[name].aim == 1.1
        assert all(math.isfinite(ratio) for ratio in result.ratios(lines[name]))
    if has_compiler():
        assert lines["PPO, minibatch 512: compiled"].against == "PPO, minibatch 512"
    assert lines["TD3, 64×64"].against == ""


def test_lines_have_figures_and_roles_report_all_parts(measure_quickly: Measure) -> None:
    result = measure_quickly("limits")
    of_framework = {f"worker: {part}" for part in (*WORKER_PARTS, FRAMEWORK)}
    of_framework |= {f"trainer: {part}" for part in (*TRAINER_PARTS, FRAMEWORK)}
    found = {line.what: line.samples[0] for line in result.measures}
    assert of_framework <= set(found)
    aims = {line.what: line.aim for line in result.measures if line.aim is not None}
    assert aims == {"worker: framework": 1.0, "trainer: framework": 0.5}
    assert found[f"worker: {CLOCKS}"] < found["worker: framework"]


def test_lines_of_memories_and_draws(measure_quickly: Measure) -> None:
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


def test_sizes_of_the_processes_of_a_run(measure_quickly: Measure) -> None:
    found = measure_quickly("memory", "PPO: ")
    sizes = {measure.what: measure.samples[0] for measure in found.measures}
    for role in ("trainer", "worker", "coordinator", "zygote", "Redis", "S3 server", "Ray"):
        assert 1 < sizes[f"PPO: {role} at work"] < 10_000
        assert sizes[f"PPO: {role} at the start"] <= sizes[f"PPO: {role} at work"]


def test_every_part_is_measured_with_the_whole_path(measure_quickly: Measure) -> None:
    result = measure_quickly("native", "one layer", "worker")
    found = {line.what: line for line in result.measures}
    whole = "the whole path, one layer of 32"
    assert {whole, "a worker alone, on one core"} <= set(found) and "environments alone, on one core" not in found
    assert found[whole].unit == "env steps/s" and found[whole].aim is None, "small sizes have nothing to reach"
    assert {f"{whole}: {role}" for role in ("worker", "trainer", "redis-server")} <= set(found)
    assert result.settings["config"]["environment"]["vectorization"] == "native" and AIM == 500_000


def test_recovery(measure_quickly: Measure) -> None:
    result = measure_quickly("recovery", "worker")
    assert {measure.what for measure in result.measures} == {"worker-0, p50", "worker-0, p95"}
    assert {measure.unit for measure in result.measures} == {"s"}
    assert "the ledger balances after all kills" in result.remarks


@pytest.mark.parametrize(("family", "lines", "beyond"), [("workers", 1, 0), ("networks", 2, 1)])
def test_sizes_are_measured_and_worked_out(measure_quickly: Measure, family: str, lines: int, beyond: int) -> None:
    result = measure_quickly("scale", family)
    assert len(result.measures) == lines
    measured, worked_out = result.curves
    assert [size for size, _ in measured.points] == [size for size, _ in worked_out.points][:lines]
    assert len(worked_out.points) == lines + beyond
    assert worked_out.dashed and all(rate > 0 for _, rate in worked_out.points)
    for found in result.settings["points"].values():
        assert {"trainer", "redis-server", "worker"} <= set(found["cores used"]) and found["limit by arithmetic"]


def test_milestones_of_a_start(measure_quickly: Measure) -> None:
    found = measure_quickly("start-up")
    seconds = {measure.what: measure.samples[0] for measure in found.measures}
    order = [
        "Ray is launched", "imports and checks are done", "Redis serves", "the S3 server serves", "Ray is joined",
        "roles are asked for", "the trainer's process has its imports", "first fragment", "first update",
    ]  # fmt: skip
    assert [seconds[name] for name in order] == sorted(seconds[name] for name in order)
    assert seconds["Ray's own start"] == pytest.approx(seconds["Ray is joined"] - seconds["Ray is launched"])
    assert {measure.unit for measure in found.measures} == {"s"}
    aims = {measure.what: measure.aim for measure in found.measures if measure.aim is not None}
    assert aims == {"first update": 5.0, "the end of a run": 1.0}


def test_transport(measure_quickly: Measure) -> None:
    result = measure_quickly("transport", "4 KB")
    ratios = {measure.what: result.ratios(measure) for measure in result.measures if measure.against}
    assert any(what.startswith("ours, bytes") for what in ratios) and all(ratio > 0 for (ratio,) in ratios.values())
    assert all(measure.unit == "bytes/s" for measure in result.measures)


def test_setting_runs_for_real(measure_quickly: Measure) -> None:
    result = measure_quickly("tuning", "slow: 1 × 8 × 64, async")
    (line,) = result.measures
    assert (line.what, line.against) == ("slow: 1 × 8 × 64, async", "")
    assert result.settings[line.what]["environment"]["vectorization"] == "async"
