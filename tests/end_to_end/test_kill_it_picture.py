"""README's moving picture is drawn from real runs whose processes are killed."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from docs import kill_it


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_kill_it_picture_shows_kills_and_equal_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "kill-it.svg"
    kill_it.main(target)
    text = target.read_text()
    ET.fromstring(text)
    digests = re.findall(r"sha256 ([0-9a-f]{64})<", text)
    assert len(digests) == 2 and digests[0] == digests[1] and digests[0] in capfd.readouterr().out
    assert re.findall(r"kill -9 \d+  # (\w+)<", text) == ["worker", "trainer"]
    committed = Path(kill_it.__file__).with_name("kill-it.svg").read_text()
    assert committed.count("\n") == text.count("\n"), "run docs/kill_it.py"
