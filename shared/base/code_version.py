"""Versions of this code and of the compiler, as a checkpoint records them."""

import functools
import importlib.metadata
import os
import subprocess

from stagecoach.shared.base.errors import PACKAGE
from stagecoach.shared.base.process import child_environment

SOURCE = PACKAGE.parents[1]
"""The checkout, if the package is in one."""
CODE_VERSION = "STAGECOACH_CODE_VERSION"
"""Environment variable with the version of code that runs without an installation."""


@functools.cache
def code_version() -> str:
    """Returns the installed version; in a git checkout with its commit, and `dirty` where changed: `0.1.0+3b58d32`.
    Code that was copied to a cluster has it in `CODE_VERSION`."""
    if told := os.environ.get(CODE_VERSION):
        return told
    version = importlib.metadata.version("stagecoach-rl")
    if not (SOURCE / ".git").exists():
        return version
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=child_environment())
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}+{found.stdout.strip()}"


@functools.cache
def compiler_version(command: str) -> str:
    """Returns the first line that the compiler says of its version; empty if it cannot be run."""
    try:
        found = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.partition("\n")[0]
