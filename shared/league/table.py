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
    """A player that does not change, and where it is found."""

    kind: PlayerKind
    sha256: str = ""
    """Of its object in the run's store (shared/storage/shared_objects.py), for `policy`, `mixture` and `onnx`."""
    source: str = ""
    """What the config says of it: `module:function` for `function`; otherwise where it came from."""
    seats: tuple[str, ...] = ()
    """The policy ids whose agents' seats it may take."""


@dataclass(frozen=True)
class Learner(PlainData):
    """One that learns from the matches in which it is drawn."""

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
    """Those that can be drawn, without current weights."""


def sides_of(
    sides: tuple[tuple[str, ...], ...], agents: Mapping[str, str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """`league.sides` (by default each of `agents`, agent → policy id, is one), and the policy of each side's seats."""
    found = sides or tuple((agent,) for agent in agents)
    return found, tuple(agents[side[0]] for side in found)


def player_hash(data: bytes) -> str:
    """The SHA-256 that names a player's bytes."""
    return hashlib.sha256(data).hexdigest()


def kind_of(source: str) -> PlayerKind:
    """What a fixed player is, by its source in the config."""
    if source == "random":
        return "random"
    if source.endswith(".onnx"):
        return "onnx"
    return "function" if _FUNCTION.fullmatch(source) else "policy"


SNAPSHOT = re.compile(r".*-[0-9a-f]{12}")


def snapshot_id(policy_id: str, sha256: str) -> str:
    """The player id of a snapshot of a policy, which `SNAPSHOT` fits."""
    return f"{policy_id}-{sha256[:12]}"
