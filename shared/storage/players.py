"""Players in a run's checkpoints: snapshots, and their mean strategies."""

import contextlib
import json
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound
from stagecoach.shared.experience.mixture import encode_mixture
from stagecoach.shared.league.table import player_hash
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS, CheckpointStore
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS, read_shared_object

LEAGUE = "trainer/league.json"
"""A checkpoint's league (`trainer_node/learning/league.py: LeagueState`)."""
MEAN = "mean"


def named_so(asked: str, snapshots: Collection[str]) -> list[str]:
    """Returns the snapshots with this player id, else those whose id begins with it."""
    return [player for player in snapshots if player == asked] or [its for its in snapshots if its.startswith(asked)]


def snapshots_in(league: bytes) -> dict[str, str]:
    """Player id → SHA-256 of the snapshots in a checkpoint's league; raises `ValueError` or `KeyError`."""
    return {snapshot["id"]: snapshot["sha256"] for snapshot in json.loads(league)["snapshots"]}


def mean_of(name: str, league: bytes, read: Callable[[str], bytes]) -> bytes | None:
    """Returns a mean strategy as a mixture: `POLICY-mean`, or `mean` if one policy has snapshots; None for other names.

    Each snapshot weighs as much as its learner had played when it was taken: averaging linear in time, as in CFR+
    (Tammelin 2014), discounts the first, untrained snapshots. `read` returns a snapshot's bytes by SHA-256. Raises
    `CheckpointNotFound` for `mean` if several policies have snapshots.
    """
    taken = json.loads(league)["snapshots"]
    policies = sorted({its["policy"] for its in taken})
    if name == MEAN and len(policies) > 1:
        raise CheckpointNotFound(f"several policies have snapshots; choose one: {f'-{MEAN}, '.join(policies)}-{MEAN}")
    own = [its for its in taken if name in (MEAN, f"{its['policy']}-{MEAN}")]
    played = [float(its["env_steps"]) for its in own]
    members = [(read(its["sha256"]), weight if any(played) else 1.0) for its, weight in zip(own, played, strict=True)]
    return encode_mixture(members) if members else None


def read_mean(checkpoints: CheckpointStore, checkpoint: str, name: str) -> bytes | None:
    """Reads the mean strategy `name` of a stored checkpoint, as `mean_of` does; raises what the store raises, too."""
    if not _is_mean(name):
        return None
    league = checkpoints.load(checkpoint, only=LEAGUE).objects.get(LEAGUE)
    return mean_of(name, league, partial(read_shared_object, checkpoints.store)) if league is not None else None


def read_player(run: Path, checkpoint: Path, player: str) -> bytes | None:
    """Reads a mean strategy of a checkpoint's folder, or a snapshot of any checkpoint of the run's folder.

    Raises `CheckpointNotFound` or `CheckpointDamaged`; returns None for an unknown player.
    """
    if _is_mean(player) and (league := checkpoint / LEAGUE).is_file():
        mean = mean_of(player, league.read_bytes(), partial(_verified, checkpoint.parents[2] / SHARED_OBJECTS))
        if mean is not None:
            return mean
    snapshots = dict[str, str]()
    for league in (run / CHECKPOINTS).glob(f"*/*/{LEAGUE}") if "-" in player else ():
        with contextlib.suppress(ValueError, KeyError):
            snapshots |= snapshots_in(league.read_bytes())
    named = named_so(player, snapshots)
    if len(named) > 1:
        raise CheckpointNotFound(f"{player!r} matches {', '.join(named)}; give more of the name")
    if not named or not (run / SHARED_OBJECTS / snapshots[named[0]]).is_file():
        return None
    return _verified(run / SHARED_OBJECTS, snapshots[named[0]])


def _is_mean(name: str) -> bool:
    return name == MEAN or name.endswith(f"-{MEAN}")


def _verified(folder: Path, sha256: str) -> bytes:
    path = folder / sha256
    if not path.is_file():
        raise CheckpointNotFound(f"there is no {path}, a snapshot that the checkpoint names")
    if player_hash(data := path.read_bytes()) != sha256:
        raise CheckpointDamaged(f"{path} was altered: it has another SHA-256 than its name")
    return data
