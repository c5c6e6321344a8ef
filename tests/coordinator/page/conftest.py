"""Runs for the page to show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stagecoach.coordinator.run_access.run import Run


@pytest.fixture
def runs_dir(ended_run: Run, tmp_path: Path) -> Path:
    """A folder of runs with an ended one, `a`."""
    shutil.copytree(ended_run.folder.path, tmp_path / "runs" / "a")
    return tmp_path / "runs"
