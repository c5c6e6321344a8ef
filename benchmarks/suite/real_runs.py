"""Real runs that are measured in their steady state, all in one Ray."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.provenance import ROOT
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.flow_control import Flow, FlowState
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.runtime.run_context import RunContext, open_run_context

_START_SECONDS = 300.0
_EDGE_SECONDS = 0.005
"""How exactly the moment of a publication is seen."""


@contextmanager
def real_run(config: Config) -> Iterator[tuple[Run, RunContext]]:
    """Started, with what looks into it; ended in any case."""
    run = Run.start(config, "measured", import_path=(str(ROOT),))
    try:
        address = run.folder.live_address()
        assert address is not None, "it was started a moment ago"
        role = open_run_context(run.config, address, "coordinator")
        try:
            yield run, role
        finally:
            role.redis.close()
    finally:
        run.abandon()
        run.wait(_START_SECONDS)


def wait_for_first_versions(run: Run, flow: Flow) -> None:
    """Raises `RuntimeError` where the run ends instead."""
    poll(Wait("the run's first versions", _START_SECONDS), lambda: run.ended or flow.read().version >= 3)
    if run.ended:
        raise RuntimeError(f"the run has ended: {run.wait(1.0).reason}")


def speed(flow: Flow, config: Config, seconds: float) -> float:
    """Env steps/s that are behind a published version, from one publication to another at least so much later."""
    first, began = _publication(flow)
    time.sleep(seconds)
    last, ended = _publication(flow)
    rollout = config.rollout
    transitions = (last.consumed - first.consumed) * rollout.fragment_steps * config.environment.num_envs
    return transitions / (ended - began)


def _publication(flow: Flow) -> tuple[FlowState, float]:
    """The flow at the next publication, and when that was."""
    before = flow.read().version
    wait = Wait("the next policy version", _START_SECONDS)
    while (state := flow.read()).version == before:
        wait.check()
        time.sleep(_EDGE_SECONDS)
    return state, time.perf_counter()


@contextmanager
def one_ray(cpus: int = 3) -> Iterator[None]:
    """One Ray for all runs: each uses the one that its process is connected to.

    Three CPUs are enough for trainer, worker and evaluator; Ray starts as many idle processes beforehand.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()
