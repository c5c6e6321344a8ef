"""Rows of metrics as a store has them, without what differs from run to run."""

from __future__ import annotations

from stagecoach.shared.storage.metric_log import read
from stagecoach.shared.storage.object_store import ObjectStore

CLOCKS = ("time/unix_seconds", "time/fps", "train/learn_seconds", "rollout/acting_seconds")
SHAPED = "rollout/ep_shaped_rew"
"""A resume leaves out the episodes that had begun before it (reward_normalization.py: ShapedReturns)."""


def recorded(store: ObjectStore, stream: str) -> list[tuple[str, dict[str, float]]]:
    """Label and row of each, without clocks, waits and shaped returns."""
    rows = [row for _, rows in read(store, stream) for row in rows.named()]
    return [
        (
            label,
            {name: row[name] for name in sorted(row) if name not in CLOCKS and not name.startswith(("wait/", SHAPED))},
        )
        for label, row in rows
    ]
