"""Action trace: a worker's actions in its running episodes, with which its successor resumes them.

The worker stores each fragment's actions in Redis, in the same step as the push. A successor resets each environment
with the seed of its running episode (environments/seeding.py) and repeats the actions, to the end of the last pushed
fragment: from there it acts as its predecessor would have. If the observations differ, it begins new episodes.
"""

from collections.abc import Mapping, Sequence
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

MOST_BYTES = 1 << 20
"""Largest trace of a worker that is kept in Redis."""
MOST_TRIES = 3
"""Incarnations that may die while they resume the same position; the next one begins new episodes."""
_ENVIRONMENT = "environment state"
"""Stands in a blob where a policy's id does."""
_LARGEST = (1 << 64) - 1
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, MemoryError)
"""Exceptions of NumPy and the constructors for a valid blob that is not a trace, or for no blobs."""


@dataclass(frozen=True)
class ActionTrace(RunningEpisodes):
    """Actions of one or several consecutive fragments: enough to resume the episodes in which it ends."""

    lineage: SeedLineage
    number: int
    digest: str
    """Digest of the observations after its last step."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """Policy id → `[S, state size]`: the hidden state of a recurrent policy after the last step; also the state of its
    exploration (sampler.py)."""
    directed: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Director → its decisions for the running episodes (sampling/director.py)."""
    objects: Sequence[str] = ()
    """The SHA-256 of the shared objects that these episodes use."""

    @property
    def fragments(self) -> int:
        """Number of the last fragments that hold the running episodes' actions, if this is one fragment's trace."""
        return -(-max(self.lengths) // self.steps) if any(self.lengths) else 1

    def fits(self, description: EnvironmentDescription, num_envs: int) -> bool:
        found = {id_: {name: array.shape[1] for name, array in its.items()} for id_, its in self.actions.items()}
        return len(self.episodes) == num_envs and found == {
            policy_id: dict.fromkeys(
                description.policies[policy_id].action.column_names("action"), num_envs * description.slots(policy_id)
            )
            for policy_id in description.seated
        }


def encode(trace: ActionTrace) -> bytes:
    flat = {f"{policy}/{name}": array for policy, columns in trace.actions.items() for name, array in columns.items()}
    dtypes = {name: array.dtype.str for name, array in flat.items()}
    header = vars(trace) | {"lineage": vars(trace.lineage), "actions": dtypes}
    del header["states"], header["state"]
    states = {f"{_ENVIRONMENT}/{name}": array for name, array in trace.state.items()}
    states |= {f"{policy}/{STATE}": array for policy, array in trace.states.items()}
    return tensor_blob.encode({name: _small(array) for name, array in flat.items()} | states, header)


def decode(blob: bytes) -> ActionTrace:
    """Decodes a trace; raises `FragmentError`, or one of `_MALFORMED` for anything but a trace."""
    flat, header = tensor_blob.decode(blob)
    actions: dict[str, Columns] = {}
    states: Columns = {}
    state: Columns = {}
    for name, array in flat.items():
        policy_id, _, column = name.partition("/")
        if policy_id == _ENVIRONMENT:
            state[column] = array
        elif column == STATE:
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
    directed = {str(name): list(running) for name, running in header["directed"].items()}
    objects = list(header["objects"])
    return ActionTrace(episodes, lengths, actions, lineage, number, digest, states, directed, objects, state=state)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value!r} is not a count")
    return value


def read(blobs: Sequence[bytes]) -> ActionTrace | None:
    """Returns the trace in the blobs from Redis; None if it is missing or cannot be resumed."""
    try:
        parts = [decode(blob) for blob in blobs]
        last = parts[-1]
        parts = parts[-last.fragments :]
        numbers = [(last.lineage, last.number - back) for back in reversed(range(last.fragments))]
        if [(part.lineage, part.number) for part in parts] != numbers:
            return None  # Redis was rolled back, or the first of them are gone
        actions = {
            policy_id: {name: np.concatenate([part.actions[policy_id][name] for part in parts]) for name in columns}
            for policy_id, columns in last.actions.items()
        }
        return replace(last, actions=actions)
    except (FragmentError, *_MALFORMED):
        return None


def digest(now: Mapping[str, Columns], returns: Array) -> str:
    """Returns a hash of the current observations (zeros for absent agents) and the running returns."""
    found = xxhash.xxh3_64()
    for _, columns in sorted(now.items()):
        for _, array in sorted(columns.items()):
            found.update(array.tobytes())
    found.update(returns.tobytes())
    return found.hexdigest()


def _small(array: Array) -> Array:
    small = array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() < 256
    return array.astype(np.uint8) if small else array
