"""Action trace: its length, and traces that cannot be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.sampling import action_trace
from tests.support.environments.small import CHASE, CHASE_POLICIES, MODULE
from tests.support.environments.stage import Stage

LIFE = SeedLineage(1, 0, 0, 0)


def line(environment: dict[str, Any], sections: Mapping[str, Any] = {}, left: Sequence[bytes] = ()) -> Stage:
    """Returns a worker's stage with three environments."""
    return Stage({"num_envs": 3} | environment, left=left, **sections)


def test_trace_spans_longest_running_episode() -> None:
    worker = line({"id": "Pendulum-v1", "max_episode_steps": 20})
    lengths = []
    for _ in range(6):
        worker.sample()
        lengths.append(len(worker.left))
    assert lengths == [1, 2, 1, 2, 3, 1], "7, 14, 1 (after 20), 8, 15, 2 steps of 7"


def test_native_environment_with_objects_leaves_no_trace() -> None:
    worker = line({"id": f"{MODULE}:phase_vector", "vectorization": "native"})
    worker.sample()
    assert worker.left == [] and worker.sampler.position_digest == ""


@pytest.mark.parametrize(("one", "other"), [("native", "sync"), ("sync", "native")])
def test_digest_detects_trace_of_other_vectorization(one: str, other: str) -> None:
    worker = line({"id": "CartPole-v1", "vectorization": one})
    worker.sample()
    successor = line({"id": "CartPole-v1", "vectorization": other}, left=worker.left)
    assert successor.past is not None and successor.sampler.position_digest != successor.past.digest


@pytest.mark.parametrize(
    ("environment", "sections"),
    [({"id": f"{MODULE}:Unseeded"}, {}), (CHASE, CHASE_POLICIES)],
    ids=["unseeded", "counts"],
)
def test_digest_detects_irreproducible_environment(environment: dict[str, Any], sections: dict[str, Any]) -> None:
    worker = line(environment, sections)
    worker.sample()
    successor = line(environment, sections, worker.left)
    assert successor.past is not None and successor.sampler.position_digest != successor.past.digest


def test_read_returns_none_for_incomplete_trace() -> None:
    worker = line({"id": "Pendulum-v1"})
    for _ in range(3):
        worker.sample()
    left = worker.left
    assert len(left) == 3 and action_trace.read(left) is not None
    assert action_trace.read([]) is None
    assert action_trace.read([*left[:2], b"garbage"]) is None
    assert action_trace.read(left[1:]) is None, "the first is gone"
    assert action_trace.read([left[0], left[2]]) is None, "an older Redis came back, and lost one"


def test_read_returns_none_for_malformed_trace() -> None:
    """Traces that are valid blobs, but written by somebody else."""

    def step(**changes: Any) -> bytes:
        made = {"lineage": LIFE, "number": 0, "episodes": (0, 0), "lengths": (4, 4), "digest": "d", "actions": actions}
        return action_trace.encode(action_trace.ActionTrace(**(made | changes)))  # type: ignore[arg-type]

    actions = {"default": {"action": np.zeros((2, 2), np.int64)}}
    last = step(number=1)
    assert action_trace.read([step(), last]) is not None
    text: Any = "4"
    wrong: list[dict[str, Any]] = [
        {"actions": {"default": {"action": np.zeros((2, 2, 3), np.int64)}}},
        {"actions": {"default": {"other": np.zeros((2, 2), np.int64)}}},
        {"actions": {"default": {"action": np.zeros(2, np.int64)}}},
        {"actions": {}}, {"number": "x"}, {"number": -1}, {"lengths": ("a", 4)}, {"lengths": (4,)},
        {"episodes": (-1, 0)},
        {"lineage": SeedLineage(3, 1, text, 0)}, {"lineage": SeedLineage(3, 1, 4, -1)},
    ]  # fmt: skip
    for changes in wrong:
        assert action_trace.read([step(**changes), last]) is None, changes
