"""The benchmark kit: files give back the samples, ratios go repeat by repeat, pages say what was reached, checks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.kit.check import compare
from benchmarks.kit.measure import Curve, Measure, Result, reached, read, write
from benchmarks.kit.options import Options, in_turns
from benchmarks.kit.report import write_index, write_page

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


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    write(RESULT, tmp_path / "speed.json")
    found = read(tmp_path / "speed.json")
    assert replace(found, curves=()) == replace(RESULT, curves=()) and list(found.curves) == list(RESULT.curves)


def test_ratios_are_taken_repeat_by_repeat() -> None:
    assert RESULT.ratios(RESULT.measures[1]) == pytest.approx([0.9, 1.1, 0.75])


@pytest.mark.parametrize(("index", "expected"), [(0, None), (1, True), (2, True), (3, False)])
def test_an_aim_is_compared_with_the_median(index: int, expected: bool | None) -> None:
    assert reached(RESULT, RESULT.measures[index]) is expected


def test_a_page_shows_lines_aims_notes_settings_and_pictures(tmp_path: Path) -> None:
    write(RESULT, tmp_path / "speed.json")
    write_page(RESULT, tmp_path)
    write_index(tmp_path)
    page = (tmp_path / "speed.md").read_text()
    assert "| ours | messages/s | 220 | 90 – 300 | plain | **0.9** | 0.75 – 1.1 | ≥ 0.8 | yes |" in page
    assert "| too slow | messages/s | 10 | 10 – 10 | plain | **0.05** | 0.025 – 0.1 | ≥ 0.8 | NO |" in page
    assert "with a slow store" in page and '"bytes": 4096' in page
    for picture in ("speed.png", "speed-by-size.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG") and f"({picture})" in page
    assert "| [speed](speed.md) | 2026-01-01 | 3 | 2 of 3 |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(("samples", "worse"), [([60.0, 130.0, 280.0], 0), ([30.0, 60.0, 120.0], 1)])
def test_a_check_finds_only_what_is_worse_beyond_spread_and_tolerance(samples: list[float], worse: int) -> None:
    plain, ours = RESULT.measures[0], RESULT.measures[1]
    found = replace(RESULT, measures=[plain, replace(ours, samples=samples)])
    assert len(compare(RESULT, found)) == worse


def test_what_is_compared_is_measured_in_turns_after_a_round_that_does_not_count(tmp_path: Path) -> None:
    order: list[str] = []

    def call(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = in_turns(Options(2, quick=False), {"a": lambda: call("a"), "b": lambda: call("b")})
    assert order == ["a", "b"] * 3
    assert samples == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
