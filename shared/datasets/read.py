"""A dataset of any format, read as a recording of each policy; docs/guides/offline.md says what each format holds."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from stagecoach.shared.base.errors import DatasetError
from stagecoach.shared.base.user_code import install
from stagecoach.shared.config.recorded import RecordedConfig
from stagecoach.shared.datasets import archive_format
from stagecoach.shared.datasets.recording import (
    Episode,
    Recording,
    Recordings,
    Table,
    as_column,
    episodes_of,
    flags,
    numbers,
)
from stagecoach.shared.experience.fragment import INFO
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.storage.log_archive import EXPERIENCE

_MINARI = Path("data", "main_data.hdf5")
_WORDS = {"true": "1", "false": "0"}
_POLICY, _AGENT = "policy", "agent"
_LOG_PROBS = ("log_probs", "infos/action_log_probs")


def read_dataset(config: RecordedConfig, description: EnvironmentDescription) -> Recordings:
    """Reads a dataset for all policies of `description`, without the inputs of critics; raises `DatasetError`, or the
    errors of an archive's store."""
    acting = {policy_id: spaces.acting for policy_id, spaces in description.policies.items()}
    description = replace(description, policies=acting)
    kind, path = _format(config), Path(config.path).expanduser()
    if kind == "archive":
        episodes = archive_format.read(config.path, description, config.endpoint_url)
    elif not path.exists():
        gone = "does not exist" if path.is_absolute() else f"does not exist in {Path.cwd()}"
        raise DatasetError(f"{config.section}.path={config.path} {gone}; expected a {kind} dataset there")
    elif kind == "csv":
        episodes = read_csv(path, description)
    else:
        episodes = read_hdf5(path / _MINARI if kind == "minari" and path.is_dir() else path, description)
    alone, recordings = len(episodes) == 1, Recordings()
    for policy_id, its in episodes.items():
        where = config.path if alone else f"{config.path} (policy {policy_id})"
        recordings[policy_id] = Recording(description.policies[policy_id], _good_enough(config, its, where), where)
    if config.sha256 not in (None, found := recordings.sha256):
        raise DatasetError(
            f"{config.section}.path={config.path} has the SHA-256 {found[:12]}, the run expects "
            f"{str(config.sha256)[:12]} ({config.section}.sha256); restore the data, or start a new run"
        )
    return recordings


def _good_enough(config: RecordedConfig, episodes: list[Episode], where: str) -> list[Episode]:
    if config.min_return is None:
        return episodes
    complete = [(episode, episode.record.episode_return) for episode in episodes if episode.record is not None]
    best = max((episode_return for _, episode_return in complete), default=None)
    if best is None or best < config.min_return:
        raise DatasetError(
            f"{config.section}.min_return={config.min_return}: the best whole episode of {where} returned "
            f"{'nothing, since it has none' if best is None else f'{best:g}'}"
        )
    return [episode for episode, episode_return in complete if episode_return >= config.min_return]


def _format(config: RecordedConfig) -> str:
    path = Path(config.path).expanduser()
    if urlsplit(config.path).scheme in {"s3", "file"} or (path / EXPERIENCE).is_dir():
        return "archive"
    if (path / _MINARI).is_file():
        return "minari"
    by_suffix = {".csv": "csv", ".hdf5": "hdf5", ".h5": "hdf5"}
    if path.suffix.lower() in by_suffix:
        return by_suffix[path.suffix.lower()]
    found = "a file" if path.exists() else f"it does not exist in {Path.cwd()}"
    if path.is_dir():
        listed = ", ".join(sorted(entry.name for entry in path.iterdir())[:5])
        found = f"it holds {listed or 'nothing'}"
    raise DatasetError(
        f"{config.section}.path={config.path} is of no known format ({found}); expected a run's folder with "
        f"{EXPERIENCE}, a Minari dataset's folder with {_MINARI}, an .hdf5 or .h5 file, or a .csv file"
    )


