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
    folder = Path(target).resolve()
    if (folder / MANIFEST).is_file():  # of an upload
        folder = folder.parent
    if any(folder.glob(f"*/{MANIFEST}")):
        return _in_folder(folder.parent.parent, folder.name)
    if (folder / CHECKPOINTS).is_dir():
        return _in_folder(folder, None)
    if folder.is_dir():
        raise CheckpointNotFound(
            f"{folder} holds no checkpoint ({MANIFEST} is missing); give a run's id or such a folder"
        )
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
