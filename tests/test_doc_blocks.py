"""The blocks of README and docs are run, page by page, as a reader would run them; test_docs.py checks them all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from docs.build_site import DOCS, ROOT
from stagecoach.coordinator.catalog.run_files import is_locked, run_paths
from tests.support.suite.pages import SHELL, blocks

GATING = ("README.md", "docs/index.md")
"""Pages that are run for each change; the others at night."""
RUN = [
    page.relative_to(ROOT).as_posix()
    for page in sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
    if any(block.language in (*SHELL, "python") and not block.not_run for block in blocks(page))
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ray if name in GATING else pytest.mark.nightly) for name in RUN]
)
def test_blocks_run(name: str, tmp_path: Path) -> None:
    """As a reader would, in an empty folder; with a copy of examples/ where the page names it."""
    if "examples" in (ROOT / name).read_text():
        shutil.copytree(ROOT / "examples", tmp_path / "examples")
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "tests.support.suite.pages", str(ROOT / name)]
    environ = os.environ | {"PATH": programs, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    with open(tmp_path / "output", "w+") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(1400)
        finally:
            with contextlib.suppress(ProcessLookupError):  # what a page leaves in the background
                os.killpg(process.pid, signal.SIGKILL)
            for path in filter(is_locked, run_paths(tmp_path / "runs")):  # and its detached runs
                subprocess.run([sys.executable, "-m", "stagecoach", "stop", path.name], cwd=tmp_path, timeout=300)
        output.seek(0)
        assert code == 0, output.read()[-5000:]
