"""What a benchmark is asked for, and what it may use."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """From the command line."""

    repeats: int
    """How often everything is measured; what is compared is measured in turns, so that noise meets all alike."""
    quick: bool
    """Only to see that it works: sizes and times so small that the figures say nothing."""
    only: Sequence[str] = ()
    """Parts of the lines' names; empty for all."""
    cache: Path = Path(".bench")
    """Where what takes long to make is kept between runs (virtual environments of others)."""

    def wants(self, what: str) -> bool:
        """Whether this line is asked for."""
        return not self.only or any(part in what for part in self.only)

    def tell(self, text: str) -> None:
        """How far it is, to standard error."""
        print(text, file=sys.stderr, flush=True)


def in_turns(options: Options, calls: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Name → a sample for each repeat. One round that does not count comes first; then each round calls all in turn."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(options.repeats + (not options.quick)):
        counts = options.quick or repeat > 0
        for name, call in calls.items():
            gc.collect()
            value = call()
            if counts:
                samples[name].append(value)
            options.tell(f"{'round ' + str(repeat) if counts else 'warm-up'}: {name}: {value:,.6g}")
    return samples


def per_second(call: Callable[[], int], seconds: float) -> float:
    """How much a second `call` gets done, as it says; for at least so many seconds."""
    began, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        done += call()
    return done / passed


def median_seconds(call: Callable[[], object], times: int) -> float:
    """The median of so many calls."""
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
