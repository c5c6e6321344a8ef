"""Judges tests that failed and passed when `.ci/run` tried them again alone, and names each.

Such a test is accepted if it hit a time limit, if this machine is slow at the moment, since then any limit can be too
short, or if tests/flakes.toml names it with a reason. Any other one fails the run: its second result is luck.

`python -m tests.support.suite.flakes quick` compares the reports `quick` and `quick-again`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.suite import reports, speed

KNOWN = Path(__file__).parents[2] / "flakes.toml"
SLOW = 1.5
"""Slowness at which every flake is accepted; the factor of tests/support/suite/speed.py."""


def judge(
    first: Sequence[reports.Test], again: Sequence[reports.Test], known: Mapping[str, str], slowness: float
) -> tuple[str, int]:
    """Returns a report, and the number of flakes that are not accepted."""
    passed = {test.nodeid for test in again if test.failure is None}
    lines, refused = list[str](), 0
    for test in first:
        if test.failure is None or test.nodeid not in passed:
            continue
        if test.nodeid in known:
            why = f"known: {known[test.nodeid]}"
        elif test.hit_time_limit:
            why = "accepted: it hit a time limit"
        elif slowness >= SLOW:
            why = f"accepted: this machine is {slowness} times slower than a quiet one"
        else:
            why, refused = "NOT KNOWN: fix it, or name it with its reason in tests/flakes.toml", refused + 1
        lines += [f"flaky: {test.nodeid}", f"  {why}", f"  {test.failure.splitlines()[0][:200]}"]
    return "\n".join(lines), refused


def main(part: str) -> int:
    known = tomllib.loads(KNOWN.read_text())
    text, refused = judge(reports.read(part), reports.read(f"{part}-again"), known, speed.measure())
    print(text)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
