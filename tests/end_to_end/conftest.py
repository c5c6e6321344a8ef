"""The command line that these tests type into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command_line import CommandLine


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[CommandLine]:
    """Stagecoach in a folder of the test's own; whatever a run leaves behind is ended."""
    terminal = CommandLine(tmp_path)
    yield terminal
    terminal.close()
