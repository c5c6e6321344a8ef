"""How `pytest -n` shares the tests among its processes; tests/conftest.py tells pytest-xdist so."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.groups import GROUPS, group_of

WHOLE = ("tests/cluster", "tests/end_to_end")
"""Folders of which one test at a time is enough for a machine: each has a Ray, or three."""
APART = ("tests/learning/", "tests/benchmarks/test_suite.py")
"""The tests of these compute for long and share nothing."""


def turn(item: pytest.Item) -> int:
    """The place of a test in the order of all.

    The groups come first, most valuable first, since they wait more than they compute; then the many short tests, so
    that all processes end at once.
    """
    return (*GROUPS, None).index(group_of(item))


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]  # where it is not installed, it is of any type
    """The tests of a file, or of a whole folder, run in one process, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        folder = file.rpartition("/")[0]
        return folder if folder in WHOLE else nodeid if nodeid.startswith(APART) else file

    def remove_node(self, node: Any) -> str | None:
        """What a process that is gone had still to do is done by others, but for the test at which it has died (or was
        ended, at its time limit): xdist 3.8 would give that one away again and again."""
        left = {
            scope: [nodeid for nodeid, done in tests.items() if not done]
            for scope, tests in self.assigned_work.pop(node).items()
        }
        crashed = next((nodeids.pop(0) for nodeids in left.values() if nodeids), None)
        for scope, nodeids in left.items():
            if nodeids:
                self.workqueue[scope] = dict.fromkeys(nodeids, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed
