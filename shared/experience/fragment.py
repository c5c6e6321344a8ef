"""The fragment, the unit that travels: T steps × N environments from one worker, acted by one policy version.

`encode` and `decode` are a pair; `check` compares a fragment with the run. Any defect raises `FragmentError` with the
ledger's reason, so that the fragment is dropped and counted, never silently skipped.

Columns, per policy id, with S slots (environments × agents of that policy):

| column | shape | dtype |
|---|---|---|
| `obs…` | T × S × … | as the space says |
| `action…` | T × S × … | as the space says (float32 for boxes) |
| `reward` | T × S | float32 |
| `log_prob` | T × S | float32: of the action at acting time, for boxes a density; NaN if unknown |
| `terminated`, `truncated`, `mask` | T × S | bool; `mask` is false where an agent was absent |
| `bootstrap_obs…` | S × … | observation after the last step |
| `final_obs…` | M × … | true last observation of each episode that ended (terminated: if it is known) |
| `final_index` | M × 2 | int32: step, slot of each `final_obs` row |
| `state_in` | S × state size | float32: hidden state of a policy with a core before the first step; absent for others |
| `info/NAME` | T × S | float32: numbers of the step's `info`, NaN if missing (`environment.info_columns`) |

If agents act in turns, row k of a slot is its k-th turn whose outcome came within the fragment. The row after the last
one, whose `mask` is false, has the observation of its next turn.

The state within the fragment follows from the columns: it is reset to zero after each step that ended an episode, or
that no agent acted.

The last observation of a terminated episode has value 0, even if the step was truncated as well. Empty rows are left
out on the wire (`_leave_out`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from stagecoach.shared.base.errors import DropReason, FragmentError
from stagecoach.shared.experience import column_codec, tensor_blob
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, PolicySpaces

WIRE_VERSION = 1
STATE = "state_in"
INFO = "info/"
_schema = partial(FragmentError, DropReason.SCHEMA)
_MOST = 1 << 53
"""Largest count in a header: metrics are floats, which hold every whole number up to it."""
_Count = Annotated[int, Field(ge=0, le=_MOST, strict=True)]
_Size = Annotated[int, Field(ge=1, le=_MOST, strict=True)]
_Number = Annotated[float, Field(strict=True)]
_Value = (
    Annotated[bool, Field(strict=True)]
    | Annotated[int, Field(strict=True)]
    | Annotated[float, Field(strict=True, allow_inf_nan=False)]
    | Annotated[str, Field(strict=True)]
)
_LATER = {"match", "parameters", "lessons"}
_DENSE = 0.9
"""Share of nonempty rows above which all rows are sent."""
LARGEST = 1e12
"""Largest magnitude of a number to learn from. The square of a sum over a million steps stays within float32 (3.4e38);
beyond that, one number makes all weights NaN."""
LARGEST_SHOWN = 1e30
"""Largest magnitude of an episode's numbers (its return, the environment's own), which are only shown and averaged."""


@dataclass(frozen=True)
class MatchRecord:
    """Players and outcome of an episode."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    learner: str
    side: _Count
    """Side of the learner."""
    players: tuple[str, ...]
    """Player id per side."""
    outcome: tuple[Annotated[float, Field(ge=0, le=1)], ...]
    """Outcome per side: 1 for a win, 0.5 for a draw, 0 for a loss."""
    forfeit: str = ""
    """`PLAYER: reason`, a line for each player that lost by forfeit."""

    @property
    def forfeited(self) -> dict[str, str]:
        """Players that lost by forfeit, with the reason."""
        lines = (line.partition(": ") for line in self.forfeit.splitlines())
        return {player: why for player, _, why in lines if player in self.players}

    def result(self, mine: int, other: int | None = None) -> float:
        """Returns 1 for a win of side `mine`, 0.5 for a draw, 0 for a loss, by default against the best other side."""
        best = max(self.outcome[:mine] + self.outcome[mine + 1 :]) if other is None else self.outcome[other]
        return 0.5 + 0.5 * ((self.outcome[mine] > best) - (self.outcome[mine] < best))


