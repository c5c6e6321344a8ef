"""The benchmark kit: `python -m benchmarks NAME … [--repeats 5] [--quick]`, or `make bench BENCH="…"`.

Each benchmark measures, prints a table, and writes a page, pictures and its samples into docs/benchmarks/. `check`
measures again and compares the ratios with those that are there (`make bench-check`).
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.kit.check import compare
from benchmarks.kit.measure import Result, read, write
from benchmarks.kit.options import Options
from benchmarks.kit.report import write_index, write_page
from benchmarks.provenance import ROOT, commit, machine, versions

NAMES = (
    "limits",
    "end-to-end",
    "native",
    "transport",
    "adoption",
    "checkpoint",
    "recovery",
    "memory",
    "start-up",
    "scale",
    "learner",
    "tuning",
    "peers",
)
"""In the order in which all of them run; each is `measure(options)` of a module in suite/."""
PAGES = ROOT / "docs" / "benchmarks"


def run(name: str, options: Options, command: str) -> Result:
    """One benchmark, with what it was made with."""
    load = os.getloadavg()[0]
    module = importlib.import_module(f"benchmarks.suite.{name.replace('-', '_')}")
    result: Result = module.measure(options)
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return replace(
        result, command=command, made=made, load=load, machine=machine(), commit=commit(),
        versions=versions() | result.versions,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line; answers the exit code: 0, or 1 where a check finds a ratio that has become worse."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, "check", []], help="which; all by default")
    parser.add_argument("--repeats", type=int, default=5, help="how often each thing is measured")
    parser.add_argument("--quick", action="store_true", help="only to see that it works; its figures say nothing")
    parser.add_argument("--only", nargs="+", default=(), metavar="PART", help="lines with one of these in their name")
    parser.add_argument("--cache", type=Path, default=ROOT / ".bench", help="what is kept between runs")
    parser.add_argument("--out", type=Path, help="where pages go, or what `check` compares with (docs/benchmarks/; "
                        "nothing is written there with --quick or --only)")  # fmt: skip
    given = parser.parse_args(arguments)
    checking, out = "check" in given.names, given.out or PAGES
    keeps = given.out is not None or not (given.quick or given.only)
    names = [name for name in given.names if name != "check"]
    if not names:
        there = {path.stem for path in out.glob("*.json")}
        names = [name for name in NAMES if not checking or name in there]
    options = Options(1 if given.quick else given.repeats, given.quick, tuple(given.only), given.cache)
    worse: list[str] = []
    for name in names:
        again = f" --only {' '.join(given.only)}" if given.only else ""
        result = run(name, options, f"python -m benchmarks {name} --repeats {options.repeats}{again}")
        if checking:
            worse += compare(read(out / f"{name}.json"), result)
        elif keeps:
            write(result, out / f"{name}.json")
            write_page(result, out)
            write_index(out)
            print((out / f"{name}.md").read_text(), flush=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                write_page(result, Path(folder))
                print((Path(folder) / f"{name}.md").read_text(), flush=True)
    for line in worse:
        print(f"WORSE: {line}", flush=True)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
