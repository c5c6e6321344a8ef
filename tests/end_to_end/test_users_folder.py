"""A folder with modules of the same names as Stagecoach's own keeps no process of a run from starting."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shared.user_code import PACKAGES, SOURCE
from tests.end_to_end.command_line import CommandLine, check_ledger
from tests.support.speed import stretched

pytestmark = pytest.mark.timeout(300)


def test_a_detached_run_in_a_folder_with_modules_of_our_names(terminal: CommandLine) -> None:
    for name in PACKAGES:
        (terminal.folder / name).mkdir()
        (terminal.folder / name / "__init__.py").write_text("raise RuntimeError('the module of the user')\n")
    for name in ("own_environment.py", "own_environment.yaml"):
        shutil.copy(SOURCE / "examples" / name, terminal.folder)

    def stagecoach(*arguments: str) -> None:
        program = Path(sys.executable).parent / "stagecoach"
        done = subprocess.run(
            [program, *arguments], cwd=terminal.folder, env=terminal.environ, capture_output=True, text=True,
            timeout=stretched(150), check=False,
        )  # fmt: skip
        assert done.returncode == 0, done

    endless = [f"--set=stop_at.{bound}" for bound in ("updates=100000", "env_steps=null", "mean_return=null")]
    stagecoach("train", "own_environment.yaml", "--run-id", "a", "--detach", *endless)
    terminal.until("a", "training", lambda status: status.version > 1)
    stagecoach("stop", "a")
    check_ledger(terminal.marker("a", ".finished"))
