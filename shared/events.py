"""What happened in a run, for people and for the evaluator: a short Redis stream of JSON events.

Events inform; nothing that is learnt depends on them. Kinds: `checkpoint`, `evaluation`, `worker`, `trainer`,
`environment`, `store`, `export`, `service`, `scaling`, `state`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import redis

from shared.redis_keys import RunKeys
from shared.scripts import write_small

_KEPT = 1000
_EVALUATIONS_KEPT = 100


@dataclass(frozen=True)
class Event:
    """One event: its stream id, kind, one line of text, and data."""

    id: str
    kind: str
    text: str
    data: dict[str, Any]


def emit(client: redis.Redis, run_id: str, kind: str, text: str, **data: Any) -> None:
    """Adds an event; only the newest thousand or so are kept."""
    fields = ["kind", kind, "text", text, "data", json.dumps(data)]
    write_small(client, RunKeys(run_id).flow, RunKeys(run_id).events, "XADD", "MAXLEN", "~", _KEPT, "*", *fields)


def read_events(client: redis.Redis, run_id: str, after: str = "0-0", block_seconds: float = 0.0) -> list[Event]:
    """Events after the id `after`, waiting at most `block_seconds` for the first."""
    block = max(1, int(block_seconds * 1000)) if block_seconds else None
    answer = cast(Any, client.xread({RunKeys(run_id).events: after}, block=block))
    if not answer:
        return []
    entries = answer[0][1] if isinstance(answer, list) else next(iter(answer.values()))[0]
    return [
        Event(id_.decode(), fields[b"kind"].decode(), fields[b"text"].decode(), json.loads(fields[b"data"]))
        for id_, fields in entries
    ]


def recent_events(client: redis.Redis, run_id: str, count: int) -> str:
    """The id after which the last `count` events come."""
    found = cast(list[Any], client.xrevrange(RunKeys(run_id).events, count=count + 1))
    return found[count][0].decode() if len(found) > count else "0-0"


def record_evaluation(client: redis.Redis, run_id: str, checkpoint: str, scores: dict[str, Any]) -> None:
    """Keeps the scores of one checkpoint."""
    write_small(client, RunKeys(run_id).flow, RunKeys(run_id).evaluations, "HSET", checkpoint, json.dumps(scores))


def prune_evaluations(client: redis.Redis, run_id: str, keep: Collection[str]) -> None:
    """Forgets the scores of checkpoints that are gone, but for the newest hundred."""
    found = list(read_evaluations(client, run_id))
    old = [name for name in found[:-_EVALUATIONS_KEPT] if name not in keep]
    if old:
        client.hdel(RunKeys(run_id).evaluations, *old)


def read_evaluations(client: redis.Redis, run_id: str) -> dict[str, dict[str, Any]]:
    """Checkpoint name → scores, in the order of their policy versions."""
    raw = cast(dict[bytes, bytes], client.hgetall(RunKeys(run_id).evaluations))
    scores = {name.decode(): json.loads(text) for name, text in raw.items()}
    return dict(sorted(scores.items(), key=lambda item: int(item[1]["version"])))
