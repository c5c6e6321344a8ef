"""What a measurement was made with: machine, commit and versions."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_CODE = ("coordinator", "rollout_worker", "trainer_node", "shared", "benchmarks")
_JOINED = dict.fromkeys(
    ("0d057e6618ba", "f2f682a9d1b9", "00f48790e5c7", "13355b372fee", "5a0ec6c4c368", "bc8143a9e3a3", "32f03b1c8705",
     "da1ec5bba474"),
    "c1dc0a37",
)  # fmt: skip
"""Commits of a branch that results name → the one commit by which it entered the log as a whole."""


def machine() -> dict[str, Any]:
    """Processor, cores and system."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}"}


def commit() -> str:
    """Of this checkout, with `-dirty` where code is not as committed; empty where there is no git."""
    try:
        name, changed = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{name}-dirty" if changed else name


@functools.cache
def in_log(name: str) -> bool:
    """True if HEAD descends from that commit; False for `-dirty` ones, and without git."""
    try:
        return bool(name) and _git("merge-base", "--is-ancestor", _JOINED.get(name, name), "HEAD") == ""
    except (OSError, subprocess.CalledProcessError):
        return False


def commits_since(name: str) -> int | None:
    """How many commits HEAD has that this one has not; None where git does not know it."""
    try:
        return int(_git("rev-list", "--count", f"{_JOINED.get(name, name)}..HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str]:
    """Of what decides the numbers."""
    named = ("stagecoach-rl", "torch", "numpy", "gymnasium", "ray")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in named}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
