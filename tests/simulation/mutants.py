"""Plants faults into the product (mutants.toml), one at a time, and walks until one is found.

`python -m tests.simulation.mutants` plants one after the other, each in a process of its own, and prints how long walks
took to find it; `--only NAME` plants those whose name has this in it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

ROOT = Path(__file__).parents[2]
MUTANTS: dict[str, dict[str, str]] = tomllib.loads((Path(__file__).parent / "mutants.toml").read_text())
_LUA = "shared/protocol/lua/"


def plant(name: str) -> None:
    """Spoils the product in this process; before anything of it is imported."""
    file, right, wrong = (MUTANTS[name][part] for part in ("file", "right", "wrong"))
    text = (ROOT / file).read_text()
    assert text.count(right) == 1, f"{name}: {file} has {text.count(right)} times {right!r}"
    spoilt = text.replace(right, wrong)
    if file.endswith(".lua"):
        _plant_script(file.removeprefix(_LUA), spoilt)
        return
    compiled = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> CodeType | None:
        path = Path(loader.path).resolve()
        return compile(spoilt, str(path), "exec") if path == ROOT / file else compiled(loader, fullname)

    SourceFileLoader.get_code = get_code  # type: ignore[method-assign,assignment]


def _plant_script(name: str, spoilt: str) -> None:
    from stagecoach.shared.protocol import scripts

    class Folder:
        """The scripts' folder, with one of them spoilt."""

        def __init__(self, path: Any, below: str = "") -> None:
            self._path, self._below = path, below

        def __truediv__(self, part: str) -> Folder:
            return Folder(self._path / part, f"{self._below}{part}" if part.endswith(".lua") else f"{part}/")

        def read_text(self) -> str:
            return spoilt if self._below == name else str(self._path.read_text())

    scripts._LUA = Folder(scripts._LUA)  # type: ignore[assignment]
    scripts.source.cache_clear()


def hunt(name: str, seconds: float = 1e9, walks: int = 1_000_000, first_seed: int = 1) -> tuple[bool, str]:
    """Walks with the fault planted, in a process of its own, for as long or as often as given.

    Returns whether it is found, and how: the seed, seconds of a processor, and the violation.
    """
    command = [sys.executable, "-m", "tests.simulation.mutants", "--plant", name, "--seconds", str(seconds)]
    command += ["--walks", str(walks), "--first-seed", str(first_seed)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = ended.stdout.strip().partition("\n")[0]
    if not said:
        raise RuntimeError(f"walks with {name} did not run: {ended.stderr.strip()[-1000:]}")
    return ended.returncode == 1 and said.startswith("seed"), said


def _walk_with(name: str, seconds: float, walks: int, first_seed: int) -> int:
    plant(name)
    from tests.simulation.walk import Plan, walk

    began = time.process_time()
    for seed in range(first_seed, first_seed + walks):
        found, spent = walk(Plan.drawn(seed)), time.process_time() - began
        if found.violation:
            print(f"seed {seed}, {spent:.0f} s: {found.violation}")
            return 1
        if spent > seconds:
            break
    print(f"not found by {seed + 1 - first_seed} walks in {spent:.0f} s")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="those with this in their name")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a processor, for each")
    parser.add_argument("--walks", type=int, default=1_000_000, help="at most, for each")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plant:
        return _walk_with(given.plant, given.seconds, given.walks, given.first_seed)
    names = [name for name in MUTANTS if given.only in name]
    missed = []
    with ThreadPoolExecutor(given.jobs) as pool:
        hunts = pool.map(lambda name: hunt(name, given.seconds, given.walks, given.first_seed), names)
        for name, (found, said) in zip(names, hunts, strict=True):
            missed += [] if found else [name]
            print(f"| {name} | {said[:150]} |", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} found; not found: {', '.join(missed) or 'none'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
