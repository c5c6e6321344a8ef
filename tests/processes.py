"""How `pytest -n` shares the tests among its processes; tests/conftest.py tells pytest-xdist so."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

FOLDERS = ("cluster", "deploy", "benchmarks", "trainer_node", "rollout_worker", "chaos", "coordinator", "end_to_end")
"""In which order they are taken up: the whole clusters first, which take longest and wait most, beside tests that start
no Ray; then those that do; and last the many short ones, so that all processes end at once."""


class WholeFiles(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]  # where it is not installed, it is of any type
    """The tests of a file run in one process, one after the other, and so do all whole clusters: a machine has room for
    one at a time."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        return "tests/cluster" if file.startswith("tests/cluster/") else file

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
