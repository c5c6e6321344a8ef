"""The action trace: what a worker has done in its running episodes, so that its successor can take them up.

With each fragment the worker leaves the fragment's actions in Redis, in the same step as the push. A successor resets
each environment with the seed of its running episode (environments/seeding.py), does the actions again, and stands
where the last pushed fragment ended: it then acts what its predecessor would have acted. An environment that does not
come back to the same observations begins new episodes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.environments.vector_env import RunningEpisodes
from stagecoach.shared.base.errors import FragmentError
from stagecoach.shared.experience import tensor_blob
from stagecoach.shared.experience.fragment import STATE
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.league.table import PlayerRef

MOST_BYTES = 1 << 20
"""A trace that would be longer is not kept: it lies in Redis, for each worker."""
MOST_TRIES = 3
"""How many incarnations may die while they act on from the same place; the next one begins anew."""
_LARGEST = (1 << 64) - 1
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, MemoryError)
"""What NumPy and the constructors raise over a blob that is sound and no trace, and over no blobs."""


@dataclass(frozen=True)
class ActionTrace(RunningEpisodes):
    """What was done in a fragment, or in several that follow each other: enough to take up the episodes it ends in."""

    lineage: SeedLineage
    number: int
    """Of the last fragment, in this lineage."""
    digest: str
    """Of what was observed after its last step."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """Policy id → `[S, state size]`: the hidden state of a recurrent policy after the last step; also what its
    exploration carries on (sampler.py)."""
    matches: Sequence[Mapping[str, Any]] = ()
    """In a league, the match of each environment's running episode (rollout_worker/league/casting.py)."""
    parameters: Sequence[Mapping[str, Any]] = ()
    """The parameters of each, where there are any (rollout_worker/environments/parameters.py)."""

    @property
    def fragments(self) -> int:
        """How many of the last fragments hold the actions of the running episodes, where this is one fragment's."""
        return -(-max(self.lengths) // self.steps) if any(self.lengths) else 1

    def fits(self, description: EnvironmentDescription, num_envs: int, functions: Collection[str] = ()) -> bool:
        """Whether it is of so many environments with such agents, and of no other scripted players than `functions`."""
        try:
            refs = [PlayerRef.from_dict(ref) for match in self.matches for ref in match["refs"].values()]
        except _MALFORMED:
            return False
        if any(ref.kind == "function" and ref.source not in functions for ref in refs):
            return False
        found = {id_: {name: array.shape[1] for name, array in its.items()} for id_, its in self.actions.items()}
        return len(self.episodes) == num_envs and found == {
            policy_id: dict.fromkeys(
                description.policies[policy_id].action.column_names("action"), num_envs * description.slots(policy_id)
            )
            for policy_id in description.seated
        }


def encode(trace: ActionTrace) -> bytes:
    """One blob; the inverse is `decode`."""
    flat = {f"{policy}/{name}": array for policy, columns in trace.actions.items() for name, array in columns.items()}
    dtypes = {name: array.dtype.str for name, array in flat.items()}
    header = vars(trace) | {"lineage": vars(trace.lineage), "actions": dtypes}
    del header["states"]
    for name in ("matches", "parameters"):
        if not header[name]:
            del header[name]
    states = {f"{policy}/{STATE}": array for policy, array in trace.states.items()}
    return tensor_blob.encode({name: _small(array) for name, array in flat.items()} | states, header)


def decode(blob: bytes) -> ActionTrace:
    """Raises `FragmentError`, or one of `_MALFORMED` for anything else than a trace."""
    flat, header = tensor_blob.decode(blob)
    actions: dict[str, Columns] = {}
    states: Columns = {}
    for name, array in flat.items():
        policy_id, _, column = name.partition("/")
        if column == STATE:
            states[policy_id] = array
        else:
            actions.setdefault(policy_id, {})[column] = array.astype(np.dtype(header["actions"][name]))
    lengths, episodes = tuple(map(_count, header["lengths"])), tuple(map(_count, header["episodes"]))
    lineage = SeedLineage(**{name: _count(value) for name, value in header["lineage"].items()})
    arrays = [array for columns in actions.values() for array in columns.values()]
    steps = {array.shape[0] if array.ndim > 1 else -1 for array in arrays}
    if len(steps) != 1 or steps & {-1} or (steps == {0} and any(lengths)) or len(lengths) != len(episodes):
        raise ValueError(f"a trace with {steps} rows, {len(lengths)} lengths and {len(episodes)} episodes")
    number, digest = _count(header["number"]), str(header["digest"])
    matches, parameters = header.get("matches", ()), header.get("parameters", ())
    return ActionTrace(episodes, lengths, actions, lineage, number, digest, states, matches, parameters)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is no count")
    return value


def read(blobs: Sequence[bytes]) -> ActionTrace | None:
    """The trace in what Redis holds; None where it holds none, or one that cannot be taken up."""
    try:
        parts = [decode(blob) for blob in blobs]
        last = parts[-1]
        parts = parts[-last.fragments :]
        numbers = [(last.lineage, last.number - back) for back in reversed(range(last.fragments))]
        if [(part.lineage, part.number) for part in parts] != numbers:
            return None  # an older Redis came back, or the first of them are gone
        actions = {
            policy_id: {name: np.concatenate([part.actions[policy_id][name] for part in parts]) for name in columns}
            for policy_id, columns in last.actions.items()
        }
        return replace(last, actions=actions)
    except (FragmentError, *_MALFORMED):
        return None


def digest(now: Mapping[str, Columns], returns: Array) -> str:
    """A hash of all that is observed now (zeros where an agent is absent), and of the running returns."""
    found = xxhash.xxh3_64()
    for _, columns in sorted(now.items()):
        for _, array in sorted(columns.items()):
            found.update(array.tobytes())
    found.update(returns.tobytes())
    return found.hexdigest()


def _small(array: Array) -> Array:
    """Choices need a byte each, mostly."""
    small = array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() < 256
    return array.astype(np.uint8) if small else array