def read_csv(path: Path, description: EnvironmentDescription) -> dict[str, list[Episode]]:
    """Reads each policy's episodes, with columns `info/NAME`, NaN where missing; raises `DatasetError`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            header = [name.strip() for name in next(rows, [])]
            numbered = [(rows.line_num, row) for row in rows if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{path} cannot be read as CSV: {error}") from None
    for line, row in numbered:
        if len(row) != len(header):
            raise DatasetError(f"{path}: line {line} has {len(row)} cells, expected {len(header)} as in the first line")
    if len(description.policies) > 1 and _POLICY not in header:
        wanted = ", ".join(description.policies)
        raise DatasetError(f"{path} has no column {_POLICY}; expected in each row which policy acted, such as {wanted}")
    parts = {policy_id: _of_policy(path, header, numbered, policy_id) for policy_id in description.policies}
    spaces, told = description.policies, description.info_columns
    return {policy_id: list(episodes_of(_csv_table(its, spaces[policy_id], told))) for policy_id, its in parts.items()}


def _of_policy(path: Path, header: list[str], numbered: list[tuple[int, list[str]]], policy_id: str) -> "_Cells":
    """Returns the policy's rows, agent by agent, without columns that are empty in all of them (other policies'). Each
    row comes with its line in the file."""
    places = {name: header.index(name) for name in (_POLICY, _AGENT) if name in header}
    if _POLICY in places:
        numbered = [(line, row) for line, row in numbered if row[places[_POLICY]].strip() == policy_id]
        if not numbered:
            raise DatasetError(f"{path} has no row of policy {policy_id}; name it in the column {_POLICY}")
    if _AGENT in places:
        numbered = sorted(numbered, key=lambda each: each[1][places[_AGENT]])
    lines, rows = [line for line, _ in numbered], [row for _, row in numbered]
    if not places:
        return _Cells(path, header, rows, lines)
    kept = [at for at, name in enumerate(header) if name != _POLICY and any(row[at].strip() for row in rows)]
    where = f"{path} (policy {policy_id})"
    return _Cells(where, [header[at] for at in kept], [[row[at] for at in kept] for row in rows], lines)


def _flags(source: "_Cells | _Group", name: str, rows: int, optional: bool = False) -> Array:
    """`[M]` bool; false without such a column, if that is `optional`."""
    values = np.zeros(rows) if optional and name not in source else source.array(name)
    return flags(values, rows, f"{source.where}: {name}")


def _numbers(source: "_Cells | _Group", name: str, rows: int, reset: bool = False) -> Array:
    """`[M]` float32; NaN without such a column. The first row is left out where it is one of the `reset`."""
    if name not in source:
        return np.full(rows, np.nan, np.float32)
    values = source.array(name)
    values = values[1:] if reset and values.shape[:1] == (rows + 1,) else values
    return numbers(values, rows, f"{source.where}: {name}", unknown=True)


class _Cells:
    def __init__(
        self, where: Path | str, header: Sequence[str], cells: Sequence[Sequence[str]], lines: Sequence[int]
    ) -> None:
        if twice := sorted({name for name in header if list(header).count(name) > 1}):
            raise DatasetError(f"{where} has the columns {', '.join(twice)} more than once")
        self.where, self.lines = where, lines
        self._columns = dict(zip(header, zip(*cells, strict=True), strict=True)) if cells else dict.fromkeys(header, ())
        self.rows = len(cells)
        self.unread = set(header)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def text(self, name: str) -> tuple[str, ...]:
        if name not in self._columns:
            raise DatasetError(
                f"{self.where} has no column {name}, which the run's spaces need, only {', '.join(self._columns)}"
            )
        self.unread.discard(name)
        return self._columns[name]

    def array(self, name: str) -> Array:
        """`[M]`, float64."""
        values = np.empty(self.rows)
        for row, cell in enumerate(self.text(name)):
            try:
                values[row] = float(_WORDS.get(cell.strip().lower(), cell))
            except ValueError:
                found = f"{cell!r} in line {self.lines[row]}"
                raise DatasetError(f"{self.where}: {name} is {found}, expected a number") from None
        return values

    def space(self, spec: SpaceSpec, prefix: str, name: str) -> Columns:
        """The space's columns, from those of the file that begin with `name`."""
        columns = {}
        for leaf in spec.leaves:
            found = leaf.column(name)
            if not leaf.shape or (leaf.size == 1 and found in self):
                where, values = f"{self.where}: {found}", self.array(found)
            else:
                parts = [self.array(f"{found}.{index}") for index in range(leaf.size)]
                where, values = f"{self.where}: {found}.…", np.stack(parts, axis=1).reshape(self.rows, *leaf.shape)
            columns[leaf.column(prefix)] = as_column(where, values, leaf, action=prefix == "action")
        return columns


