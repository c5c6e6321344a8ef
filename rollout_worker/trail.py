"""The trail: what a worker has done in its running episodes, so that its successor can take them up.

All of a worker's randomness comes from its *life* (run seed, worker number, the incarnation that began it, restarts of
its environment), the number of the fragment, and the number of the episode. With each fragment the worker leaves the
fragment's actions in Redis, in the same step as the push. A successor resets each environment with the seed of its
running episode, does the actions again, and stands where the last pushed fragment ended: it then acts what its
predecessor would have acted. An environment that does not come back to the same observations begins new episodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from shared import tensor_blob
from shared.fragment import STATE
from shared.spaces import Array, Columns, EnvironmentDescription

MOST_BYTES = 1 << 20
"""A trail that would be longer is not kept: it lies in Redis, for each worker."""
MOST_TRIES = 3
"""So many incarnations may die while they act on from the same place; the next one begins anew."""
_FRAGMENT, _ENVIRONMENTS, _EPOCH = 0, 1, 2
_MASK = (1 << 64) - 1
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, MemoryError)
"""What NumPy and the constructors raise over a blob that is sound and no step."""


@dataclass(frozen=True)
class Life:
    """What all randomness of a line of fragments comes from."""

    seed: int
    worker: int
    incarnation: int
    restarts: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.restarts}"

    def next(self) -> Life:
        """The life that begins where an environment has raised: whoever comes to that place begins the same one."""
        return replace(self, restarts=self.restarts + 1)

    def acting(self, number: int) -> int:
        """The seed of the actions in fragment `number`."""
        return self._seeds(_FRAGMENT, number, 1)[0]

    def environments(self, count: int) -> list[int]:
        """The seed of each environment's first episode; `episode_seed` has the others."""
        return self._seeds(_ENVIRONMENTS, 0, count)

    def shuffling(self, epoch: int) -> int:
        """The seed of the order in which recorded experience is taken in an epoch."""
        return self._seeds(_EPOCH, epoch, 1)[0]

    def _seeds(self, kind: int, number: int, count: int) -> list[int]:
        parts = [self.seed, self.worker, self.incarnation, self.restarts, kind, number]
        return [int(value) for value in np.random.SeedSequence(parts).generate_state(count)]


def episode_seed(first: int, episode: int) -> int:
    """The seed of an environment's episode (0, 1, …), from that of its first one; 64 bits.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): a short episode must not
    pay for more.
    """
    if episode == 0:
        return first
    mixed = (first + episode * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


@dataclass(frozen=True)
class Past:
    """Where each environment stands: the number of its episode, and what was done in it so far."""

    episodes: tuple[int, ...]
    lengths: tuple[int, ...]
    """Steps in the running episode, per environment."""
    actions: Mapping[str, Columns]
    """Policy id → columns `[L, S, …]` of the last steps; at least as many as the longest of these episodes has."""

    def of(self, environment: int) -> tuple[int, int, int]:
        """Episode, first and last row of `actions` of one environment."""
        rows = len(next(iter(next(iter(self.actions.values())).values())))
        return self.episodes[environment], rows - self.lengths[environment], rows


@dataclass(frozen=True)
class Step:
    """One fragment's part of the trail."""

    life: Life
    number: int
    """Of the fragment, in this life."""
    episodes: tuple[int, ...]
    lengths: tuple[int, ...]
    digest: str
    """Of what was observed after its last step."""
    actions: Mapping[str, Columns]
    states: Mapping[str, Array] = field(default_factory=dict)
    """Policy id → `[S, state size]`: what a policy with a core remembers after the last step."""

    @property
    def fragments(self) -> int:
        """How many of the last fragments hold the actions of the running episodes."""
        if not any(self.lengths):
            return 1
        steps = len(next(iter(next(iter(self.actions.values())).values())))
        return max(1, -(-max(self.lengths) // steps))


def encode(step: Step) -> bytes:
    """One blob; the inverse is `decode`."""
    flat = {f"{policy}/{name}": array for policy, columns in step.actions.items() for name, array in columns.items()}
    header = vars(step) | {"life": vars(step.life), "actions": {name: array.dtype.str for name, array in flat.items()}}
    del header["states"]
    states = {f"{policy}/{STATE}": array for policy, array in step.states.items()}
    return tensor_blob.encode({name: _small(array) for name, array in flat.items()} | states, header)


def decode(blob: bytes) -> Step:
    """Raises `BlobError`, or one of `_MALFORMED` for anything else than a step."""
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
    life = Life(**{name: _count(value) for name, value in header["life"].items()})
    arrays = [array for columns in actions.values() for array in columns.values()]
    steps = {array.shape[0] if array.ndim > 1 else -1 for array in arrays}
    if len(steps) != 1 or steps & {-1} or (steps == {0} and any(lengths)) or len(lengths) != len(episodes):
        raise ValueError(f"a step with {steps} rows, {len(lengths)} lengths and {len(episodes)} episodes")
    return Step(life, _count(header["number"]), episodes, lengths, str(header["digest"]), actions, states)


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value <= _MASK:
        raise ValueError(f"{value!r} is no count")
    return value


@dataclass(frozen=True)
class Trail:
    """What a successor takes up."""

    life: Life
    number: int
    """Of the next fragment."""
    past: Past
    digest: str
    states: Mapping[str, Array] = field(default_factory=dict)
    """As in `Step`."""

    def fits(self, description: EnvironmentDescription, num_envs: int) -> bool:
        """Whether it is of so many environments with such agents."""
        slots = {policy_id: num_envs * description.slots(policy_id) for policy_id in description.policies}
        found = {id_: {name: array.shape[1] for name, array in part.items()} for id_, part in self.past.actions.items()}
        return len(self.past.episodes) == num_envs and found == {
            policy_id: dict.fromkeys(spaces.action.column_names("action"), slots[policy_id])
            for policy_id, spaces in description.policies.items()
        }


def read(blobs: Sequence[bytes]) -> Trail | None:
    """The trail in what Redis holds; None where it cannot be taken up, or is none (somebody else wrote there)."""
    try:
        return _joined([decode(blob) for blob in blobs]) if blobs else None
    except (tensor_blob.BlobError, *_MALFORMED):
        return None


def _joined(steps: Sequence[Step]) -> Trail | None:
    last = steps[-1]
    needed = steps[-last.fragments :]
    numbers = [(step.life, step.number) for step in needed]
    if numbers != [(last.life, last.number - back) for back in reversed(range(last.fragments))]:
        return None  # an older Redis came back, or the first of them are gone
    actions = {
        policy_id: {name: np.concatenate([step.actions[policy_id][name] for step in needed]) for name in columns}
        for policy_id, columns in last.actions.items()
    }
    return Trail(last.life, last.number + 1, Past(last.episodes, last.lengths, actions), last.digest, last.states)


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
