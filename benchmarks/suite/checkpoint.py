"""How long a checkpoint keeps the trainer, whatever the store does: the time that the main thread spends on it.

A real trainer writes checkpoints every few updates into a real S3 server: directly, through a proxy that holds each PUT
back for seconds, or never. All three runs learn in turns from made fragments (random numbers in CartPole's shape), and
each learns in every round; stalls are over all checkpoints of a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.checkpoint.feeding import FeedingWorker
from benchmarks.checkpoint.slow_store import SlowStore
from benchmarks.checkpoint.stalls import TrainerStation, Updates
from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.kit.own_run import Services, own_services
from benchmarks.kit.station import Station
from benchmarks.transport.made_fragments import Shape

_AIM_MS = 5.0
_PUT_SECONDS = 2.0
_EVERY, _UPDATES, _BEGINNING = 3, 60, 6
_ON_POLICY, _OFF_POLICY = Shape(16, 8), Shape(64, 64)
_HELD = 262_144
"""Transitions in a replay buffer, all there before anything is measured."""
_NETWORKS = {"64×64": [64, 64], "2 M": [1000, 1000]}
_STORES = ("never", "fast store", "slow store")


def _cases(quick: bool) -> dict[str, dict[str, Any]]:
    """Name → what the config has of it."""
    held = 4 * _OFF_POLICY.transitions if quick else _HELD
    dqn: dict[str, Any] = {
        "name": "dqn",
        "minibatch_size": 64,
        "gradient_steps_per_env_step": 1 / _OFF_POLICY.transitions,
    }
    uniform, prioritized = ({"kind": kind, "capacity": held} for kind in ("uniform", "prioritized"))
    cases: dict[str, dict[str, Any]] = {
        "PPO, 64×64": {"algorithm": {"name": "ppo", "minibatch_size": 128, "epochs": 1}},
        "PPO, 2 M": {"algorithm": {"name": "ppo", "minibatch_size": 128, "epochs": 1}},
        "DQN, replay buffer, 64×64": {"algorithm": dqn | {"replay_buffer": uniform}, "heatup": f"{held} env_steps"},
        "DQN, prioritized, 64×64": {"algorithm": dqn | {"replay_buffer": prioritized}, "heatup": f"{held} env_steps"},
        "DQN, prioritized, 2 M": {"algorithm": dqn | {"replay_buffer": prioritized}, "heatup": f"{held} env_steps"},
    }
    return {name: cases[name] for name in list(cases)[3:4]} if quick else cases


def measure(options: Options) -> Result:
    """Each case in three runs that take turns."""
    measures: list[Measure] = []
    settings: dict[str, Any] = {
        "checkpoint.every": f"{_EVERY} updates", "updates in a round": _updates(options),
        "seconds of each PUT of the slow store": _put_seconds(options), "transitions in a replay buffer": _HELD,
        "fragments": {"PPO": vars(_ON_POLICY), "DQN": vars(_OFF_POLICY)},
    }  # fmt: skip
    with own_services(s3=True) as services, _stations(services, _put_seconds(options)) as (slow, trainers, workers):
        for name, sections in _cases(options.quick).items():
            if options.wants(name):
                found, settings[name] = _rounds(options, services, slow, trainers, workers, name, sections)
                measures += _lines(name, found)
    return Result("checkpoint", __doc__ or "", measures, settings)


@contextmanager
def _stations(services: Services, put_seconds: float) -> Iterator[tuple[Station, list[Station], list[Station]]]:
    """The slow store, and a trainer and a worker for each of the three."""
    made = [Station(SlowStore, services.s3_endpoint, put_seconds)]
    try:
        for _ in _STORES:
            made += [Station(TrainerStation), Station(FeedingWorker, 0)]
        yield made[0], made[1::2], made[2::2]
    finally:
        for station in made:
            station.close()


def _rounds(
    options: Options, services: Services, slow: Station, trainers: list[Station], workers: list[Station],
    name: str, sections: dict[str, Any],
) -> tuple[dict[str, list[Updates]], dict[str, Any]]:  # fmt: skip
    """Store → what each round's updates took; and what the trainers were."""
    shape = _ON_POLICY if name.startswith("PPO") else _OFF_POLICY
    config = _config(name.rpartition(", ")[2], shape, sections)
    parameters = 0
    for store, trainer, worker in zip(_STORES, trainers, workers, strict=True):
        endpoint = slow.call("url") if store == "slow store" else None
        launch = services.new_run(config, endpoint)
        worker.begin("feed", launch, shape)
        parameters = trainer.call("start", launch, store != "never", _BEGINNING, seconds=300)
    found: dict[str, list[Updates]] = {store: [] for store in _STORES}
    for repeat in range(options.repeats + (not options.quick)):
        for store, trainer in zip(_STORES, trainers, strict=True):
            took = trainer.call("learn", _updates(options), seconds=300)
            if repeat or options.quick:
                found[store].append(took)
            stalls = f"; stalls of {1000 * statistics.median(took.stalls):.2f} ms" if took.stalls else ""
            options.tell(f"round {repeat}: {name}, {store}: {_updates(options) / took.seconds:.1f} updates/s{stalls}")
    peaks = {store: trainer.call("peak_bytes") for store, trainer in zip(_STORES, trainers, strict=True)}
    for trainer, worker in zip(trainers, workers, strict=True):
        trainer.call("end")
        worker.answer()
    return found, {"parameters": parameters, "most bytes of a trainer's process so far": peaks}


def _updates(options: Options) -> int:
    return 2 * _EVERY if options.quick else _UPDATES


def _put_seconds(options: Options) -> float:
    return 0.1 if options.quick else _PUT_SECONDS


def _config(network: str, shape: Shape, sections: dict[str, Any]) -> dict[str, Any]:
    return {
        "environment": {"id": "CartPole-v1", "num_envs": shape.envs},
        "policies": {"default": {"hidden_sizes": _NETWORKS[network]}},
        "rollout": {"fragment_steps": shape.steps, "fragments_per_update": 1, "max_log_bytes": 4 << 30},
        "checkpoint": {"every": f"{_EVERY} updates"},
        "stop_at": {"updates": 10**9},
        **sections,
    }


def _lines(name: str, found: dict[str, list[Updates]]) -> list[Measure]:
    measures = []
    for store in _STORES[1:]:
        stalls = [[1000 * stall for stall in took.stalls] for took in found[store]]
        worked = [1000 * statistics.median(took.worked) for took in found[store]]
        who = f"{name}, {store}"
        measures += [
            Measure(f"stall p50, {who}", "ms", list(map(statistics.median, stalls)), aim=_AIM_MS, better="less"),
            Measure(f"stall p95, {who}", "ms", list(map(_p95, stalls)), aim=_AIM_MS, better="less"),
            Measure(f"stall, processor time p50, {who}", "ms", worked, better="less"),
            Measure(f"stall, longest, {who}", "ms", list(map(max, stalls)), better="less"),
        ]
    for store in _STORES:
        rates = [took.updates / took.seconds for took in found[store]]
        against = "" if store == "never" else f"updates, {name}, never"
        measures.append(Measure(f"updates, {name}, {store}", "1/s", rates, against))
    return measures


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]
