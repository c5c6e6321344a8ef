"""Round trips of actions and steps a second through a gateway on loopback: CartPole by JSON, a 64×64 policy.

The gateway, the trainer and Redis are those of a real run with one worker. The clients are separate processes with
little code of their own, so that they are not the limit. Steps count when they are in the log and acknowledged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kit.measure import Curve, Measure, Result
from benchmarks.kit.options import Options
from benchmarks.kit.outside import CartPoles, outside_run
from benchmarks.kit.station import Station
from benchmarks.usage import processor_seconds

_SESSIONS, _CLIENTS, _FRAGMENT = 50, 2, 128
_PACE = 20.0
_SECONDS, _QUICK_SECONDS = 10.0, 2.0
_REMOTE, _ON_POLICY, _LATE = "steps/s, remote", "steps/s, local acting", "steps/s, local acting, dqn, late: learn"
_AIMS = {_REMOTE: 5000.0, _ON_POLICY: 15_000.0, _LATE: 15_000.0}
_BINS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1000]
_PPO: dict[str, Any] = {"algorithm": {"name": "ppo", "epochs": 1}}
_DQN: dict[str, Any] = {
    "algorithm": {"name": "dqn", "gradient_steps_per_env_step": 0.001}, "heatup": {"duration": "16 env_steps"},
    "policies": {"default": {"hidden_sizes": [64, 64]}}, "gateway": {"port": 0, "late": "learn"},
}  # fmt: skip


def measure(options: Options) -> Result:
    """Each line has a run of its own; its repeats are one after the other in that run."""
    seconds = _QUICK_SECONDS if options.quick else _SECONDS
    measures: list[Measure] = []
    curves: list[Curve] = []
    for sessions, pace in ((1, 0.0), (_SESSIONS, _PACE)):
        who = f"round trip, {sessions} session{'s' if sessions > 1 else ''}"
        if options.wants(who):
            with _clients(sessions, False, _PPO) as (stations, _):
                rounds = [_round(stations, seconds, pace)[1] for _ in range(options.repeats)]
            for share, aim in ((50, 2.0), (99, 10.0)):
                samples = [float(np.percentile(its, share)) for its in rounds]
                measures.append(Measure(f"{who}, p{share}", "ms", samples, aim=aim, better="less"))
            counted, _ = np.histogram(np.concatenate(rounds), [0.0, *_BINS])
            shares = 100 * np.cumsum(counted) / max(1, counted.sum())
            curves.append(
                Curve("round-trips", who, "at most ms", "% of turns", [*zip(_BINS, shares.tolist(), strict=True)])
            )
    for what, local, sections in ((_REMOTE, False, _PPO), (_ON_POLICY, True, _PPO), (_LATE, True, _DQN)):
        if options.wants(what):
            with _clients(_SESSIONS, local, sections) as (stations, pid):
                samples, costs = [], []
                for _ in range(options.repeats):
                    before = processor_seconds(pid) or 0.0
                    samples.append(_round(stations, seconds, 0.0)[0])
                    spent = (processor_seconds(pid) or 0.0) - before
                    costs.append(1e6 * spent / seconds / max(1.0, samples[-1]))
                    options.tell(f"{what}: {samples[-1]:.0f}, {costs[-1]:.0f} µs each")
            measures.append(Measure(what, "1/s", samples, aim=_AIMS[what]))
            measures.append(Measure(f"{what}: the gateway's processor time", "µs a step", costs, better="less"))
    settings = {
        "sessions": f"1 that steps as it is answered; {_SESSIONS} in {_CLIENTS} processes, {_PACE:g} steps a second "
        "each for round trips, without a pause for steps/s",
        "trainer": f"fragments of {_FRAGMENT} turns of each session, one epoch of one minibatch, lockstep; dqn: a "
        "gradient step for 1,000 turns",
        "local acting": "actions are drawn at random, since only the gateway is measured",
    }
    remarks = [
        "round trips include waits for the trainer between two versions",
        "steps/s with local acting include turns that came too late for their version and are not learned from",
        "a gateway has one interpreter: its processor time for a step is what bounds it on a machine with free cores",
    ]
    return Result("gateway", __doc__ or "", measures, settings, curves, remarks)


@contextmanager
def _clients(sessions: int, local: bool, sections: dict[str, Any]) -> Iterator[tuple[list[Station], int]]:
    """Yields the clients, warmed up, and the gateway's process."""
    clients = min(_CLIENTS, sessions)
    algorithm = {"minibatch_size": min(_FRAGMENT * sessions, 64 if local and sections is _DQN else 10**6)}
    sections = sections | {"algorithm": sections["algorithm"] | algorithm}
    rollout = {"workers": 1, "fragment_steps": _FRAGMENT, "fragments_per_update": 1}
    with (
        tempfile.TemporaryDirectory(prefix="gateway-", ignore_cleanup_errors=True) as folder,
        outside_run(Path(folder), sessions, rollout=rollout, **sections) as (run, url, token),
    ):
        stations = [Station(CartPoles, url, token, sessions // clients, local) for _ in range(clients)]
        try:
            _round(stations, 3.0, 0.0)
            yield stations, next(beat.pid for beat in run.status(accounting=False).roles if beat.id == "worker-0")
        finally:
            for station in stations:
                station.close()


def _round(stations: list[Station], seconds: float, pace: float) -> tuple[float, list[float]]:
    """Returns steps a second of all clients, and round trips in milliseconds."""
    for station in stations:
        station.begin("play", seconds, pace)
    found = [station.answer() for station in stations]
    return sum(rate for rate, _ in found), [1000 * trip for _, trips in found for trip in trips]
