"""The schedule: phases, when a checkpoint is due and when the run ends, from the counters."""

from __future__ import annotations

from typing import Any

import pytest

from stagecoach.shared.base import world
from stagecoach.shared.experience.counters import Counters, Phase, PhaseCounters
from stagecoach.trainer_node.recovery.trainer_state import RunSchedule
from stagecoach.trainer_node.state.snapshot import phase_at
from tests.conftest import minimal_config


def counters(*, heatup: int = 0, heatup_episodes: int = 0, **train: int) -> PhaseCounters:
    return PhaseCounters(Counters(heatup, heatup_episodes), Counters(**train))


def schedule(**sections: Any) -> RunSchedule:
    return RunSchedule(minimal_config(**sections))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, as a list of one number that the test moves."""
    now = [1000.0]
    monkeypatch.setattr(world, "monotonic", lambda: now[0])
    return now


def test_heat_up_lasts_until_its_own_counter_has_passed_it() -> None:
    none, steps, episodes = (minimal_config(heatup=text) for text in ("0 env_steps", "100 env_steps", "3 episodes"))
    assert phase_at(none, PhaseCounters()) is Phase.TRAIN
    assert phase_at(steps, counters(heatup=99, env_steps=5000)) is Phase.HEATUP
    assert phase_at(steps, counters(heatup=100)) is Phase.TRAIN
    assert phase_at(episodes, counters(heatup=10_000, heatup_episodes=2)) is Phase.HEATUP
    assert phase_at(episodes, counters(heatup_episodes=3)) is Phase.TRAIN


def test_checkpoint_is_due_when_multiple_is_passed() -> None:
    every = schedule(checkpoint={"every": "10 env_steps"})
    due = []
    for steps in range(0, 60, 4):
        now = counters(env_steps=steps)
        if every.checkpoint_due(now, 0):
            due.append(steps)
            every.checkpointed(now)
    assert due == [12, 20, 32, 40, 52]


def test_schedule_of_restored_run_equals_unbroken_one() -> None:
    restored = schedule(checkpoint={"every": "4 updates"})
    restored.checkpointed(counters(updates=6))
    assert next(updates for updates in range(6, 13) if restored.checkpoint_due(counters(updates=updates), 0)) == 8


def test_checkpoint_is_due_when_log_is_half_full() -> None:
    bound = 1 << 20
    log = schedule(rollout={"fragment_steps": 8, "fragments_per_update": 2, "max_log_bytes": bound})
    assert not log.checkpoint_due(PhaseCounters(), bound // 2 - 1)
    assert log.checkpoint_due(PhaseCounters(), bound // 2)


def test_timed_checkpoint_is_due_once_per_interval(clock: list[float]) -> None:
    timed = schedule(checkpoint={"every": "1000 updates", "every_seconds": 60})
    clock[0] += 59
    assert not timed.checkpoint_due(PhaseCounters(), 0)
    clock[0] += 1
    assert timed.checkpoint_due(PhaseCounters(), 0)
    timed.checkpointed(PhaseCounters())
    assert not timed.checkpoint_due(PhaseCounters(), 0)


@pytest.mark.parametrize("unit", ["env_steps", "updates", "episodes"])
def test_run_ends_at_its_bound_not_counting_heatup(unit: str) -> None:
    bounded = schedule(stop_at={unit: 10})
    ends = [
        bounded.exhausted(counters(heatup=10_000, heatup_episodes=10_000, **{unit: count})) for count in (9, 10, 11)
    ]
    assert ends == [False, True, True]


def test_run_ends_at_first_bound_or_by_the_clock(clock: list[float]) -> None:
    bounded = schedule(stop_at={"updates": 10, "episodes": 3, "hours": 2})
    assert bounded.exhausted(counters(updates=1, episodes=3))
    assert not bounded.exhausted(counters(updates=1))
    clock[0] += 2 * 3600
    assert bounded.exhausted(counters(updates=1))


def test_solved_bound_alone_never_exhausts_the_run(clock: list[float]) -> None:
    solved = schedule(stop_at={"mean_return": 475})
    clock[0] += 1e9
    assert not solved.exhausted(counters(env_steps=10**12, updates=10**9, episodes=10**9))
