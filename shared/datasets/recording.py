"""A recording: all transitions of a dataset as columns, and fragments' columns cut from it.

Episodes lie end to end. Observations have one row more per episode than there are steps (the one after the last step),
so the observation after step m of episode e is the row after that of step m: m + e + 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shared.errors import DatasetError
from shared.fragment import EpisodeRecord
from shared.spaces import Array, Columns, PolicySpaces


@dataclass(frozen=True)
class Episode:
    """An episode, or what is recorded of it, L steps long."""

    observations: Columns
    """`obs…` `[L + 1, …]`: the last row is what was observed after the last step."""
    actions: Columns
    """`action…` `[L, …]`."""
    reward: Array
    """`[L]`, float32."""
    log_prob: Array
    """`[L]`, float32; NaN where it is not known."""
    terminated: bool
    """Whether the last step ended it; otherwise it was truncated, or the data end there."""
    record: EpisodeRecord | None
    """None where its beginning or its end is not in the data."""
    last_known: bool = True
    """Whether the data have what was observed after the last step. Where they do not the step terminated, and the row
    before stands there again."""

    def __len__(self) -> int:
        return len(self.reward)


class Recording:
    """The episodes of a dataset, in its order."""

    def __init__(self, spaces: PolicySpaces, episodes: Sequence[Episode], where: str) -> None:
        """Raises `DatasetError` where there is no step."""
        kept = [episode for episode in episodes if len(episode)]
        if not kept:
            raise DatasetError(f"{where} holds no transition; expected at least one")
        self.spaces = spaces
        self.where = where
        """Where it was read, for messages."""
        self.columns = {
            **_end_to_end(spaces.observation.column_names("obs"), [episode.observations for episode in kept]),
            **_end_to_end(spaces.action.column_names("action"), [episode.actions for episode in kept]),
            "reward": np.concatenate([episode.reward for episode in kept]),
            "log_prob": np.concatenate([episode.log_prob for episode in kept]),
        }
        lengths = np.array([len(episode) for episode in kept])
        self._starts = np.cumsum(lengths) - lengths
        self._ends = np.cumsum(lengths) - 1
        self._terminated = np.array([episode.terminated for episode in kept])
        self._last_known = np.array([episode.last_known for episode in kept])
        self.records = tuple(episode.record for episode in kept)

    def __len__(self) -> int:
        """Steps."""
        return len(self.columns["reward"])

    @cached_property
    def sha256(self) -> str:
        """Of all that is learnt from (64 hex digits): the same for the same transitions in any format."""
        found = hashlib.sha256()
        arrays = self.columns | {"ends": self._ends, "terminated": self._terminated, "last_known": self._last_known}
        for name, array in sorted(arrays.items()):
            found.update(f"{name} {array.dtype.str} {array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
        found.update(repr(self.records).encode())
        return found.hexdigest()

    def episodes(self) -> Iterator[Episode]:
        """Each of them, as views."""
        for number, (start, end) in enumerate(zip(self._starts.tolist(), self._ends.tolist(), strict=True)):
            steps, rows = slice(start, end + 1), slice(start + number, end + number + 2)
            yield Episode(
                {name: self.columns[name][rows] for name in self.spaces.observation.column_names("obs")},
                {name: self.columns[name][steps] for name in self.spaces.action.column_names("action")},
                self.columns["reward"][steps],
                self.columns["log_prob"][steps],
                bool(self._terminated[number]),
                self.records[number],
                bool(self._last_known[number]),
            )

    def pieces(self, steps: int) -> int:
        """How many pieces of `steps` steps there are: the last one may be shorter."""
        return -(-len(self) // steps)

    def cut(self, pieces: Sequence[int] | Array, steps: int) -> tuple[Columns, list[EpisodeRecord]]:
        """Those pieces beside each other, as the columns of a fragment (shared/fragment.py), and what ended in them.

        A piece that is shorter than `steps` is filled up with masked steps. An episode that was cut off ends like a
        truncated one.
        """
        step = np.arange(steps)[:, None] + np.asarray(pieces, np.int64)[None, :] * steps
        mask = step < len(self)
        step = np.minimum(step, len(self) - 1)
        episode = np.searchsorted(self._ends, step)
        ended = mask & (step == self._ends[episode])
        terminated = self._terminated[episode]
        columns: Columns = {"mask": mask, "terminated": ended & terminated, "truncated": ended & ~terminated}
        final = np.argwhere(ended & self._last_known[episode])
        after = step + episode + 1
        for name in self.spaces.observation.column_names("obs"):
            rows = self.columns[name]
            columns[name] = rows[step + episode]
            columns[f"bootstrap_{name}"] = rows[after[-1]]
            columns[f"final_{name}"] = rows[after[final[:, 0], final[:, 1]]]
        for name in self.spaces.action.column_names("action"):
            columns[name] = self.columns[name][step]
        for name in ("reward", "log_prob"):
            columns[name] = np.where(mask, self.columns[name][step], np.float32(0))
        columns["final_index"] = final.astype(np.int32)
        known = [self.records[number] for number in episode[ended].tolist()]
        return columns, [record for record in known if record is not None]

    def fragments(self, steps: int) -> Iterator[Columns]:
        """The whole of it, in order, as fragments with one slot."""
        for piece in range(self.pieces(steps)):
            yield self.cut([piece], steps)[0]


def _end_to_end(names: Sequence[str], parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in names}
