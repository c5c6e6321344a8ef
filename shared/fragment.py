"""The fragment, the unit that travels: T steps × N environments from one worker, acted by one policy version.

Encode and decode are a pair; `check` compares what arrived with the run. Whatever is wrong raises `FragmentError`
with the ledger's word for it, so that a fragment is dropped and counted, never skipped in silence.

Columns, per policy id, with S slots (environments × agents of that policy):

| column | shape | dtype |
|---|---|---|
| `obs…` | T × S × … | as the space says |
| `action…` | T × S × … | as the space says (float32 for boxes) |
| `reward` | T × S | float32 |
| `log_prob` | T × S | float32: of the action as it was acted, for boxes a density; NaN where it is not known |
| `terminated`, `truncated`, `mask` | T × S | bool; `mask` is false where an agent was absent |
| `bootstrap_obs…` | S × … | observation after the last step |
| `final_obs…` | M × … | true last observation of each episode that ended (terminated: where it is known) |
| `final_index` | M × 2 | int32: step, slot of each `final_obs` row |
| `state_in` | S × state size | float32: what a policy with a core remembers before the first step; absent for others |

Within the fragment that state follows from the columns: it begins at zero again after each step that ended an episode,
or that nobody acted.

Nothing is bootstrapped from the last observation of an episode that terminated: its value is 0, also where the step was
truncated as well. Wire version 2 is still read: it has no such observations, and a `log_prob` of 0 where it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shared import column_codec, tensor_blob
from shared.errors import FragmentError
from shared.spaces import Array, Columns, EnvironmentDescription, PolicySpaces
from shared.steps import Phase

WIRE_VERSION = 3
_READABLE = (2, WIRE_VERSION)
"""Archives, and the log of a run that is resumed, may hold older fragments; columns mean the same in all of these."""
STATE = "state_in"
LARGEST = 1e12
"""The largest magnitude of a number that is learnt from. Its square, also of a sum over a million steps, stays below
3.4e38, the end of float32: beyond that, one number makes all weights NaN."""
LARGEST_SHOWN = 1e30
"""The same for numbers of an episode (its return, the environment's own), which are only shown and averaged."""
REASONS = (
    "undecodable",
    "corrupt",
    "wire_version",
    "schema",
    "foreign",
    "foreign_run",
    "not_finite",
    "magnitude",
    "stale",
    "duplicate",
    "lost",
    "lost_body",
    "poison",
)
"""Why a fragment may be dropped, in the ledger's words."""


@dataclass
class EpisodeRecord:
    """One episode that ended in a fragment. (Not frozen: that makes it three times as slow to make.)"""

    episode_return: float
    """Undiscounted sum of rewards, over all agents."""
    length: int
    """Env steps."""
    success: bool | None = None
    """The environment's `is_success` or `success`, where it tells."""
    agent_returns: dict[str, float] = field(default_factory=dict)
    """Per agent, where there is more than one."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment put into its last `info`."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON; not copied, since a fragment may hold hundreds of these."""
        return vars(self)


@dataclass(frozen=True)
class FragmentHeader:
    """Who made the fragment, in which order, with which policy."""

    run_id: str
    worker_id: str
    incarnation: int
    seq: int
    phase: Phase
    policy_versions: dict[str, int]
    steps: int
    num_envs: int
    episodes: tuple[EpisodeRecord, ...] = ()
    acting_seconds: float = 0.0
    life: str = "0.0"
    """Which line of episodes it goes on with: a successor that takes them up has its predecessor's."""
    wire_version: int = WIRE_VERSION

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, not copied."""
        return vars(self) | {"episodes": [record.as_dict() for record in self.episodes]}

    @property
    def transitions(self) -> int:
        """Env steps in the fragment."""
        return self.steps * self.num_envs

    @property
    def version(self) -> int:
        """The oldest policy version that acted."""
        return min(self.policy_versions.values())


@dataclass(frozen=True)
class Fragment:
    """A header and, per policy id, the columns above."""

    header: FragmentHeader
    columns: dict[str, Columns]
    position: str = ""
    """Of its entry, where it was read from the log; no part of its bytes."""


def encode(fragment: Fragment, compression: column_codec.Compression = "none") -> bytes:
    """One safetensors blob; the same fragment always gives the same bytes."""
    flat = {
        f"{policy}/{name}": array for policy, columns in fragment.columns.items() for name, array in columns.items()
    }
    packed, layout = column_codec.pack(flat, compression)
    return tensor_blob.encode(packed, fragment.header.as_dict() | {"layout": layout})


def decode(blob: bytes) -> Fragment:
    """The fragment in `blob`; raises `FragmentError` (`undecodable`, `corrupt`, `wire_version`, `schema`)."""
    try:
        packed, header = tensor_blob.decode(blob)
    except tensor_blob.BlobError as error:
        raise FragmentError(error.reason, error.detail) from None
    if header.get("wire_version") not in _READABLE:
        readable = " and ".join(map(str, _READABLE))
        raise FragmentError("wire_version", f"found {header.get('wire_version')!r}, this trainer reads {readable}")
    try:
        layout = header.pop("layout")
        episodes = tuple(EpisodeRecord(**record) for record in header.pop("episodes"))
        parsed = FragmentHeader(**header | {"episodes": episodes, "phase": Phase(header["phase"])})
        _check_header(parsed)
        columns: dict[str, Columns] = {}
        for name, array in column_codec.unpack(packed, layout).items():
            policy_id, _, column = name.partition("/")
            columns.setdefault(policy_id, {})[column] = array
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise FragmentError("schema", f"{type(error).__name__}: {error}") from None
    return Fragment(parsed, columns)


def _check_header(header: FragmentHeader) -> None:
    for name in ("incarnation", "seq", "steps", "num_envs"):
        value = getattr(header, name)
        if type(value) is not int or value < (1 if name in {"steps", "num_envs"} else 0):
            raise ValueError(f"{name} is {value!r}")
    if any(not isinstance(text, str) for text in (header.run_id, header.worker_id, header.life)):
        raise ValueError("run_id, worker_id and life must be text")
    if type(header.acting_seconds) not in (int, float) or not 0 <= header.acting_seconds < math.inf:
        raise ValueError(f"acting_seconds is {header.acting_seconds!r}")
    if not header.policy_versions or any(type(v) is not int or v < 0 for v in header.policy_versions.values()):
        raise ValueError(f"policy_versions is {header.policy_versions!r}")
    for record in header.episodes:
        _check_record(record)


def _check_record(record: EpisodeRecord) -> None:
    """In plain loops: a fragment of many short episodes has thousands of these."""
    sound = True
    for number in (record.episode_return, *record.agent_returns.values(), *record.metrics.values()):
        if type(number) is not float and type(number) is not int:
            raise ValueError(f"episode record {record!r}")
        sound = sound and -LARGEST_SHOWN <= number <= LARGEST_SHOWN
    if type(record.length) is not int or record.length < 1 or type(record.success) not in (bool, type(None)):
        raise ValueError(f"episode record {record!r}")
    if not sound:
        numbers = (record.episode_return, *record.agent_returns.values(), *record.metrics.values())
        reason = "magnitude" if all(map(math.isfinite, numbers)) else "not_finite"
        raise FragmentError(reason, f"episode record {record!r}; numbers may be up to {LARGEST_SHOWN:g}")


def check(
    fragment: Fragment,
    run_id: str,
    description: EnvironmentDescription,
    state_sizes: Mapping[str, int] | None = None,
    *,
    by_log_prob: bool = False,
) -> None:
    """Refuses what does not belong to this run: `foreign_run`, `schema`, `not_finite`, `magnitude`.

    `state_sizes`: policy id → `PolicyConfig.state_size`, of policies that remember something. `by_log_prob`: what is
    learnt from the fragment depends on its `log_prob`, so that none may be unknown.
    """
    if fragment.header.run_id != run_id:
        raise FragmentError("foreign_run", f"fragment of run {fragment.header.run_id!r} in the log of {run_id!r}")
    if set(fragment.columns) != set(description.policies):
        raise FragmentError("schema", f"policies {sorted(fragment.columns)}, expected {sorted(description.policies)}")
    if set(fragment.header.policy_versions) != set(description.policies):
        raise FragmentError("schema", f"policy versions of {sorted(fragment.header.policy_versions)}")
    header = fragment.header
    for policy_id, spaces in description.policies.items():
        slots = header.num_envs * description.slots(policy_id)
        columns = fragment.columns[policy_id]
        _check_columns(
            columns, expected_columns(spaces, header.steps, slots, (state_sizes or {}).get(policy_id, 0)), policy_id
        )
        _check_choices(columns, spaces, policy_id)
        if by_log_prob and np.isnan(columns["log_prob"]).any():
            raise FragmentError("not_finite", f"{policy_id}/log_prob is not known, and the algorithm learns by it")


def expected_columns(
    spaces: PolicySpaces, steps: int, slots: int, state_size: int = 0
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Column → shape (−1 for any) and dtype of one policy's part of a fragment."""
    flags = {name: ((steps, slots), np.dtype(np.bool_)) for name in ("terminated", "truncated", "mask")}
    numbers = {name: ((steps, slots), np.dtype(np.float32)) for name in ("reward", "log_prob")}
    expected: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {**flags, **numbers}
    expected["final_index"] = ((-1, 2), np.dtype(np.int32))
    for leaf in spaces.observation.leaves:
        expected[leaf.column("obs")] = ((steps, slots, *leaf.shape), leaf.column_dtype)
        expected[leaf.column("bootstrap_obs")] = ((slots, *leaf.shape), leaf.column_dtype)
        expected[leaf.column("final_obs")] = ((-1, *leaf.shape), leaf.column_dtype)
    for leaf in spaces.action.leaves:
        dtype = np.dtype(np.float32) if leaf.kind == "box" else leaf.column_dtype
        expected[leaf.column("action")] = ((steps, slots, *leaf.shape), dtype)
    if state_size:
        expected[STATE] = ((slots, state_size), np.dtype(np.float32))
    return expected


def holdable(name: str, array: Array) -> bool:
    """Whether all numbers in a column are finite; a `log_prob` may be NaN."""
    return array.dtype.kind != "f" or bool((np.isfinite(array) | (np.isnan(array) & (name == "log_prob"))).all())


def _check_columns(
    columns: Mapping[str, Array], expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], policy_id: str
) -> None:
    if set(columns) != set(expected):
        odd = sorted(set(columns) ^ set(expected))
        raise FragmentError("schema", f"policy {policy_id}: columns {odd} are missing or unknown")
    rows = len(columns["final_index"]) if columns["final_index"].ndim else 0
    for name, (shape, dtype) in expected.items():
        array = columns[name]
        wanted = tuple(rows if size == -1 else size for size in shape)
        if array.shape != wanted or array.dtype != dtype:
            raise FragmentError("schema", f"{policy_id}/{name} is {array.dtype}{array.shape}, expected {dtype}{wanted}")
        if not holdable(name, array):
            raise FragmentError("not_finite", f"{policy_id}/{name} holds NaN or infinite values")
        _check_magnitude(array, f"{policy_id}/{name}")
    steps, slots = columns["reward"].shape
    where = columns["final_index"]
    if rows and ((where < 0).any() or (where >= np.array([steps, slots])).any()):
        raise FragmentError("schema", f"{policy_id}/final_index points outside of {steps} × {slots}")
    covered = np.zeros((steps, slots), np.bool_)
    covered[where[:, 0], where[:, 1]] = True
    if rows != int(covered.sum()) or (columns["truncated"] & ~covered).any():
        raise FragmentError("schema", f"{policy_id}: final_obs does not cover each truncated slot once")
    if (covered & ~(columns["terminated"] | columns["truncated"])).any():
        raise FragmentError("schema", f"{policy_id}: final_obs of a slot whose episode goes on")


def _check_magnitude(array: Array, name: str) -> None:
    if not array.size or not (array.dtype.kind == "f" or array.dtype.itemsize == 8):
        return
    low, high = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)  # without NaN
    if low < -LARGEST or high > LARGEST:
        raise FragmentError(
            "magnitude", f"{name} holds values from {low:g} to {high:g}, beyond {LARGEST:g}; scale them down in the env"
        )


def _check_choices(columns: Mapping[str, Array], spaces: PolicySpaces, policy_id: str) -> None:
    named = [(leaf, prefix) for leaf in spaces.observation.leaves for prefix in ("obs", "bootstrap_obs", "final_obs")]
    for leaf, prefix in named + [(leaf, "action") for leaf in spaces.action.leaves]:
        array = columns[leaf.column(prefix)]
        if leaf.kind == "box" or not array.size:
            continue
        if (array < 0).any() or (array >= np.asarray(leaf.nvec).reshape(leaf.shape)).any():
            raise FragmentError("schema", f"{policy_id}/{leaf.column(prefix)} holds a choice that does not exist")
