"""Events of a run, for people and for the evaluator: a short Redis stream of JSON.

Nothing that is learned depends on them, and `emit` hides Redis errors. Kinds: `checkpoint`, `evaluation`, a role
(`worker`, `trainer`, `rank`, `evaluator`), `environment`, `store`, `export`, `service`, `scaling`, `state`.
"""

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import redis
from pydantic import BaseModel, NonNegativeInt, TypeAdapter

from stagecoach.shared.base.printable import JSON_OBJECT, foreign, left_out, printable, printable_data
from stagecoach.shared.experience.checkpoint_name import checkpoint_env_steps, checkpoint_version
from stagecoach.shared.experience.log_entry import id_order
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.scripts import read_stream, write_small
from stagecoach.shared.storage.metric_log import UNIX_TIME

_LOGGER = logging.getLogger("stagecoach.events")
_KEPT = 1000
_DATA_CHARACTERS = 100_000
_EVALUATIONS_KEPT = 100
EVENT_ID = ("event/milliseconds", "event/number")
"""The id of an event in Redis, as two metrics of its row. Its label is kind, text and data (JSON), tabs between."""


@dataclass(frozen=True)
class Event:
    """An event of a run; `checkpoint`, `version`, `env_steps` and `score` return None if they do not apply."""

    id: str
    kind: str
    """`checkpoint`, `evaluation`, `state`, `worker`, `note` …"""
    text: str
    """One line for people."""
    data: dict[str, Any]
    """Data of its kind, such as all scores of an evaluation."""

    def __str__(self) -> str:
        return f"{self.kind:<11} {self.text}"

    @property
    def unix_seconds(self) -> float:
        return id_order(self.id)[0] / 1000

    @property
    def checkpoint(self) -> str | None:
        """Name of the checkpoint that was written or evaluated."""
        name = self.data.get({"checkpoint": "name", "evaluation": "checkpoint"}.get(self.kind, ""))
        return name if isinstance(name, str) and checkpoint_version(name) is not None else None

    @property
    def version(self) -> int | None:
        """Policy version of that checkpoint."""
        return checkpoint_version(self.checkpoint or "")

    @property
    def env_steps(self) -> int | None:
        """Env steps trained on at that checkpoint."""
        return None if self.checkpoint is None else checkpoint_env_steps(self.checkpoint)

    @property
    def score(self) -> float | None:
        """Score of an evaluation: its mean return, or what `checkpoint.best_by` names."""
        told = [self.data.get(name) for name in ("ranking", "mean_return")] if self.kind == "evaluation" else []
        return next((float(value) for value in told if isinstance(value, int | float)), None)


class _Returns(BaseModel, extra="allow"):
    """Scores of one evaluation."""

    mean_return: float
    std_return: float = 0.0
    min_return: float = 0.0
    max_return: float = 0.0
    mean_length: float = 0.0
    success_rate: float | None = None
    episodes: NonNegativeInt = 0
    env_steps_played: NonNegativeInt = 0
    policies: dict[str, float] = {}
    agents: dict[str, float] = {}
    metrics: dict[str, float] = {}
    win_rates: dict[str, float] = {}
    match_returns: dict[str, float] = {}
    ranking: float | None = None
    """Value that ranks it instead of the mean return (`checkpoint.best_by`)."""
    ranked_by: str = ""
    """Description of `ranking`."""


class _Scores(_Returns):
    version: NonNegativeInt
    env_steps: NonNegativeInt = 0
    checkpoint: str = ""
    confirmation: _Returns | None = None


_SCORES = TypeAdapter(_Scores)


def emit(client: redis.Redis, run_id: str, kind: str, text: str, **data: Any) -> None:
    """Adds an event of printable text; about the newest thousand are kept. Logs Redis errors instead of raising."""
    shown = json.dumps(printable_data(data))
    if len(shown) > _DATA_CHARACTERS:
        shown = json.dumps({"left_out": f"{len(shown)} characters of data"})
    fields = ["kind", printable(kind), "text", printable(text), "data", shown]
    try:
        write_small(client, RunKeys(run_id), RunKeys(run_id).events, "XADD", "MAXLEN", "~", _KEPT, "*", *fields)
    except redis.RedisError as error:
        _LOGGER.warning("Redis rejects the event %r: %s", printable(text), error)


def read_events(client: redis.Redis, run_id: str, after: str = "0-0", block_seconds: float = 0.0) -> list[Event]:
    entries = read_stream(client, RunKeys(run_id).events, after, None, block_seconds)
    return [_event(run_id, id_.decode(), fields) for id_, fields in entries]


