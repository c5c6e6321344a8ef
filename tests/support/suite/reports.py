"""JUnit reports of the last run of each part, as `make test`, `make test-rest` and `.ci/run` write them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[3] / ".pytest_cache" / "reports"
_TIME_LIMIT = re.compile(r"Timeout \(>|TimeoutE|WaitTimeout|it did not happen|never saw|timed out")


class Test(NamedTuple):
    nodeid: str
    seconds: float
    failure: str | None
    """Message of the failure or error."""

    @property
    def hit_time_limit(self) -> bool:
        """True if it failed because something took too long, as anything may on a busy machine."""
        return self.failure is not None and _TIME_LIMIT.search(self.failure) is not None


def read(name: str) -> list[Test]:
    """Returns the tests in a report; none if there is no report."""
    path = FOLDER / f"{name}.xml"
    return [_test(case) for case in ElementTree.parse(path).iter("testcase")] if path.exists() else []


def _test(case: ElementTree.Element) -> Test:
    failures = [element.get("message", "") for kind in ("failure", "error") for element in case.findall(kind)]
    file = case.attrib["classname"].replace(".", "/") + ".py"
    return Test(f"{file}::{case.attrib['name']}", float(case.attrib["time"]), "\n".join(failures) or None)
