"""A CSV file with one row per transition, episodes in order.

| column | |
|---|---|
| `obs.0`, `obs.1`, … | the observation before the step; `obs` where it is a single number, `obs.KEY.0` in a dict |
| `action` or `action.0`, … | the same for the action |
| `reward`, `terminated` | of the step; `terminated` is 1 (or `true`) where it ended the episode |
| `truncated` | optional: 1 where the episode was stopped here by something else |
| `next_obs.0`, … | optional: the observation after the step |
| `log_prob` | optional: natural logarithm of the probability (density) that the action was chosen with; nan: unknown |
| `episode`, `step` | optional: an id that changes with each episode; 0, 1, … in it |
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shared.datasets.leaves import Find, space_columns
from shared.datasets.recording import Episode
from shared.datasets.table import Table, episodes_of, flags, numbers
from shared.errors import DatasetError
from shared.spaces import Array, Leaf, PolicySpaces

_WORDS = {"true": "1", "false": "0"}


def read(path: Path, spaces: PolicySpaces) -> list[Episode]:
    """Its episodes; raises `DatasetError`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            header = [name.strip() for name in next(rows, [])]
            cells = [row for row in rows if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path} cannot be read as CSV: {error}") from None
    odd = next((number for number, row in enumerate(cells) if len(row) != len(header)), None)
    if odd is not None:
        raise DatasetError(
            f"{path}: row {odd} has {len(cells[odd])} cells, expected {len(header)} as in the first line"
        )
    return list(episodes_of(_table(path, _Cells(path, header, cells), spaces)))


class _Cells:
    """The columns of the file by name, which notes what is asked for."""

    def __init__(self, path: Path, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
        twice = sorted({name for name in header if list(header).count(name) > 1})
        if twice:
            raise DatasetError(f"{path} has the columns {', '.join(twice)} more than once")
        self._path = path
        self._columns = dict(zip(header, zip(*cells, strict=True), strict=True)) if cells else dict.fromkeys(header, ())
        self.rows = len(cells)
        self.unread = set(header)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def text(self, name: str) -> tuple[str, ...]:
        if name not in self._columns:
            raise DatasetError(
                f"{self._path} has no column {name}, which the run's spaces ask for; found {', '.join(self._columns)}"
            )
        self.unread.discard(name)
        return self._columns[name]

    def number(self, name: str) -> Array:
        """`[M]`, float64."""
        text = [_WORDS.get(cell.strip().lower(), cell) for cell in self.text(name)]
        try:
            return np.array(text, np.str_).astype(np.float64) if text else np.zeros(0)
        except ValueError:
            row = next(number for number, cell in enumerate(text) if not _is_number(cell))
            raise DatasetError(f"{self._path}: {name} is {text[row]!r} in row {row}, expected a number") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _table(path: Path, cells: _Cells, spaces: PolicySpaces) -> Table:
    def find(prefix: str) -> Find:
        return lambda leaf, _: _leaf(path, cells, leaf, leaf.column(prefix))

    obs = space_columns(spaces.observation, "obs", find("obs"))
    action = space_columns(spaces.action, "action", find("action"))
    told = any(name.startswith("next_obs") for name in cells.unread)
    none = np.zeros(cells.rows)
    terminated = flags(cells.number("terminated"), cells.rows, f"{path}: terminated")
    truncated = flags(cells.number("truncated") if "truncated" in cells else none, cells.rows, f"{path}: truncated")
    log_prob = cells.number("log_prob") if "log_prob" in cells else np.full(cells.rows, np.nan)
    table = Table(
        obs,
        action,
        numbers(cells.number("reward"), cells.rows, f"{path}: reward"),
        terminated,
        truncated,
        numbers(log_prob, cells.rows, f"{path}: log_prob", unknown=True),
        space_columns(spaces.observation, "obs", find("next_obs")) if told else None,
        _changes(cells),
    )
    _check_steps(path, cells, table)
    if cells.unread:
        raise DatasetError(
            f"{path} has the columns {', '.join(sorted(cells.unread))}, which mean nothing here; leave them out"
        )
    return table


def _leaf(path: Path, cells: _Cells, leaf: Leaf, name: str) -> tuple[str, Array]:
    if not leaf.shape or (leaf.size == 1 and name in cells):
        return f"{path}: {name}", cells.number(name)
    parts = [cells.number(f"{name}.{index}") for index in range(leaf.size)]
    return f"{path}: {name}.…", np.stack(parts, axis=1).reshape(cells.rows, *leaf.shape)


def _changes(cells: _Cells) -> Array:
    """After which rows the episode's id is another."""
    changes = np.zeros(cells.rows, np.bool_)
    if "episode" in cells:
        ids = np.array(cells.text("episode"), np.str_)
        changes[:-1] = ids[1:] != ids[:-1]
    return changes


def _check_steps(path: Path, cells: _Cells, table: Table) -> None:
    """Where steps are counted, none may be missing."""
    if "step" not in cells:
        return
    steps = cells.number("step")
    begins = np.ones(cells.rows, np.bool_)
    ends = table.terminated | table.truncated | _changes(cells)
    begins[1:] = ends[:-1]
    expected = np.where(begins, 0, np.concatenate([[0], steps[:-1] + 1]))
    if (steps != expected).any():
        row = int(np.flatnonzero(steps != expected)[0])
        raise DatasetError(
            f"{path}: step is {steps[row]:g} in row {row}, expected {expected[row]:g}; are transitions missing, out of "
            f"order, or is an episode's end not marked (terminated, truncated, episode)?"
        )