def _csv_table(cells: _Cells, spaces: PolicySpaces, info_columns: Sequence[str]) -> Table:
    rows, obs = cells.rows, cells.space(spaces.observation, "obs", "obs")
    action = cells.space(spaces.action, "action", "action")
    told = any(name.startswith("next_obs") for name in cells.unread)
    table = Table(
        obs,
        action,
        numbers(cells.array("reward"), rows, f"{cells.where}: reward"),
        _flags(cells, "terminated", rows),
        _flags(cells, "truncated", rows, optional=True),
        _numbers(cells, "log_prob", rows),
        cells.space(spaces.observation, "obs", "next_obs") if told else None,
        _changes(cells),
        info={name: _numbers(cells, name, rows) for name in (INFO + its for its in info_columns)},
    )
    _check_steps(cells, table)
    if cells.unread:
        unknown = ", ".join(sorted(cells.unread))
        raise DatasetError(f"{cells.where} has the columns {unknown}, which mean nothing here; leave them out")
    return table


def _changes(cells: _Cells) -> Array:
    """Returns rows after which the episode's id or the agent changes."""
    changes = np.zeros(cells.rows, np.bool_)
    for name in ("episode", _AGENT):
        if name in cells:
            ids = np.array(cells.text(name), np.str_)
            changes[:-1] |= ids[1:] != ids[:-1]
    return changes


def _check_steps(cells: _Cells, table: Table) -> None:
    if "step" not in cells:
        return
    steps = cells.array("step")
    begins = np.ones(cells.rows, np.bool_)
    begins[1:] = (table.terminated | table.truncated | _changes(cells))[:-1]
    expected = np.where(begins, 0, np.concatenate([[0], steps[:-1] + 1]))
    if (steps != expected).any():
        row = int(np.flatnonzero(steps != expected)[0])
        whose = f" of {cells.text(_AGENT)[row]}" if _AGENT in cells else ""
        raise DatasetError(
            f"{cells.where}: step is {steps[row]:g} in line {cells.lines[row]}{whose}, expected {expected[row]:g}; are "
            f"transitions missing, out of order, or is an episode's end not marked (terminated, truncated, episode)?"
        )


def read_hdf5(path: Path, description: EnvironmentDescription) -> dict[str, list[Episode]]:
    """Reads each policy's episodes, with `infos/NAME` as columns, NaN where missing; raises `DatasetError`."""
    found = {}
    with _opened(path) as file:
        for policy_id, spaces in description.policies.items():
            in_group = hasattr(file.get(policy_id), "keys")
            if len(description.policies) > 1 and not in_group:
                expected = f"expected one of each policy, found {', '.join(file)}"
                raise DatasetError(f"{path} has no group {policy_id}; {expected}")
            where, node = (f"{path}: {policy_id}", file[policy_id]) if in_group else (str(path), file)
            found[policy_id] = list(_hdf5_episodes(where, node, spaces, description.info_columns))
    return found


