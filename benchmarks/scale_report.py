"""The table of a scale rehearsal."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.usage import RedisLook
from shared.heartbeat import BEAT_SECONDS


@dataclass(frozen=True)
class Measured:
    """What was measured while workers came and went."""

    seconds: float
    workers: int
    processor: dict[str, float]
    """Role → processor seconds."""
    counts: Counter[str]
    waits: list[float]
    """Seconds from asking for a claim until it was granted, each."""
    transitions: int
    """In a fragment."""
    consumed: int
    """Fragments."""
    versions: int
    redis: RedisLook
    board_bytes: int
    heartbeat_seconds: list[float]
    signals: dict[str, Any]
    load: float


def table(m: Measured) -> str:
    """In Markdown."""
    lines = [f"| {m.workers} workers, {m.seconds:.0f} s, load {m.load:.1f} | |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows(m)])


def rows(m: Measured) -> list[tuple[str, str]]:
    """Figure and value."""
    calls = sum(m.redis.commands.values())
    granted, refused = m.counts["granted"], m.counts["refused"]
    share = sum(m.waits) / (m.workers * m.seconds)
    used = dict(m.processor)
    per_worker = used.get("workers", 0.0) / m.workers / m.seconds
    return [
        ("fragments/s, consumed", _rate(m.consumed, m)),
        ("env steps/s", _rate(m.consumed * m.transitions, m)),
        ("policy versions/s", f"{m.versions / m.seconds:.2f}"),
        ("into Redis (MB/s)", f"{m.redis.bytes_in / m.seconds / 1e6:.2f}"),
        ("out of Redis (MB/s)", f"{m.redis.bytes_out / m.seconds / 1e6:.2f}"),
        ("policy fetches/s × bytes of a version", f"{m.counts['fetches'] / m.seconds:.0f} × {m.board_bytes}"),
        ("workers' time that is waiting for credit", f"{100 * share:.0f} %"),
        ("wait for a claim, p50 / p95 (ms)", f"{1000 * _at(m.waits, 50):.0f} / {1000 * _at(m.waits, 95):.0f}"),
        ("claims granted/s; refused for each", f"{granted / m.seconds:.0f}; {refused / max(granted, 1):.1f}"),
        ("Redis commands/s, those within scripts too", _rate(calls, m)),
        ("Redis connections", str(m.redis.connections)),
        ("Redis memory (MiB)", f"{m.redis.memory_bytes / 2**20:.0f}"),
        ("heartbeats/s", f"{m.workers / BEAT_SECONDS:.0f}"),
        ("reading all heartbeats, p50 (ms)", f"{1000 * _at(m.heartbeat_seconds, 50):.1f}"),
        *((f"processor, {role}", f"{100 * value / m.seconds:.0f} %") for role, value in sorted(used.items())),
        ("processor, for each worker", f"{100 * per_worker:.2f} %"),
        ("Redis, for each fragment consumed (µs)", f"{1e6 * used.get('redis-server', 0) / max(m.consumed, 1):.0f}"),
        ("joined / left / died / lost with their process", " / ".join(str(m.counts[name]) for name in _MOVES)),
    ]  # fmt: skip


_MOVES = ("joined", "left", "died", "crashed")


def _rate(count: int, m: Measured) -> str:
    return f"{count / m.seconds:,.0f}"


def _at(values: Sequence[float], percent: int) -> float:
    """A percentile; 0 of nothing."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else sum(values)
