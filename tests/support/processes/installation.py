"""Virtual environments without Stagecoach, where a deployment's own pip command installs it in seconds and offline."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parents[3]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
LINKED = sorted(path.name for path in (ROOT / "src" / "stagecoach").iterdir() if path.is_symlink())
TRAVELING: list[str] = [*BUILD["sdist"]["only-include"], *LINKED]
"""What has to reach a machine that installs Stagecoach from a checkout."""
SCRIPTS = ("pip", "ray")
"""Programs of the requirements that deployments call."""


def make_environment(folder: Path, seen_as: Path | None = None) -> None:
    """Creates a virtual environment that has this session's requirements; its machine sees it as `seen_as`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # no .pth file of these folders is read, so this checkout, which one names, stays outside
    (site / "requirements.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    for name in SCRIPTS:
        (entry,) = distribution(name).entry_points.select(group="console_scripts", name=name)
        script = folder / "bin" / name
        lines = [f"#!{seen_as or folder}/bin/python", "import sys", f"from {entry.module} import {entry.attr}"]
        script.write_text("\n".join([*lines, f"sys.exit({entry.attr}())\n"]))
        script.chmod(0o755)


def write_pip_config(home: Path, wheels: Path) -> None:
    """Lets pip in `home` take packages from the folder `wheels` alone."""
    config = home / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f"[global]\nno-index = true\nfind-links = {wheels}\ndisable-pip-version-check = true\n")


def download_build_system(wheels: Path) -> None:
    """Downloads the packages that pip builds Stagecoach with."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), "hatchling", "editables"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"pip cannot download the build system: {done.stderr}"


class Machine:
    """A home folder that holds nothing of ours but a virtual environment with the requirements."""

    def __init__(self, home: Path, wheels: Path) -> None:
        self.home, self.environment = home, home / "stagecoach-venv"
        home.mkdir()
        make_environment(self.environment)
        write_pip_config(home, wheels)
        (home / "bin").mkdir()

    def add_tool(self, name: str, script: str) -> None:
        """Puts a shell script on its path."""
        tool = self.home / "bin" / name
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

    def run(self, command: str, folder: Path | None = None, environ: Mapping[str, str] | None = None) -> str:
        """Runs a command as in a fresh session of its user; returns what it prints."""
        path = f"{self.home}/bin:{self.environment}/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder or self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", **(environ or {})},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout


def copy(name: str, target: Path) -> None:
    """Copies a file or folder of this checkout."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if (ROOT / name).is_symlink():
        target.symlink_to((ROOT / name).readlink())
    elif (ROOT / name).is_dir():
        shutil.copytree(ROOT / name, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(ROOT / name, target)
