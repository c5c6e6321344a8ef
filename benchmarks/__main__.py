"""The benchmark kit: `python -m benchmarks NAME … [--repeats 3] [--quick]`, or `make bench BENCH="…"`.

Each benchmark measures, prints a table, and writes a page, pictures and its samples into docs/benchmarks/. Without
names all of them do, one after the other, and say how long it is going to take. `check` measures again and compares the
ratios with those that are there (`make bench-check`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.kit.check import compare
from benchmarks.kit.leaderboard import write_leaderboard
from benchmarks.kit.measure import Result, read, write
from benchmarks.kit.options import Options
from benchmarks.kit.report import write_index, write_page
from benchmarks.provenance import ROOT, commit, machine, versions


@dataclass(frozen=True)
class Page:
    """A benchmark of its own page."""

    minutes: float
    """On two quiet cores with three repeats, everything installed."""
    module: str = ""
    """Module in suite/, if its name differs from the page's. The `peers` module also receives the page's name."""
    most_repeats: int = 1000
    """Upper bound of `--repeats`, for pages whose single repeat takes minutes."""


NAMES = {
    "limits": Page(2),
    "end-to-end": Page(6),
    "native": Page(2),
    "transport": Page(5),
    "adoption": Page(1),
    "gateway": Page(4),
    "checkpoint": Page(5),
    "recovery": Page(2),
    "memory": Page(5, most_repeats=1),
    "start-up": Page(2),
    "scale": Page(5, most_repeats=1),
    "learner": Page(5),
    "tuning": Page(9, most_repeats=1),
    "peers": Page(12),
    "peers-native": Page(4, "peers"),
    "peers-control": Page(14, "peers"),
    "peers-images": Page(10, "peers"),
    "peers-recovery": Page(7, "peers_recovery"),
    "time-to": Page(20, "time_to"),
}
"""In the order in which all of them run; each is `measure(options)` of a module in suite/."""
PAGES = ROOT / "docs" / "benchmarks"


def run(name: str, options: Options, command: str) -> Result:
    """One benchmark, with what it was made with."""
    load, page = os.getloadavg()[0], NAMES[name]
    module = importlib.import_module(f"benchmarks.suite.{page.module or name.replace('-', '_')}")
    result: Result = module.measure(options, name) if page.module == "peers" else module.measure(options)
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return replace(
        result, command=command, made=made, load=load, machine=machine(), commit=commit(),
        versions=versions() | result.versions,
    )  # fmt: skip


def write_pages(result: Result, folder: Path) -> None:
    """Its page and pictures."""
    (write_leaderboard if result.benchmark == "time-to" else write_page)(result, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line; answers the exit code: 0, or 1 where a check finds a ratio that has become worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, "check", []], help="which; all by default")
    parser.add_argument("--repeats", type=int, default=3, help="how often each thing is measured")
    parser.add_argument("--quick", action="store_true", help="only to see that it works; its figures say nothing")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="lines with one of these in their name")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="what is kept between runs")
    parser.add_argument("--out", type=Path, help="where pages go, or what `check` compares with (docs/benchmarks/; "
                        "nothing is written there with --quick or --only)")  # fmt: skip
    given = parser.parse_args(arguments)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # with it each process of a run compiles all modules again
    checking, out = "check" in given.names, given.out or PAGES
    keeps = given.out is not None or not (given.quick or given.only)
    names = [name for name in given.names if name != "check"]
    if not names:
        there = {path.stem for path in out.glob("*.json")}
        names = [name for name in NAMES if not checking or name in there]
    worse: list[str] = []
    for number, name in enumerate(names):
        repeats = 1 if given.quick else min(given.repeats, NAMES[name].most_repeats)
        options = Options(repeats, given.quick, tuple(given.only), given.cache)
        left = sum(_minutes(one, given.repeats) for one in names[number:])
        took = "" if given.quick else f", about {_minutes(name, given.repeats):.0f} min of {left:.0f} left"
        options.tell(f"== {number + 1} of {len(names)}: {name}{took}")
        began, again = time.monotonic(), f" --only {' '.join(given.only)}" if given.only else ""
        result = run(name, options, f"python -m benchmarks {name} --repeats {repeats}{again}")
        options.tell(f"== {name} took {(time.monotonic() - began) / 60:.1f} min")
        if checking:
            worse += compare(read(out / f"{name}.json"), result)
        elif keeps:
            write(result, out / f"{name}.json")
            write_pages(result, out)
            write_index(out)
            print((out / f"{name}.md").read_text(), flush=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                write_pages(result, Path(folder))
                print((Path(folder) / f"{name}.md").read_text(), flush=True)
    for line in worse:
        print(f"WORSE: {line}", flush=True)
    return 1 if worse else 0


def _minutes(name: str, repeats: int) -> float:
    """Estimates the minutes of this many repeats from those of three."""
    page = NAMES[name]
    return page.minutes * (min(repeats, page.most_repeats) / min(3, page.most_repeats))


if __name__ == "__main__":
    sys.exit(main())
