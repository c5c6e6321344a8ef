"""A run's league as its newest checkpoint has it: ratings and the payoff matrix."""

import json
from typing import Any

from shared.config.run_config import Config
from shared.errors import CheckpointDamaged, UserError
from shared.storage.checkpoint_store import CheckpointStore
from trainer_node.checkpointing.snapshot import LEAGUE
from trainer_node.learning.league import LeagueState, standings


def league_of(checkpoints: CheckpointStore, config: Config) -> dict[str, Any]:
    """`checkpoint`, the newest, and what `standings` returns of it.

    Raises `UserError` where the run has no league, `CheckpointNotFound`, `CheckpointDamaged`, or what the store raises.
    """
    if config.league is None:
        raise UserError(f"run {checkpoints.run_id!r} has no league; `league:` in its config makes one (docs/LEAGUE.md)")
    found = checkpoints.load(checkpoints.resolve("latest"), only=LEAGUE)
    try:
        state = LeagueState.from_dict(json.loads(found.objects[LEAGUE]))
    except (KeyError, ValueError) as error:
        raise CheckpointDamaged(f"{found.manifest.name} has no readable {LEAGUE} ({type(error).__name__})") from None
    return {"checkpoint": found.manifest.name, **standings(state, sorted(config.league.fixed))}
