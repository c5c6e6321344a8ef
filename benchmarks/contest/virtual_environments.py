"""The peers' own virtual environments: made once from pinned requirements, and reused while those stay as they are.
And MuJoCo, in a folder that is put on the path of our own programs where our environment has none.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
_MADE_FROM = "made-from.sha256"
_INSTALL = ("-m", "pip", "install", "--quiet")
_INSTALL_SECONDS = 1800.0


class NotInstalled(Exception):
    """A peer that cannot be installed here; the message ends with what the installer said last."""


def python_of(peer: str, cache: Path, *, install: bool, tell: Callable[[str], None]) -> Path:
    """Its interpreter. Raises `NotInstalled` where the environment is not there and cannot, or must not, be made."""

    def make(folder: Path) -> None:
        run(peer, [sys.executable, "-m", "venv", str(folder)])
        run(peer, [str(folder / "bin" / "python"), *_INSTALL, "--requirement", str(REQUIREMENTS / f"{peer}.txt")])

    return _made(peer, cache, make, install, tell) / "bin" / "python"


def mujoco_path(cache: Path, *, install: bool, tell: Callable[[str], None]) -> tuple[Path, ...]:
    """Folders that have to be on the path so that `import mujoco` works here; raises `NotInstalled`."""
    if importlib.util.find_spec("mujoco") is not None:
        return ()

    def make(folder: Path) -> None:
        command = [sys.executable, *_INSTALL, "--no-deps", "--target", str(folder)]
        run("mujoco", [*command, "--requirement", str(REQUIREMENTS / "mujoco.txt")])

    return (_made("mujoco", cache, make, install, tell),)


def _made(what: str, cache: Path, make: Callable[[Path], None], install: bool, tell: Callable[[str], None]) -> Path:
    """The folder, made anew where its requirements have changed."""
    requirements, folder = REQUIREMENTS / f"{what}.txt", cache.resolve() / "peers" / what
    digest, made_from = hashlib.sha256(requirements.read_bytes()).hexdigest(), folder / _MADE_FROM
    if made_from.is_file() and made_from.read_text() == digest:
        return folder
    if not install:
        raise NotInstalled(f"{what} is not installed in {folder}, or not as {requirements.name} has it now")
    tell(f"installing {what} into {folder} (some minutes the first time) …")
    if folder.exists():
        shutil.rmtree(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    make(folder)
    made_from.write_text(digest)
    return folder


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
