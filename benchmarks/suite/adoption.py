"""How soon a published policy version is acted with: from the start of the publication to a worker's first step.

Real worker processes in lockstep wait for credit; a publisher puts the next version on the board once all of them wait.
Their environment notes the clock (one for all processes of a machine) at the first step of each fragment, whose header
tells the version. p50 and p95 are over all versions and workers of a repeat.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.adoption.publishing import LockstepPublisher, worker_processes
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.kit.own_run import Services, own_services

_P50_MS = {"64×64": 5.0, "2 M parameters": 10.0}
_P95_MS = 20.0
_NETWORKS = {"64×64": [64, 64], "2 M parameters": [1000, 1000]}
_WORKERS = (1, 4)
_VERSIONS, _WARM_UP = 60, 20
_FRAGMENT_STEPS = 4


def measure(options: Options) -> Result:
    """Networks × numbers of workers, each in a run of its own."""
    measures: list[Measure] = []
    settings: dict[str, Any] = {
        "versions in a repeat": 3 if options.quick else _VERSIONS,
        "fragment": f"{_FRAGMENT_STEPS} steps of 1 environment, which does nothing",
        "lockstep": "max_policy_lag 0, as many fragments for an update as there are workers",
    }
    with own_services() as services:
        for network, sizes in _NETWORKS.items():
            for workers in _WORKERS[:1] if options.quick else _WORKERS:
                who = f"{network}, {workers} worker{'s' if workers > 1 else ''}"
                if options.wants(who):
                    found, parameters, board_bytes = _sampled(options, services, sizes, workers)
                    measures += _lines(who, found)
                    settings[who] = {"parameters": parameters, "bytes on the board": board_bytes}
    remarks = [
        "with more workers than cores, the last of them acts after the others: their first steps take turns",
        "`with encoding` begins before the weights are copied and encoded: what the trainer does before it publishes",
    ]
    return Result("adoption", __doc__ or "", measures, settings, remarks=remarks)


def _sampled(
    options: Options, services: Services, hidden_sizes: list[int], workers: int
) -> tuple[list[tuple[list[float], list[float]]], int, int]:
    """For each repeat the milliseconds from publishing, and from encoding; parameters, and bytes on the board."""
    launch = services.new_run({
        "environment": {
            "id": "benchmarks.adoption.noting:make", "kwargs": {"fragment_steps": _FRAGMENT_STEPS}, "num_envs": 1,
        },
        "policies": {"default": {"hidden_sizes": hidden_sizes}},
        "rollout": {"fragment_steps": _FRAGMENT_STEPS, "fragments_per_update": workers, "max_policy_lag": 0,
                    "catch_up_seconds": 0},
        "algorithm": {"name": "ppo", "minibatch_size": _FRAGMENT_STEPS},
        "stop_at": {"updates": 10**9},
    }, shared_memory=True)  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="notes-") as folder:
        publisher = LockstepPublisher(launch, Path(folder), workers)
        try:
            with worker_processes(launch, Path(folder), workers):
                publisher.warm_up(1 if options.quick else _WARM_UP)
                found = []
                for repeat in range(options.repeats):
                    found.append(publisher.measure(3 if options.quick else _VERSIONS))
                    p50 = statistics.median(found[-1][0])
                    options.tell(f"round {repeat + 1}: {hidden_sizes}, {workers} workers: p50 {p50:.2f} ms")
                publisher.end()
            return found, publisher.parameters, publisher.board_bytes
        finally:
            publisher.close()


def _lines(who: str, found: list[tuple[list[float], list[float]]]) -> list[Measure]:
    published, encoded = zip(*found, strict=True)
    return [
        Measure(
            f"p50, {who}",
            "ms",
            [statistics.median(x) for x in published],
            aim=_P50_MS[who.partition(",")[0]],
            better="less",
        ),
        Measure(f"p95, {who}", "ms", [_p95(x) for x in published], aim=_P95_MS, better="less"),
        Measure(f"p50 with encoding, {who}", "ms", [statistics.median(x) for x in encoded], better="less"),
        Measure(f"p95 with encoding, {who}", "ms", [_p95(x) for x in encoded], better="less"),
    ]


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
