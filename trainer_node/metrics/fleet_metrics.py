"""Metrics of the fleet, as rows next to training's: speed of the workers, mean and worst; where each role's time goes;
depth of the log. Taken from heartbeats every few seconds, and so by the clock: nothing that is learned depends on them.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from stagecoach.shared.base import world
from stagecoach.shared.protocol.flow_control import FlowState
from stagecoach.shared.protocol.heartbeat import Beat

PAUSE_SECONDS = 5.0


class FleetMetrics:
    """Differences between one reading of the heartbeats and the next."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], Beat] = {}
        self._time = world.monotonic()

    def row(self, beats: Sequence[Beat], flow: FlowState) -> dict[str, float]:
        now = world.monotonic()
        seconds, self._time = max(now - self._time, 1e-9), now
        alive = {(beat.role, beat.id): beat for beat in beats if beat.alive}
        both = [(its, beat) for key, beat in alive.items() if (its := self._before.get(key)) is not None]
        both = [(its, beat) for its, beat in both if its.process == beat.process]
        self._before = alive
        workers = [beat for beat in alive.values() if beat.role == "worker"]
        row: dict[str, float] = {
            "fleet/workers": len(workers),
            "fleet/workers_wanted": flow.desired_workers,
            "fleet/worker_restarts": sum(int(beat.progress.get("incarnation", 0)) for beat in workers),
            "log/bytes": flow.log_bytes,
            "log/in_flight": flow.in_flight,
            "log/window": flow.window,
        }
        acted = [_transitions(beat) - _transitions(its) for its, beat in both if beat.role == "worker"]
        if acted:
            row |= {"fleet/fps": sum(acted) / seconds, "fleet/worker_fps_mean": fmean(acted) / seconds}
            row["fleet/worker_fps_min"] = min(acted) / seconds
            row["fleet/heartbeat_age_max"] = max(beat.age_seconds for beat in workers)
        for role in ("trainer", "worker", "evaluator"):
            row |= _time_shares(role, [(its, beat) for its, beat in both if beat.role == role])
        return row


def _time_shares(role: str, both: Sequence[tuple[Beat, Beat]]) -> dict[str, float]:
    """Returns each stage's share of the time between two heartbeats, over all processes of a role."""
    spent = defaultdict[str, float](float)
    for before, beat in both:
        for stage, seconds in beat.stages.items():
            spent[stage] += max(0.0, seconds - before.stages.get(stage, 0.0))
    total = sum(spent.values())
    return {f"time_share/{role}/{stage}": seconds / total for stage, seconds in spent.items()} if total else {}


def _transitions(beat: Beat) -> int:
    return int(str(beat.progress.get("transitions", 0)))
