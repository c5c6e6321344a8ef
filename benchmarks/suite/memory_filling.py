"""Fills one replay buffer in a process of its own, and prints what it takes.

Resident bytes are the process's own: what it has after the memory was filled, less what it had with one fragment made.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from stagecoach.shared.config.algorithms.replay_buffer import ReplayBufferConfig
from stagecoach.shared.experience.fragment import expected_columns
from stagecoach.shared.experience.spaces import Array, Columns, Leaf, PolicySpaces, SpaceSpec
from stagecoach.trainer_node.learning.algorithms.off_policy import make_replay_buffer
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer

STACK, SIDE = 4, 84
SOURCES = 2
_ROUND_AGAIN = 1.1
"""So much of its capacity is put in: the oldest fragments leave, as in any longer run."""
_END, _CUT = 1 / 250, 1 / 5000
"""Chances that a step ends an episode (a life lost in Breakout), or that a limit cuts it off."""


def spaces_of(kind: str) -> PolicySpaces:
    """Of `images`, `goals` or `vector` (CartPole)."""
    choice = SpaceSpec((Leaf("", "discrete", (), "int64", (4,), (0,)),), 0)
    if kind == "images":
        return PolicySpaces(SpaceSpec((Leaf("", "box", (STACK, SIDE, SIDE), "uint8"),), 0), choice)
    if kind == "vector":
        return PolicySpaces(SpaceSpec((Leaf("", "box", (4,), "float32"),), 0), choice)
    leaves = tuple(Leaf(name, "box", (2,), "float32") for name in ("achieved_goal", "desired_goal", "observation"))
    nesting = {"dict": {leaf.path: index for index, leaf in enumerate(leaves)}}
    return PolicySpaces(SpaceSpec(leaves, nesting), choice)


def fragments(spaces: PolicySpaces, steps: int, slots: int) -> Iterator[tuple[str, Columns]]:
    """For ever: source and columns, each going on where the source's last one ended. Frames are noise."""
    random = np.random.default_rng(0)
    standing: dict[str, Columns] = {}
    while True:
        for source in range(SOURCES):
            name = f"worker-{source}"
            columns = _fragment(random, spaces, steps, slots, standing.get(name))
            standing[name] = {key: array.copy() for key, array in columns.items() if key.startswith("bootstrap_")}
            yield name, columns


def _fragment(
    random: np.random.Generator, spaces: PolicySpaces, steps: int, slots: int, before: Columns | None
) -> Columns:
    ended, cut = random.random((steps, slots)) < _END, random.random((steps, slots)) < _CUT
    columns: Columns = {"final_index": np.argwhere(cut).astype(np.int32), "mask": np.ones((steps, slots), np.bool_)}
    columns |= {"terminated": ended & ~cut, "truncated": cut}
    for leaf in spaces.observation.leaves:
        name = leaf.column("obs")
        seen = np.empty((steps + 1, slots, *leaf.shape), leaf.column_dtype)
        if leaf.dtype == "uint8":
            _watch(random, seen, ended | cut, None if before is None else before[f"bootstrap_{name}"])
        else:
            seen[:] = random.normal(size=seen.shape)
            if before is not None:
                seen[0] = before[f"bootstrap_{name}"]
        columns[name], columns[f"bootstrap_{name}"] = seen[:-1], seen[-1]
        last = columns[name][cut]
        columns[f"final_{name}"] = np.concatenate([last[:, 1:], last[:, :1]], axis=1) if len(leaf.shape) > 1 else last
    for name, (shape, dtype) in expected_columns(spaces, steps, slots).items():
        if name not in columns:
            columns[name] = random.integers(-1 if name == "reward" else 0, 2, shape).astype(dtype)
    return columns


def _watch(random: np.random.Generator, seen: Array, over: Array, before: Array | None) -> None:
    """Stacks `[T + 1, S, k, H, W]` as `FrameStackObservation` makes them: a reset repeats its first frame."""
    steps, slots, _, *frame = seen.shape
    frames = np.frombuffer(random.bytes(steps * slots * int(np.prod(frame))), np.uint8).reshape(steps, slots, *frame)
    seen[0] = frames[0][:, None] if before is None else before
    for step in range(1, steps):
        seen[step, :, :-1], seen[step, :, -1] = seen[step - 1, :, 1:], frames[step]
        for slot in np.flatnonzero(over[step - 1]):
            seen[step, slot] = frames[step, slot]


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(memory: ReplayBuffer, source: Iterator[tuple[str, Columns]], fragments: int) -> float:
    """Puts in so many fragments; answers the processor seconds that the memory took for it."""
    used = 0.0
    for _ in range(fragments):
        name, columns = next(source)
        began = time.process_time()
        memory.add(name, columns)
        used += time.process_time() - began
    return used


def main() -> int:
    """Prints what was found as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spaces", choices=["images", "goals", "vector"])
    parser.add_argument("config", help="the memory's section, as JSON")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    given = parser.parse_args()
    config: ReplayBufferConfig = TypeAdapter(ReplayBufferConfig).validate_python(json.loads(given.config))
    spaces = spaces_of(given.spaces)
    made = fragments(spaces, given.steps, given.slots)
    next(made), next(made)
    before = resident_bytes()
    memory = make_replay_buffer(config, spaces, given.steps, given.slots)
    put = int(memory.fragments * _ROUND_AGAIN) + 1
    used = fill(memory, made, put)
    after = resident_bytes()
    found = {
        "transitions": len(memory), "before": before, "after": after,
        "add_seconds": used / (put * given.steps * given.slots),
    }  # fmt: skip
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
