"""The blocks of README and docs are run, page by page, as a reader would run them; test_docs.py checks them all."""

from __future__ import annotations

import contextlib
import os
import re
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

CHECKED = ("docs/complaints.md",)
"""Pages whose text blocks are compared with what the block before them prints."""
VARIES = re.compile(r"(…|\d\.\de-\d\d\b|\b[0-9a-f]{16,64}\b|\s+)")
"""Text that is not compared letter by letter: omissions, rounding errors, digests, white space."""


def check_text(page: Path, output: str) -> None:
    """Checks that each text block stands, line by line and in order, in the output of the block before it.

    `…` is any text, and a rounding error any number. Digests depend on the machine: those that are equal in the page
    must be equal in the output, and different ones different.
    """
    printed = dict(re.findall(r"^--- (\S+)\n(.*?)(?=^--- |\Z)", output, re.MULTILINE | re.DOTALL))
    place, digests = "", dict[str, str]()
    for block in blocks(page):
        if block.language != "text":
            place = block.place
            continue
        lines = iter(printed[place].splitlines())
        for line in block.text.splitlines():
            parts = VARIES.split(line.strip())
            pattern = re.compile("".join(map(_pattern, parts)))
            found = next(filter(None, (pattern.fullmatch(each.strip()) for each in lines)), None)
            assert found, f"{block.place} shows {line!r}, but {place} prints:\n{printed[place]}"
            shown = [part for part in parts if re.fullmatch("[0-9a-f]{16,64}", part)]
            for expected, digest in zip(shown, found.groups(), strict=True):
                assert digests.setdefault(expected[:16], digest[:16]) == digest[:16], f"{block.place}: {line}"
    assert len(set(digests.values())) == len(digests), digests


def _pattern(part: str) -> str:
    """Returns the regular expression for a part of a page's line; a digest is a group."""
    if part == "…":
        return ".*"
    if part.isspace():
        return r"\s+"
    if re.fullmatch(r"\d\.\de-\d\d", part):
        return r"\d\S*"
    return f"([0-9a-f]{{{len(part)}}})" if re.fullmatch("[0-9a-f]{16,64}", part) else re.escape(part)


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
    environ = os.environ | {
        "PATH": programs,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'clients/python'}",
        "MPLBACKEND": "Agg",
    }
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
        text = output.read()
        assert code == 0, text[-5000:]
        if name in CHECKED:
            check_text(ROOT / name, text)


@pytest.mark.parametrize(
    ("printed", "is_same"),
    [
        ("3 of 9\nat 2.0e-07, in x\n", True),
        ("4 of 9\nat 2.0e-07, in x\n", False),
        ("at 2.0e-07, in x\n3 of 9\n", False),
        (f"{'b' * 16}\n{'b' * 64}\n{'c' * 16}\n", True),
        (f"{'b' * 16}\n{'d' * 64}\n{'c' * 16}\n", False),
        (f"{'b' * 16}\n{'b' * 64}\n{'b' * 16}\n", False),
    ],
)
def test_text_of_page_is_compared(printed: str, is_same: bool, tmp_path: Path) -> None:
    text = f"{'0' * 16}\n{'0' * 64}\n{'1' * 16}\n" if printed[0] == "b" else "3 of 9\nat 1.0e-09, in …\n"
    (tmp_path / "page.md").write_text(f"```sh\ntrue\n```\n```text\n{text}```\n")
    with contextlib.nullcontext() if is_same else pytest.raises(AssertionError):
        check_text(tmp_path / "page.md", f"--- page.md:1\nother\n{printed}")
