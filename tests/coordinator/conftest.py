"""The command line in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from coordinator.cli import main
from tests.coordinator.terminal import CONFIG, Stagecoach
from tests.end_to_end.command_line import Ended


@pytest.fixture
def stagecoach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Stagecoach]:
    """`stagecoach …` in this process, in a folder of its own that has a `config.yaml`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["stagecoach", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capfd.readouterr()
        return Ended(code, printed.out, printed.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
