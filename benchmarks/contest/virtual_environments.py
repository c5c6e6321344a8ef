"""The peers' own virtual environments: made once from pinned requirements, and reused while those stay as they are."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
_MADE_FROM = "made-from.sha256"
_INSTALL_SECONDS = 1800.0


class NotInstalled(Exception):
    """A peer that cannot be installed here; the message ends with what the installer said last."""


def python_of(peer: str, cache: Path, *, install: bool, tell: Callable[[str], None]) -> Path:
    """Its interpreter. Raises `NotInstalled` where the environment is not there and cannot, or must not, be made."""
    requirements = REQUIREMENTS / f"{peer}.txt"
    folder = cache.resolve() / "peers" / peer
    python, made_from = folder / "bin" / "python", folder / _MADE_FROM
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if made_from.is_file() and made_from.read_text() == digest:
        return python
    if not install:
        raise NotInstalled(f"{peer} is not installed in {folder}, or not as {requirements.name} has it now")
    tell(f"installing {peer} into {folder} (some minutes the first time) …")
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    run(peer, [sys.executable, "-m", "venv", str(folder)])
    run(peer, [str(python), "-m", "pip", "install", "--quiet", "--requirement", str(requirements)])
    made_from.write_text(digest)
    return python


def run(peer: str, command: list[str]) -> None:
    """One step of an installation; raises `NotInstalled` with the last line of what it said."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_INSTALL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"{peer} cannot be installed: {error}") from None
    if done.returncode:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise NotInstalled(f"{peer} cannot be installed: {said[-1] if said else f'exit code {done.returncode}'}")
