"""HDF5 files: D4RL's flat layout (one row per transition), and the one that Minari writes (a group per episode).

Flat: `observations`, `actions`, `rewards`, `terminals`, and optionally `timeouts`, `next_observations`, `log_probs`
(D4RL's own files have `infos/action_log_probs`). Minari: `episode_0`, … with `observations` (one row more than steps),
`actions`, `rewards`, `terminations`, `truncations`. Dict spaces are groups of their keys, tuples of `_index_0`, ….
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shared.datasets.leaves import Find, space_columns
from shared.datasets.recording import Episode
from shared.datasets.table import Table, episodes_of, flags, numbers
from shared.errors import DatasetError
from shared.extras import install
from shared.fragment import EpisodeRecord
from shared.spaces import Array, Columns, Leaf, PolicySpaces

_LOG_PROBS = ("log_probs", "infos/action_log_probs")


def read(path: Path, spaces: PolicySpaces) -> list[Episode]:
    """Its episodes; raises `DatasetError`."""
    with _opened(path) as file:
        if "observations" in file:
            return list(episodes_of(_table(_Group(str(path), file), spaces)))
        names = [name for name in file if name.startswith("episode_") and name.removeprefix("episode_").isdigit()]
        if not names:
            raise DatasetError(
                f"{path} holds {', '.join(file) or 'nothing'}, expected observations, actions, rewards, terminals "
                f"(D4RL) or episode_0, episode_1, … (Minari)"
            )
        ordered = sorted(names, key=lambda name: int(name.removeprefix("episode_")))
        return [_episode(_Group(f"{path}: {name}", file[name]), spaces) for name in ordered]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        import h5py
    except ImportError:
        raise DatasetError(f"reading {path} needs h5py: {install('data')}") from None
    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise DatasetError(f"{path} cannot be read as HDF5: {error}") from None
    with file:
        yield file


class _Group:
    """A group of the file and its name in messages."""

    def __init__(self, where: str, node: Any) -> None:
        self.where = where
        self._node = node

    def __contains__(self, name: str) -> bool:
        return name in self._node

    def array(self, name: str) -> Array:
        """Raises `DatasetError` where there is none."""
        found = self._node.get(name) if hasattr(self._node, "get") else None
        if found is None or hasattr(found, "keys"):
            has = ", ".join(self._node) if hasattr(self._node, "keys") else "an array"
            kind = "is a group" if found is not None else "is missing"
            raise DatasetError(f"{self.where}: {name} {kind}, expected an array as the run's spaces say; found {has}")
        return np.asarray(found[()])

    def rows(self, name: str) -> Array:
        """The same, where it has an axis."""
        values = self.array(name)
        if not values.ndim:
            raise DatasetError(f"{self.where}: {name} is a single value, expected a row for each step")
        return values

    def space(self, name: str) -> Find:
        """What stands below `name`, nested as the space is."""

        def find(_: Leaf, way: tuple[str | int, ...]) -> tuple[str, Array]:
            place = "/".join([name, *(f"_index_{key}" if isinstance(key, int) else key for key in way)])
            return f"{self.where}: {place}", self.rows(place)

        return find


def _table(group: _Group, spaces: PolicySpaces) -> Table:
    rewards = group.rows("rewards")
    rows = len(rewards)
    log_prob = next((name for name in _LOG_PROBS if name in group), None)
    timeouts = group.array("timeouts") if "timeouts" in group else np.zeros(rows)
    next_obs = None
    if "next_observations" in group:
        next_obs = space_columns(spaces.observation, "obs", group.space("next_observations"))
        _check_rows(group, next_obs, rows, "next_observations")
    obs = space_columns(spaces.observation, "obs", group.space("observations"))
    action = space_columns(spaces.action, "action", group.space("actions"))
    _check_rows(group, obs, rows, "observations")
    _check_rows(group, action, rows, "actions")
    return Table(
        obs,
        action,
        numbers(rewards, rows, f"{group.where}: rewards"),
        flags(group.array("terminals"), rows, f"{group.where}: terminals"),
        flags(timeouts, rows, f"{group.where}: timeouts"),
        None if log_prob is None else numbers(group.array(log_prob), rows, f"{group.where}: {log_prob}", unknown=True),
        next_obs,
    )


def _episode(group: _Group, spaces: PolicySpaces) -> Episode:
    rewards = group.rows("rewards")
    steps = len(rewards)
    reward = numbers(rewards, steps, f"{group.where}: rewards")
    terminated = flags(group.array("terminations"), steps, f"{group.where}: terminations")
    truncated = flags(group.array("truncations"), steps, f"{group.where}: truncations")
    if (terminated | truncated)[:-1].any():
        raise DatasetError(f"{group.where} goes on after a step that terminated or truncated it")
    observations = space_columns(spaces.observation, "obs", group.space("observations"))
    actions = space_columns(spaces.action, "action", group.space("actions"))
    _check_rows(group, observations, steps + 1, "observations")
    _check_rows(group, actions, steps, "actions")
    ended = bool((terminated | truncated)[-1:].any())
    record = EpisodeRecord(float(reward.sum(dtype=np.float64)), steps) if ended else None
    return Episode(
        observations, actions, reward, np.full(steps, np.nan, np.float32), bool(terminated[-1:].any()), record
    )


def _check_rows(group: _Group, columns: Columns, rows: int, name: str) -> None:
    for column in columns.values():
        if len(column) != rows:
            raise DatasetError(f"{group.where}: {name} has {len(column)} rows, expected {rows} for its rewards")
