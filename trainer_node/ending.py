"""How a trainer ends its run: the last score, the last export, and `.finished`."""

from __future__ import annotations

import time

from shared.checkpoint import FINISHED
from shared.errors import WaitTimeout
from shared.events import emit, read_evaluations
from shared.failure import reason_in_words
from shared.heartbeat import Heartbeat, poll, read_heartbeats
from shared.ledger import read_books
from shared.role import Role
from shared.steps import PhaseCounters
from trainer_node.publisher import Publisher

_EXPORT_SECONDS = 300.0


def wait_for_evaluation(role: Role, heartbeat: Heartbeat, name: str, reason: str) -> None:
    """The final score belongs into the summary, where there is an evaluator to give it.

    Who stops the run does not wait for it; after a failure there may be none.
    """
    if reason not in ("solved", "exhausted"):
        return

    def done() -> bool:
        evaluators = [beat for beat in read_heartbeats(role.redis, role.run_id) if beat.role == "evaluator"]
        alive = any(beat.alive for beat in evaluators)
        return not alive or name in read_evaluations(role.redis, role.run_id)

    try:
        with heartbeat.waiting("the last evaluation", role.config.evaluation.final_wait_seconds) as wait:
            poll(wait, done)
    except WaitTimeout as error:
        emit(role.redis, role.run_id, "evaluation", f"{name} is not evaluated: {error}")


def wait_for_exports(role: Role, heartbeat: Heartbeat, publisher: Publisher) -> None:
    """The newest checkpoint and the best one are exported as the run ends, where checkpoints are; or it is told."""
    if not publisher.exports:
        return
    try:
        with heartbeat.waiting("the last export", _EXPORT_SECONDS) as wait:
            poll(wait, publisher.exported)
    except WaitTimeout as error:
        text = f"the last checkpoints are not exported: {error}; `stagecoach checkpoints export --onnx` does it"
        emit(role.redis, role.run_id, "export", text)


def write_finished(role: Role, reason: str, final: str | None, version: int, counters: PhaseCounters | None) -> None:
    """`.finished`: why, the final checkpoint, the counters and the books."""
    books = read_books(role.redis, role.run_id)
    content = {
        "run_id": role.run_id,
        "reason": reason,
        "failure": role.flow.read().failure,
        "final": final,
        "version": version,
        "counters": counters.as_dict() if counters else None,
        "ledger": {worker: line.as_dict() for worker, line in books.items()},
        "time": round(time.time(), 3),
    }
    role.checkpoints.write_marker(FINISHED, content)
    emit(role.redis, role.run_id, "state", f"run finished: {reason_in_words(reason)}")
