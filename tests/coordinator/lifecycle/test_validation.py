"""Memory limits in control groups of either version, and modules that hide the package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagecoach.coordinator.lifecycle.validation import check, memory_bytes
from stagecoach.shared.base.errors import UserError
from tests.conftest import minimal_config

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("line", "limits", "expected"),
    [
        ("0::/", {"memory.max": "1000\n"}, 1000),  # a container with a namespace of its own
        ("0::/user/job", {"user/job/memory.max": "max\n", "user/memory.max": "2000\n"}, 2000),
        ("0::/user/job", {"user/job/memory.max": "1500\n", "user/memory.max": "2000\n"}, 1500),
        ("0::/user/job", {"user/job/memory.max": "max\n"}, MACHINE),
        ("4:cpu,memory:/docker/a", {"memory/docker/a/memory.limit_in_bytes": "3000\n"}, 3000),
        ("4:memory:/docker/a", {"memory/memory.limit_in_bytes": "3500\n"}, 3500),  # the host's path, in a container
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("3:cpu:/a", {"memory/a/memory.limit_in_bytes": "10\n"}, MACHINE),
        ("", {}, MACHINE),
    ],
)
def test_memory_is_that_of_the_tightest_control_group(
    tmp_path: Path, line: str, limits: dict[str, str], expected: int
) -> None:
    mine, groups = tmp_path / "cgroup", tmp_path / "groups"
    mine.write_text(line)
    for name, limit in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(limit)
    assert memory_bytes(groups, mine) == expected
    assert memory_bytes(groups, tmp_path / "none") == MACHINE


@pytest.mark.parametrize("name", ["stagecoach.py", "stagecoach/__init__.py"])
def test_module_that_hides_the_package_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"{name} hides the installed package stagecoach .*; rename it"):
        check(minimal_config())
