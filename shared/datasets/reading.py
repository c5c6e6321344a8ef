"""A dataset of any format, read as one recording."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from shared.archive import EXPERIENCE
from shared.dataset_config import DatasetFormat, RecordedConfig
from shared.datasets import from_archive, from_csv, from_hdf5
from shared.datasets.recording import Episode, Recording
from shared.errors import DatasetError
from shared.spaces import EnvironmentDescription

_MINARI = Path("data", "main_data.hdf5")


def read_dataset(config: RecordedConfig, description: EnvironmentDescription) -> Recording:
    """All of it, for the run's environment; raises `DatasetError`, or what the store of an archive raises."""
    if len(description.agents) != 1:
        raise DatasetError(
            f"{config.section}.path={config.path}: recorded experience is that of one agent, the run's environment has "
            f"{', '.join(description.agents)}"
        )
    (spaces,) = description.policies.values()
    kind, path = _format(config), Path(config.path).expanduser()
    if kind == "archive":
        episodes = from_archive.read(config.path, description, config.endpoint_url)
    elif not path.exists():
        raise DatasetError(f"{config.section}.path={config.path} does not exist; expected a {kind} dataset there")
    elif kind == "csv":
        episodes = from_csv.read(path, spaces)
    else:
        episodes = from_hdf5.read(path / _MINARI if kind == "minari" and path.is_dir() else path, spaces)
    recording = Recording(spaces, _good_enough(config, episodes), config.path)
    if config.sha256 not in (None, recording.sha256):
        raise DatasetError(
            f"{config.section}.path={config.path} has the SHA-256 {recording.sha256[:12]}, the run was made with "
            f"{str(config.sha256)[:12]} ({config.section}.sha256); bring back what was there, or start a new run"
        )
    return recording


def _good_enough(config: RecordedConfig, episodes: list[Episode]) -> list[Episode]:
    if config.min_return is None:
        return episodes
    records = [episode.record for episode in episodes if episode.record is not None]
    best = max((record.episode_return for record in records), default=None)
    if best is None or best < config.min_return:
        raise DatasetError(
            f"{config.section}.min_return={config.min_return}: the best whole episode of {config.path} returned "
            f"{'nothing: there is none' if best is None else f'{best:g}'}"
        )
    return [item for item in episodes if item.record is not None and item.record.episode_return >= config.min_return]


def _format(config: RecordedConfig) -> DatasetFormat:
    if config.format != "auto":
        return config.format
    path = Path(config.path).expanduser()
    if urlsplit(config.path).scheme in {"s3", "file"} or (path / EXPERIENCE).is_dir():
        return "archive"
    if (path / _MINARI).is_file():
        return "minari"
    suffix = path.suffix.lower()
    if suffix == ".csv":
        return "csv"
    if suffix in {".hdf5", ".h5"}:
        return "hdf5"
    found = "it does not exist" if not path.exists() else f"it holds {_listed(path)}" if path.is_dir() else "a file"
    raise DatasetError(
        f"{config.section}.path={config.path} is of no known format ({found}); expected a run's folder with "
        f"{EXPERIENCE}, a Minari dataset's folder with {_MINARI}, an .hdf5 or .h5 file, or a .csv file"
    )


def _listed(path: Path) -> str:
    return ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
