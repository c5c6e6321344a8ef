"""Limits of control groups, workers beyond the cores, and modules that hide the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.lifecycle.validation import available_cores, check, excess_workers, memory_bytes
from stagecoach.shared.base.errors import UserError
from tests.conftest import minimal_config
from tests.support.processes.command_line import command_line

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


def test_workers_far_beyond_cores_are_named_with_what_fits(tmp_path: Path) -> None:
    quota, cores = tmp_path / "cpu.max", len(os.sched_getaffinity(0))
    for text, expected in (("150000 100000\n", min(2, cores)), ("50000 100000\n", 1), ("max 100000\n", cores)):
        quota.write_text(text)
        assert available_cores(quota) == expected
    assert available_cores(tmp_path / "none") == cores
    rollout = {"fragment_steps": 8, "fragments_per_update": 2}
    few, many = (minimal_config(rollout=rollout | {"workers": workers}) for workers in (8, 9))
    assert excess_workers(few, 4) is None
    assert "rollout.workers=9 on 4 cores" in str(excess_workers(many, 4))
    servers: dict[str, Any] = {"redis": {"url": "redis://h:1"}, "store": {"url": "s3://b"}, "ray": {"address": "auto"}}
    assert excess_workers(many.replace(servers), 4) is None


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", [[], ["--detach"]], ids=str)
def test_train_warns_of_workers_beyond_cores(flags: list[str], tmp_path: Path) -> None:
    former = os.sched_getaffinity(0)
    with command_line(tmp_path) as terminal:
        config = terminal.write_config(rollout={"workers": 3, "fragment_steps": 8}, stop_at={"updates": 1})
        os.sched_setaffinity(0, {min(former)})  # which a process inherits
        try:
            started = terminal.start("train", config, "--run-id", "a", *flags)
        finally:
            os.sched_setaffinity(0, former)
        done = terminal.ended(started)
    assert done.code == 0
    assert done.err.startswith("Warning: rollout.workers=3 on 1 core: 1 can act at once"), done.err
    assert done.err.endswith("set rollout.workers=1\n")
