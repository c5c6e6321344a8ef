"""Finding a checkpoint that a person names: of a run on this machine, or in a folder of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.run_folder import RunFolder
from shared.checkpoint import CHECKPOINTS, CONFIG, MANIFEST, CheckpointStore
from shared.config import Config
from shared.config_sources import load_config
from shared.errors import CheckpointNotFound
from shared.object_store import FileStore, open_store

_EXPECTED = "a run's id, RUN/NAME, or the folder of a checkpoint or of a run (also as file:///…)"


@dataclass(frozen=True)
class Found:
    """A checkpoint, the store it is in, and its run's config."""

    config: Config
    store: CheckpointStore
    name: str
    import_path: tuple[str, ...]
    """Folders of the run's own modules."""
    made_here: bool
    """Whether the config was made on this machine; else it names code only with a person's consent (trust.py)."""


def find_checkpoint(target: str, runs_dir: Path) -> Found:
    """`target` is a run (what is promoted there, else its best, else its newest), `RUN/NAME`, or a folder.

    NAME may be `best`, `latest`, `final` or `promoted`; a folder is a checkpoint's, or a run's in a store of files or
    exported. Raises `RunNotFound` or `CheckpointNotFound` with what there is.
    """
    scheme, separator, rest = target.partition("://")
    if separator and scheme != "file":
        run_id = rest.rstrip("/").rpartition("/")[2]
        known = f"; `stagecoach watch {target}` makes a run in a bucket known here: then give {run_id}"
        raise CheckpointNotFound(
            f"no checkpoint is taken from {target}; expected {_EXPECTED}{known if scheme == 's3' else ''}"
        )
    folder = Path(rest if separator else target).expanduser().resolve()
    if (folder / MANIFEST).is_file():  # of an upload
        folder = folder.parent
    if any(folder.glob(f"*/{MANIFEST}")):
        return _in_folder(folder.parent.parent, folder.name)
    if (folder / CHECKPOINTS).is_dir():
        return _in_folder(folder, None)
    if folder.is_dir():
        raise CheckpointNotFound(f"{folder} holds no checkpoint ({MANIFEST} is missing); expected {_EXPECTED}")
    if separator or target.startswith(("/", ".", "~")):
        raise CheckpointNotFound(f"there is no folder {folder}; expected {_EXPECTED}")
    run_id, _, name = target.partition("/")
    run = RunFolder.find(run_id, runs_dir)
    config = run.config()
    address = run.live_address() or run.offline_address(config)
    store = CheckpointStore(open_store(address, config), run_id)
    return Found(config, store, store.resolve(name) if name else store.preferred(), run.import_path(), run.made_here)


def _in_folder(run_folder: Path, name: str | None) -> Found:
    if not (run_folder / CONFIG).is_file():
        raise CheckpointNotFound(
            f"{run_folder} is no run's folder: {run_folder / CONFIG} is missing, which names the environment"
        )
    config = load_config(run_folder / CONFIG, environ={})
    store = CheckpointStore(FileStore(run_folder.parent, run_folder.name), run_folder.name)
    return Found(config, store, name or store.preferred(), (), made_here=False)
