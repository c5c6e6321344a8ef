"""Benchmarks run in a process of their own, as a user runs them: what they do to their process stays there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kit.measure import Result, read

MeasureQuickly = Callable[..., Result]


@pytest.fixture
def measure_quickly(tmp_path: Path) -> MeasureQuickly:
    """`measure_quickly("limits", "memory: copy")`: one quick round of a benchmark, or of some of its lines."""

    def measure(name: str, *only: str) -> Result:
        command = [sys.executable, "-m", "benchmarks", name, "--quick", "--out", str(tmp_path)]
        command += ["--only", *only] if only else []
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return read(tmp_path / f"{name}.json")

    return measure
