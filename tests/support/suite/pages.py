"""Blocks of the documentation's pages; as a program, runs the blocks of one page in order.

A block is run unless `<!-- not run: reason -->` stands before it. `<!-- run first: command -->` before a block
makes what the reader has already, such as a run. All Python of a page shares one namespace, that of
`__main__`, as in a notebook. A block that begins with `# name.py` (or another file) is written to that file.
"""

from __future__ import annotations

import linecache
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHELL = ("sh", "bash", "console")
_FENCE = re.compile(
    r"^(?P<marks>`{3,})(?P<language>[\w+-]*)[^\n]*\n(?P<text>.*?)^(?P=marks)\s*$", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"<!-- (?P<kind>not run|run first): (?P<text>(?:(?!-->).)+?) -->\s*\Z", re.DOTALL)
_FILE = re.compile(r"(?:#|//) (?P<name>[\w./-]+\.\w+)\n")
_OPERATORS = re.compile(r"[;&|()<>]+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    place: str
    language: str
    text: str
    not_run: str = ""
    """Why it cannot be run; empty for a block that is run."""
    run_first: str = ""
    """Commands that make what the reader has already, such as a run."""

    @property
    def file(self) -> str:
        """The file that the block is written to, or an empty string."""
        found = _FILE.match(self.text) if self.language not in SHELL else None
        return found["name"] if found else ""

    @property
    def script(self) -> str:
        """Its commands; of a console those after `$`, without the output."""
        if self.language != "console":
            return self.text
        return "".join(re.findall(r"^\$ (.*(?:\\\n.*)*\n)", self.text, re.MULTILINE))

    def commands(self) -> Iterator[list[str]]:
        """Yields the words of each simple command, without variables that are set before it."""
        for line in self.script.replace("\\\n", " ").splitlines():
            words = shlex.shlex(re.sub(r"(^|\s)#.*", "", line), posix=True, punctuation_chars=True)
            words.whitespace_split, words.commenters = True, ""
            command: list[str] = []
            for word in [*words, ";"]:
                if not _OPERATORS.fullmatch(word):
                    if command or not re.match(r"\w+=", word):
                        command.append(word)
                elif command:
                    yield command
                    command = []


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page."""
    text = page.read_text()
    found = []
    for match in _FENCE.finditer(text):
        place = f"{page.name}:{text.count(chr(10), 0, match.start()) + 1}"
        before = text[max(0, match.start() - 1000) : match.start()]
        comments = {}
        while comment := _COMMENT.search(before):
            comments[comment["kind"].replace(" ", "_")] = comment["text"]
            before = before[: comment.start()]
        found.append(Block(place, match["language"], match["text"], **comments))
    return found


def run(page: Path) -> None:
    """Runs a page's blocks in the working directory.

    Raises:
        subprocess.CalledProcessError: if a command of a shell block fails.
    """
    namespace = vars(sys.modules["__main__"])
    for block in blocks(page):
        if block.not_run:
            continue
        print(f"--- {block.place}", flush=True)
        if block.run_first:
            _shell(block.run_first)
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            linecache.cache[block.place] = (len(block.text), None, block.text.splitlines(keepends=True), block.place)
            exec(compile(block.text, block.place, "exec"), namespace)
        elif block.language in SHELL:
            _shell(block.script)


def _shell(script: str) -> None:
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.path[0] = ""
    run(Path(sys.argv[1]))
