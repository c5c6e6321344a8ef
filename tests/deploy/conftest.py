"""The packages that pip builds Stagecoach with, downloaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.installation import download_build_system


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of wheels, for environments without a package index."""
    folder = tmp_path_factory.mktemp("wheels")
    download_build_system(folder)
    return folder
