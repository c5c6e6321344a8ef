"""Virtual environments without Stagecoach, where a deployment's own pip command installs it in seconds and offline."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

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
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), "hatchling"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"pip cannot download hatchling: {done.stderr}"
