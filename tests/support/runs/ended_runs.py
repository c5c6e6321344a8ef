"""Copies of a run that has ended, as runs of other ids and configs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.loading import dump_config


def copies(run: Run, runs_dir: Path, made: Mapping[str, Mapping[str, Any]]) -> list[Run]:
    """Copies a run with an embedded store under each id, with these fields in its config."""
    found = []
    for run_id, changes in made.items():
        folder = runs_dir / run_id
        shutil.copytree(run.folder.path, folder)
        (bucket,) = (folder / "s3").glob(f"*/{run.run_id}")
        bucket.rename(bucket.with_name(run_id))
        overrides = tuple(f"{name}={value}" for name, value in changes.items())
        (folder / "config.yaml").write_text(dump_config(run.folder.config(overrides)))
        found.append(Run.attach(run_id, runs_dir))
    return found
