"""How many workers fit: against counting by hand, against trying all placements, and on a real cluster."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.coordinator.catalog.status import WorkerCapacity, check_order
from stagecoach.coordinator.fleet.capacity import fit, read_autoscaler_limit
from stagecoach.shared.base.errors import UserError

CPU1, CPU4, GPU = {"CPU": 1.0}, {"CPU": 4.0}, {"CPU": 1.0, "GPU": 0.25}


@pytest.mark.parametrize(
    ("machines", "roles", "worker", "expected"),
    [
        ([CPU4, CPU4], [CPU1, {"CPU": 0.5}], CPU1, 6),
        ([CPU4, CPU4], [CPU1, CPU1], CPU1, 6),
        ([CPU4, CPU4], [CPU1, {"CPU": 0.5}], {"CPU": 0.5}, 13),
        ([{"CPU": 0.5}, {"CPU": 0.5}], [], CPU1, 0),
        ([{"CPU": 8.0, "GPU": 1.0}, {"CPU": 8.0}], [{"CPU": 1.0, "GPU": 1.0}], GPU, 0),
        ([{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0}], [{"CPU": 1.0, "GPU": 1.0}], GPU, 4),
        ([{"CPU": 8.0, "simulator": 2.0}, {"CPU": 8.0}], [CPU1], {"CPU": 1.0, "simulator": 1.0}, 2),
        ([{"CPU": 2.0}, {"CPU": 2.0}], [{"CPU": 64.0}], CPU1, 4),
        ([{"CPU": 0.3}], [], {"CPU": 0.1}, 3),
        ([CPU1], [], {}, 10_000),
        ([], [CPU1], CPU1, 0),
    ],
)
def test_capacity_by_hand(
    machines: list[dict[str, float]], roles: list[dict[str, float]], worker: dict[str, float], expected: int
) -> None:
    assert fit(machines, roles, worker, None) == expected


def test_capacity_counts_trainer_where_it_runs() -> None:
    machines = [CPU4, {"CPU": 3.0}]
    assert fit(machines, [CPU1], {"CPU": 2.0}, None) == 3, "at best the trainer takes the odd CPU"
    assert fit(machines, [CPU1], {"CPU": 2.0}, 0) == 2, "but it runs on the other machine"


amounts = st.integers(0, 4).map(float)
machine = st.fixed_dictionaries({"CPU": amounts, "GPU": st.integers(0, 1).map(float)})


@settings(max_examples=100)
@given(st.lists(machine, max_size=3), st.lists(machine, max_size=1), st.integers(1, 2), st.integers(0, 1))
def test_capacity_is_that_of_best_placement(
    machines: list[dict[str, float]], roles: list[dict[str, float]], cpus: int, gpus: int
) -> None:
    worker = {"CPU": float(cpus), "GPU": float(gpus)}

    def left(places: tuple[int, ...]) -> int | None:
        free = [dict(machine) for machine in machines]
        for place, role in zip(places, roles, strict=True):
            free[place] = {name: amount - role[name] for name, amount in free[place].items()}
        if any(amount < 0 for machine in free for amount in machine.values()):
            return None
        return sum(min(int(machine[name] // amount) for name, amount in worker.items() if amount) for machine in free)

    possible = [left(places) for places in itertools.product(range(len(machines)), repeat=len(roles))]
    best = max((count for count in possible if count is not None), default=None)
    if best is not None:
        assert fit(machines, roles, worker, None) == best


@pytest.mark.parametrize("version", ["_private", "v2"])
def test_autoscaler_limit_is_that_of_its_monitor(tmp_path: Path, version: str) -> None:
    """Starts a process that looks like Ray's monitor, since a real one needs a cluster launcher."""
    monitor, cluster = tmp_path / "ray" / "autoscaler" / version / "monitor.py", tmp_path / "cluster.yaml"
    monitor.parent.mkdir(parents=True)
    monitor.write_text("import sys; print('up', flush=True); sys.stdin.read()")
    cluster.write_text("max_workers: 5")
    for number, (argument, expected) in enumerate(((f"--autoscaling-config={cluster}", 5), ("--logs-dir=/", 0))):
        arguments = [sys.executable, str(monitor), argument, "--gcs-address=a:1"]
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdin is not None
            process.stdout.readline()
            processes = tmp_path / str(number)
            processes.mkdir()
            (processes / str(process.pid)).symlink_to(f"/proc/{process.pid}")
            assert read_autoscaler_limit("a:1", processes) == expected
            assert read_autoscaler_limit("b:1", processes) == 0, "another cluster's"
            process.stdin.close()


def test_autoscaler_limit_is_infinite_on_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert read_autoscaler_limit("a:1", tmp_path) == math.inf


def test_capacity_refuses_with_number_that_fits() -> None:
    room = WorkerCapacity(6, False, "1 CPU", "the cluster (2 machines, 8 CPUs; the trainer takes 1 CPU)")
    room.refuse(6, "--set rollout.workers=", "add machines")
    with pytest.raises(UserError) as refused:
        room.refuse(12, "--set rollout.workers=", "add machines")
    remedy = "--set rollout.workers=6, or add machines"
    assert str(refused.value) == f"12 workers with 1 CPU each requested, but {room.cluster} has room for 6: {remedy}"
    with pytest.raises(UserError, match=r"has room for none: add machines$"):
        WorkerCapacity(0, False, "1 CPU", "the cluster").refuse(1, "--set rollout.workers=", "add machines")
    WorkerCapacity(0, True, "1 CPU", "the cluster").refuse(1000, "", "")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, None, None), "scale to 0: expected at least 1 worker; `stagecoach stop r` ends the run"),
        ((-3, None, None), "scale to -3"),
        ((10_001, None, None), "at most 10000"),
        ((None, 0, None), "--min 0: expected at least 1"),
        ((None, None, 0), "--max 0: expected at least 1"),
        ((3, 1, None), "a number or bounds, not both: `stagecoach scale r 3`"),
    ],
)
def test_orders_that_nobody_can_mean(order: tuple[int | None, int | None, int | None], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check_order("r", *order)
