"""Metrics of the fleet, as rows next to training's: speed of the workers, mean and worst; where each role's time goes;
depth of the log. Taken from heartbeats every few seconds, and so by the clock: nothing that is learned depends on them.
"""

import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from stagecoach.shared.protocol.flow_control import FlowState
from stagecoach.shared.protocol.heartbeat import Beat

PAUSE_SECONDS = 5.0


class FleetMetrics:
    """Differences between one look at the heartbeats and the next."""

    def __init__(self) -> None:
        self._before: dict[str, Beat] = {}
        self._time = time.monotonic()

    def row(self, beats: Sequence[Beat], flow: FlowState) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._time = max(now - self._time, 1e-9), now
        alive = [beat for beat in beats if beat.alive]
        workers = [beat for beat in alive if beat.role == "worker"]
        row: dict[str, float] = {
            "fleet/workers": len(workers),
            "fleet/workers_wanted": flow.desired_workers,
            "fleet/worker_restarts": sum(int(beat.progress.get("incarnation", 0)) for beat in workers),
            "log/bytes": flow.log_bytes,
            "log/in_flight": flow.in_flight,
            "log/window": flow.window,
        }
        speeds = [self._acted(beat) / seconds for beat in workers if self._known(beat) is not None]
        if speeds:
            row |= {"fleet/fps": sum(speeds), "fleet/worker_fps_mean": fmean(speeds)}
            row["fleet/worker_fps_min"] = min(speeds)
            row["fleet/heartbeat_age_max"] = max(beat.age_seconds for beat in workers)
        for role in ("trainer", "worker", "evaluator"):
            row |= self._shares(role, [beat for beat in alive if beat.role == role])
        self._before = {f"{beat.role}:{beat.id}": beat for beat in alive}
        return row

    def _known(self, beat: Beat) -> Beat | None:
        """Returns the last heartbeat of the same process."""
        before = self._before.get(f"{beat.role}:{beat.id}")
        return before if before is not None and before.process == beat.process else None

    def _acted(self, beat: Beat) -> int:
        before = self._known(beat)
        return 0 if before is None else _transitions(beat) - _transitions(before)

    def _shares(self, role: str, beats: Sequence[Beat]) -> dict[str, float]:
        """Stage → its share of the time since the last look, over all processes of a role."""
        spent: dict[str, float] = {}
        for beat in beats:
            if (before := self._known(beat)) is not None:
                for stage, seconds in beat.stages.items():
                    passed = max(0.0, seconds - before.stages.get(stage, 0.0))
                    spent[stage] = spent.get(stage, 0.0) + passed
        total = sum(spent.values())
        return {f"time_share/{role}/{stage}": passed / total for stage, passed in spent.items()} if total else {}


def _transitions(beat: Beat) -> int:
    progress: Mapping[str, object] = beat.progress
    return int(str(progress.get("transitions", 0)))
