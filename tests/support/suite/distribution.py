"""Distribution of tests among the processes of `pytest -n`; tests/conftest.py hands it to pytest-xdist."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.suite import durations

HEAVY = ("tests/cluster/", "tests/end_to_end/")
"""Each of their tests starts a Ray, or three: two at a time are enough for a machine."""
MOST_HEAVY = 2
APART = (
    "/test_crash_points.py", "/test_job.py", "/test_kills.py", "/test_learns.py", "/test_protocol_search.py",
    "/test_suite.py",
)  # fmt: skip
"""Files of long tests that share nothing: each test goes to whichever process is free."""


def scope_of(nodeid: str) -> str:
    """Tests with the same scope run in one process, in the order of their file."""
    file = nodeid.partition("::")[0]
    return nodeid if file.endswith(APART) else file


def longest_first(items: list[pytest.Item], part: str | None) -> None:
    """Sorts by the recorded duration of each scope, so that all processes end at about the same time."""
    seconds = durations.read(part)
    items.sort(key=lambda item: -seconds.get(scope_of(item.nodeid), 0))


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]  # of any type where it is not installed
    """Distributes whole scopes in the order of collection, and at most `MOST_HEAVY` heavy ones at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        heavy = [
            other
            for other, work in self.assigned_work.items()
            if other is not node
            and any(scope.startswith(HEAVY) and not all(tests.values()) for scope, tests in work.items())
        ]
        if len(heavy) >= MOST_HEAVY:
            light = next((scope for scope in self.workqueue if not scope.startswith(HEAVY)), None)
            if light is not None:
                self.workqueue.move_to_end(light, last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: Any) -> str | None:
        """Gives the remaining tests of a dead process to the others, except for the test at which it died (or was ended
        at its time limit), which xdist 3.8 would assign again and again."""
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