@dataclass
class EpisodeRecord:
    """One episode that ended in a fragment. (Not frozen, which would triple the time to create it.)"""

    __pydantic_config__ = ConfigDict(extra="forbid")
    episode_return: _Number
    """Undiscounted sum of rewards, over all agents."""
    length: _Size
    success: Annotated[bool, Field(strict=True)] | None = None
    """The environment's `is_success` or `success`, if it reports one."""
    agent_returns: dict[str, _Number] = field(default_factory=dict)
    """Returns of each agent, if there are several."""
    metrics: dict[str, _Number] = field(default_factory=dict)
    """Numbers in the environment's last `info`."""
    match: MatchRecord | None = None
    """Match, if players opposed each other."""
    parameters: dict[str, _Value] = field(default_factory=dict)
    """Values drawn by the worker (`environment.parameters`)."""
    lessons: dict[str, _Count] = field(default_factory=dict)
    """Lessons of these values, by entry of `environment.parameters`."""

    def returns_by_player(self, description: EnvironmentDescription) -> dict[str, float]:
        """Returns the summed returns of each policy's agents; in a match, of each player on all of its sides."""
        players, found = self.match.players if self.match is not None else (), dict[str, float]()
        seated = {agent: player for side, player in zip(description.sides, players, strict=False) for agent in side}
        for agent, its in self.agent_returns.items():
            player = seated.get(agent, description.agents.get(agent, ""))
            found[player] = found.get(player, 0.0) + its
        return found

    def plain(self) -> dict[str, Any]:
        """Returns data for JSON, without optional parts that are empty."""
        data = vars(self) | {"match": self.match and vars(self.match)}
        return {name: value for name, value in data.items() if value or name not in _LATER}


@dataclass(frozen=True)
class FragmentHeader:
    """Origin of a fragment: worker, sequence number and policy versions."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    run_id: str
    worker_id: str
    incarnation: _Count
    seq: _Count
    phase: Phase
    policy_versions: Annotated[dict[str, _Count], Field(min_length=1)]
    steps: _Size
    num_envs: _Size
    episodes: tuple[EpisodeRecord, ...] = ()
    acting_seconds: Annotated[float, Field(ge=0, le=LARGEST, strict=True)] = 0.0
    life: str = "0.0"
    """Identifies the sequence of episodes: a successor that resumes them keeps it, and a fragment that is missing from
    the log starts another one."""
    history: str = ""
    """Identifies the policy version's weights: after a loss, its number may get other weights."""
    wire_version: int = WIRE_VERSION

    @property
    def transitions(self) -> int:
        return self.steps * self.num_envs

    @property
    def version(self) -> int:
        """Oldest policy version that acted."""
        return min(self.policy_versions.values())


_HEADER = TypeAdapter(FragmentHeader)


@dataclass(frozen=True)
class Fragment:
    """A header and the columns above by policy id."""

    header: FragmentHeader
    columns: dict[str, Columns]
    position: str = ""
    """Position of its entry, if it was read from the log; not part of its bytes."""
    pushed_at: int | None = None
    """Policy version on the board when it was pushed, if known; not part of its bytes."""


def encode(fragment: Fragment, compression: column_codec.Compression = "none") -> bytes:
    """Returns one safetensors blob; the same fragment always gives the same bytes."""
    flat = {f"{policy}/{name}": array for policy, its in fragment.columns.items() for name, array in its.items()}
    sparse = {policy: names for policy, its in fragment.columns.items() if (names := _leave_out(policy, its, flat))}
    packed, layout = column_codec.pack(flat, compression)
    episodes = [record.plain() for record in fragment.header.episodes]
    header = vars(fragment.header) | {"episodes": episodes, "layout": layout} | ({"sparse": sparse} if sparse else {})
    return tensor_blob.encode(packed, header)


def _leave_out(policy: str, columns: Columns, flat: Columns) -> list[str]:
    """Reduces columns of `flat` (policy/column) to the rows of `kept_rows` `[K, …]` if many others are empty (no agent,
    or an opponent acted). Returns the reduced columns: those whose other rows are all zero."""
    kept = kept_rows(columns)
    if kept.mean() > _DENSE:
        return []
    named = [name for name, its in columns.items() if its.shape[:2] == kept.shape and its.dtype != np.bool_]
    rowwise = [name for name in named if not name.startswith(("bootstrap", "final", STATE))]
    named = [name for name in rowwise if not columns[name][~kept].any()]
    flat |= {f"{policy}/{name}": columns[name][kept] for name in named}
    return named


