"""How many workers fit: against counting by hand, against trying all placements, and on a real cluster."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.coordinator.catalog.status import WorkerCapacity, check_order
from stagecoach.coordinator.fleet.capacity import Additions, Machines, fit, parse_additions, read_autoscaler_config
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
    assert fit(machines, roles, worker, False, None) == expected
    apart = [{"CPU": 8.0}, CPU4]
    assert fit(apart, [CPU1], CPU1, True, None) == 8, "at best the trainer takes the smaller one"
    assert fit(apart, [CPU1], CPU1, True, 0) == 4, "but that is where it stands"
    assert fit(apart[:1], [CPU1], CPU1, True, None) == 0


amounts = st.integers(0, 4).map(float)
machine = st.fixed_dictionaries({"CPU": amounts, "GPU": st.integers(0, 1).map(float)})


@settings(max_examples=100)
@given(st.lists(machine, max_size=3), st.lists(machine, max_size=2), st.integers(1, 2), st.integers(0, 1))
def test_room_is_what_the_best_of_all_placements_leaves(
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
        found = fit(machines, roles, worker, False, None)
        assert found <= best
        if len(roles) <= 1:
            assert found == best


CLUSTER: dict[str, Any] = {
    "cluster_name": "c", "max_workers": 5, "provider": {"type": "aws", "region": "eu-west-1"},
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 4}, "node_config": {}},
        "large": {"resources": {"CPU": 16, "memory": 10**10}, "node_config": {}, "min_workers": 1, "max_workers": 3},
        "small": {"resources": {"CPU": 2}, "node_config": {}},
    },
}  # fmt: skip


def test_additions_come_from_cluster_file() -> None:
    found = parse_additions(yaml.safe_dump(CLUSTER), True)
    assert found == Additions((Machines({"CPU": 16, "memory": 10**10}, 3), Machines({"CPU": 2}, 5)), 5)
    kinds = {"local.cluster.node": {"resources": {}, "node_config": {}, "min_workers": 2, "max_workers": 2}}
    local = CLUSTER | {"provider": {"type": "local"}, "head_node_type": "local.cluster.node", "max_workers": 2}
    found = parse_additions(yaml.safe_dump(local | {"available_node_types": kinds}), True)
    assert found == Additions((Machines(None, 2),), 2), "provider local does not say how large its machines are"
    assert parse_additions(None, True) == Additions(), "a monitor without a config adds nothing"
    assert parse_additions(None, False).unknown, "an autoscaler in a container of its own"


@pytest.mark.parametrize("version", ["_private", "v2"])
def test_additions_come_from_running_monitor(tmp_path: Path, version: str) -> None:
    """A process that looks like Ray's, since a real one comes only with a cluster launcher."""
    monitor = tmp_path / "ray" / "autoscaler" / version / "monitor.py"
    monitor.parent.mkdir(parents=True)
    monitor.write_text("import sys; print('up', flush=True); sys.stdin.read()")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    arguments = [sys.executable, str(monitor), f"--autoscaling-config={tmp_path / 'cluster.yaml'}", "--gcs-address=a:1"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        processes = tmp_path / "processes"
        processes.mkdir()
        (processes / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        text, monitored = read_autoscaler_config("a:1", processes)
        assert read_autoscaler_config("b:1", processes) == (None, True), "another cluster's"
        process.stdin.close()
    assert monitored
    assert text is not None and yaml.safe_load(text) == CLUSTER


def test_capacity_refuses_with_number_that_fits() -> None:
    room = WorkerCapacity(6, 6, "1 CPU", "the cluster (2 machines, 8 CPUs; the trainer takes 1 CPU)")
    room.refuse(6, "--set rollout.workers=", "add machines")
    with pytest.raises(UserError) as refused:
        room.refuse(12, "--set rollout.workers=", "add machines")
    said = (
        f"12 workers with 1 CPU each asked for; {room.cluster} has room for 6: --set rollout.workers=6, or add machines"
    )
    assert str(refused.value) == said
    with pytest.raises(UserError, match=r"has room for none: add machines$"):
        WorkerCapacity(0, 0, "1 CPU", "the cluster").refuse(1, "--set rollout.workers=", "add machines")
    WorkerCapacity(0, None, "1 CPU", "the cluster").refuse(1000, "", "")  # an autoscaler without a limit


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