def _hdf5_episodes(where: str, node: Any, spaces: PolicySpaces, info_columns: Sequence[str]) -> Iterator[Episode]:
    if "observations" in node:
        yield from episodes_of(_hdf5_table(_Group(where, node), spaces, info_columns, minari=False))
        return
    names = [name for name in node if name.startswith("episode_") and name.removeprefix("episode_").isdigit()]
    if not names:
        raise DatasetError(
            f"{where} holds {', '.join(node) or 'nothing'}, expected observations, actions, rewards, terminals (D4RL) "
            f"or episode_0, episode_1, … (Minari)"
        )
    for name in sorted(names, key=lambda name: int(name.removeprefix("episode_"))):
        group = _Group(f"{where}: {name}", node[name])
        table = _hdf5_table(group, spaces, info_columns, minari=True)
        if (table.terminated | table.truncated)[:-1].any():
            raise DatasetError(f"{group.where} continues after a step that terminated or truncated it")
        yield from episodes_of(table)


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
    def __init__(self, where: str, node: Any) -> None:
        self.where, self._node = where, node

    def __contains__(self, name: str) -> bool:
        return name in self._node

    def array(self, name: str) -> Array:
        found = self._node.get(name) if hasattr(self._node, "get") else None
        if found is None or hasattr(found, "keys"):
            has = ", ".join(self._node) if hasattr(self._node, "keys") else "an array"
            kind = "is a group" if found is not None else "is missing"
            raise DatasetError(f"{self.where}: {name} {kind}, expected an array for the run's spaces, found {has}")
        return np.asarray(found[()])

    def rows(self, name: str) -> Array:
        """The same, where it has an axis."""
        values = self.array(name)
        if not values.ndim:
            raise DatasetError(f"{self.where}: {name} is a single value, expected a row for each step")
        return values

    def space(self, spec: SpaceSpec, prefix: str, name: str, rows: int) -> Columns:
        """The space's columns, `rows` long, from what stands below `name`, nested as the space is."""
        columns = {}
        for leaf, place in _places(spec, spec.structure, name):
            found = as_column(f"{self.where}: {place}", self.rows(place), leaf, action=prefix == "action")
            if len(found) != rows:
                raise DatasetError(f"{self.where}: {name} has {len(found)} rows, expected {rows} for its rewards")
            columns[leaf.column(prefix)] = found
        return columns


def _places(spec: SpaceSpec, structure: Any, place: str) -> Iterator[tuple[Leaf, str]]:
    """Each leaf and its path in the file; a tuple's items are named by their index."""
    if isinstance(structure, int):
        yield spec.leaves[structure], place
    elif "dict" in structure:
        for key, below in structure["dict"].items():
            yield from _places(spec, below, f"{place}/{key}")
    else:
        for index, below in enumerate(structure["tuple"]):
            yield from _places(spec, below, f"{place}/_index_{index}")


def _hdf5_table(group: _Group, spaces: PolicySpaces, info_columns: Sequence[str], minari: bool) -> Table:
    rewards = group.rows("rewards")
    rows, flag = len(rewards), ("terminations", "truncations") if minari else ("terminals", "timeouts")
    obs, next_obs = group.space(spaces.observation, "obs", "observations", rows + minari), None
    if minari:
        obs, next_obs = ({name: array[part] for name, array in obs.items()} for part in (slice(-1), slice(1, None)))
    elif "next_observations" in group:
        next_obs = group.space(spaces.observation, "obs", "next_observations", rows)
    log_prob = next((name for name in _LOG_PROBS if name in group), _LOG_PROBS[0])
    return Table(
        obs,
        group.space(spaces.action, "action", "actions", rows),
        numbers(rewards, rows, f"{group.where}: rewards"),
        _flags(group, flag[0], rows),
        _flags(group, flag[1], rows, optional=not minari),
        np.full(rows, np.nan, np.float32) if minari else _numbers(group, log_prob, rows),
        next_obs,
        info={INFO + name: _numbers(group, f"infos/{name}", rows, reset=minari) for name in info_columns},
    )
