"""Reference results that several modules compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs.fault_run import FaultRun


@pytest.fixture
def place(tmp_path: Path) -> Iterator[FaultRun]:
    """A Redis behind a proxy, without shards."""
    found = FaultRun(tmp_path)
    yield found
    found.close()


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[FaultRun]:
    found = FaultRun(tmp_path, shards=2)
    yield found
    found.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of a run without shards or any fault."""
    found = FaultRun(tmp_path_factory.mktemp("undisturbed"))
    try:
        return found.game().finish()
    finally:
        found.close()
