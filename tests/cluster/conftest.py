"""Hosts on this machine, once for the tests of a module; those stand in the order of their cluster's life."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.hosts import Network, unsupported

WHY_NOT = unsupported()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder's tests with the reason where hosts cannot be created."""
    for item in items:
        if WHY_NOT is not None and item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Head, two workers, a host for services, and the laptop."""
    folder = tmp_path_factory.mktemp("hosts")
    with Network(folder, ["head", "one", "two", "services", "laptop"]) as network:
        yield network