def _event(run_id: str, id_: str, fields: dict[bytes, bytes]) -> Event:
    """Returns the event; a malformed one keeps its id, so that a reader gets past it."""
    data = foreign(JSON_OBJECT, fields.get(b"data", b""), f"event {id_} of run {run_id}")
    if data is None or not {b"kind", b"text"} <= fields.keys():
        return Event(id_, "malformed", "an event that another program wrote", {})
    kind, text = (printable(fields[name].decode(errors="replace")) for name in (b"kind", b"text"))
    return Event(id_, kind, text, data)


def oldest_event(client: redis.Redis, run_id: str) -> str | None:
    """Returns the id of the oldest event that Redis still has; None without events."""
    found = read_stream(client, RunKeys(run_id).events, "0-0", 1, 0.0)
    return found[0][0].decode() if found else None


def event_row(event: Event) -> tuple[str, dict[str, float]]:
    """Label and metrics of an event in the store; the inverse is `recorded_event`."""
    data = [json.dumps(event.data)] if event.data else []
    row = dict(zip(EVENT_ID, map(float, id_order(event.id)), strict=True)) | {UNIX_TIME: event.unix_seconds}
    return "\t".join((event.kind, event.text, *data)), row


def recorded_event(label: str, row: Mapping[str, float]) -> Event:
    """Returns the event of a row in the store; raises `KeyError` for a row of another stream."""
    kind, text, data = (*label.split("\t", 2), "", "")[:3]
    id_ = "{}-{}".format(*(int(row[name]) for name in EVENT_ID))
    return Event(id_, kind, text, foreign(JSON_OBJECT, data.encode() or b"{}", f"the data of event {id_}") or {})


def recent_events(client: redis.Redis, run_id: str, count: int) -> str:
    """Returns the id before the last `count` events."""
    found = cast(list[Any], client.xrevrange(RunKeys(run_id).events, count=count + 1))
    return found[count][0].decode() if len(found) > count else "0-0"


def record_evaluation(client: redis.Redis, run_id: str, checkpoint: str, scores: dict[str, Any]) -> None:
    """Stores the scores of one checkpoint, with its `version`; `confirmation` has those of a second evaluation."""
    text = json.dumps(printable_data(scores))
    write_small(client, RunKeys(run_id), RunKeys(run_id).evaluations, "HSET", checkpoint, text)


def prune_evaluations(client: redis.Redis, run_id: str, keep: Collection[str]) -> None:
    """Deletes the scores of checkpoints not in `keep`, except the newest hundred."""
    found = list(read_evaluations(client, run_id))
    old = [name for name in found[:-_EVALUATIONS_KEPT] if name not in keep]
    if old:
        client.hdel(RunKeys(run_id).evaluations, *old)


def read_evaluations(client: redis.Redis, run_id: str) -> dict[str, dict[str, Any]]:
    """Returns checkpoint name → scores by policy version, each with `version` and a finite `mean_return`."""
    raw = cast(dict[bytes, bytes], client.hgetall(RunKeys(run_id).evaluations))
    scores = {}
    for name, text in raw.items():
        checkpoint = name.decode(errors="replace")
        what = f"the score of {checkpoint} of run {run_id}"
        found = foreign(_SCORES, text, what)
        if found is not None and checkpoint_version(checkpoint) is None:
            left_out(what, "no checkpoint has such a name")
        elif found is not None:
            scores[checkpoint] = found.model_dump(exclude_unset=True)
    return dict(sorted(scores.items(), key=lambda item: (item[1]["version"], item[0])))


def confirmed_return(scores: Mapping[str, Any]) -> float | None:
    """Returns the ranking by the second evaluation, without which a checkpoint cannot be the best; else None."""
    confirmation = scores.get("confirmation")
    return ranking(confirmation) if confirmation else None


def ranking(scores: Mapping[str, Any]) -> float:
    """Returns the value that ranks an evaluation: the mean return of all agents, or as `checkpoint.best_by` says."""
    found = scores.get("ranking")
    return float(scores["mean_return"] if found is None else found)


def solves(
    scores: Mapping[str, Any], mean_return: float | Mapping[str, float] | None, success_rate: float | None
) -> bool:
    """Checks whether each evaluation reaches these scores; the mean return may be given by policy."""
    each, total = (mean_return, None) if isinstance(mean_return, Mapping) else ({}, mean_return)
    return all(
        (target is None or float(one.get(name) or 0.0) >= target)
        and all(policy_return(one, policy_id) >= least for policy_id, least in each.items())
        for one in (scores, scores.get("confirmation") or scores)
        for name, target in (("mean_return", total), ("success_rate", success_rate))
    )


def policy_return(scores: Mapping[str, Any], policy_id: str) -> float:
    """Returns the mean return of a policy's agents; a run's only policy has that of all."""
    return float(scores.get("policies", {}).get(policy_id, scores["mean_return"]))
