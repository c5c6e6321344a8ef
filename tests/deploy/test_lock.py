"""requirements.lock: what pyproject.toml and constraints.txt ask for, each with hashes, and no index by name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==([^ ;]+)", LOCK, re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_lock_satisfies_every_requirement_but_torch() -> None:
    asked = [Requirement(text) for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["cluster"]]]
    assert len(asked) > 20 and "torch" not in PINS
    for each in asked:
        assert each.name == "torch" or each.specifier.contains(PINS[each.name.lower()]), str(each)


def test_lock_agrees_with_constraints() -> None:
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert {name: version for name, version in pinned if PINS.get(name.lower(), version) != version} == {}


def test_lock_has_hashes_and_names_no_index() -> None:
    entries = re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]
    assert len(entries) == len(PINS)
    assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in LOCK and "--index" not in LOCK and "--find-links" not in LOCK
    for marker in re.findall(r" ; (.*?) \\\\$", LOCK, re.MULTILINE):
        Marker(marker)
