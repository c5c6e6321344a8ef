"""The benchmark kit: files give back the samples, ratios go repeat by repeat, pages say what was reached; intervals."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kit import report
from benchmarks.kit.check import compare
from benchmarks.kit.measure import Curve, Measure, Result, write
from benchmarks.kit.options import Options, in_turns
from benchmarks.kit.report import write_index, write_page
from stagecoach.coordinator.run_access.seed_statistics import bootstrap, iqm

RESULT = Result(
    "speed",
    "How fast?",
    [
        Measure("plain", "messages/s", [100.0, 200.0, 400.0]),
        Measure("ours", "messages/s", [90.0, 220.0, 300.0], against="plain", aim=0.8),
        Measure("stall", "ms", [3.0, 4.0, 9.0], aim=5.0, better="less", note="with a slow store"),
        Measure("too slow", "messages/s", [10.0, 10.0, 10.0], against="plain", aim=0.8),
    ],
    settings={"bytes": 4096},
    curves=[Curve("speed-by-size", "ours", "bytes", "bytes/s", [(1.0, 2.0), (10.0, 20.0)])],
    made="2026-01-01T00:00:00+00:00",
    machine={"cores": 2},
)


def test_page_shows_lines_aims_notes_and_pictures(tmp_path: Path) -> None:
    """Ratios are taken repeat by repeat, and an aim is compared with the median."""
    write(RESULT, tmp_path / "speed.json")
    write_page(RESULT, tmp_path)
    write_index(tmp_path)
    page = (tmp_path / "speed.md").read_text()
    assert "| ours | messages/s | 220 | 90 – 300 | plain | **0.9** | 0.75 – 1.1 | ≥ 0.8 | yes |" in page
    assert "| too slow | messages/s | 10 | 10 – 10 | plain | **0.05** | 0.025 – 0.1 | ≥ 0.8 | NO |" in page
    assert "| stall | ms | 4 | 3 – 9 |" in page and "with a slow store" in page and '"bytes": 4096' in page
    for picture in ("speed.png", "speed-by-size.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG") and f"({picture})" in page
    assert "| [speed](speed.md) | 2026-01-01 |  | 3 | 2 of 3 |  |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("behind", "old"), [(299, ""), (300, "measured 300 commits ago"), (None, "not in this history")]
)
def test_page_is_marked_as_old_after_300_commits(
    behind: int | None, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "commits_since", lambda commit: behind)
    write(replace(RESULT, commit="0123456789ab-dirty"), tmp_path / "speed.json")
    write_page(replace(RESULT, commit="0123456789ab-dirty"), tmp_path)
    write_index(tmp_path)
    page = (tmp_path / "speed.md").read_text()
    assert old in page and ("**Old**" in page) is bool(old)
    assert ("**old**" in (tmp_path / "README.md").read_text()) is bool(old)


@pytest.mark.parametrize(("samples", "worse"), [([60.0, 130.0, 280.0], 0), ([30.0, 60.0, 120.0], 1)])
def test_check_reports_only_what_exceeds_spread_and_tolerance(samples: list[float], worse: int) -> None:
    plain, ours = RESULT.measures[0], RESULT.measures[1]
    found = replace(RESULT, measures=[plain, replace(ours, samples=samples)])
    assert len(compare(RESULT, found)) == worse


def test_sides_are_measured_in_turns_after_a_warmup() -> None:
    order: list[str] = []

    def call(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = in_turns(Options(2, quick=False), {"a": lambda: call("a"), "b": lambda: call("b")})
    assert order == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12))
def test_interquartile_mean_drops_a_quarter_at_each_end(scores: list[float]) -> None:
    left = list(scores)
    for _ in range(int(0.25 * len(scores))):
        left.remove(min(left))
        left.remove(max(left))
    assert iqm(np.array(scores)) == pytest.approx(statistics.fmean(left), abs=1e-9)


def test_interval_equals_that_of_all_resamples() -> None:
    """Four seeds can be drawn in 256 ways; so the true distribution can be counted out."""
    scores = np.array([1.0, 2.0, 4.0, 11.0])
    means = [statistics.fmean(drawn) for drawn in itertools.product(scores, repeat=4)]
    low, high = bootstrap([scores], lambda strata: strata[0].mean(), confidence=0.8, resamples=20_000)
    assert low == pytest.approx(np.quantile(means, 0.1), abs=0.3)
    assert high == pytest.approx(np.quantile(means, 0.9), abs=0.3)