def _put_back(columns: Columns, names: Sequence[str], most_bytes: int) -> None:
    kept = kept_rows(columns)
    for name in names:
        shape = (*kept.shape, *columns[name].shape[1:])
        if math.prod(shape) * columns[name].itemsize > most_bytes:
            raise ValueError(f"{name} would have the shape {shape}, expected at most {most_bytes} bytes")
        rows = np.zeros(shape, columns[name].dtype)
        rows[kept] = columns[name]
        columns[name] = rows


def decode(blob: bytes, most_bytes: int = column_codec.MAX_UNPACKED_BYTES) -> Fragment:
    """Returns the fragment in `blob`; raises `FragmentError` (`undecodable`, `corrupt`, `wire_version`, `schema` …),
    also before unpacking more than `most_bytes` (see `expected_bytes`)."""
    packed, header = tensor_blob.decode(blob)
    if (found := header.get("wire_version")) != WIRE_VERSION:
        raise FragmentError(DropReason.WIRE_VERSION, f"found {found!r}, this trainer reads {WIRE_VERSION}")
    try:
        layout, sparse = header.pop("layout"), header.pop("sparse", {})
        parsed = _HEADER.validate_python(header)
        columns: dict[str, Columns] = {}
        for name, array in column_codec.unpack(packed, layout, most_bytes).items():
            policy_id, _, column = name.partition("/")
            columns.setdefault(policy_id, {})[column] = array
        for policy_id, names in sparse.items():
            _put_back(columns[policy_id], names, most_bytes)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _schema(f"{'.'.join(map(str, first['loc']))} is {first['input']!r:.100} ({first['msg']})") from None
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise _schema(f"{type(error).__name__}: {error}") from None
    for record in parsed.episodes:
        drawn = (value for value in record.parameters.values() if not isinstance(value, str))
        numbers = (record.episode_return, *record.agent_returns.values(), *record.metrics.values(), *drawn)
        if not all(-LARGEST_SHOWN <= number <= LARGEST_SHOWN for number in numbers):
            finite = all(abs(number) < math.inf for number in numbers)  # isfinite raises for a large int
            reason = DropReason.MAGNITUDE if finite else DropReason.NOT_FINITE
            raise FragmentError(reason, f"episode record {record!r:.1000}; numbers may be up to {LARGEST_SHOWN:g}")
    return Fragment(parsed, columns)


def check(
    fragment: Fragment, run_id: str, description: EnvironmentDescription,
    state_sizes: Mapping[str, int] | None = None, *, by_log_prob: Collection[str] = (),
) -> None:  # fmt: skip
    """Rejects a fragment that does not fit the run: `foreign_run`, `schema`, `not_finite`, `magnitude`. `state_sizes`
    are those of recurrent policies; `by_log_prob` are the policies whose algorithm needs `log_prob`."""
    header, policies = fragment.header, set(description.policies)
    if header.run_id != run_id:
        raise FragmentError(DropReason.FOREIGN_RUN, f"fragment of run {header.run_id!r} in the log of {run_id!r}")
    if set(fragment.columns) != policies:
        raise _schema(f"policies {sorted(fragment.columns)}, expected {sorted(policies)}")
    if set(header.policy_versions) != policies:
        raise _schema(f"policy versions of {sorted(header.policy_versions)}, expected {sorted(policies)}")
    for policy_id, spaces in description.policies.items():
        columns, slots = fragment.columns[policy_id], header.num_envs * description.slots(policy_id)
        state_size = (state_sizes or {}).get(policy_id, 0)
        expected = expected_columns(spaces, header.steps, slots, state_size, description.info_columns)
        _check_columns(columns, expected, policy_id)
        _check_choices(columns, spaces, policy_id)
        if policy_id in by_log_prob and np.isnan(columns["log_prob"]).any():
            detail = f"{policy_id}/log_prob is not known, and the algorithm learns by it"
            raise FragmentError(DropReason.NOT_FINITE, detail)


