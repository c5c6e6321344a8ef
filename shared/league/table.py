"""The match table: who may play whom, as it is published with a policy version.

Workers draw each episode's match from it (`matchmaking.draw`). A player's id is the policy id for a policy's current
weights, `main-<first 12 hex digits of its SHA-256>` for a snapshot, and its name in the config for a fixed player.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stagecoach.shared.experience.spaces import PlainData

PlayerKind = Literal["policy", "mixture", "function", "onnx", "random"]
"""A `mixture` is a league's mean strategy (shared/storage/players.py)."""
_FUNCTION = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True)
class PlayerRef(PlainData):
    """A player that does not change, and its location."""

    kind: PlayerKind
    sha256: str = ""
    """SHA-256 of its shared object, for `policy`, `mixture` and `onnx`."""
    source: str = ""
    """Source in the config: `module:function` for `function`; otherwise its origin."""
    seats: tuple[str, ...] = ()
    """Policy ids whose agents' seats it may take."""


@dataclass(frozen=True)
class Learner(PlainData):
    """A policy that learns from the matches in which it is drawn."""

    policy: str
    sides: tuple[int, ...]
    """The sides that it may take."""
    opponents: dict[str, tuple[tuple[str, float], ...]]
    """Policy id of a side's seats → (player id, probability) for that side; the probabilities add up to 1."""


@dataclass(frozen=True)
class MatchTable(PlainData):
    sides: tuple[tuple[str, ...], ...]
    """The agents of each side."""
    seats: tuple[str, ...]
    """The policy id that each side's agents are mapped to."""
    learners: dict[str, Learner]
    players: dict[str, PlayerRef] = field(default_factory=dict)
    """Players that can be drawn, except current weights."""


def sides_of(
    sides: tuple[tuple[str, ...], ...], agents: Mapping[str, str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Returns `league.sides` (by default one for each of `agents`, agent → policy id), and the policy of each."""
    found = sides or tuple((agent,) for agent in agents)
    return found, tuple(agents[side[0]] for side in found)


def player_hash(data: bytes) -> str:
    """Returns the SHA-256 that names a player's bytes."""
    return hashlib.sha256(data).hexdigest()


def kind_of(source: str) -> PlayerKind:
    """Returns the kind of a fixed player, by its source in the config."""
    if source == "random":
        return "random"
    if source.endswith(".onnx"):
        return "onnx"
    return "function" if _FUNCTION.fullmatch(source) else "policy"


SNAPSHOT = re.compile(r".*-[0-9a-f]{12}")


def snapshot_id(policy_id: str, sha256: str) -> str:
    """Returns the player id of a policy's snapshot, which `SNAPSHOT` matches."""
    return f"{policy_id}-{sha256[:12]}"
