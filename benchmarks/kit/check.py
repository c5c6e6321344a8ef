"""Has a ratio become worse than the one that is stored? Times are not compared: another machine has others."""

from __future__ import annotations

import statistics

from benchmarks.kit.measure import Result
from benchmarks.kit.report import figure

TOLERANCE = 0.15
"""How much worse a median may be than the stored one, beside the spread of the stored one."""


def compare(stored: Result, found: Result) -> list[str]:
    """A line for each ratio that is worse than the stored one, beyond tolerance and spread; prints all."""
    before = {measure.what: measure for measure in stored.measures if measure.against}
    worse = []
    for measure in found.measures:
        if not measure.against or measure.what not in before:
            continue
        then, now = stored.ratios(before[measure.what]), found.ratios(measure)
        median, its = statistics.median(then), statistics.median(now)
        more = measure.better == "more"
        bound = min(then) * (1 - TOLERANCE) if more else max(then) * (1 + TOLERANCE)
        bad = its < bound if more else its > bound
        line = (
            f"{found.benchmark}: {measure.what} ÷ {measure.against}: {figure(its)}, stored {figure(median)} "
            f"({figure(min(then))} – {figure(max(then))})"
        )
        print(f"{'WORSE ' if bad else 'as before '}{line}", flush=True)
        if bad:
            worse.append(line)
    return worse