def expected_columns(
    spaces: PolicySpaces, steps: int, slots: int, state_size: int = 0, info_columns: Sequence[str] = ()
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Returns shape (−1 for any) and dtype by column of one policy's part of a fragment."""
    flags = {name: ((steps, slots), np.dtype(np.bool_)) for name in ("terminated", "truncated", "mask")}
    told = (INFO + name for name in info_columns)
    numbers = {name: ((steps, slots), np.dtype(np.float32)) for name in ("reward", "log_prob", *told)}
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


def expected_bytes(
    description: EnvironmentDescription, steps: int, num_envs: int, state_sizes: Mapping[str, int] | None = None
) -> int:
    """Returns the maximum size of an unpacked fragment of this shape, including the parts of stacked frames."""
    found = 0
    for policy_id, spaces in description.policies.items():
        slots, state_size = num_envs * description.slots(policy_id), (state_sizes or {}).get(policy_id, 0)
        expected = expected_columns(spaces, steps, slots, state_size, description.info_columns)
        for shape, dtype in expected.values():
            found += math.prod(steps * slots if length == -1 else length for length in shape) * dtype.itemsize
    return min(2 * found, column_codec.MAX_UNPACKED_BYTES)


def kept_rows(columns: Columns) -> Array:
    """Returns the rows to learn from `[T, S]`: those with an action, and with turns the row after the last of them."""
    there, *over = (columns[name].astype(np.bool_) for name in ("mask", "terminated", "truncated"))
    goes_on = there & ~(over[0] | over[1])
    kept = there.copy()
    kept[1:] |= goes_on[:-1]
    return kept


def holdable(name: str, array: Array) -> bool:
    """Returns whether all numbers in a column are finite; a `log_prob` or a number of the `info` may be NaN."""
    may_be_unknown = name == "log_prob" or name.startswith(INFO)
    return array.dtype.kind != "f" or bool((np.isfinite(array) | (np.isnan(array) & may_be_unknown)).all())


def _check_columns(
    columns: Columns, expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]], policy_id: str
) -> None:
    if odd := sorted(set(columns) ^ set(expected)):
        raise _schema(f"policy {policy_id}: columns {odd} are missing or unknown")
    rows = len(columns["final_index"]) if columns["final_index"].ndim else 0
    for name, (shape, dtype) in expected.items():
        array, where = columns[name], f"{policy_id}/{name}"
        wanted = tuple(rows if size == -1 else size for size in shape)
        if array.shape != wanted or array.dtype != dtype:
            raise _schema(f"{where} is {array.dtype}{array.shape}, expected {dtype}{wanted}")
        if not holdable(name, array):
            raise FragmentError(DropReason.NOT_FINITE, f"{where} holds NaN or infinite values")
        if array.size and (array.dtype.kind == "f" or array.dtype.itemsize == 8):
            low, high = np.fmin.reduce(array, axis=None), np.fmax.reduce(array, axis=None)  # without NaN
            if low < -LARGEST or high > LARGEST:
                found = f"{where} holds values from {low:g} to {high:g}, beyond {LARGEST:g}"
                raise FragmentError(DropReason.MAGNITUDE, f"{found}; scale them down in the env")
    steps, slots = columns["reward"].shape
    index = columns["final_index"]
    if rows and ((index < 0).any() or (index >= np.array([steps, slots])).any()):
        raise _schema(f"{policy_id}/final_index points outside of {steps} × {slots}")
    covered = np.zeros((steps, slots), np.bool_)
    covered[index[:, 0], index[:, 1]] = True
    if rows != int(covered.sum()) or (columns["truncated"] & ~covered).any():
        raise _schema(f"{policy_id}: final_obs does not cover each truncated slot once")
    if (covered & ~(columns["terminated"] | columns["truncated"])).any():
        raise _schema(f"{policy_id}: final_obs of a slot whose episode continues")


def _check_choices(columns: Columns, spaces: PolicySpaces, policy_id: str) -> None:
    named = [(leaf, prefix) for leaf in spaces.observation.leaves for prefix in ("obs", "bootstrap_obs", "final_obs")]
    for leaf, prefix in named + [(leaf, "action") for leaf in spaces.action.leaves]:
        array = columns[leaf.column(prefix)]
        if leaf.kind != "box" and array.size and leaf.beyond(array).any():
            raise _schema(f"{policy_id}/{leaf.column(prefix)} holds a choice that does not exist")
