"""Durations of the tests: a committed table of seconds by part and scope, from the reports of the last runs.

`make durations` writes it again. Scopes under a second are left out: `distribution.py` runs those last.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

from tests.support.suite import reports
from tests.support.suite.groups import PARTS

TABLE = Path(__file__).parents[2] / "durations.json"


def read(part: str | None) -> Counter[str]:
    """Returns seconds by scope: those of a part, or the sum of all parts."""
    table: dict[str, dict[str, int]] = json.loads(TABLE.read_text())
    return sum((Counter(scopes) for name, scopes in table.items() if part in (None, name)), Counter[str]())


def main() -> None:
    """Replaces the rows of each part that has a report."""
    from tests.support.suite.distribution import scope_of  # which needs pytest-xdist, and this module

    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for part in PARTS:
        seconds = defaultdict[str, float](float)
        for test in reports.read(part):
            seconds[scope_of(test.nodeid)] += test.seconds
        if seconds:
            longest = sorted(seconds, key=lambda scope: -seconds[scope])
            table[part] = {scope: round(seconds[scope]) for scope in longest if seconds[scope] >= 1}
            print(f"{part}: {sum(seconds.values()):.0f} s in {len(seconds)} scopes")
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
