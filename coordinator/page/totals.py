"""Counters of a run that never fall while its processes are replaced."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from stagecoach.trainer_node.metrics.update_metrics import LAG_BUCKETS

ROLES = ("coordinator", "trainer", "rank", "evaluator", "worker")
OTHER = "other"
MOST_NAMES = 48
"""Maximum number of names of waits, or stages, a role; heartbeats are foreign data, so the rest counts as `other`."""
_ROUNDING_SECONDS = 0.5
"""Less than the time between beats, more than the rounding of a heartbeat's seconds."""


class Spent(NamedTuple):
    kind: str
    """`waited` or `stages`, as heartbeats name them."""
    role: str
    name: str


class _Process(NamedTuple):
    id: str
    age_seconds: float
    spent: dict[Spent, float]


class Totals:
    """Sums over processes. One thread calls `add`, which replaces `spent` and `highest` and never changes them."""

    def __init__(self) -> None:
        self.spent: dict[Spent, float] = {}
        """Seconds of all processes seen."""
        self.highest: dict[tuple[str, ...], float] = {}
        """Highest value of each number that outlives processes, because Redis or the checkpoints hold it. A resumed
        trainer starts at its checkpoint's numbers and exceeds these once it has reread the log."""
        self._gone: dict[Spent, float] = {}
        self._newest: dict[str, _Process] = {}

    def add(self, state: Mapping[str, Any]) -> None:
        for beat in state.get("roles", ()):
            self._add_process(f"{beat['role']}:{beat['id']}", beat)
        spent = dict(self._gone)
        for process in self._newest.values():
            _add(spent, process.spent)
        self.spent = spent
        highest = dict(self.highest)
        for key, value in _lasting(state):
            highest[key] = max(value, highest.get(key, 0.0))
        self.highest = highest

    def _add_process(self, name: str, beat: Mapping[str, Any]) -> None:
        role = beat["role"] if beat["role"] in ROLES else OTHER
        spent = [(kind, each, value) for kind in ("waited", "stages") for each, value in beat[kind].items()]
        seconds = {Spent(kind, role, each): _number(value) for kind, each, value in spent}
        age = sum(value for key, value in seconds.items() if key.kind == "stages")
        before = self._newest.get(name)
        if before is not None and before.id == beat["process"] and age > before.age_seconds - _ROUNDING_SECONDS:
            # a nested wait interrupts the outer one, whose seconds are reported again when it continues
            seconds = {key: max(value, before.spent.get(key, 0.0)) for key, value in (before.spent | seconds).items()}
        elif before is not None:
            _add(self._gone, before.spent)
        self._newest[name] = _Process(beat["process"], age, seconds)


def _add(sums: dict[Spent, float], more: Mapping[Spent, float]) -> None:
    for key, value in more.items():
        known = key in sums or sum(1 for other in sums if other[:2] == key[:2]) < MOST_NAMES
        named = key if known else key._replace(name=OTHER)
        sums[named] = sums.get(named, 0.0) + value


def _lasting(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], float]]:
    found: list[tuple[tuple[str, ...], float]] = []
    found += [((name,), _number(state.get(name))) for name in ("env_steps", "updates", "episodes")]
    total = state.get("ledger", {}).get("total", {})
    counts: dict[tuple[str, ...], Any] = {(name,): total[name] for name in ("produced", "consumed") if name in total}
    counts |= {("dropped", reason): count for reason, count in total.get("dropped", {}).items()}
    found += [(key, _number(count.get("transitions"))) for key, count in counts.items()]
    for beat in state.get("roles", ()):
        progress = beat["progress"]
        if beat["role"] == "worker":
            found.append((("incarnation", beat["id"]), _number(progress.get("incarnation"))))
        lags = progress.get("lags")
        if beat["role"] == "trainer" and isinstance(lags, list) and len(lags) == len(LAG_BUCKETS) + 2:
            found += [(("lags", str(index)), _number(value)) for index, value in enumerate(lags)]
    return found


def _number(value: Any) -> float:
    """Converts foreign data; anything but a number ≥ 0 becomes 0."""
    return float(value) if isinstance(value, int | float) and value >= 0 else 0.0
