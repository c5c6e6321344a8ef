"""Which checkpoints stay: the last k, the best b by evaluation, every m-th, and those that a pointer names."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from shared.checkpoint import checkpoint_version
from shared.config import CheckpointConfig


def best_checkpoints(scores: Mapping[str, float], names: Collection[str]) -> list[str]:
    """The evaluated ones among `names`, best mean return first; of equals the newest first."""
    evaluated = [name for name in names if name in scores]
    return sorted(evaluated, key=lambda name: (-scores[name], -(checkpoint_version(name) or 0)))


def superfluous(
    names: Sequence[str], scores: Mapping[str, float], config: CheckpointConfig, protected: Collection[str]
) -> list[str]:
    """Those of `names` (all that the store has, oldest first) that may be deleted, oldest first."""
    keep = {*names[-config.keep_last :], *best_checkpoints(scores, names)[: config.keep_best], *protected}
    if config.keep_every is not None:
        keep |= {name for name in names if (checkpoint_version(name) or 0) % config.keep_every == 0}
    return [name for name in names if name not in keep]
