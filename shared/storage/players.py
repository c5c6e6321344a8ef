"""The players in a checkpoint's league."""

import json
from collections.abc import Collection
from functools import partial

from stagecoach.shared.league.mean import is_mean, mean_of
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.shared_objects import read_shared_object

LEAGUE = "trainer/league.json"
"""Of a checkpoint: all that the league is (`trainer_node/learning/league.py: LeagueState`)."""


def named_so(asked: str, snapshots: Collection[str]) -> list[str]:
    """The snapshots that are meant by a player id, or by the beginning of one."""
    return [player for player in snapshots if player == asked] or [its for its in snapshots if its.startswith(asked)]


def snapshots_in(league: bytes) -> dict[str, str]:
    """Player id → SHA-256 of the snapshots in a checkpoint's league; raises `ValueError` or `KeyError`."""
    return {snapshot["id"]: snapshot["sha256"] for snapshot in json.loads(league)["snapshots"]}


def read_mean(checkpoints: CheckpointStore, checkpoint: str, name: str) -> bytes | None:
    """Reads the mean strategy `name` of a stored checkpoint, as `mean_of` does; raises what the store raises, too."""
    if not is_mean(name):
        return None
    league = checkpoints.load(checkpoint, only=LEAGUE).objects.get(LEAGUE)
    return mean_of(name, league, partial(read_shared_object, checkpoints.store)) if league is not None else None
