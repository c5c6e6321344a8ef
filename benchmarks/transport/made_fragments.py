"""Fragments of CartPole's shape, made of random numbers: what travels does not depend on who acted it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import Columns, EnvironmentDescription

POLICY = "default"


@dataclass(frozen=True)
class Shape:
    """How large a fragment is."""

    steps: int
    envs: int

    @property
    def transitions(self) -> int:
        """In one fragment."""
        return self.steps * self.envs


def made_columns(description: EnvironmentDescription, shape: Shape, seed: int) -> Columns:
    """All columns of one fragment, as a worker hands them to the codec: no episode is cut off by a time limit."""
    numbers = np.random.default_rng(seed)
    expected = fragment.expected_columns(description.policies[POLICY], shape.steps, shape.envs)
    columns: Columns = {}
    for name, (sizes, dtype) in expected.items():
        at = tuple(0 if size == -1 else size for size in sizes)
        if dtype.kind == "f":
            columns[name] = numbers.standard_normal(at, np.float32).astype(dtype)
        else:
            columns[name] = np.zeros(at, dtype)
    for leaf in description.policies[POLICY].action.leaves:
        name = leaf.column("action")
        columns[name] = numbers.integers(0, 2, columns[name].shape).astype(columns[name].dtype)
    columns["mask"] = np.ones_like(columns["mask"])
    return columns


def made_fragment(
    run_id: str,
    worker: str,
    seq: int,
    version: int,
    shape: Shape,
    columns: Columns,
    incarnation: int = 0,
    phase: Phase = Phase.TRAIN,
    history: str = "",
) -> fragment.Fragment:
    """With the header that a worker gives it."""
    header = fragment.FragmentHeader(
        run_id=run_id, worker_id=worker, incarnation=incarnation, seq=seq, phase=phase,
        policy_versions={POLICY: version}, steps=shape.steps, num_envs=shape.envs, episodes=(), acting_seconds=0.1,
        history=history,
    )  # fmt: skip
    return fragment.Fragment(header, {POLICY: columns})


def array_bytes(columns: Columns) -> int:
    """What the arrays of a fragment hold, whatever carries them."""
    return sum(array.nbytes for array in columns.values())
