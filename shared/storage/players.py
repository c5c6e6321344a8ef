"""Players as objects of the run's store, named by their SHA-256: a `policy.safetensors` or an `.onnx` file.

They never change, so writing one again is harmless, and a reader may keep what it has read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from stagecoach.shared.base.errors import ObjectMissing, PlayerUnusable
from stagecoach.shared.league.mean import is_mean, mean_of
from stagecoach.shared.league.table import player_hash

if TYPE_CHECKING:
    from stagecoach.shared.storage.checkpoint_store import CheckpointStore
    from stagecoach.shared.storage.object_store import ObjectStore

PLAYERS = "league/players/"
LEAGUE = "trainer/league.json"
"""Of a checkpoint: all that the league is (`trainer_node/learning/league.py: LeagueState`)."""


def write_player(store: ObjectStore, data: bytes) -> str:
    """Stores a player; returns its SHA-256. Raises as the store does."""
    sha256 = player_hash(data)
    store.put(PLAYERS + sha256, data)
    return sha256


def read_player(store: ObjectStore, sha256: str) -> bytes:
    """A player's bytes, verified; raises `PlayerUnusable`, or as the store does where it is away."""
    try:
        data = store.get(PLAYERS + sha256)
    except ObjectMissing:
        raise PlayerUnusable(
            f"the store has no player {PLAYERS}{sha256}, which the league has; bring the object back, or resume from a "
            f"checkpoint without it, if there is one"
        ) from None
    if (found := player_hash(data)) != sha256:
        raise PlayerUnusable(
            f"the player {PLAYERS}{sha256} was altered: its SHA-256 is {found} ({len(data)} bytes); bring the object "
            f"back, or resume from a checkpoint without it, if there is one"
        )
    return data


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
    return mean_of(name, league, partial(read_player, checkpoints.store)) if league is not None else None
