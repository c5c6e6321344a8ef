"""The config's section for training from recorded experience."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.section import Section

DatasetFormat = Literal["archive", "minari", "hdf5", "csv"]


class DatasetConfig(Section):
    """Recorded experience that the rollout workers give to the trainer instead of stepping environments."""

    path: str
    """A run's folder in the store (with archived experience; also `s3://…`), a Minari dataset's folder, an HDF5 file in
    D4RL's layout, or a CSV file. The same on each machine that a worker or the coordinator runs on."""
    format: Literal["auto"] | DatasetFormat = "auto"
    """What is there; `auto` looks."""
    endpoint_url: str | None = None
    """The S3 endpoint of an archive at `s3://…`; none is AWS."""
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    """Of the transitions themselves, whatever their format. Filled in when the run is made; a worker that reads
    something else refuses to begin. Given by hand, it pins a dataset."""
